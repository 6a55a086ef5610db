"""What a hub's log says: transitions only, one line each, by comparing two snapshots. Pure."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_fence.protocol.pool import EngineView, PoolSnapshot, called, listed, relabelled

MAX_LINES: Final = 10
"""Of one kind from one comparison; more engines than that become one line with their number."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log; `fields` are for readers that are programs."""

    level: int
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def counted(number: int, noun: str) -> str:
    """Such as `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def compare(before: PoolSnapshot | None, now: PoolSnapshot) -> list[LogLine]:
    """What happened between two snapshots of one pool."""
    lines: list[LogLine] = []
    if now.leading if before is None else before.leading != now.leading:
        lines.append(_leading(now))
    if before is None:
        before = PoolSnapshot(now.target, now.published, leading=now.leading, asked=now.asked, reclaimed=now.reclaimed)
    lines += _engines(before, now)
    if before.leading or not now.leading:  # what the record held when this hub began to lead is told by that line alone
        lines += _epochs(before, now)
    lines += _weights(before, now)
    lines += _tiers(before, now)
    lines += _memory(before, now)
    return lines


def _leading(now: PoolSnapshot) -> LogLine:
    if now.leading:
        return LogLine(
            logging.INFO, f"leading: epoch {now.target}, published {now.published}", {"target": now.target, "published": now.published}
        )
    return LogLine(logging.WARNING, "not leading: nothing is granted or published")


def _epochs(before: PoolSnapshot, now: PoolSnapshot) -> Iterable[LogLine]:
    if now.target > before.target:
        who = f" by {now.origin.value.lower()}" if now.origin is not None else ""
        to_go = sum(view.alive and not view.converged for view in now.engines)
        engines = f"{to_go} of {counted(_alive(now), 'engine')} to go" if _alive(now) else "no engine is there"
        text = f"epoch {now.target} recorded, asked for{who}; {engines}"
        yield LogLine(logging.INFO, text, {"target": now.target, "origin": now.origin.value if now.origin else ""})
    if now.published > before.published:
        took = f" after {now.reset_seconds:.3f} s" if now.reset_seconds is not None and now.published == now.target else ""
        text = f"epoch {now.published} published{took}: no engine uses an older one"
        keep = "running request keeps what it held" if now.old_epoch_requests == 1 else "running requests keep what they held"
        old_epoch_requests = f"; {now.old_epoch_requests} {keep}" if now.old_epoch_requests else ""
        # Below what was published; the next epoch may be asked for already, and nobody at it yet.
        late = [view for view in now.engines if view.alive and view.epoch is not None and view.epoch < now.published]
        behind = f"; not acknowledged, fenced by {'its lease' if len(late) == 1 else 'their leases'}: {_names(late)}" if late else ""
        yield LogLine(
            logging.WARNING if late else logging.INFO,
            text + old_epoch_requests + behind,
            {
                "published": now.published,
                "seconds": now.reset_seconds,
                "old_epoch_requests": now.old_epoch_requests,
                "laggards": [view.display_name for view in late[:MAX_LINES]],
            },
        )


def _engines(before: PoolSnapshot, now: PoolSnapshot) -> Iterable[LogLine]:
    known = {view.instance: view for view in before.engines}
    here = {view.instance: view for view in now.engines}
    joined = [view for instance, view in here.items() if instance not in known]
    silent = [view for instance, view in here.items() if not view.alive and instance in known and known[instance].alive]
    back = [view for instance, view in here.items() if view.alive and instance in known and not known[instance].alive]
    gone = [view for instance, view in known.items() if instance not in here]
    yield from _each(joined, logging.INFO, "joined", "engines joined")
    yield from _each(back, logging.INFO, "is heard again", "engines are heard again")
    yield from _each(silent, logging.WARNING, "is silent: its lease is over", "engines are silent: their leases are over")
    yield from _each(gone, logging.INFO, "left", "engines left")


def _each(views: list[EngineView], level: int, one: str, many: str) -> Iterable[LogLine]:
    """One line for each, or one for all; `one` may name fields of the view."""
    if len(views) > MAX_LINES:
        yield LogLine(level, f"{len(views)} {many}", {"engines": len(views)})
        return
    for view in views:
        name = view.display_name
        yield LogLine(level, f"engine {name} {one.format(view)}", {"engine": name, "instance": view.instance.hex()})


def _weights(before: PoolSnapshot, now: PoolSnapshot) -> Iterable[LogLine]:
    known = {view.instance: view for view in before.engines}
    changed: dict[bytes, list[EngineView]] = {}
    unknown: list[EngineView] = []
    for view in now.engines:
        old = known.get(view.instance)
        if not view.alive or (old is not None and (old.weights, old.weights_note) == (view.weights, view.weights_note)):
            continue
        if view.weights is not None:
            changed.setdefault(view.weights, []).append(view)
        elif view.weights_note:
            unknown.append(view)
    for weights, views in list(changed.items())[:MAX_LINES]:
        what = f"weights {called(weights.hex(), now.labels.get(weights, ''))}"
        text = f"engine {views[0].display_name} holds {what}" if len(views) == 1 else f"{len(views)} engines hold {what}: {_names(views)}"
        yield LogLine(logging.INFO, text, {"weights": weights.hex(), "engines": len(views)})
    yield from _each(unknown, logging.INFO, "holds unknown weights: {0.weights_note}", "engines hold unknown weights")
    held = {view.weights for view in now.engines if view.alive and view.weights is not None}
    for weights, label in now.labels.items():
        if before.leading and before.labels.get(weights) != label:
            note = relabelled(before.labels, weights, label, held)
            text = f"weights {weights.hex()[:8]} are called {label}" + (f": {note}" if note else "")
            yield LogLine(logging.WARNING if note else logging.INFO, text, {"weights": weights.hex(), "label": label})


def _tiers(before: PoolSnapshot, now: PoolSnapshot) -> Iterable[LogLine]:
    """Engines that cannot use their tiers, or not all of them. As a rule they cannot from their start to their end."""
    known = {view.instance: view.tiers_note for view in before.engines if view.tiers_off}
    new = [view for view in now.limited if known.get(view.instance) != view.tiers_note]
    yield from _each(new, logging.WARNING, "lacks tiers: {0.tiers_note}", "engines lack tiers")


def _memory(before: PoolSnapshot, now: PoolSnapshot) -> Iterable[LogLine]:
    if now.wipe_failed and not before.wipe_failed:
        yield LogLine(logging.WARNING, "the store could not be emptied; nobody finds the old keys, and they are removed one by one instead")
    if now.reclaimed > before.reclaimed and now.reclaimed_keys:  # a pool without a store has nothing to tell
        text = f"the store holds no keys below epoch {now.reclaimed}; {now.reclaimed_keys} removed so far"
        yield LogLine(logging.INFO, text, {"below": now.reclaimed, "keys": now.reclaimed_keys, "bytes": now.reclaimed_bytes})


def _alive(now: PoolSnapshot) -> int:
    return sum(view.alive for view in now.engines)


def _names(views: list[EngineView]) -> str:
    return listed([view.display_name for view in views])
