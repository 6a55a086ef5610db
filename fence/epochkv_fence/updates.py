"""Which trainer pushes weights to a pool: one at a time, or engines would hold some of both and share them under one name.

An update is held open by asking again, like a lease, and by nothing else: a trainer that dies blocks the next one for a lease
and its margin, as an engine that dies does a publication. What it has pushed by then nobody knows, so the epoch is raised with
nobody named, as when its push had failed. The pool's record says which update is open, before its trainer is told so: a hub
that takes over knows of it, and gives the trainer a lease and margin to go on.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Final

from epochkv_fence.authority import UpdateNote
from epochkv_fence.messages import OpenUpdate

MAX_OVER: Final = 256


class _Over(enum.IntEnum):
    """How an update ended; what is known later only adds."""

    ENDED = 0  # its trainer said so
    PASSED_OVER = 1  # taken for dead, and another one was opened
    FAILED_FOR = 2  # one of those that pushed at a time, and that the pool was failed for


@dataclass(slots=True)
class _Open:
    """`failed`: its trainer was taken for dead, and the weights for unknown."""

    number: bytes
    holder: str
    version: str
    since: float
    until: float
    failed: bool = False


class Updates:
    """Of one pool."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._over: dict[bytes, _Over] = {}  # the newest last
        self._mixed: str | None = None  # two have pushed these at a time, and the hub does not act on it yet
        self._settles_at = 0  # the epoch that says what came of the last one
        self._note: UpdateNote | None = None  # as the record has it
        self._writing: UpdateNote | None = None

    # ------------------------------------------------------------------ leadership and the record

    def lead(self, note: UpdateNote | None, until: float, now: float) -> None:
        """The record was read: who pushed when it was written may still be pushing, and has `until` to say so."""
        self._note = note
        if note is not None and note.open and note.number not in self._over:
            self._open = _Open(note.number, note.holder, note.version, now, until)

    def forget(self) -> None:
        """Another hub may lead meanwhile, and admit somebody."""
        self._open = self._note = self._writing = self._mixed = None

    def unwritten(self, durable: int) -> UpdateNote | None:
        """What the record is to say and does not. That one has ended only when the epoch that says how it did is durable."""
        current, note = self._open, self._note
        if self._writing is not None:
            return None
        if current is not None and not current.failed:
            if note is not None and note.open and note.number == current.number:
                return None
            return UpdateNote((note.serial if note is not None else 0) + 1, current.number, current.holder, current.version)
        if note is not None and note.open and self._mixed is None and durable >= self._settles_at:
            return replace(note, open=False)
        return None

    def write(self, note: UpdateNote) -> None:
        """A write of `note` is under way."""
        self._writing = note

    def written(self, note: UpdateNote) -> None:
        """It is durable."""
        self._writing = None
        if note.follows(self._note):
            self._note = note

    def write_failed(self) -> None:
        """It may have landed or not, or land later."""
        self._writing = None

    @property
    def noted(self) -> bytes | None:
        """The update that the record says is open."""
        return self._note.number if self._note is not None and self._note.open else None

    # ------------------------------------------------------------------ trainers

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
            if self._over[asked.number] is not _Over.ENDED and asked.since_seconds > 0:
                self._mix(asked)
        elif current is not None and current.number == asked.number:
            current.until, current.failed = max(current.until, until), False
        elif asked.since_seconds > 0 and not self._was_last(asked.number):
            self._mix(asked)
        elif (current is None or now >= current.until) and (admit or asked.since_seconds > 0):
            if current is not None:
                self._end(current.number, _Over.PASSED_OVER)
            self._open = _Open(asked.number, asked.holder, asked.version, now - asked.since_seconds, until)

    def _was_last(self, number: bytes) -> bool:
        """The record named it before its trainer was told, and names it still: nobody was let in after it."""
        return self._note is not None and self._note.number == number

    def _mix(self, asked: OpenUpdate) -> None:
        """It was taken for dead and goes on, and others have pushed since: nobody knows what engines hold. Once for each of
        those others, and once if there is none any more."""
        current = self._open
        if current is None and self._over.get(asked.number) is _Over.FAILED_FOR:
            return
        self._mixed = asked.version if current is None else current.version
        self._end(asked.number, _Over.FAILED_FOR)
        if current is not None:
            self._end(current.number, _Over.FAILED_FOR)

    def end(self, number: bytes, epoch: int = 0) -> None:
        """Its trainer says that it is over, and how it ended with `epoch`; 0: nothing was pushed, or nobody may share anyway."""
        self._settles_at = max(self._settles_at, epoch)
        self._end(number, _Over.ENDED)

    def shown(self, now: float) -> OpenUpdate | None:
        """The one that is open."""
        current = self._open
        if current is None or now >= current.until:
            return None
        return OpenUpdate(
            current.number, current.holder, current.version, since_seconds=max(0.0, now - current.since), left_seconds=current.until - now
        )

    # ------------------------------------------------------------------ what it means for weights

    def unsettled(self, target: int) -> bool:
        """What weights engines hold is not known, and the target does not say so: somebody pushes, or was last heard pushing."""
        pushing = self._open is not None and not self._open.failed
        return pushing or self._mixed is not None or self._settles_at > target

    def expires_at(self) -> float:
        """When the trainer is taken for dead, unless it asks again."""
        if self._mixed is not None:
            return -math.inf
        return self._open.until if self._open is not None and not self._open.failed else math.inf

    def fail(self, epoch: int) -> str:
        """It is: `epoch` says so, to come. Returns the version of the weights that were pushed."""
        mixed, self._mixed = self._mixed, None
        version = mixed or ""
        if mixed is None and self._open is not None:
            self._open.failed, version = True, self._open.version
        self._settles_at = max(self._settles_at, epoch)
        return version

    def _end(self, number: bytes, how: _Over) -> None:
        if self._open is not None and self._open.number == number:
            self._open = None
        self._over[number] = max(self._over.pop(number, how), how)
        while len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]
