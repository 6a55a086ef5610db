"""Counters for Prometheus and warnings that are said once, shared by the parts of one client."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict


class Counters:
    """Named numbers that only grow. Any thread may add."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> float:
        """Add and return the new value."""
        with self._lock:
            self._values[name] += amount
            return self._values[name]

    def snapshot(self) -> dict[str, float]:
        """A copy of everything counted so far."""
        with self._lock:
            return dict(self._values)


class Notices:
    """Warnings said once per kind, until `forget`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def say(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Log a warning unless this kind was said already."""
        if kind not in self._said:
            self._said.add(kind)
            self._logger.warning(message, *args, exc_info=exc_info)

    def forget(self) -> None:
        """Everything may be said again (the state they described is over)."""
        self._said.clear()
