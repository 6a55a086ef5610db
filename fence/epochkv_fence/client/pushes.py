"""Waiting until a push has reached every engine, and saying what the new weights are called.

Nothing is asked of the pool but questions and labels: engines name their KV by what they hold, whoever waits or does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from epochkv_fence.client.resets import Teller
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
from epochkv_fence.client.session import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, Looks
from epochkv_fence.protocol.messages import Label, Labelled

SETTLE_SECONDS: Final = 0.25
"""After a push has returned, what engines report of it may still be on its way."""
FIRST_POLL_SECONDS: Final = 0.05
MAX_POLL_SECONDS: Final = 1.0
LOOKS_SHARE: Final = 10
"""A look at thousands of engines takes time that their hub needs: pause this many times as long as it took."""
LAST_LOOK_SECONDS: Final = 1.0
"""A hub that answers is given so long for the last look, whatever is left of the time."""
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
        report: who holds what after it; None until the block has ended well.
    """

    label: str | None
    before: WeightsReport
    other_than: frozenset[str]
    report: WeightsReport | None = None


class Pushes:
    """Waits for pushes of weights, and says what weights are called."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks

    async def weights(self, timeout_s: float) -> WeightsReport:
        status = await self._looks.status(timeout_s)
        return report(status.engines, status.labels)

    async def begin_update(self, label: str | None, names: Collection[str] | None, timeout_s: float) -> Update:
        """Before the push: note who holds what."""
        status = await self._looks.status(timeout_s)
        engines, _ = chosen(status.engines, names)
        before = report(engines, status.labels)
        return Update(label, before, before.common)

    async def wait_weights(
        self,
        names: Collection[str] | None,
        timeout_s: float,
        label: str | None,
        other_than: Collection[str],
        progress: WeightsProgress | None = None,
    ) -> WeightsReport:
        called_at = time.monotonic()
        until, pause, tell = called_at + max(timeout_s, SETTLE_SECONDS), FIRST_POLL_SECONDS, Teller(progress)
        while True:
            began = time.monotonic()
            status = await self._looks.status(max(until - began, LAST_LOOK_SECONDS))
            took = time.monotonic() - began
            engines, absent = chosen(status.engines, names)
            problem = why_not(engines, absent, other_than, status.labels, status.engines) or _too_early(status, began - called_at)
            if not problem:
                break
            late = (*absent, *(engine.name for engine in outliers(engines, other_than)))
            tell(WeightsStanding(report(engines, status.labels), late, problem))
            if began >= until:
                same = "the same, new weights" if other_than else "the same weights"
                text = f"not all engines of pool {status.name} hold {same} after {timeout_s:g} s: {problem}"
                raise WeightsDiverged(text, late, report(engines, status.labels))
            await asyncio.sleep(max(0.0, min(max(pause, LOOKS_SHARE * took), until - time.monotonic())))
            pause = min(2 * pause, MAX_POLL_SECONDS)
        found = report(engines, status.labels)
        if label is None:
            return found
        for weights in sorted(found.ids):
            await self._label(weights, label, max(until, time.monotonic() + LABEL_SECONDS))
        return report(engines, {**status.labels, **dict.fromkeys(found.ids, label)})

    async def _label(self, weights: str, label: str, until: float) -> None:
        """Say what weights are called, until a hub has noted it.

        Raises:
            HubUnreachable: none has in time.
        """
        pause = FIRST_RETRY_SECONDS
        with self._looks.session.conversation() as conversation:
            while True:
                conversation.ask(Label(conversation.request, bytes.fromhex(weights), label))
                again = min(until, time.monotonic() + pause)
                while (answer := await conversation.next(again - time.monotonic())) is not None:
                    if isinstance(answer, Labelled) and (answer.weights.hex(), answer.label) == (weights, label):
                        return
                if time.monotonic() >= until:
                    error = await self._looks.unreachable()
                    text = f"all engines hold weights {weights[:8]}, and that they are called {label!r} is not known to be noted"
                    raise HubUnreachable(f"{error}. {text}") from error
                pause = min(2 * pause, MAX_RETRY_SECONDS)


def _too_early(status: PoolStatus, waited: float) -> str:
    """Why engines that hold the same, as far as is known, prove nothing yet; empty: they do."""
    if status.settling_seconds > 0:
        return f"the hub has only begun to lead, and may not know every engine for another {status.settling_seconds:.0f} s"
    return "what engines report may still be on its way" if waited < SETTLE_SECONDS else ""
