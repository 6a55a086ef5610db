"""The end of an outage of the API server: keys that wait out a backoff because of it are looked at soon, and not after half a minute."""

from __future__ import annotations

import random

import structlog

from epochkv_operator.kube.queue import WorkQueue
from epochkv_operator.kube.work_keys import Key

log = structlog.get_logger(__name__)
OUTAGE_WRITES = 3
"""So many writes in a row without success are an outage; fewer may be one object's own trouble, such as a webhook's."""
SPREAD_SECONDS = 1.0


class Storm:
    """Which keys wait for the API server. All methods run on one loop."""

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._waiting: set[Key] = set()
        self._failures = 0

    def waits(self, key: Key) -> None:
        """The key was put off because the API server did not answer, or had an error."""
        self._waiting.add(key)

    def served(self, key: Key) -> None:
        self._waiting.discard(key)

    def write(self, answered: bool) -> None:
        """A write was answered, or not."""
        if not answered:
            self._failures += 1
            return
        outage, self._failures = self._failures >= OUTAGE_WRITES, 0
        if outage:
            self.over()

    def over(self) -> None:
        """The API server answers again."""
        if self._waiting:
            log.info("the API server answers again", objects_waiting=len(self._waiting))
        for key in self._waiting:
            self._queue.add_after(key, random.uniform(0.0, SPREAD_SECONDS))
        self._waiting.clear()
