"""When to stop promising loads from L2: a path that fails for ever would cost every hit a failed load, up to a whole deadline.

The master may answer every existence query while no byte arrives (a hung or unreachable store node, foreign objects, a
client that cannot read). Only the end of a load shows that, so loads are counted here: after a few failures in a row L2 is
not asked for a while, then one load goes ahead as a trial, and the pause doubles until one succeeds. Saves go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 30.0


class LoadPause:
    """Decides whether L2 may be asked. Scheduler thread only, but `paused` may be read anywhere.

    Args:
        trial_seconds: a trial that was not heard of for so long does not count any more.
        clock: monotonic seconds.

    Attributes:
        num_pauses: how often loads were paused, or went on being paused after a failed trial.
    """

    def __init__(self, trial_seconds: float, clock: Callable[[], float]) -> None:
        self._trial_seconds = trial_seconds
        self._clock = clock
        self._failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._until = 0.0
        self._trial: str | None = None
        self._trial_until = 0.0
        self.num_pauses = 0

    @property
    def paused(self) -> bool:
        """Whether the last loads failed and none has succeeded since."""
        return self._failures >= MAX_FAILURES

    def allows(self) -> bool:
        """Whether a lookup may ask L2 now."""
        if not self.paused:
            return True
        now = self._clock()
        return now >= self._until and (self._trial is None or now >= self._trial_until)

    def begin(self, request_id: str) -> None:
        """A load from L2 was accepted; the first one after a pause is the trial, and nobody else asks until it has ended."""
        if self.paused and self.allows():
            self._trial, self._trial_until = request_id, self._clock() + self._trial_seconds

    def end(self, request_id: str, arrived: bool | None) -> None:
        """A load from L2 has ended on all ranks; `arrived` is None when its end says nothing about the path (it was poisoned)."""
        was_trial = self._trial == request_id
        if was_trial:
            self._trial = None
        if arrived:
            if self.paused:
                logger.info("loads from the L2 store succeed again")
            self._failures, self._pause = 0, FIRST_PAUSE_SECONDS
        elif arrived is not None:
            self._fail(was_trial)

    def _fail(self, was_trial: bool) -> None:
        self._failures += 1
        if not was_trial and self._failures != MAX_FAILURES:
            return
        if not was_trial:
            logger.warning(
                "%d loads from the L2 store have failed in a row: not asking it for %.0f s, then one load at a time until one "
                "succeeds (pauses grow to %.0f s)",
                *(self._failures, self._pause, LAST_PAUSE_SECONDS),
            )
        self._until = self._clock() + self._pause
        self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)
        self.num_pauses += 1
