"""Waiting until a push has reached every engine, and saying what the new weights are called.

Nothing is asked of the pool but questions and labels: engines name their KV by what they hold, whoever waits or does not.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from epochkv_fence.client.arguments import check_weights
from epochkv_fence.client.resets import Reporter
from epochkv_fence.client.results import (
    HubUnreachable,
    PoolStatus,
    WeightsDiverged,
    WeightsReport,
    WeightsStanding,
    chosen,
    outliers,
    report,
    why_not,
)
from epochkv_fence.client.session import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, STATUS_SECONDS, Session
from epochkv_fence.protocol.messages import MAX_NAME, Label, Labelled
from epochkv_fence.protocol.pool import SHOWN_DIGITS, called, relabelled

WEIGHTS_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 0.25
"""After a push has returned, what engines report of it may still be on its way."""
FIRST_POLL_SECONDS: Final = 0.05
MAX_POLL_SECONDS: Final = 1.0
STATUS_SHARE: Final = 10
"""A status of thousands of engines takes time that their hub needs: pause this many times as long as it took."""
LAST_STATUS_SECONDS: Final = 1.0
"""A hub that answers is given so long for the last status, whatever is left of the time."""
LABEL_SECONDS: Final = 3.0
"""The same for a label, which has to be durable."""

WeightsProgress = Callable[[WeightsStanding], None]


@dataclass(slots=True)
class Update:
    """A push of weights under way, as the caller's block sees it.

    Attributes:
        label: what the new weights are to be called; None: nothing.
        before: who held what before the push.
        other_than: what the push has to replace: the weights that all engines of a fingerprint held.
        engines: names of those that the push is for; None: all.
        report: who holds what after it; None until the block has ended well.
    """

    label: str | None
    before: WeightsReport
    other_than: frozenset[str]
    engines: frozenset[str] | None = None
    report: WeightsReport | None = None


async def weights(session: Session, timeout_s: float = STATUS_SECONDS) -> WeightsReport:
    """Which live engines hold which weights now.

    Raises:
        HubUnreachable: no hub answered in time.
    """
    status = await session.status(timeout_s)
    return report(status.engines, status.labels)


async def begin_update(session: Session, label: str | None, engines: Iterable[str] | None, timeout_s: float) -> Update:
    """Before the push: note who holds what, and give it a label if it has none, so that it is known when something loads it again."""
    names, _ = check_weights(engines, timeout_s, label, ())
    until = time.monotonic() + timeout_s
    while (status := await session.status(max(until - time.monotonic(), LAST_STATUS_SECONDS))).settling_seconds > 0:
        if time.monotonic() >= until:
            raise HubUnreachable(f"{_too_early(status, 0.0)}, and until then nobody knows what the push replaces: it has not begun")
        await asyncio.sleep(min(status.settling_seconds, MAX_POLL_SECONDS))
    until = max(until, time.monotonic() + LABEL_SECONDS)
    before = report(chosen(status.engines, names)[0], status.labels)
    if label is not None:
        for weights in sorted(before.common - set(status.labels)):
            digits = f"-{weights[:SHOWN_DIGITS]}" if len(before.common) > 1 else ""
            name = f"before-{label}"[: MAX_NAME - len(digits)] + digits
            await _label(session, weights, name, until, "the push has not begun")
    return Update(label, before, before.common, names)


async def wait_weights(
    session: Session,
    engines: Iterable[str] | None = None,
    timeout_s: float = WEIGHTS_SECONDS,
    label: str | None = None,
    other_than: Iterable[str] | None = None,
    progress: WeightsProgress | None = None,
    only_new: bool = False,
) -> WeightsReport:
    """Wait until all engines hold the same weights, bit by bit; engines of different fingerprints need not be equal.

    Whoever joins meanwhile counts, and whoever leaves, or dies and loses its lease, does not. Without `other_than` weights
    that nobody has replaced are the same, too.

    Args:
        engines: names, each of which has to be a live engine's (without `/rank`: all ranks). None: every engine of the pool.
        timeout_s: for the wait; the last look and the label may take a few seconds more.
        label: what these weights are called from now on, at most 253 characters; of several names the newest counts.
        other_than: digests (32 hex digits) of weights that are not new, such as `pool.weights().common` before the push.
        progress: called on another thread with a `WeightsStanding` after every look. A plain function.
        only_new: also raise `WeightsDiverged` where engines held these weights before under a label, or `label` was that of
            others, or nobody can tell: no weights have a label, and `other_than` is None. Nothing is called `label` then.

    Returns:
        Who holds what. Its `notes` say what `only_new` would raise for, unless the weights are only called what they were.

    Raises:
        WeightsDiverged: they do not in time. It names those that differ, those whose weights are unknown and why, and
            those that still hold `other_than`.
        HubUnreachable: no hub answered in time, or none has noted the label.
        ArgumentError (a ValueError): an argument cannot be meant.
    """
    names, digests = check_weights(engines, timeout_s, label, other_than or ())
    called_at = time.monotonic()
    until, pause, show = called_at + max(timeout_s, SETTLE_SECONDS), FIRST_POLL_SECONDS, Reporter(progress)
    while True:
        began = time.monotonic()
        status = await session.status(max(until - began, LAST_STATUS_SECONDS))
        took = time.monotonic() - began
        found, absent = chosen(status.engines, names)
        problem = why_not(found, absent, digests, status.labels, status.engines) or _too_early(status, began - called_at)
        if not problem:
            break
        late = (*absent, *(engine.name for engine in outliers(found, digests)))
        show(WeightsStanding(report(found, status.labels), late, problem))
        if began >= until:
            same = "the same, new weights" if digests else "the same weights"
            text = f"not all engines of pool {status.name} hold {same} after {timeout_s:g} s: {problem}"
            raise WeightsDiverged(text, late, report(found, status.labels))
        await asyncio.sleep(max(0.0, min(max(pause, STATUS_SHARE * took), until - time.monotonic())))
        pause = min(2 * pause, MAX_POLL_SECONDS)
    held = report(found, status.labels)
    notes = _notes(status, held, label or "", only_new=only_new) if label is not None or only_new else ()
    if notes and only_new:
        text = f"all engines of pool {status.name} hold the same weights, and they are not new: {'; '.join(notes)}"
        raise WeightsDiverged(text, (), replace(held, notes=notes))
    if only_new and other_than is None and not status.labels:
        text = f"no weights of pool {status.name} have a label, so nobody can tell whether engines started with these"
        raise WeightsDiverged(f"{text}; label what they start with, or give it as other_than", (), held)
    if label is None:
        return held
    until = max(until, time.monotonic() + LABEL_SECONDS)
    for weights in sorted(held.ids):
        await _label(session, weights, label, until, "all engines hold the same weights")
    return replace(report(found, {**status.labels, **dict.fromkeys(held.ids, label)}), notes=notes)


async def _label(session: Session, weights: str, label: str, until: float, known: str) -> None:
    """Say what weights are called, until a hub has noted it. Raises `HubUnreachable` with what is `known`: none has in time."""
    with session.conversation() as conversation:
        asked = Label(conversation.request, bytes.fromhex(weights), label)
        async for answer in conversation.answers(asked, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, until):
            if isinstance(answer, Labelled) and (answer.weights.hex(), answer.label) == (weights, label):
                return
    error = await session.unreachable()
    text = f"{known}, and that {weights[:SHOWN_DIGITS]} are called {label!r} is not known to be noted"
    raise HubUnreachable(f"{error}. {text}") from error


def _notes(status: PoolStatus, held: WeightsReport, label: str, *, only_new: bool) -> tuple[str, ...]:
    known = {bytes.fromhex(weights): name for weights, name in status.labels.items()}
    notes = []
    for group in sorted(held.groups, key=lambda group: group.id):
        others = {bytes.fromhex(engine.weights) for engine in status.engines if engine.weights and engine.fingerprint != group.fingerprint}
        if note := relabelled(known, bytes.fromhex(group.id), label, others, only_new=only_new):
            notes.append(f"{called(group.id, label)}: {note}")
    return tuple(notes)


def _too_early(status: PoolStatus, waited: float) -> str:
    """Why engines that hold the same, as far as is known, prove nothing yet; empty: they do."""
    if status.settling_seconds > 0:
        return f"the hub became leader just now; the list of engines is complete in {status.settling_seconds:.0f} s"
    return "what engines report may still be on its way" if waited < SETTLE_SECONDS else ""
