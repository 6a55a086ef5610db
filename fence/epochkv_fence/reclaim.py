"""After publication: have one engine remove the keys of older epochs. Gives memory back; nothing ever waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from epochkv_fence.boots import BootRecord


class Reclaimer:
    """Whom to ask next, and when to stop.

    Attributes:
        due_at: when to ask the next engine; infinity while there is nothing to remove.
        done_below: highest epoch below which an engine reported that no keys are left.
    """

    def __init__(self) -> None:
        self.due_at = math.inf
        self.done_below = 0
        self._turn = 0

    def stop(self) -> None:
        self.due_at = math.inf

    def start(self, published: int, at: float) -> None:
        """Keys below `published` are garbage from now on."""
        if published > self.done_below:
            self.due_at = min(self.due_at, at)

    def choose(self, published: int, able: Sequence[BootRecord], pause: float, now: float) -> BootRecord | None:
        """The engine to ask now, another one each time: what one cannot remove, the next one may."""
        if published <= self.done_below:
            self.stop()
            return None
        self.due_at = now + pause
        if not able:
            return None
        self._turn += 1
        return able[self._turn % len(able)]

    def answered(self, below: int, removed: int, published: int) -> bool:
        """Take an engine's answer; returns whether `done_below` has grown."""
        if removed or not self.done_below < below <= published:
            return False
        self.done_below = below
        if below == published:
            self.stop()
        return True
