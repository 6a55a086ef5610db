"""One timer for everything that is due."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

FAILED_TURN_SECONDS: Final = 0.25


class Alarm:
    """Takes a turn when one is due, and when something happened.

    Args:
        turn: does what is due by a time of the monotonic clock; returns when the next turn is due.
    """

    def __init__(self, turn: Callable[[float], float], counters: Counter[str]) -> None:
        self._turn = turn
        self._counters = counters
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self._loop = None
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()

    def soon(self) -> None:
        """Something happened. The turn comes a little later, so that many events may share one."""
        if self._soon is None and self._loop is not None:
            self._soon = self._loop.call_soon(self.now)

    def now(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._loop is None:
            return
        now = time.monotonic()
        try:
            due = self._turn(now)
        except Exception:
            self._counters["turns_failed"] += 1
            logger.exception("the hub's turn failed")
            due = now + FAILED_TURN_SECONDS
        when = self._loop.time() + max(0.0, due - now)
        if self._timer is not None:
            if self._timer.when() <= when and not self._timer.cancelled():
                return  # it comes earlier, and looks again
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self.now()
