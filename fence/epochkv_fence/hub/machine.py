"""The hub side of the fence as a pure state machine: one pool's target and published epoch, and its grants.

No I/O, no clock: `step(event, now)` returns what the driver has to do. The driver (`net.server`) runs the
leadership reads that serve all pools; the model tests run two of these against one authority under a virtual clock.
The rules are those of the design page "fence", section 4; the small methods are the rules one by one, so that the model
tests can show that each of them is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.boots import NEVER, BootRecord
from epochkv_fence.hub.state import Ask, Round
from epochkv_fence.hub.store import HubStore
from epochkv_fence.protocol.authority import Origin, PoolRecord, Term
from epochkv_fence.protocol.messages import (
    Bump,
    Error,
    Grant,
    Heartbeat,
    Label,
    Leave,
    Message,
    Nudge,
    Propose,
    Reclaimed,
    Refusal,
    Source,
    Status,
)
from epochkv_fence.protocol.pool import PoolConfig

NUDGE_SECONDS: Final = 0.25
NUDGES_PER_SECOND: Final = 2_000
"""Thousands of boots that were just nudged are on their way: nudged again, each would only send another heartbeat."""
MAX_BOOTS: Final = 10_000


class Hub(HubStore):
    """Takes events, one by one."""

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event at `now` (seconds on this hub's monotonic clock)."""
        return [*self._take(event, now), *self._note_labels()]

    def _take(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: PLR0911, PLR0912 - one line per event
        match event:
            case ev.Heard(peer, message, key_index):
                return self._heard(peer, message, key_index, now)
            case ev.RoundBegan(number):
                return self._begin_round(number, now)
            case ev.RoundVerified(number):
                return self._finish_round(number, now)
            case ev.RoundDropped(number):
                return self._drop_round(number)
            case ev.Tick():
                return self._tick(now)
            case ev.Asked(epoch, origin):
                return self._asked(Ask(epoch, now, origin), now)
            case ev.Acquired(term, record):
                return self._acquire(term, record, now)
            case ev.SteppedDown():
                return self._step_down()
            case ev.Recorded(epoch):
                return self._recorded(epoch, now)
            case ev.RecordFailed():
                self._recording = None
                self._retry_at = now + ev.RETRY_SECONDS
                return []
            case ev.Observed(record):
                return self._observe(record, now)
            case ev.Noted():
                self._noting, self._noted = False, True
                return []
            case ev.NoteFailed():
                self._noting = False
                self._retry_at = now + ev.RETRY_SECONDS
                return []
            case ev.LabelsNoted() | ev.LabelsNoteFailed():
                return self._labels_noted(event)
            case ev.Published(epoch):
                self._publishing, self._stored = None, max(self._stored, epoch)
                return self._raise_published(epoch, now)
            case ev.PublishFailed():
                return self._publish_failed(now)
            case ev.Configured(config):
                return self._configure(config, now)
            case ev.Wiped() | ev.WipeFailed() | ev.Swept() | ev.SweepFailed():
                return self._store_answered(event, now)

    # ------------------------------------------------------------------ leadership

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        self._abandon()
        self.term = term
        self._noted = record.granting
        self._durable = self._proven = record.target
        # Nobody was ever granted anything: there is no older grant to wait for.
        self._lead_until = now + self._lead_wait() if record.granting else NEVER
        self.published = max(self.published, record.published)
        self._stored = record.published  # less than that, after a restore: then it is published again
        self._forget_at = now + self.config.hold_seconds
        self._led_at = now
        self._labels.lead(record.labels)
        self._reclaim_after(now + self.config.reclaim_seconds)
        self._sweep_weights_after(now + self.config.grace_seconds)
        actions = self._raise_target(record.target, record.origin, now)
        if not actions:
            actions = [ev.Changed(), *self._nudge(self._behind, now)]
        actions += self._heal(max((boot.epoch or 0 for boot in self._boots.values()), default=0), now)
        return [*actions, *self._record(now), *self._note()]

    def _step_down(self) -> list[ev.Action]:
        return [*self._abandon(), ev.Changed()]

    def _abandon(self) -> list[ev.Action]:
        """Forget everything that belongs to a term: what was evaluated and not yet read is void."""
        questions = self._trainers.questions + (self._round.questions if self._round is not None else [])
        self._trainers.questions = []
        self.term = None
        self._lead_until = self._led_at = math.inf
        self._round = None
        self._recording = self._publishing = None
        self._noting = False
        self._retry_at = NEVER
        self._reclaimer.stop()
        self._wiper.stop()
        return [self._not_leading(peer) for peer in [*(peer for peer, _ in questions), *self._labels.forget()]]

    def _not_leading(self, peer: bytes) -> ev.Action:
        """Who does not lead, or has not read the record, does not know the target: a trainer that took an old one for it
        would ask for an epoch that is long published, and believe that its reset is done."""
        return ev.Send(peer, Error(Refusal.NOT_LEADING, f"this hub does not lead pool {self.config.name} now; ask again"))

    def _configure(self, config: PoolConfig, now: float) -> list[ev.Action]:
        if self.term is not None and self._lead_until > now:
            self._lead_until += max(0.0, config.hold_seconds - self.config.hold_seconds)
        before, self.config = self.config, config
        if config.client_public_keys != before.client_public_keys:
            for record in self._boots.values():
                record.keys_changed(before.client_public_keys, config.client_public_keys)
        if config.reclaim != before.reclaim:
            self._wiper.stop()
            self._reclaimer.stop()
            self._reclaim_after(now)
            self._sweep_weights_after(now)
        return [ev.Changed()]

    # ------------------------------------------------------------------ target and asks

    def _asked(self, ask: Ask, now: float) -> list[ev.Action]:
        """The highest epoch asked for counts, and of asks for one epoch the first."""
        if not ask.possible:
            return []
        if ask.epoch > self._wanted():
            self._ask = ask
            return self._record(now)
        return []

    def _heal(self, epoch: int, now: float) -> list[ev.Action]:
        """An engine reports an epoch that is not on record. It was granted it, so it was durable once: the record was
        rolled back (a restored store). Then what it says about older grants is void, too."""
        if self.term is None or epoch <= max(self.target, self._durable):
            return []
        self._lead_until = max(self._lead_until, now + self._lead_wait())
        return self._asked(Ask(epoch, now, Origin(Source.ENGINE)), now)

    def _record(self, now: float) -> list[ev.Action]:
        if not self._record_due() or now < self._retry_at:
            return []
        self._recording = self._wanted()
        ask = self._ask
        origin = ask.origin if ask is not None and ask.epoch == self._recording > self.target else self._origin
        return [ev.Record(self._recording, origin)]

    def _recorded(self, epoch: int, now: float) -> list[ev.Action]:
        self._recording = None
        self._durable = max(self._durable, epoch)
        return [*self._raise_target(epoch, None, now), *self._record(now)]

    def _observe(self, record: PoolRecord, now: float) -> list[ev.Action]:
        """A durable target above our own raises ours: an old leader's late Record is harmless."""
        if self.term is None:
            return []
        self._noted = self._noted or record.granting
        self._durable = max(self._durable, record.target)
        actions = self._raise_target(record.target, record.origin, now)
        if record.target == self.target and record.origin not in (None, self._origin):
            self._origin, actions = record.origin, [*actions, ev.Changed()]
        if self._labels.found(record.labels):
            actions = [*actions, ev.Changed()]
        return [*actions, *self._raise_published(record.published, now)]

    def _raise_target(self, target: int, origin: Origin | None, now: float) -> list[ev.Action]:
        """`target` is durable: every grant so far may be below it. `origin`: as found with it, if it was."""
        if target <= self.target:
            if origin is not None and target == self.target:
                self._origin = origin
            return []
        ask = self._ask if self._ask is not None and self._ask.epoch == target else None
        self._origin = ask.origin if origin is None and ask is not None else origin
        self.target = target
        for record in self._boots.values():
            record.below_until = max(record.below_until, record.live_until)
            record.live_until = NEVER
        self._behind = {boot: None for boot, record in self._boots.items() if not record.at_least(target)}
        self._started_at = ask.seen if ask is not None else now
        return [ev.Changed(), *self._nudge(self._behind, now)]

    # ------------------------------------------------------------------ messages

    def _heard(self, peer: bytes, message: Message, key_index: int, now: float) -> list[ev.Action]:  # noqa: PLR0911
        match message:
            case Heartbeat():
                return self._heartbeat(peer, message, now, key_index)
            case Propose(epoch=epoch):
                return self._propose(epoch, now)
            case Bump():
                return self._bump(peer, message, now)
            case Status():
                return self._question(peer, message, now)
            case Reclaimed():
                new = self._reclaimer.answered(message, self.published)
                return [ev.Changed()] if new else []
            case Label():
                return self._label(peer, message)
            case Leave(boot=boot):
                return self._leave(boot, now)
            case Error():
                return []
            case _:
                text = f"a hub takes no {type(message).__name__}"
                return [ev.Send(peer, Error(Refusal.UNEXPECTED, text))]

    def _leave(self, boot: bytes, now: float) -> list[ev.Action]:
        """It has no lease any more, and takes none: nobody waits for it, and a heartbeat of its that comes late counts not."""
        self._departed[boot] = None
        while len(self._departed) > MAX_BOOTS:
            del self._departed[next(iter(self._departed))]
        if not self._drop(boot, now):
            return []
        self._engines_changed(now)
        return [ev.Changed()]

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        if beat.boot in self._departed:
            return []
        record = self._boots.get(beat.boot)
        new = record is None
        if record is None:
            if len(self._boots) >= MAX_BOOTS:
                text = f"pool {self.config.name} already has {MAX_BOOTS} engine boots; wait until some are forgotten"
                return [ev.Send(peer, Error(Refusal.LIMIT, text))]
            record = self._boots[beat.boot] = BootRecord(beat.boot, beat)
            self._behind[beat.boot] = None
            self._forget_at = min(self._forget_at, now + self.config.hold_seconds)
        before = None if new else record.newest
        changed = record.hear(peer, beat, now, key_index)
        self._holdings.change(before, record.newest, record.weights_at)
        if beat.weights is not None:
            self._reported.hear(beat.weights, self.config.grace_seconds, now)
        if record.at_least(self.target):
            self._behind.pop(beat.boot, None)
        self._await_round(record, peer, beat.seq, now)
        if new or changed:
            self._engines_changed(now)
        return [*([ev.Changed()] if new or changed else []), *self._heal(record.epoch or 0, now), *self._note()]

    def _propose(self, epoch: int, now: float) -> list[ev.Action]:
        """Made from an older epoch: somebody's proposal was first, and one bump serves all."""
        if self.term is None or epoch != self.target + 1:
            return []
        return self._asked(Ask(epoch, now, Origin(Source.ENGINE)), now)

    def _bump(self, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
        """Taken also by a hub that does not lead yet, which answers when it does."""
        actions = self._asked(Ask(bump.epoch, now, Origin(Source.TRAINER)), now)
        if bump.epoch > self.published:
            self._trainers.wait(peer, bump.request, bump.epoch)
        if self.term is None:
            return [*actions, self._not_leading(peer)]
        return [*actions, *self._answer([(peer, bump.request, bump.epoch)])] if self._may_tell(bump.epoch) else actions

    def _answer(self, waiters: list[tuple[bytes, int, int]]) -> list[ev.Action]:
        answers = self._bump_statuses([(request, epoch) for _, request, epoch in waiters])
        return [ev.Send(peer, answer) for (peer, _, _), answer in zip(waiters, answers, strict=True)]

    def _question(self, peer: bytes, question: Status, now: float) -> list[ev.Action]:
        """The first page waits for a leadership read: a hub that was deposed without knowing it knows an old target."""
        if self.term is None:
            return [self._not_leading(peer)]
        if question.first > 0 or question.after is not None:
            return [ev.Send(peer, self._status(question, now))]
        self._trainers.ask(peer, question)
        return []

    def _nudge(self, boots: Iterable[bytes], now: float) -> list[ev.Action]:
        self._nudge_at = now + max(NUDGE_SECONDS, len(self._behind) / NUDGES_PER_SECOND)
        if self.term is None:
            return []
        return [ev.Send(self._boots[boot].peer, Nudge(boot)) for boot in boots]

    def _note(self) -> list[ev.Action]:
        """Before the first grant of all, note durably that grants may be out."""
        if self.term is None or self._noted or self._noting or not self._waiting:
            return []
        self._noting = True
        return [ev.NoteGranting()]

    # ------------------------------------------------------------------ labels

    def _label(self, peer: bytes, asked: Label) -> list[ev.Action]:
        if self.term is None:
            return [self._not_leading(peer)]
        answer = self._labels.ask(peer, asked)
        return [] if answer is None else [ev.Send(peer, answer)]

    def _note_labels(self) -> list[ev.Action]:
        if self.term is None or not self._labels.unwritten:
            return []
        return [ev.NoteLabels(self._labels.write())]

    def _labels_noted(self, event: ev.LabelsNoted | ev.LabelsNoteFailed) -> list[ev.Action]:
        match event:
            case ev.LabelsNoted(labels):
                answers = self._labels.written(labels)
                return [ev.Changed(), *(ev.Send(peer, answer) for peer, answer in answers)] if answers else []
            case ev.LabelsNoteFailed(labels):
                self._labels.write_failed(labels)
                return []

    # ------------------------------------------------------------------ rounds

    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        if self.term is None:
            self._round = None
            return []
        publish = self.target if self._may_publish(now) else None
        beats: dict[bytes, tuple[bytes, int]] = {}
        if self._may_grant():  # also when nobody waits: what is heard from now on must not get into this round
            beats, self._waiting, self._joining = self._waiting, {}, False
        questions, self._trainers.questions = self._trainers.questions, []
        durable = min(self._durable, self.target)
        self._round = Round(number, self.term, beats, durable, publish, questions)
        self._last_round = now
        if not self.round_open:
            self._round = None
        return []

    def _finish_round(self, number: int, now: float) -> list[ev.Action]:
        """After the read, in one step: the epoch from memory, the time of granting, the grants; then the publication, if
        it was evaluated before the read."""
        current = self._take_round(number)
        if current is None:
            return []
        actions = self._grant_all(current, now)
        if current.target > self._proven:
            self._proven = current.target
            actions += self._answer([waiter for waiter in self._trainers.waiters() if self._may_tell(waiter[2])])
        actions += [ev.Send(peer, self._status(question, now)) for peer, question in current.questions]
        if current.publish is not None and current.publish > self._stored and self._publishing is None:
            self._publishing = current.publish
            actions.append(ev.Publish(current.publish))
        return actions

    def _take_round(self, number: int) -> Round | None:
        current = self._round
        if current is None or current.number != number:
            return None
        self._round = None
        return current if current.term == self.term else None

    def _grant_all(self, current: Round, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for boot, (peer, seq) in current.beats.items():
            record = self._boots.get(boot)
            if record is not None:
                actions.append(ev.Send(peer, self._grant(record, seq, now)))
        return actions

    def _grant(self, record: BootRecord, seq: int, now: float) -> Grant:
        record.granted_at = now
        record.live_until = max(record.live_until, now + self._hold())
        return Grant(record.boot, seq, self.target, self.config.lease_seconds)

    def _drop_round(self, number: int) -> list[ev.Action]:
        current = self._take_round(number)
        if current is not None:
            self._trainers.questions[:0] = current.questions
            for boot, (peer, seq) in current.beats.items():
                self._waiting.setdefault(boot, (peer, seq))
        return []

    # ------------------------------------------------------------------ publication

    def _raise_published(self, epoch: int, now: float) -> list[ev.Action]:
        """`epoch` is published, by this hub or another one."""
        if epoch <= self.published:
            return []
        self.published = epoch
        self._published_at = now
        if epoch == self.target and self._started_at is not None:
            self._reset_seconds = now - self._started_at
        self._clean_after(now)
        return [ev.Changed(), *self._answer(self._trainers.served(epoch))]

    def _publish_failed(self, now: float) -> list[ev.Action]:
        """Perhaps the record was lost (a wiped status, a restored store): record the target again before the next try."""
        self._publishing = None
        self._durable = self._proven = 0
        self._retry_at = now + ev.RETRY_SECONDS
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
        return [*actions, *self._clean(now)]

    def _forget(self, now: float) -> list[ev.Action]:
        """Drop boots that were silent for a lease and margin; by then every grant they had is dead."""
        dead = [boot for boot, record in self._boots.items() if now >= record.dead_at(self.config.hold_seconds)]
        for boot in dead:
            self._drop(boot, now)
        self._forget_at = now + self.config.hold_seconds / 3 if self._boots else math.inf
        if not dead:
            return []
        self._engines_changed(now)
        return [ev.Changed()]
