"""Counters for Prometheus and warnings that are said now and then, shared by the parts of one client."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable


class Counters:
    """Named numbers that only grow. Any thread may add."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> float:
        with self._lock:
            self._values[name] += amount
            return self._values[name]

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)


AGAIN_SECONDS = 60.0


class Notices:
    """Warnings of which each kind is said at most once a minute, with how many were left out. Any thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._said: dict[str, float] = {}
        self._left_out: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def say(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Log a warning unless one of this kind was logged less than a minute ago."""
        now = self._clock()
        with self._lock:
            if now < self._said.get(kind, -AGAIN_SECONDS) + AGAIN_SECONDS:
                self._left_out[kind] += 1
                return
            self._said[kind] = now
            left_out = self._left_out.pop(kind, 0)
        if left_out:
            message, args = f"{message} (and %d more since it was said last)", (*args, left_out)
        self._logger.warning(message, *args, exc_info=exc_info)

    def forget(self) -> None:
        """Everything may be said again (the state they described is over)."""
        with self._lock:
            self._said.clear()
            self._left_out.clear()
