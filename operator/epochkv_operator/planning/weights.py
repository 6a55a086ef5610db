"""Which weights live engines hold: proof that a push arrived, for conditions, status and the printer columns. Pure.

Engines name KV by what they hold, so nothing here decides who shares; engines of other weights only share less. No text
holds an age: a pool in which nothing changes is not written to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from epochkv_operator.planning.context import NO_HUB, Condition, HubEngine, HubView, Json, listed, timestamp

PUSH_SECONDS: Final = 60.0
"""A push takes no longer: engines that still differ then were missed by it."""
_CONDITION: Final = "WeightsConverged"
_ID_CHARACTERS: Final = 8
_MAX_GROUPS: Final = 8
_MAX_OUTLIERS: Final = 5
_MAX_KINDS: Final = 4


def weights_converged(hub: HubView | None) -> Condition:
    """The live engines of each fingerprint hold the same weights."""
    if hub is None:
        return Condition(_CONDITION, "Unknown", "HubUnavailable", NO_HUB)
    unknown = [f"{engine.display_name} ({engine.weights_note or 'it has not said yet'})" for engine in hub.unknown]
    silent = f"the weights of these engines are not known, and they share nothing: {listed(unknown, _MAX_OUTLIERS)}" if unknown else ""
    if hub.outliers and hub.overdue:
        remedy = "push to them again; they serve correctly, and share KV only with engines of equal weights"
        text = f"not all engines hold the weights that most hold: {_outliers(hub)}; {remedy}"
        return Condition(_CONDITION, "False", "Diverged", f"{text}; {silent}" if silent else text)
    if silent:
        return Condition(_CONDITION, "Unknown", "Unknown", silent)
    if hub.outliers:
        return Condition(_CONDITION, "False", "Updating", f"weights are being pushed: {_outliers(hub)}")
    held = sorted({_called(engine.known_weights, hub) for engine in hub.engines if engine.known_weights is not None})
    text = f"all engines hold {listed(held, _MAX_KINDS)}" if held else "no engine is connected"
    return Condition(_CONDITION, "True", "Converged", text)


def summary(engines: Iterable[HubEngine], hub: HubView) -> str:
    """`3f2a9c1e 15/16`: what most of these engines hold and how many, per fingerprint; empty without a live one."""
    most = {outlier.most_hold for outlier in hub.outliers}  # of as many, the hub has chosen
    kinds: dict[str, list[HubEngine]] = {}
    for engine in engines:
        if engine.live:
            kinds.setdefault(engine.fingerprint, []).append(engine)
    found: list[str] = []
    for _, kind in sorted(kinds.items()):
        held = Counter(engine.weights for engine in kind if engine.weights is not None)
        chosen = max(held, key=lambda weights: (held[weights], weights in most, weights), default=None)
        found.append(f"{short(chosen)} {held[chosen]}/{len(kind)}" if chosen is not None else f"unknown 0/{len(kind)}")
    return listed(found, _MAX_KINDS)


def groups(hub: HubView, previous: Json) -> list[Json]:
    """`status.weights`. The time of weights that the live status shows already is kept: hubs and their clocks come and go."""
    before = {group["id"]: group["since"] for group in previous.get("weights") or []}
    return [
        {
            "id": group.id,
            **({"label": group.label} if group.label else {}),
            "engines": group.engines,
            "since": before.get(group.id) or timestamp(group.since),
        }
        for group in hub.weights[:_MAX_GROUPS]
    ]


def short(weights: str) -> str:
    """What people see of the 32 hex digits."""
    return weights[:_ID_CHARACTERS]


def _called(weights: str | None, hub: HubView) -> str:
    label = next((group.label for group in hub.weights if group.id == weights), "")
    return short(weights or "") + (f" ({label})" if label else "")


def _outliers(hub: HubView) -> str:
    found: Sequence[str] = [
        f"{outlier.name} holds {_called(outlier.holds, hub)} instead of {_called(outlier.most_hold, hub)}" for outlier in hub.outliers
    ]
    return listed(found, _MAX_OUTLIERS)
