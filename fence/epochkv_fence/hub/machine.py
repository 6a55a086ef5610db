"""The hub side of the fence as a pure state machine: one pool's target and published epoch, and its grants.

No I/O, no clock: `step(event, now)` returns what the driver has to do. The driver (`net.serving.server`) runs the leadership reads
that serve all pools; the model tests run two of these against one authority under a virtual clock.
`state` has what a hub knows, and `rules` has the rules of the design page "fence", section 4.
"""

from __future__ import annotations

import math
from typing import Final

from epochkv_fence.hub import events as ev
from epochkv_fence.hub import hearing, removal, resets, snapshot
from epochkv_fence.hub.rounds import Round
from epochkv_fence.hub.rules import RULES, HubRules
from epochkv_fence.hub.state import HubState
from epochkv_fence.protocol.authority import Term
from epochkv_fence.protocol.messages import Grant
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot

ROUND_SECONDS: Final = 1.0
"""Longest pause between grant rounds while no reset is open."""
ROUNDS_PER_LEASE: Final = 10
"""A grant is worth what is left of its lease since the heartbeat was sent, so short leases need quicker rounds."""
JOIN_SECONDS: Final = 0.05
"""The same while a boot waits that has no grant of this hub: it may share nothing because of that, as after a restart."""
QUESTION_SECONDS: Final = 0.05
"""Shortest pause between rounds that are for a trainer's question alone."""


class Hub:
    """One pool's hub. A test passes other `rules` to show that the fence needs its own."""

    def __init__(self, config: PoolConfig, rules: HubRules = RULES) -> None:
        self.state = HubState(config, rules)

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event at `now` (seconds on this hub's monotonic clock)."""
        actions = self._take(event, now)
        labels = self.state.labels
        return [*actions, ev.NoteLabels(labels.write())] if self.state.leading and labels.unwritten else actions

    def _take(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: PLR0911, PLR0912 - one line per event
        hub = self.state
        match event:
            case ev.Heard(peer, message, key_index):
                return hearing.hear(hub, peer, message, key_index, now)
            case ev.RoundBegan(number):
                self._begin_round(number, now)
            case ev.RoundVerified(number):
                return self._finish_round(number, now)
            case ev.RoundDropped(number):
                hub.rounds.put_back(number, hub.lead.term)
            case ev.Tick():
                return self._tick(now)
            case ev.Asked(epoch, origin):
                return resets.ask(hub, epoch, origin, now)
            case ev.Acquired(term, record):
                return resets.acquire(hub, term, record, now)
            case ev.SteppedDown():
                return [*resets.abandon(hub), ev.Changed()]
            case ev.Recorded(epoch):
                return resets.recorded(hub, epoch, now)
            case ev.RecordFailed():
                hub.record.write_failed(now)
            case ev.Observed(record):
                return resets.observe(hub, record, now)
            case ev.Noted():
                hub.record.note_written()
            case ev.NoteFailed():
                hub.record.note_failed(now)
            case ev.LabelsNoted(labels):
                answers = hub.labels.written(labels)
                return [ev.Changed(), *(ev.Send(peer, answer) for peer, answer in answers)] if answers else []
            case ev.LabelsNoteFailed(labels):
                hub.labels.write_failed(labels)
            case ev.Published(epoch):
                return resets.published(hub, epoch, now)
            case ev.PublishFailed():
                hub.record.publish_failed(now)
            case ev.Configured(config):
                return resets.configure(hub, config, now)
            case ev.Wiped() | ev.WipeFailed() | ev.Swept() | ev.SweepFailed():
                return removal.answered(hub, event, now)
        return []

    # ------------------------------------------------------------------ for the driver

    @property
    def term(self) -> Term | None:
        """The term in which this hub leads this pool; None while it does not lead or has not read the record."""
        return self.state.lead.term

    @property
    def target(self) -> int:
        return self.state.record.target

    @property
    def published(self) -> int:
        return self.state.record.published

    def snapshot(self, now: float) -> PoolSnapshot:
        """The pool at `now`; times are on this hub's clock (the driver turns them into Unix seconds)."""
        return snapshot.pool_snapshot(self.state, now)

    # ------------------------------------------------------------------ rounds

    @property
    def round_open(self) -> bool:
        """Something in the present round needs its leadership read."""
        current = self.state.rounds.current
        if current is None:
            return False
        return bool(current.beats or current.questions) or self._proof_wanted() or current.publish is not None

    def _proof_wanted(self) -> bool:
        """Trainers wait to hear that the target is on record."""
        record = self.state.record
        return record.durable >= record.target > record.proven and bool(self.state.waiters)

    def round_at(self, now: float) -> float:
        """When the next round should begin; infinity while there is nothing to do."""
        hub, rounds = self.state, self.state.rounds
        if not hub.leading or rounds.current is not None:
            return math.inf
        due = resets.publish_at(hub)
        if rounds.beats and hub.rules.may_grant(hub.record):
            pause = min(JOIN_SECONDS if rounds.joining else ROUND_SECONDS, hub.config.lease_seconds / ROUNDS_PER_LEASE)
            due = min(due, max(now, rounds.last_at + (0.0 if hub.open else pause)))
        if rounds.questions or self._proof_wanted():
            due = min(due, max(now, rounds.last_at + QUESTION_SECONDS))
        return due

    def _begin_round(self, number: int, now: float) -> None:
        hub, record = self.state, self.state.record
        if hub.lead.term is None:
            hub.rounds.current = None
            return
        publish = record.target if now >= resets.publish_at(hub) else None
        # Also when nobody waits: what is heard from now on must not get into this round.
        grant = hub.rules.may_grant(record)
        hub.rounds.begin(number, hub.lead.term, min(record.durable, record.target), publish, grant=grant, now=now)
        if not self.round_open:
            hub.rounds.current = None

    def _finish_round(self, number: int, now: float) -> list[ev.Action]:
        """The read shows that this hub leads. In one step, it takes the epoch from memory, grants it, and answers questions.

        It publishes only what `_begin_round` evaluated, because the read shows that this hub led after that.
        """
        hub, record = self.state, self.state.record
        current = hub.rounds.take(number, hub.lead.term)
        if current is None:
            return []
        actions = self._grants(current, now)
        if current.target > record.proven:
            record.proven = current.target
            actions += snapshot.answers(hub, [waiter for waiter in hub.waiters.all() if hub.rules.may_tell(record, waiter[2])])
        actions += [ev.Send(peer, snapshot.status(hub, question, now)) for peer, question in current.questions]
        return actions + (record.publish(current.publish) if current.publish is not None else [])

    def _grants(self, current: Round, now: float) -> list[ev.Action]:
        hub = self.state
        actions: list[ev.Action] = []
        for name, (peer, seq) in current.beats.items():
            boot = hub.boots.known.get(name)
            if boot is not None:
                boot.grant(now, now + hub.rules.hold_seconds(hub.config))
                actions.append(ev.Send(peer, Grant(name, seq, hub.record.target, hub.config.lease_seconds)))
        return actions

    # ------------------------------------------------------------------ time

    def tick_at(self) -> float:
        """When the next `Tick` is due."""
        hub, record = self.state, self.state.record
        if not hub.leading:
            return hub.boots.forget_at
        due = min(hub.boots.forget_at, hub.reclaimer.due_at, hub.wiper.due_at(), hub.reported.look_at())
        if hub.open and hub.boots.behind:
            due = min(due, hub.boots.nudge_at)
        pending = record.unwritten or (bool(hub.rounds.beats) and not record.noted and not record.noting)
        return min(due, record.retry_at) if pending else due

    def _tick(self, now: float) -> list[ev.Action]:
        hub = self.state
        actions = self._forget(now) if now >= hub.boots.forget_at else []
        if not hub.leading:
            return actions
        if hub.open and hub.boots.behind and now >= hub.boots.nudge_at:
            actions += hub.boots.nudge(now)
        if now >= hub.record.retry_at:
            actions += resets.write_target(hub, now) + resets.note_granting(hub)
        return [*actions, *removal.tick(hub, now)]

    def _forget(self, now: float) -> list[ev.Action]:
        hub = self.state
        over = hub.boots.forget(lambda boot: hub.rules.may_forget(boot, hub.config, now), hub.config.hold_seconds, now)
        for boot in over:
            hub.rounds.drop(boot)
        if not over:
            return []
        removal.engines_changed(hub, now)
        return [ev.Changed()]
