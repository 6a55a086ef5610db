"""The engine side of the fence as a pure state machine: what may this engine instance name its KV with, and until when.

No I/O, no clock, no randomness: `step(event, now)` returns what the driver has to do, in order. The driver
(`net.agent`) runs it in a thread of the EngineCore process; the model tests run it under a virtual clock
with every fault there is. The rules are those of the design page "fence", section 3.
"""

from collections import Counter
from typing import Final, NamedTuple

import msgspec

from epochkv_fence.protocol.messages import MAX_EPOCH, Error, Grant, Leave, Message, Nudge, Propose, Reclaim

RETRY_SECONDS: Final = 1.0
"""Heartbeat period without a live lease (also before the first grant tells the lease's length)."""
MIN_GAP_SECONDS: Final = 0.005
"""Pokes and nudges closer together than this share one heartbeat."""
MAX_OPEN_SEQS: Final = 256
"""Heartbeats remembered as unanswered; a grant for an older one is refused, which is safe."""
BEATS_PER_LEASE: Final = 3
NO_LEASE: Final = 0.0


class View(NamedTuple):
    """What the scheduler thread reads, replaced as a whole. `epoch` may be used while `now < lease_until`."""

    epoch: int | None
    lease_until: float


# ---------------------------------------------------------------------------------------------------------------- events


class Started(msgspec.Struct, frozen=True):
    """The engine can adopt: vLLM has set its own root. Until then nothing is sent and nothing accepted."""


class Tick(msgspec.Struct, frozen=True):
    """`deadline()` has come, or time has passed."""


class Poked(msgspec.Struct, frozen=True):
    """Something the hub should know has changed, or a connection to it came up: heartbeat now."""


class Received(msgspec.Struct, frozen=True):
    """A message from the hub."""

    message: Message


class Adopted(msgspec.Struct, frozen=True):
    """The `Adopt` asked for is done: the new root is bound."""

    epoch: int


class AdoptFailed(msgspec.Struct, frozen=True):
    """The `Adopt` asked for could not be done; nothing has changed. A later grant asks again."""


class Settled(msgspec.Struct, frozen=True):
    """After `Settle`: the scheduler thread is outside `schedule()`, so no lookup under the old root is open."""


class Proposed(msgspec.Struct, frozen=True):
    """This engine's caches were reset alone: ask the hub for `epoch`, repeatedly until it is reached."""

    epoch: int


class Woke(msgspec.Struct, frozen=True):
    """This process was restored from an image, perhaps not as the only one. Processes of one instance would answer for each other: it
    goes on as `instance`, without a lease."""

    instance: bytes


class Left(msgspec.Struct, frozen=True):
    """The engine shuts down, and its scheduler thread is outside `schedule()`: it admits nothing more. Nothing follows."""


Event = Started | Tick | Poked | Received | Adopted | AdoptFailed | Settled | Proposed | Woke | Left


# --------------------------------------------------------------------------------------------------------------- actions


class Beat(msgspec.Struct, frozen=True):
    """Send a heartbeat with these fields; the driver adds identity, age, weights, `old_epoch_requests` and statistics."""

    seq: int
    epoch: int | None


class Adopt(msgspec.Struct, frozen=True):
    """Bind the root of `epoch`, then say `Adopted` (or `AdoptFailed`)."""

    epoch: int


class Settle(msgspec.Struct, frozen=True):
    """Say `Settled` as soon as the scheduler thread is outside `schedule()`."""


class Send(msgspec.Struct, frozen=True):
    """Send this message to the hub."""

    message: Message


class RemoveOld(msgspec.Struct, frozen=True):
    """Remove the pool's keys of epochs below `below`, and unless `keep` is empty those of all other weights, away from this
    thread, and send `Reclaimed` with this `number`."""

    below: int
    keep: tuple[bytes, ...] = ()
    number: int = 0


class HubRefused(msgspec.Struct, frozen=True):
    """The hub rejected a message of ours."""

    error: Error


Action = Beat | Adopt | Settle | Send | RemoveOld | HubRefused


class _Pending(NamedTuple):
    """A grant whose adoption is under way."""

    epoch: int
    lease_end: float


class Agent:
    """One instance of one engine.

    Attributes:
        epoch: highest epoch adopted in this engine instance; survives lease loss.
        lease_until: on the lease clock (`common.LeaseClock`); moves only once the granted epoch *is* adopted, so a lease never
            covers the use of a lower one.
        refused: grants dropped, by reason, and proposals that no epoch is left for.
    """

    def __init__(self, instance: bytes) -> None:
        self.instance = instance
        self.epoch: int | None = None
        self.lease_until = NO_LEASE
        self.lease_seconds: float | None = None
        self.refused: Counter[str] = Counter()
        self._started = False
        self._left = False
        self._acknowledged: int | None = None
        self._settling = False
        self._pending: _Pending | None = None
        self._next_seq = 0
        self._sent_at: dict[int, float] = {}
        self._beat_due = 0.0
        self._last_beat = float("-inf")
        self._proposal: int | None = None

    # ------------------------------------------------------------------ reading

    @property
    def view(self) -> View:
        """The adopted epoch, and until when it may be used."""
        return View(self.epoch, self.lease_until)

    def deadline(self) -> float:
        """When the next `Tick` is due; infinity before `Started` and after `Left`."""
        return self._beat_due if self._started and not self._left else float("inf")

    # ------------------------------------------------------------------ stepping

    def step(self, event: Event, now: float) -> list[Action]:  # noqa: PLR0911 - one line per event
        """Take one event at `now` (seconds on the lease clock)."""
        if self._left:
            return []
        match event:
            case Started():
                self._started = True
                return self._beat(now)
            case Tick():
                return self._beat(now) if self._started and now >= self._beat_due else []
            case Poked():
                return self._poked(now)
            case Received(message):
                return self._received(message, now)
            case Adopted(epoch):
                return self._adopted(epoch)
            case AdoptFailed():
                self._pending = None
                return []
            case Settled():
                return self._settled(now)
            case Proposed(epoch):
                return self._proposed(epoch)
            case Woke(instance):
                self.instance, self.lease_until = instance, NO_LEASE
                self._sent_at.clear()
                self._pending = self._pending and self._pending._replace(lease_end=NO_LEASE)
                return self._poked(now)
            case Left():
                return self._leave()

    def _received(self, message: Message, now: float) -> list[Action]:
        match message:
            case Grant():
                return self._granted(message, now)
            case Nudge(instance):
                return self._poked(now) if instance == self.instance else []
            case Reclaim(instance, below, keep, number):
                return [RemoveOld(below, tuple(keep), number)] if instance == self.instance else []
            case Error():
                return [HubRefused(message)]
            case _:
                self.refused["unexpected"] += 1
                return []

    # ------------------------------------------------------------------ grants

    def _granted(self, grant: Grant, now: float) -> list[Action]:
        reason = self._refusal(grant, now)
        if reason is not None:
            self.refused[reason] += 1
            return []
        self.lease_seconds = grant.lease_seconds
        lease_end = self._lease_end(grant, now)
        if grant.epoch == self.epoch:
            self.lease_until = max(self.lease_until, lease_end)
            return []
        self._pending = _Pending(grant.epoch, lease_end)
        return [Adopt(grant.epoch)]

    def _refusal(self, grant: Grant, now: float) -> str | None:  # noqa: PLR0911 - one line per rule
        """Why this grant is dropped, or None. Each line is a rule whose removal the model tests must notice."""
        if not self._started:
            return "not_started"
        if grant.instance != self.instance:
            return "other_instance"
        if grant.seq not in self._sent_at:
            return "unknown_seq"
        if now >= self._sent_at[grant.seq] + grant.lease_seconds:
            return "expired"
        if self.epoch is not None and grant.epoch < self.epoch:
            return "lower_epoch"
        if self._pending is not None:
            return "adopting"
        return None

    def _lease_end(self, grant: Grant, now: float) -> float:
        """A lease counts from when the heartbeat was *sent*: the hub's promise is about that moment, not about now."""
        return self._sent_at[grant.seq] + grant.lease_seconds

    def _adopted(self, epoch: int) -> list[Action]:
        pending = self._pending
        if pending is None or pending.epoch != epoch:
            return []
        self._pending = None
        self.epoch = epoch
        self.lease_until = max(self.lease_until, pending.lease_end)
        if self._proposal is not None and self._proposal <= epoch:
            self._proposal = None
        self._settling = True
        return [Settle()]

    def _settled(self, now: float) -> list[Action]:
        if not self._settling:
            return []
        self._settling = False
        self._acknowledged = self.epoch
        return self._beat(now)

    def _leave(self) -> list[Action]:
        """The lease goes first: once the hub has heard of it, it waits for this engine instance no more."""
        self._left = True
        self.lease_until = NO_LEASE
        return [Send(Leave(self.instance))] if self._started else []

    # ------------------------------------------------------------------ heartbeats

    def _poked(self, now: float) -> list[Action]:
        if not self._started:
            return []
        earliest = self._last_beat + MIN_GAP_SECONDS
        if now < earliest:
            self._beat_due = min(self._beat_due, earliest)
            return []
        return self._beat(now)

    def _beat(self, now: float) -> list[Action]:
        seq = self._next_seq
        self._next_seq += 1
        self._sent_at[seq] = now
        while len(self._sent_at) > MAX_OPEN_SEQS:
            del self._sent_at[next(iter(self._sent_at))]
        self._last_beat = now
        self._beat_due = now + self._period(now)
        return [Beat(seq, self._acknowledged), *self._proposals()]

    def _period(self, now: float) -> float:
        third = RETRY_SECONDS if self.lease_seconds is None else self.lease_seconds / BEATS_PER_LEASE
        return third if now < self.lease_until else min(third, RETRY_SECONDS)

    # ------------------------------------------------------------------ proposals

    def _proposed(self, epoch: int) -> list[Action]:
        """Of several resets the highest epoch serves all."""
        if epoch > MAX_EPOCH:
            self.refused["no_epoch_left"] += 1
            return []
        if self.epoch is not None and epoch <= self.epoch:
            return []  # adopted since the reset
        if self._proposal is None or epoch >= self._proposal:
            self._proposal = epoch
        return self._proposals()

    def _proposals(self) -> list[Action]:
        return [] if self._proposal is None else [Send(Propose(self.instance, self._proposal))]
