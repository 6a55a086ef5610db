"""The wipe of a store after publication, under the reclaim policy `RemoveAll`.

It gives memory back at once, where the removal by prefix takes its time. Nothing waits for it, and names keep everybody from
what it does not reach: keys that are being read stay, and engines remove them by prefix afterwards. It also takes what was
made since the publication, so it is done once per epoch, and tried again only when the store did not answer.
"""

from __future__ import annotations

import math
from typing import Final

from epochkv_fence.hub.boots import NEVER

WIPE_SECONDS: Final = 60.0
"""So long after its publication the wipe of an epoch is tried; then its keys are removed by prefix."""
WIPE_RETRY_SECONDS: Final = 1.0


class Wiper:
    """One wipe after another: of the newest published epoch, when that of the one before has been answered.

    Attributes:
        failed: the store did not answer in time for the newest published epoch.
    """

    def __init__(self) -> None:
        self.failed = False
        self._wanted: int | None = None
        self._running: int | None = None
        self._retry_at = NEVER
        self._until = NEVER

    @property
    def open(self) -> bool:
        """The newest published epoch is to be wiped, and was not yet."""
        return self._wanted is not None

    def begin(self, epoch: int, now: float) -> None:
        """`epoch` is published."""
        self._wanted, self.failed = epoch, False
        self._retry_at, self._until = NEVER, now + WIPE_SECONDS

    def stop(self) -> None:
        """Another hub leads, or the policy has changed."""
        self._wanted = None

    def due_at(self) -> float:
        """When `next` or `give_up` has something to do."""
        if self._wanted is None:
            return math.inf
        return self._until if self._running is not None else min(self._retry_at, self._until)

    def next(self, now: float) -> int | None:
        """The epoch to wipe now; asked when `due_at` says so, hence never while a wipe is under way."""
        if self._wanted is None or now < self._retry_at:
            return None
        self._running = self._wanted
        return self._wanted

    def give_up(self, now: float) -> bool:
        """Whether it is too late by now; said once."""
        if self._wanted is None or now < self._until:
            return False
        self._wanted, self.failed = None, True
        return True

    def answered(self, epoch: int) -> bool:
        """The store has removed what it could; returns whether that is all for the newest published epoch."""
        if epoch != self._running:
            return False
        self._running = None
        if epoch != self._wanted:
            return False
        self._wanted = None
        return True

    def missed(self, epoch: int, now: float) -> None:
        """The store did not answer."""
        if epoch == self._running:
            self._running = None
            self._retry_at = now + WIPE_RETRY_SECONDS
