"""What a hub remembers about engine instances.

It keeps this in memory only: a new leader waits until older grants are dead, and every engine sends heartbeats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from epochkv_fence.hub import events as ev
from epochkv_fence.protocol.messages import Heartbeat, Nudge
from epochkv_fence.protocol.pool import EngineView, PoolConfig

NEVER: Final = -math.inf
MAX_INSTANCES: Final = 10_000
NUDGE_SECONDS: Final = 0.25
NUDGES_PER_SECOND: Final = 2_000
"""Thousands of instances that were just nudged are on their way: nudged again, each would only send another heartbeat."""
MAX_COUNT: Final = 2**63 - 1


@dataclass(slots=True)
class InstanceRecord:
    """One engine instance.

    Attributes:
        newest: its newest heartbeat, for status.
        peer: where that came from.
        seq: of that heartbeat.
        key_index: which of the keys that the pool accepts now it came with, 0 the newest.
        epoch: highest epoch heard; a late heartbeat never lowers it.
        weights_at: when it first reported the weights of its newest heartbeat, to whatever hub.
        heard_at: when it was last heard from.
        granted_at: when it was last granted anything.
        live_until: when every grant of the present target is dead by its clock.
        below_until: when every grant below the present target is dead by its clock.
    """

    instance: bytes
    newest: Heartbeat
    peer: bytes = b""
    seq: int = -1
    key_index: int = 0
    epoch: int | None = None
    weights_at: float = NEVER
    heard_at: float = NEVER
    granted_at: float = NEVER
    live_until: float = NEVER
    below_until: float = NEVER

    def hear(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> bool:
        """Take a heartbeat; return whether it changes anything that status shows."""
        before = self._shown()
        self.heard_at = now
        if beat.seq > self.seq:
            if self.seq < 0 or beat.weights != self.newest.weights:
                self.weights_at = now - beat.weights_age_seconds
            self.seq, self.peer, self.newest, self.key_index = beat.seq, peer, beat, key_index
        if beat.epoch is not None and (self.epoch is None or beat.epoch > self.epoch):
            self.epoch = beat.epoch
        return before != self._shown()

    def grant(self, now: float, until: float) -> None:
        """The hub grants it the present target now; the grant is dead after `until`."""
        self.granted_at = now
        self.live_until = max(self.live_until, until)

    def keys_changed(self, before: Sequence[str], now: Sequence[str]) -> None:
        """The pool accepts other keys, so this instance's key has another place among them. A key that is gone counts as the oldest."""
        key = before[self.key_index] if self.key_index < len(before) else None
        self.key_index = now.index(key) if key in now else len(now)

    def _shown(self) -> tuple[object, ...]:
        beat = self.newest
        tiers = beat.tiers_off, beat.tiers_note
        return self.epoch, beat.old_epoch_requests, beat.isolated, beat.weights, beat.weights_note, tiers, self.key_index

    def at_least(self, epoch: int) -> bool:
        return self.epoch is not None and self.epoch >= epoch

    def alive(self, config: PoolConfig, now: float) -> bool:
        """The hub heard from it within the last lease."""
        return now < self.heard_at + config.lease_seconds

    def dead_at(self, hold: float) -> float:
        """When the hub may forget it: it was silent for a lease and margin (`hold`), and all its grants are dead."""
        return max(self.heard_at + hold, self.granted_at + hold, self.live_until, self.below_until)

    def view(self, target: int, config: PoolConfig, now: float) -> EngineView:
        """This engine instance as status shows it; `diverged_seconds` is left for who knows the others."""
        return EngineView(
            instance=self.instance,
            epoch=self.epoch,
            converged=self.at_least(target),
            alive=self.alive(config, now),
            age_seconds=self.newest.instance_age_seconds,
            silent_seconds=max(0.0, now - self.heard_at),
            stats=dict(self.newest.stats),
            key_index=self.key_index,
            weights_since=max(0.0, now - self.weights_at),
            **self.newest.report(),
        )


class Instances:
    """All instances of one pool.

    Attributes:
        known: the instances that the hub remembers.
        behind: those of them below the target, in an order that a replay repeats.
        departed: instances that have left, the newest last.
        holdings: which weights the known instances hold.
        forget_at: when to look for instances to forget.
        nudge_at: when to nudge the instances behind again.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, InstanceRecord] = {}
        self.behind: dict[bytes, None] = {}
        self.departed: dict[bytes, None] = {}
        self.holdings = Holdings()
        self.forget_at = math.inf
        self.nudge_at = math.inf

    def hear(self, peer: bytes, beat: Heartbeat, key_index: int, *, target: int, hold: float, now: float) -> bool:
        """Take a heartbeat; return whether status changes by it. The hub remembers a silent instance for `hold` seconds."""
        record = self.known.get(beat.instance)
        before = record.newest if record is not None else None
        if record is None:
            record = self.known[beat.instance] = InstanceRecord(beat.instance, beat)
            self.behind[beat.instance] = None
            self.forget_at = min(self.forget_at, now + hold)
        changed = record.hear(peer, beat, now, key_index)
        self.holdings.change(before, record.newest, record.weights_at)
        if record.at_least(target):
            self.behind.pop(beat.instance, None)
        return changed or before is None

    def leave(self, instance: bytes, now: float) -> bool:
        """This instance gave up its lease and takes no other, so late heartbeats must not bring it back. Returns whether it was known."""
        self.departed[instance] = None
        while len(self.departed) > MAX_INSTANCES:
            del self.departed[next(iter(self.departed))]
        return self._drop(instance, now)

    def forget(self, may_forget: Callable[[InstanceRecord], bool], hold: float, now: float) -> list[bytes]:
        """Forget the instances that `may_forget` names; return them."""
        over = [instance for instance, record in self.known.items() if may_forget(record)]
        for instance in over:
            self._drop(instance, now)
        self.forget_at = now + hold / 3 if self.known else math.inf
        return over

    def _drop(self, instance: bytes, now: float) -> bool:
        self.behind.pop(instance, None)
        record = self.known.pop(instance, None)
        if record is not None:
            self.holdings.change(record.newest, None, now)
        return record is not None

    def expect(self, target: int) -> None:
        """The target has risen: every grant so far may be below it."""
        for record in self.known.values():
            record.below_until = max(record.below_until, record.live_until)
            record.live_until = NEVER
        self.behind = {instance: None for instance, record in self.known.items() if not record.at_least(target)}

    def nudge(self, now: float) -> list[ev.Action]:
        """Ask the instances behind for a heartbeat, which a grant of the new target can answer."""
        self.nudge_at = now + max(NUDGE_SECONDS, len(self.behind) / NUDGES_PER_SECOND)
        return [ev.Send(self.known[instance].peer, Nudge(instance)) for instance in self.behind]

    @property
    def highest_epoch(self) -> int:
        return max((record.epoch or 0 for record in self.known.values()), default=0)

    @property
    def old_epoch_requests(self) -> int:
        """How many requests all known instances carry under older roots."""
        return min(sum(record.newest.old_epoch_requests for record in self.known.values()), MAX_COUNT)


class Holdings:
    """Which weights the known instances of each fingerprint hold, and since when these differ."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[bytes]] = {}
        self._newest_at: dict[str, float] = {}
        self._unequal_at: dict[str, float] = {}

    def change(self, before: Heartbeat | None, after: Heartbeat | None, since: float) -> None:
        """The newest heartbeat of an instance was `before` (None: it is new) and is `after` (None: the hub forgets it).

        The engine instance has reported those weights since `since`, maybe to an earlier hub.
        """
        old, new = _holding(before), _holding(after)
        if old == new:
            return
        if new is not None:  # first, or instances that go on holding different weights would seem to agree in between
            self._newest_at[new[0]] = max(since, self._newest_at.get(new[0], NEVER))
            self._add(*new, 1)
        if old is not None:
            self._add(*old, -1)

    def _add(self, fingerprint: str, weights: bytes, number: int) -> None:
        counts = self._counts.setdefault(fingerprint, Counter())
        counts[weights] += number
        if counts[weights] <= 0:
            del counts[weights]
        if len(counts) > 1:
            self._unequal_at.setdefault(fingerprint, self._newest_at[fingerprint])
        else:
            self._unequal_at.pop(fingerprint, None)
        if not counts:
            del self._counts[fingerprint], self._newest_at[fingerprint]

    def unequal_seconds(self, fingerprint: str, now: float) -> float:
        """For how long instances of this fingerprint have held different weights."""
        return max(0.0, now - self._unequal_at.get(fingerprint, now))


def _holding(beat: Heartbeat | None) -> tuple[str, bytes] | None:
    return None if beat is None or beat.weights is None else (beat.fingerprint, beat.weights)
