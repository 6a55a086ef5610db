"""The hub side of the fence as a pure state machine: one pool's target and published epoch, and its grants.

No I/O, no clock: `step(event, now)` returns what the driver has to do. The driver (`transport.hub_server`) runs the
leadership reads that serve all pools; the model tests run two of these against one authority under a virtual clock.
The rules are those of the design page "fence", section 4; the small methods are the rules one by one, so that the model
tests can show that each of them is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import PoolRecord, Term
from epochkv_fence.boots import NEVER, BootRecord, Gate
from epochkv_fence.messages import (
    Bump,
    BumpStatus,
    Error,
    Grant,
    Heartbeat,
    Message,
    Nudge,
    Propose,
    Reclaim,
    Reclaimed,
    Refusal,
    Status,
)
from epochkv_fence.pool import PoolConfig, PoolSnapshot
from epochkv_fence.reclaim import Reclaimer
from epochkv_fence.trainers import Trainers, add_marks, status_page

NUDGE_SECONDS: Final = 0.25
ROUND_SECONDS: Final = 1.0
"""Longest pause between grant rounds while no reset is open."""
ROUNDS_PER_LEASE: Final = 10
"""A grant is worth what is left of its lease since the heartbeat was sent, so short leases need quicker rounds."""
RETRY_SECONDS: Final = 0.25
MAX_BOOTS: Final = 20_000


@dataclass(slots=True)
class _Round:
    """A grant round whose leadership read is under way."""

    number: int
    term: Term
    beats: dict[bytes, tuple[bytes, int]]
    publish: int | None


@dataclass(slots=True)
class _Ask:
    """The highest epoch asked for."""

    epoch: int
    at: float | None
    seen: float
    listed: bool = False  # asked for with a list of boots


class Hub:
    """One pool, as the hub in this process knows it.

    Attributes:
        term: the term in which this hub leads this pool; None while it does not lead or has not read the record.
        target, published: as known here; both were durable before they were raised here.
    """

    def __init__(self, config: PoolConfig, instance: bytes | None = None) -> None:
        self.config = config
        self._instance = instance
        self.term: Term | None = None
        self.target = 0
        self.published = 0
        self._durable = 0  # the target known to be durable in this term
        self._noted = False
        self._noting = False
        self._lead_until = math.inf
        self._boots: dict[bytes, BootRecord] = {}
        self._behind: dict[bytes, None] = {}  # boots not at the target, in a replayable order
        self._waiting: dict[bytes, tuple[bytes, int]] = {}
        self._round: _Round | None = None
        self._last_round = NEVER
        self._ask: _Ask | None = None
        self._gate = Gate()
        self._recording: int | None = None
        self._tried = 0  # highest epoch this hub ever tried to record
        self._publishing: int | None = None
        self._retry_at = NEVER
        self._nudge_at = math.inf
        self._forget_at = math.inf
        self._reclaimer = Reclaimer()
        self._trainers = Trainers()
        self._started_at: float | None = None
        self._published_at: float | None = None
        self._reset_seconds: float | None = None

    # ------------------------------------------------------------------ reading

    @property
    def open(self) -> bool:
        """A reset is under way: rounds follow heartbeats at once."""
        return self.term is not None and (self.target > self.published or self._recording is not None)

    @property
    def round_open(self) -> bool:
        """The round that began has something to grant or to publish, so it needs its leadership read."""
        return self._round is not None and (bool(self._round.beats) or self._round.publish is not None)

    def round_at(self, now: float) -> float:
        """When the next round should begin; infinity while there is nothing to do."""
        if self.term is None or self._round is not None:
            return math.inf
        due = math.inf
        if self._waiting and self._noted:
            pause = 0.0 if self.open else min(ROUND_SECONDS, self.config.lease_seconds / ROUNDS_PER_LEASE)
            due = max(now, self._last_round + pause)
        if self._durable >= self.target > self.published and self._publishing is None:
            due = min(due, self._publish_at(now))
        return due

    def tick_at(self) -> float:
        """When the next `Tick` is due."""
        if self.term is None:
            return self._forget_at
        due = min(self._nudge_at if self.open and self._behind else math.inf, self._forget_at, self._reclaimer.due_at)
        pending = self._record_due() or (bool(self._waiting) and not self._noted and not self._noting)
        return min(due, self._retry_at) if pending else due

    def snapshot(self, now: float) -> PoolSnapshot:
        """The pool at `now`; times are on this hub's clock (the driver turns them into Unix seconds)."""
        engines = sorted(
            (record.view(self.target, self.config, now) for record in self._boots.values()),
            key=lambda view: (view.engine, view.pod, view.rank, view.boot),
        )
        return PoolSnapshot(
            uid=self.config.uid,
            leading=self.term is not None,
            target=self.target,
            published=self.published,
            asked=max(self.target, self._ask.epoch if self._ask else 0),
            engines=engines,
            laggards=[view for view in engines if view.alive and not view.converged],
            carried=sum(view.carried for view in engines),
            started_at=self._started_at,
            published_at=self._published_at,
            reset_seconds=self._reset_seconds,
            reclaimed=self._reclaimer.done_below,
        )

    # ------------------------------------------------------------------ stepping

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: PLR0911, PLR0912 - one line per event
        """Take one event at `now` (seconds on this hub's monotonic clock)."""
        match event:
            case ev.Heard(peer, message):
                return self._heard(peer, message, now)
            case ev.RoundBegan(number):
                return self._begin_round(number, now)
            case ev.RoundVerified(number):
                return self._finish_round(number, now)
            case ev.RoundDropped(number):
                return self._drop_round(number)
            case ev.Tick():
                return self._tick(now)
            case ev.Asked(epoch, at):
                return self._asked(_Ask(epoch, at, now), now)
            case ev.Acquired(term, record):
                return self._acquire(term, record, now)
            case ev.SteppedDown():
                return self._step_down()
            case ev.Recorded(epoch):
                return self._recorded(epoch, now)
            case ev.RecordFailed(epoch):
                self._recording = None
                self._retry_at = now + RETRY_SECONDS
                return []
            case ev.Observed(record):
                return self._observe(record, now)
            case ev.Noted():
                self._noting, self._noted = False, True
                return []
            case ev.NoteFailed():
                self._noting = False
                self._retry_at = now + RETRY_SECONDS
                return []
            case ev.Published(epoch):
                return self._publish_done(epoch, now)
            case ev.PublishFailed():
                return self._publish_failed(now)
            case ev.Configured(config):
                return self._configure(config, now)
            case ev.Wiped() | ev.WipeFailed() | ev.Swept() | ev.SweepFailed():
                return []

    # ------------------------------------------------------------------ leadership

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        self._abandon()
        self.term = term
        self._noted = record.granting
        self._durable = record.target
        # Nobody was ever granted anything: there is no older grant to wait for.
        self._lead_until = now + self._lead_wait() if record.granting else NEVER
        self.published = max(self.published, record.published)
        self._forget_at = now + self.config.hold_seconds
        self._reclaim_after(now + self.config.reclaim_seconds)
        actions = self._raise_target(record.target, now)
        if not actions:
            actions = [ev.Changed(), *self._nudge(self._behind, now)]
        return [*actions, *self._record(now), *self._note()]

    def _lead_wait(self) -> float:
        """How long a new leader waits: every grant of an older leader answers a heartbeat sent before now."""
        return self.config.hold_seconds

    def _step_down(self) -> list[ev.Action]:
        self._abandon()
        return [ev.Changed()]

    def _abandon(self) -> None:
        """Forget everything that belongs to a term: what was evaluated and not yet read is void."""
        self.term = None
        self._lead_until = math.inf
        self._round = None
        self._recording = self._publishing = None
        self._noting = False
        self._retry_at = NEVER
        self._reclaimer.stop()

    def _configure(self, config: PoolConfig, now: float) -> list[ev.Action]:
        if self.term is not None and self._lead_until > now:
            self._lead_until += max(0.0, config.hold_seconds - self.config.hold_seconds)
        self.config = config
        return [ev.Changed()]

    # ------------------------------------------------------------------ target

    def _asked(self, ask: _Ask, now: float) -> list[ev.Action]:
        if self._ask is not None and ask.epoch <= self._ask.epoch:
            return []
        self._ask = ask
        return self._record(now)

    def _wanted(self) -> int:
        """The target that has to be durable: what was asked for, and never less than what was granted."""
        return max(self.target, self._ask.epoch if self._ask is not None else 0)

    def _record_due(self) -> bool:
        return self.term is not None and self._recording is None and self._wanted() > self._durable

    def _record(self, now: float) -> list[ev.Action]:
        if not self._record_due() or now < self._retry_at:
            return []
        self._recording = self._tried = self._wanted()
        return [ev.Record(self._recording)]

    def _recorded(self, epoch: int, now: float) -> list[ev.Action]:
        self._recording = None
        self._durable = max(self._durable, epoch)
        return [*self._raise_target(epoch, now), *self._record(now)]

    def _observe(self, record: PoolRecord, now: float) -> list[ev.Action]:
        """A durable target above our own raises ours: an old leader's late Record is harmless."""
        if self.term is None:
            return []
        changed = record.published > self.published
        self.published = max(self.published, record.published)
        self._noted = self._noted or record.granting
        self._durable = max(self._durable, record.target)
        return self._raise_target(record.target, now) or ([ev.Changed()] if changed else [])

    def _raise_target(self, target: int, now: float) -> list[ev.Action]:
        """`target` is durable: every grant so far may be below it.

        Only of an epoch that this hub itself tried to record is it known how old a boot was when it was asked for (the
        write may be seen before it answers, or long after it failed to). Any other target that is found recorded may have
        been asked for at any time, so no boot's age proves anything.
        """
        if target <= self.target:
            return []
        self.target = target
        for record in self._boots.values():
            record.below_until = max(record.below_until, record.live_until)
            record.live_until = NEVER
        self._behind = {boot: None for boot, record in self._boots.items() if not record.at_least(target)}
        marked = self._trainers.marked(target)
        ask = self._ask if self._ask is not None and self._ask.epoch == target <= self._tried else None
        self._gate = Gate(ask.at if ask is not None and not (ask.listed or marked) else None, marked)
        self._started_at = ask.seen if ask is not None else now
        return [ev.Changed(), *self._nudge(self._behind, now)]

    # ------------------------------------------------------------------ messages

    def _heard(self, peer: bytes, message: Message, now: float) -> list[ev.Action]:  # noqa: PLR0911 - one per message
        match message:
            case Heartbeat():
                return self._heartbeat(peer, message, now)
            case Propose(epoch=epoch):
                # Made from an older epoch: somebody's proposal was first, and one bump serves all.
                if self.term is None or epoch != self.target + 1:
                    return []
                return self._asked(_Ask(epoch, now, now), now)
            case Bump():
                return self._bump(peer, message, now)
            case Status(request=request, first=first):
                views = self.snapshot(now).engines
                return [ev.Send(peer, status_page(request, first, self.target, self.published, views))]
            case Reclaimed(below=below, removed=removed):
                return [ev.Changed()] if self._reclaimer.answered(below, removed, self.published) else []
            case Error():
                return []
            case _:
                text = f"a hub takes no {type(message).__name__}"
                return [ev.Send(peer, Error(Refusal.UNEXPECTED, text))]

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float) -> list[ev.Action]:
        record = self._boots.get(beat.boot)
        new = record is None
        if record is None:
            if len(self._boots) >= MAX_BOOTS:
                text = f"pool {self.config.name} already has {MAX_BOOTS} engine boots; wait until some are forgotten"
                return [ev.Send(peer, Error(Refusal.LIMIT, text))]
            record = self._boots[beat.boot] = BootRecord(beat.boot, beat)
            self._behind[beat.boot] = None
            self._forget_at = min(self._forget_at, now + self.config.hold_seconds)
        changed = record.hear(peer, beat, now, self.config.max_clock_rate)
        if record.at_least(self.target):
            self._behind.pop(beat.boot, None)
        if beat.seq >= self._waiting.get(beat.boot, (b"", -1))[1]:
            self._waiting[beat.boot] = (peer, beat.seq)
        return ([ev.Changed()] if new or changed else []) + self._note()

    def _bump(self, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
        if bump.boots is not None:
            self._mark(bump.epoch, bump.boots)
        actions = []
        if bump.epoch > self.target:
            actions = self._asked(_Ask(bump.epoch, now, now, listed=bump.boots is not None), now)
        if bump.epoch > self.published:
            self._trainers.wait(peer, bump.request, bump.epoch)
        return [*actions, ev.Send(peer, self._bump_status(bump.request, bump.epoch))]

    def _mark(self, epoch: int, boots: Iterable[bytes]) -> None:
        """Exactly these boots got the weights of `epoch`. A long list comes in several messages."""
        if epoch == self.target:
            add_marks(self._gate.marked, boots)
            self._gate.asked_at = None
        elif epoch > self.target:
            self._trainers.mark(epoch, boots)

    def _bump_status(self, request: int, epoch: int) -> BumpStatus:
        return BumpStatus(
            request=request,
            epoch=epoch,
            target=self.target,
            published=self.published,
            engines=len(self._boots),
            laggards=len(self._behind),
            carried=sum(record.newest.carried for record in self._boots.values()),
        )

    def _nudge(self, boots: Iterable[bytes], now: float) -> list[ev.Action]:
        self._nudge_at = now + NUDGE_SECONDS
        if self.term is None:
            return []
        return [ev.Send(self._boots[boot].peer, Nudge(boot)) for boot in boots]

    def _note(self) -> list[ev.Action]:
        """Before the first grant of all, note durably that grants may be out."""
        if self.term is None or self._noted or self._noting or not self._waiting:
            return []
        self._noting = True
        return [ev.NoteGranting()]

    # ------------------------------------------------------------------ rounds

    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        if self.term is None:
            self._round = None
            return []
        publish = self.target if self._may_publish(now) else None
        beats = self._waiting if self._may_grant() else {}
        if beats:
            self._waiting = {}
        self._round = _Round(number, self.term, beats, publish)
        self._last_round = now
        if not self.round_open:
            self._round = None
        return []

    def _may_grant(self) -> bool:
        """The note must be durable before the read that a grant rests on, or a later hub would not see it."""
        return self._noted

    def _finish_round(self, number: int, now: float) -> list[ev.Action]:
        """After the read, in one step: the epoch from memory, the time of granting, the grants; then the publication
        that was evaluated before the read."""
        current = self._take_round(number)
        if current is None:
            return []
        actions = self._grant_all(current, now)
        if current.publish is not None and current.publish > self.published and self._publishing is None:
            self._publishing = current.publish
            actions.append(ev.Publish(current.publish))
        return actions

    def _take_round(self, number: int) -> _Round | None:
        current = self._round
        if current is None or current.number != number:
            return None
        self._round = None
        return current if current.term == self.term else None

    def _grant_all(self, current: _Round, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for boot, (peer, seq) in current.beats.items():
            record = self._boots.get(boot)
            if record is not None:
                actions.append(ev.Send(peer, self._grant(record, seq, now)))
        return actions

    def _grant(self, record: BootRecord, seq: int, now: float) -> Grant:
        record.granted_at = now
        record.live_until = max(record.live_until, now + self._hold())
        mode = self._gate.mode(record, self.target, self.config)
        return Grant(record.boot, seq, self.target, mode, self.config.lease_seconds)

    def _hold(self) -> float:
        """After this a grant made now is dead: the lease, and the margin for clocks at different rates."""
        return self.config.hold_seconds

    def _drop_round(self, number: int) -> list[ev.Action]:
        current = self._take_round(number)
        if current is not None:
            for boot, (peer, seq) in current.beats.items():
                self._waiting.setdefault(boot, (peer, seq))
        return []

    # ------------------------------------------------------------------ publication

    def _may_publish(self, now: float) -> bool:
        """Nobody can be using an epoch below the target any more, by anybody's grants."""
        return (
            self._durable >= self.target > self.published
            and self._publishing is None
            and now >= self._retry_at
            and self._led_long_enough(now)
            and all(self._fenced(self._boots[boot], now) for boot in self._behind)
        )

    def _led_long_enough(self, now: float) -> bool:
        return now >= self._lead_until

    def _fenced(self, record: BootRecord, now: float) -> bool:
        """Only grants *below* the target count: grants of the target never delay publication."""
        return now >= record.below_until

    def _publish_at(self, now: float) -> float:
        """When the passing of time alone allows publication (earlier than `now` if it does)."""
        due = max(self._lead_until, self._retry_at)
        return max(due, max((self._boots[boot].below_until for boot in self._behind), default=NEVER))

    def _publish_done(self, epoch: int, now: float) -> list[ev.Action]:
        self._publishing = None
        if epoch <= self.published:
            return []
        self.published = epoch
        self._published_at = now
        if epoch == self.target and self._started_at is not None:
            self._reset_seconds = now - self._started_at
        self._reclaim_after(now)
        answers = [ev.Send(peer, self._bump_status(request, asked)) for peer, request, asked in self._trainers.served(epoch)]
        return [ev.Changed(), *answers]

    def _publish_failed(self, now: float) -> list[ev.Action]:
        """Perhaps the record was lost (a wiped status, a restored store): record the target again before the next try."""
        self._publishing = None
        self._durable = 0
        self._retry_at = now + RETRY_SECONDS
        return []

    # ------------------------------------------------------------------ time

    def _tick(self, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        if now >= self._forget_at:
            actions += self._forget(now)
        if self.term is None:
            return actions
        if self.open and self._behind and now >= self._nudge_at:
            actions += self._nudge(self._behind, now)
        if now >= self._retry_at:
            actions += self._record(now) + self._note()
        if now >= self._reclaimer.due_at:
            actions += self._reclaim(now)
        return actions

    def _forget(self, now: float) -> list[ev.Action]:
        """Drop boots that were silent for a lease and margin; by then every grant they had is dead."""
        hold = self.config.hold_seconds
        dead = [
            boot for boot, record in self._boots.items() if now >= max(record.silent_since() + hold, record.live_until, record.below_until)
        ]
        for boot in dead:
            del self._boots[boot]
            self._behind.pop(boot, None)
            self._waiting.pop(boot, None)
        self._forget_at = now + hold / 3 if self._boots else math.inf
        return [ev.Changed()] if dead else []

    def _reclaim_after(self, at: float) -> None:
        if self.config.reclaim == "Delete" and self.term is not None:
            self._reclaimer.start(self.published, at)

    def _reclaim(self, now: float) -> list[ev.Action]:
        able = [
            record
            for record in self._boots.values()
            if record.at_least(self.published) and now < record.heard_at + self.config.lease_seconds
        ]
        chosen = self._reclaimer.choose(self.published, able, self.config.reclaim_seconds, now)
        return [] if chosen is None else [ev.Send(chosen.peer, Reclaim(chosen.boot, self.published))]
