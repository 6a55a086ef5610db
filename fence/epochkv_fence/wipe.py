"""The wipe that an epoch waits for under the reclaim policy `RemoveAll`.

Every engine acknowledges the epoch in bypass with no load open; then the store is emptied by force until it says that
nothing is left; then the epoch is published and loads are released. By force, memory is given to the next writer while
somebody may still read from it, so the rule of this page is: never while anybody reads, however late the call lands.
"""

from __future__ import annotations

import math
from typing import Final

from epochkv_fence.boots import NEVER

WIPE_SECONDS: Final = 10.0
"""So much later than without a wipe an epoch may be published; then it is, and the keys are removed one by one."""
WIPE_LANDS_SECONDS: Final = 5.0
"""A removal has to begin in the store within this time after the leadership read that it rests on has begun."""
WIPE_RETRY_SECONDS: Final = 0.25


class Wiper:
    """Progress for one target. What it knows of the store's side outlives a change of target or of term.

    Attributes:
        needed: the epoch on its way is published only after the wipe. Fixed when the epoch becomes the target (or the hub a
            leader), so that a policy that is changed in between finds no grants that it forbids.
        done: the store said that nothing is left.
        given_up: the time for it is over.
        allowed_at: since when the epoch could have been published but for the wipe.
    """

    def __init__(self) -> None:
        self.needed = self.done = self.given_up = False
        self.allowed_at: float | None = None
        self._running: int | None = None
        self._counts = False
        self._lands_until = NEVER
        self._unanswered_until = NEVER  # one without an answer may land after one that was answered
        self._retry_at = NEVER

    def begin(self, needed: bool) -> None:
        """Another target, or another term: whatever was wiped or is being wiped does not count for it."""
        self.needed = needed
        self.done = self.given_up = self._counts = False
        self.allowed_at = None
        self._retry_at = NEVER

    # ------------------------------------------------------------------ when

    @property
    def open(self) -> bool:
        """There is something to wipe before the epoch may be published."""
        return self.needed and not self.done and not self.given_up

    def ready_at(self) -> float:
        """From when on, as far as the store is concerned, the next wipe may be asked for."""
        return self._retry_at if self._running is None else math.inf

    def landed_at(self) -> float:
        """When no wipe that was asked for can begin any more."""
        return self._lands_until

    def give_up_at(self) -> float:
        """When the wipe is given up."""
        return math.inf if not self.open or self.allowed_at is None else self.allowed_at + WIPE_SECONDS

    # ------------------------------------------------------------------ what happens

    def allow(self, now: float) -> None:
        """But for the wipe the epoch could be published."""
        if self.open and self.allowed_at is None:
            self.allowed_at = now

    def start(self, epoch: int, before: float) -> None:
        """A wipe is asked for; it begins before `before` or never."""
        self._running, self._counts = epoch, True
        self._lands_until = max(self._lands_until, before)

    def answered(self, epoch: int, keys: int, target: int) -> None:
        """The store removed `keys`; a wipe that began under another target or term proves nothing for this one."""
        if epoch != self._running:
            return
        counts, self._running, self._lands_until = self._counts, None, self._unanswered_until
        if counts and epoch == target and keys == 0:
            self.done = True

    def failed(self, epoch: int, now: float) -> None:
        """No answer: it may still land, until it may not."""
        if epoch == self._running:
            self._running, self._unanswered_until = None, self._lands_until
            self._retry_at = now + WIPE_RETRY_SECONDS

    def give_up(self) -> None:
        self.given_up = True
