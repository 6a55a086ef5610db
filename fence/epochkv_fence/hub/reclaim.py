"""Giving the store's memory back. Nothing ever waits for it, and names keep everybody from what it does not reach.

Keys of older epochs, and of weights that no engine holds any more, are removed by prefix: one engine at a time is asked,
another one each time, until one finds none; of older epochs once more after a pause, for what was being written meanwhile.
When no engine can do it, and the store is this pool's alone, the store is swept of older epochs instead.

Under the reclaim policy `RemoveAll` the store is wiped first, which gives memory back at once. Keys that are being read stay,
and engines remove them by prefix afterwards. A wipe also takes what was made since the publication, so it is done once per
epoch, and tried again only when the store did not answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.boots import NEVER, BootRecord
from epochkv_fence.protocol.messages import MAX_KEPT, Reclaim, Reclaimed
from epochkv_fence.protocol.pool import PoolConfig

MAX_OPEN: Final = 64
MAX_WEIGHTS: Final = MAX_KEPT
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


class Reported:
    """When each weights were last reported, by whomever. Bounded: what had no room is counted as reported just now."""

    def __init__(self) -> None:
        self._last: dict[bytes, float] = {}
        self._lost_at = NEVER
        self._look_at = math.inf

    def hear(self, weights: bytes, grace: float, now: float) -> None:
        """An engine holds these."""
        if weights not in self._last and len(self._last) >= MAX_WEIGHTS:
            self._lost_at = now
            self._look_at = min(self._look_at, now + grace)
            return
        self._last[weights] = now
        self._look_at = min(self._look_at, now + grace)

    def within(self, grace: float, now: float) -> list[bytes] | None:
        """Those of the last `grace` seconds; None: there were too many to remember."""
        if now < self._lost_at + grace:
            return None
        return sorted(weights for weights, at in self._last.items() if now < at + grace)

    def look_at(self) -> float:
        """When `expire` may find something; never later than the first that expires, while `grace` does not get shorter."""
        return self._look_at

    def expire(self, grace: float, now: float) -> bool:
        """Forget those that were not reported for `grace` seconds; returns whether there were any."""
        over = [weights for weights, at in self._last.items() if now >= at + grace]
        for weights in over:
            del self._last[weights]
        lost = self._lost_at > NEVER and now >= self._lost_at + grace
        if lost:
            self._lost_at = NEVER
        times = [*self._last.values(), *([self._lost_at] if self._lost_at > NEVER else [])]
        self._look_at = min(times, default=math.inf) + grace
        return lost or bool(over)


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
