"""After publication: have the keys of older epochs removed, and those of weights that no engine holds any more. Gives memory
back; nothing ever waits for it.

One engine at a time is asked to remove them by prefix, another one each time, until one finds none; of older epochs once more
after a pause, for what was being written meanwhile. When no engine can do it, and the store is this pool's alone, the store is
swept of older epochs instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.boots import NEVER, BootRecord
from epochkv_fence.protocol.messages import Reclaim, Reclaimed
from epochkv_fence.protocol.pool import PoolConfig

MAX_OPEN: Final = 64


@dataclass(frozen=True, slots=True)
class _Request:
    """Of one engine. `changes`: of the weights that nobody holds, as many are known to this request; 0: it is not for weights."""

    boot: bytes
    below: int
    changes: int


class Reclaimer:
    """Whom to ask next, and when to stop.

    Attributes:
        due_at: when to ask the next engine; infinity while there is nothing to remove.
        done_below: highest epoch below which nothing is left, as an engine or the store said.
        keys, num_bytes: removed so far, as far as it is known.
    """

    def __init__(self) -> None:
        self.due_at = math.inf
        self.done_below = 0
        self.keys = 0
        self.num_bytes = 0
        self._confirmed_below = 0
        self._changes = 0  # how often weights have become nobody's
        self._confirmed_changes = 0
        self._pause_until = NEVER
        self._turn = 0
        self._number = 0  # of the newest request, never used again: an answer may come late
        self._open: dict[int, _Request] = {}
        self._idle_since: float | None = None
        self._sweeping: int | None = None

    def stop(self) -> None:
        """Ask nobody any more, until `start`."""
        self.due_at = math.inf
        self._open.clear()
        self._idle_since = self._sweeping = None

    def start(self, published: int, at: float) -> None:
        """Keys below `published` are garbage from now on."""
        if published > self._confirmed_below:
            self.due_at = min(self.due_at, at)

    def start_weights(self, at: float) -> None:
        """There may be keys of weights that nobody holds any more."""
        self._changes += 1
        self.look_again(at)

    def look_again(self, at: float) -> None:
        """Which weights may be removed can be said by then, perhaps, if it could not before; after the pause, whoever changes."""
        if self._changes > self._confirmed_changes:
            self.due_at = min(self.due_at, max(at, self._pause_until))

    # ------------------------------------------------------------------ by engines

    def next(self, published: int, keep: Sequence[bytes], able: Sequence[BootRecord], config: PoolConfig, now: float) -> list[ev.Action]:
        """One engine is asked; the store itself when there was none for long and it is this pool's alone.

        Args:
            keep: the weights whose keys stay; empty: that cannot be said now, and `look_again` tells when it may.
            able: who can be asked.
        """
        epochs, weights = published > self._confirmed_below, self._changes > self._confirmed_changes
        if not epochs and not weights:
            self.stop()
            return []
        self._pause_until = now + config.reclaim_seconds
        asked = list(keep) if weights else []
        if not epochs and not asked:
            self.due_at = math.inf
            return []
        self.due_at = self._pause_until
        if able:
            self._idle_since = None
            chosen = self._choose(able)
            self._note(_Request(chosen.boot, published, self._changes if asked else 0))
            return [ev.Send(chosen.peer, Reclaim(chosen.boot, published, asked, self._number))]
        if self._idle_since is None:
            self._idle_since = now
        if epochs and config.store_admin and self._sweep_due(config.hold_seconds, now):
            self._sweeping = published
            return [ev.Sweep(published)]
        return []

    def _choose(self, able: Sequence[BootRecord]) -> BootRecord:
        """Another one each time: what one cannot remove, the next one may."""
        self._turn += 1
        return able[self._turn % len(able)]

    def _note(self, request: _Request) -> None:
        """It is sent; some are never answered."""
        if any(older.below != request.below for older in self._open.values()):
            self._open.clear()
        self._number += 1
        self._open[self._number] = request
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def answered(self, answer: Reclaimed, published: int) -> bool:
        """Take an engine's answer, once, and only of one that was asked; returns whether it says anything new. It proves what
        its own request asked for, which may be less than what is known by now."""
        request = self._open.get(answer.number)
        if request is None or (request.boot, request.below) != (answer.boot, answer.below):
            return False
        del self._open[answer.number]
        if not answer.removed:
            self._confirmed_changes = max(self._confirmed_changes, request.changes)
        return self._removed(answer.below, answer.removed, answer.removed_bytes, published)

    # ------------------------------------------------------------------ by the store

    def _sweep_due(self, hold: float, now: float) -> bool:
        """For a lease and margin no engine was there that could do it, and the last answer has come."""
        return self._sweeping is None and self._idle_since is not None and now >= self._idle_since + hold

    def swept(self, below: int, keys: int, num_bytes: int | None, published: int) -> bool:
        """Take the store's answer; returns whether it says anything new."""
        if self._sweeping != below:
            return False
        self._sweeping = None
        return self._removed(below, keys, num_bytes, published)

    def sweep_failed(self, below: int) -> None:
        """It is asked again after the pause."""
        if self._sweeping == below:
            self._sweeping = None

    def count(self, keys: int, num_bytes: int | None) -> None:
        """The store removed this, on whatever occasion."""
        self.keys += keys
        self.num_bytes += num_bytes or 0

    def _removed(self, below: int, keys: int, num_bytes: int | None, published: int) -> bool:
        self.count(keys, num_bytes)
        if keys or below != published:
            return keys > 0
        if self.done_below < published:
            self.done_below = published  # once more after the pause: what was being written may have landed since
            return True
        self._confirmed_below = published
        if self._changes <= self._confirmed_changes:
            self.stop()
        return False
