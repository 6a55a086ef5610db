"""Which trainer pushes weights to a pool: one at a time, or engines would hold some of both and share them under one name.

An update is held open by asking again, like a lease, and by nothing else: a trainer that dies blocks the next one for a lease
and its margin, as an engine that dies does a publication. It lives in memory: a new hub takes whoever says that he is in the
middle of one at his word, and admits a new one when every hold of an older hub has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from epochkv_fence.messages import OpenUpdate

MAX_OVER: Final = 256


@dataclass(slots=True)
class _Open:
    number: bytes
    holder: str
    version: str
    since: float
    until: float


class Updates:
    """Of one pool."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._over: dict[bytes, bool] = {}  # ended, the newest last; True: taken for dead, and another one was opened

    def ask(self, asked: OpenUpdate, until: float, now: float, *, admit: bool) -> None:
        """A trainer wants to open an update, or goes on with one.

        Args:
            until: when it ends unless asked for again.
            admit: a new one may be opened as far as older hubs are concerned.
        """
        if asked.over:
            self.end(asked.number)
            return
        current = self._open
        if asked.number in self._over:
            if self._over[asked.number] and asked.since_seconds > 0 and current is not None:
                self._end(current.number, passed_over=True)  # it lives, and both have pushed: nobody knows what engines hold
            return
        if current is not None and current.number == asked.number:
            current.until = max(current.until, until)
        elif (current is None or now >= current.until) and (admit or asked.since_seconds > 0):
            if current is not None:
                self._end(current.number, passed_over=True)
            self._open = _Open(asked.number, asked.holder, asked.version, now - asked.since_seconds, until)

    def end(self, number: bytes) -> None:
        """Its trainer says that it is over."""
        self._end(number, passed_over=False)

    def forget(self) -> None:
        """Another hub may lead meanwhile, and admit somebody."""
        self._open = None

    def shown(self, now: float) -> OpenUpdate | None:
        """The one that is open."""
        current = self._open
        if current is None or now >= current.until:
            return None
        return OpenUpdate(
            current.number, current.holder, current.version, since_seconds=max(0.0, now - current.since), left_seconds=current.until - now
        )

    def _end(self, number: bytes, *, passed_over: bool) -> None:
        if self._open is not None and self._open.number == number:
            self._open = None
        self._over[number] = self._over.pop(number, False) or passed_over
        while len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]
