"""Tells the owner of a hub that a pool's snapshot has changed: at once when an epoch did, else so seldom that it costs little."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

CHANGE_SHARE: Final = 0.05
"""Telling changes other than of epochs takes no more than this share of the time. Who is told may look at every engine."""
MIN_CHANGE_GAP_SECONDS: Final = 0.02


class Changes:
    """What has changed and was not told yet.

    Args:
        on_change: called with the pool's uid. What it raises is logged.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._changed: set[str] = set()
        self._told: dict[str, object] = {}
        self._tell_at: dict[str, float] = {}

    def add(self, uid: str) -> None:
        self._changed.add(uid)

    def forget(self, uid: str) -> None:
        self._changed.discard(uid)
        self._told.pop(uid, None)
        self._tell_at.pop(uid, None)

    def tell(self, epochs: Callable[[str], object], now: float) -> float:
        """Tell what may be told now; returns when to tell the rest. `epochs`: changes of these are told at once."""
        due = math.inf
        for uid in list(self._changed):
            current, tell_at = epochs(uid), self._tell_at.get(uid, -math.inf)
            if current == self._told.get(uid) and now < tell_at:
                due = min(due, tell_at)
                continue
            self._changed.discard(uid)
            self._told[uid] = current
            began = time.monotonic()
            try:
                self._on_change(uid)
            except Exception:
                logger.exception("on_change failed for pool %s", uid)
            ended = time.monotonic()
            self._tell_at[uid] = ended + max(MIN_CHANGE_GAP_SECONDS, (ended - began) / CHANGE_SHARE)
        return due
