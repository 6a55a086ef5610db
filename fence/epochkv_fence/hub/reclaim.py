"""Which removals give the store's memory back. Nothing waits for them, because names keep engines from what stays.

Engines remove keys by prefix (`StoreKeys` of the connector's scheduler role): those of older epochs, and of weights that no engine holds.
The hub asks one engine at a time, each time another, until one finds none. Of older epochs it asks once more, because saves under way
may land after the first answer. When no engine can answer, and the store is this pool's alone, the hub that saw the publication has the
store swept instead.
A sweep takes every key, and for a later hub the store may be full of keys of the published epoch.

Under the reclaim policy `RemoveAll` the hub has the store wiped first, which gives memory back at once. Keys that somebody
reads stay, and engines remove them afterwards. A wipe also takes what engines saved since the publication. So the hub wipes
once per epoch, and tries again only when the store did not answer.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from epochkv_fence.hub.record import NEVER, InstanceRecord
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_KEPT, Reclaim, Reclaimed
from epochkv_fence.protocol.pool import PoolConfig

MAX_OPEN: Final = 64
WIPE_SECONDS: Final = 60.0
"""The hub tries to wipe for this long after a publication; then engines remove the keys by prefix."""
WIPE_RETRY_SECONDS: Final = 1.0


class Wiper:
    """Wipes for the newest published epoch, one at a time: the store must answer the wipe before.

    Attributes:
        failed: the store did not answer in time for the newest published epoch.
    """

    def __init__(self) -> None:
        self.failed = False
        self._wanted: int | None = None
        self._running: int | None = None
        self._retry_at = NEVER
        self._until = NEVER

    def begin(self, epoch: int, now: float) -> None:
        self._wanted, self.failed = epoch, False
        self._retry_at, self._until = NEVER, now + WIPE_SECONDS

    def stop(self) -> None:
        """Another hub leads, or the policy has changed."""
        self._wanted, self.failed = None, False

    def due_at(self) -> float:
        """When to ask for the `next`; infinity: the store is wiped for the newest published epoch, or was given up."""
        if self._wanted is None:
            return math.inf
        return self._until if self._running is not None else min(self._retry_at, self._until)

    def next(self, now: float) -> int | None:
        """The epoch to wipe for now; None: it is too late, and was given up. Callers ask at `due_at`, hence never during a wipe."""
        if now >= self._until:
            self._wanted, self.failed = None, True
            return None
        self._running = self._wanted
        return self._wanted

    def answered(self, epoch: int) -> bool:
        """The store removed what it could; return whether that was for the newest published epoch."""
        if epoch != self._running:
            return False
        self._running = None
        if epoch != self._wanted:
            return False
        self._wanted = None
        return True

    def missed(self, epoch: int, now: float) -> None:
        if epoch == self._running:
            self._running = None
            self._retry_at = now + WIPE_RETRY_SECONDS


class Reported:
    """When any engine last reported each weights. Where there is no room for more, nothing counts as unheld for a while.

    Attributes:
        check_at: when `expire` may find something. That is never too late while `grace` does not get shorter.
    """

    def __init__(self) -> None:
        self.check_at = math.inf
        self._last: dict[bytes, float] = {}
        self._lost_at = NEVER

    def hear(self, weights: bytes, grace: float, now: float) -> None:
        """An engine holds these weights."""
        if weights in self._last or len(self._last) < MAX_KEPT:
            self._last[weights] = now
        else:
            self._lost_at = now
        self.check_at = min(self.check_at, now + grace)

    def within(self, grace: float, now: float) -> list[bytes] | None:
        """The weights of the last `grace` seconds; None: there were too many to remember."""
        if now < self._lost_at + grace:
            return None
        return sorted(weights for weights, at in self._last.items() if now < at + grace)

    def expire(self, grace: float, now: float) -> bool:
        """Forget weights that no engine reported for `grace` seconds; return whether there were any."""
        over = [weights for weights, at in self._last.items() if now >= at + grace]
        for weights in over:
            del self._last[weights]
        lost = self._lost_at > NEVER and now >= self._lost_at + grace
        if lost:
            self._lost_at = NEVER
        times = [*self._last.values(), *([self._lost_at] if self._lost_at > NEVER else [])]
        self.check_at = min(times, default=math.inf) + grace
        return lost or bool(over)


class _Request(NamedTuple):
    """What the hub asked of one engine. `changes` counts how often weights had become unheld by then; 0: it asked for epochs only."""

    instance: bytes
    below: int
    changes: int


class Reclaimer:
    """Decides which engine to ask next, and when to stop.

    Attributes:
        due_at: when to ask the next engine; infinity while there is nothing to remove.
        done_below: the highest epoch below which an engine or the store found nothing left.
        keys, num_bytes: what was removed so far, as far as the hub knows.
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
        self._may_sweep = False

    def stop(self) -> None:
        """Ask no engine any more, until `start`."""
        self.due_at = math.inf
        self._open.clear()
        self._idle_since = self._sweeping = None

    def start(self, published: int, at: float, *, sweep: bool) -> None:
        """Keys below `published` are garbage. `sweep`: it was published just now, so a sweep takes hardly any other keys."""
        self._may_sweep = sweep
        if published > self._confirmed_below:
            self.due_at = min(self.due_at, at)

    def start_weights(self, at: float) -> None:
        """The store may hold keys of weights that no engine holds any more."""
        self._changes += 1
        self.check_again(at)

    def check_again(self, at: float) -> None:
        """The hub may know by then which weights are unheld. The pause holds all the same, so that changing engines cost little."""
        if self._changes > self._confirmed_changes:
            self.due_at = min(self.due_at, max(at, self._pause_until))

    # ------------------------------------------------------------------ by engines

    def next(
        self, published: int, keep: Sequence[bytes], able: Sequence[InstanceRecord], config: PoolConfig, now: float
    ) -> list[ev.Action]:
        """Ask one engine; or the store itself, if it is this pool's alone and no engine was there for long.

        Args:
            keep: the weights whose keys stay; empty: the hub cannot tell now, and `check_again` says when it may.
            able: the instances that can answer.
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
            self._turn += 1  # another one each time, because the next may remove what this one cannot
            chosen = able[self._turn % len(able)]
            self._number += 1
            self._open[self._number] = _Request(chosen.instance, published, self._changes if asked else 0)
            if len(self._open) > MAX_OPEN:  # some engines never answer
                del self._open[next(iter(self._open))]
            return [ev.Send(chosen.peer, Reclaim(chosen.instance, published, asked, self._number))]
        if self._idle_since is None:
            self._idle_since = now
        # No engine could answer for a lease and margin, and the store is not busy with the sweep before.
        may_sweep = epochs and self._may_sweep and config.store_admin and self._sweeping is None
        if may_sweep and now >= self._idle_since + config.fence_timeout_seconds:
            self._sweeping = published
            return [ev.RemoveAll(published, sweep=True)]
        return []

    def answered(self, answer: Reclaimed, published: int) -> bool:
        """Take the first answer of an engine to its request; return whether it says anything new.

        It proves what its own request asked for, which may be less than what the hub knows by now.
        """
        request = self._open.get(answer.number)
        if request is None or (request.instance, request.below) != (answer.instance, answer.below):
            return False
        del self._open[answer.number]
        if not answer.removed:
            self._confirmed_changes = max(self._confirmed_changes, request.changes)
        return self._removed(answer.below, answer.removed, answer.removed_bytes, published)

    # ------------------------------------------------------------------ by the store

    def swept(self, below: int, keys: int, num_bytes: int | None, published: int) -> bool:
        """Take the store's answer; return whether it says anything new."""
        if self._sweeping != below:
            return False
        self._sweeping = None
        return self._removed(below, keys, num_bytes, published)

    def sweep_failed(self, below: int) -> None:
        """The store failed, so the hub asks it again after the pause."""
        if self._sweeping == below:
            self._sweeping = None

    def count(self, keys: int, num_bytes: int | None) -> None:
        """Somebody removed this from the store."""
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
