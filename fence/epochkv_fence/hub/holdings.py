"""Which weights the engines of a pool report: who differs from the others, and which weights nobody holds any more.

The hub decides nothing with it: names of KV carry the weights. It shows people whether a push reached every engine, and it has
the keys of weights removed that no engine has reported for long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from epochkv_fence.hub.boots import NEVER
from epochkv_fence.protocol.messages import MAX_KEPT, Heartbeat
from epochkv_fence.protocol.pool import EngineView, WeightsView

MAX_WEIGHTS: Final = MAX_KEPT


class Reported:
    """When each weights were last reported, by whomever. Bounded: what had no room is counted as reported just now."""

    def __init__(self) -> None:
        self._last: dict[bytes, float] = {}
        self._lost_at = NEVER
        self._look_at = math.inf

    def hear(self, weights: bytes, grace: float, now: float) -> None:
        """An engine holds these."""
        if weights not in self._last and len(self._last) >= MAX_WEIGHTS:
            self._lost_at = now
            self._look_at = min(self._look_at, now + grace)
            return
        self._last[weights] = now
        self._look_at = min(self._look_at, now + grace)

    def within(self, grace: float, now: float) -> list[bytes] | None:
        """Those of the last `grace` seconds; None: there were too many to remember."""
        if now < self._lost_at + grace:
            return None
        return sorted(weights for weights, at in self._last.items() if now < at + grace)

    def look_at(self) -> float:
        """When `expire` may find something; never later than the first that expires, while `grace` does not get shorter."""
        return self._look_at

    def expire(self, grace: float, now: float) -> bool:
        """Forget those that were not reported for `grace` seconds; returns whether there were any."""
        over = [weights for weights, at in self._last.items() if now >= at + grace]
        for weights in over:
            del self._last[weights]
        lost = self._lost_at > NEVER and now >= self._lost_at + grace
        if lost:
            self._lost_at = NEVER
        times = [*self._last.values(), *([self._lost_at] if self._lost_at > NEVER else [])]
        self._look_at = min(times, default=math.inf) + grace
        return lost or bool(over)


class Holdings:
    """What the remembered boots hold, by fingerprint, and since when those of one fingerprint hold different weights."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[bytes]] = {}
        self._newest_at: dict[str, float] = {}
        self._unequal_at: dict[str, float] = {}

    def change(self, before: Heartbeat | None, after: Heartbeat | None, since: float) -> None:
        """A boot's newest heartbeat was `before` and is `after`; None: the boot is new, or forgotten. It has reported those
        weights since then, maybe to a hub before this one."""
        old, new = _holding(before), _holding(after)
        if old == new:
            return
        if new is not None:  # first, or boots that go on holding different weights would seem to agree in between
            self._newest_at[new[0]] = max(since, self._newest_at.get(new[0], NEVER))
            self._add(*new, 1)
        if old is not None:
            self._add(*old, -1)

    def _add(self, fingerprint: str, weights: bytes, number: int) -> None:
        counts = self._counts.setdefault(fingerprint, Counter())
        counts[weights] += number
        if counts[weights] <= 0:
            del counts[weights]
        if len(counts) > 1:
            self._unequal_at.setdefault(fingerprint, self._newest_at[fingerprint])
        else:
            self._unequal_at.pop(fingerprint, None)
        if not counts:
            del self._counts[fingerprint], self._newest_at[fingerprint]

    def unequal_seconds(self, fingerprint: str, now: float) -> float:
        """For how long boots of this fingerprint have held different weights."""
        return max(0.0, now - self._unequal_at.get(fingerprint, now))


def _holding(beat: Heartbeat | None) -> tuple[str, bytes] | None:
    return None if beat is None or beat.weights is None else (beat.fingerprint, beat.weights)


# -------------------------------------------------------------------------------------------------------------- for people


def groups(engines: Iterable[EngineView], labels: Mapping[bytes, str]) -> list[WeightsView]:
    """The live engines by the weights they hold: most first, of as many the newest."""
    found = [
        WeightsView(
            weights=weights,
            label=labels.get(weights, ""),
            engines=len(members),
            since_seconds=_since(members),
            fingerprints=len({member.fingerprint for member in members}),
        )
        for weights, members in _by_weights(engines).items()
    ]
    return sorted(found, key=lambda group: (-group.engines, group.since_seconds, group.weights))


def with_divergence(engines: Sequence[EngineView], holdings: Holdings, now: float) -> list[EngineView]:
    """The same, saying of each live one that differs from most of its fingerprint for how long it has."""
    majority = {}
    fingerprints: dict[str, list[EngineView]] = {}
    for engine in engines:
        fingerprints.setdefault(engine.fingerprint, []).append(engine)
    for fingerprint, members in fingerprints.items():
        by_weights = _by_weights(members)
        if len(by_weights) > 1:
            majority[fingerprint] = min(by_weights, key=lambda held: (-len(by_weights[held]), _since(by_weights[held]), held))
    return [_diverging(engine, majority.get(engine.fingerprint), holdings, now) for engine in engines]


def differs(engine: EngineView, majority: bytes | None) -> bool:
    """A live engine that holds known weights, and not those."""
    return majority is not None and engine.alive and engine.weights is not None and engine.weights != majority


def _diverging(engine: EngineView, majority: bytes | None, holdings: Holdings, now: float) -> EngineView:
    if not differs(engine, majority):
        return engine
    seconds = min(engine.weights_since, holdings.unequal_seconds(engine.fingerprint, now))
    return replace(engine, diverged_seconds=seconds)


def _by_weights(engines: Iterable[EngineView]) -> dict[bytes, list[EngineView]]:
    found: dict[bytes, list[EngineView]] = {}
    for engine in engines:
        if engine.alive and engine.weights is not None:
            found.setdefault(engine.weights, []).append(engine)
    return found


def _since(engines: Iterable[EngineView]) -> float:
    return max(engine.weights_since for engine in engines)
