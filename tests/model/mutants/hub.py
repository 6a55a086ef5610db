"""Rules of the hub for targets, grants and publication (design page "fence", section 4), each taken away."""

from dataclasses import replace

import msgspec

from epochkv_fence.hub import machine
from epochkv_fence.hub.machine import Hub, HubState
from epochkv_fence.hub.record import NEVER, Round
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Grant, Heartbeat, Nudge
from tests.model.mutants.kind import DUEL, Mutant, deaf, deaf_to_failures_of, misreading, of_hub, without
from tests.model.parts import Rules


class _NoSecondRead(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().step(event, now)
        current = self.state.rounds.current
        if not isinstance(event, ev.RoundBegan) or current is None or current.publish is None:
            return actions
        epoch, current.publish = current.publish, None
        if not self.round_open:
            self.state.rounds.current = None
        return [*actions, *self.state.record.publish(epoch)]


class _EpochBeforeRead(Hub):
    _captured = 0

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        if isinstance(event, ev.RoundBegan):
            self._captured = self.state.record.target
        return [self._as_captured(action) for action in super().step(event, now)]

    def _as_captured(self, action: ev.Action) -> ev.Action:
        if isinstance(action, ev.Send) and isinstance(grant := action.message, Grant):
            return ev.Send(action.peer, Grant(grant.instance, grant.seq, self._captured, grant.lease_seconds))
        return action


class _KeepsRounds(Hub):
    _kept: Round | None = None

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        if isinstance(event, ev.SteppedDown | ev.Acquired):
            self._kept = self.state.rounds.current or self._kept
        kept = self._kept
        if isinstance(event, ev.RoundVerified) and kept is not None and kept.number == event.round and kept.publish is not None:
            self._kept = None
            return [ev.Publish(kept.publish)]
        return super().step(event, now)


class _GrantBeforeRecord(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().step(event, now)
        for action in actions:
            if isinstance(action, ev.RecordTarget):
                actions = [*actions, *machine.raise_target(self.state, action.epoch, None, now)]
        return actions


class _LateTargetMovesNothing(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        kept = {name: instance.live_until for name, instance in self.state.instances.known.items()}
        before = self.state.record.target
        actions = super().step(event, now)
        if isinstance(event, ev.Observed) and self.state.record.target > before:
            for name, live_until in kept.items():
                self.state.instances.known[name].below_until = NEVER
                self.state.instances.known[name].live_until = live_until
        return actions


class _HeardMayFall(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        beat = event.message if isinstance(event, ev.Heard) else None
        instance = self.state.instances.known.get(beat.instance) if isinstance(beat, Heartbeat) else None
        if instance is None or not isinstance(beat, Heartbeat):
            return super().step(event, now)
        instance.epoch = instance.epoch if beat.epoch is None else beat.epoch
        actions = super().step(event, now)
        if not instance.at_least(self.state.record.target):
            self.state.instances.behind[instance.instance] = None
            instance.below_until = now + self.state.config.fence_timeout_seconds
        return actions


class _NudgesWithoutEnd(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        instances = self.state.instances
        if not isinstance(event, ev.Tick):
            return super().step(event, now)
        instances.nudge_at = now
        known = instances.known if self.state.leading else {}
        nudges: list[ev.Action] = [ev.Send(instance.peer, Nudge(name)) for name, instance in known.items()]
        return [*super().step(event, now), *nudges]

    def tick_at(self) -> float:
        return min(super().tick_at(), self.state.rounds.last_at + 0.5)


class _RoundsWithoutPause(Hub):
    def round_at(self, now: float) -> float:
        due = super().round_at(now)
        rounds = self.state.rounds
        return due if not self.state.leading or rounds.current is not None else min(due, rounds.last_at + 0.25)

    @property
    def round_open(self) -> bool:
        return self.state.rounds.current is not None


def _lead_with_own_target(hub: HubState, event: ev.Acquired) -> ev.Event:
    """Installs its term with whatever target it remembers, not with the one read after the acquiring write."""
    return msgspec.structs.replace(event, record=replace(event.record, target=hub.record.target))


def _lead_with_own_published(hub: HubState, event: ev.Acquired) -> ev.Event:
    return msgspec.structs.replace(event, record=replace(event.record, published=max(event.record.published, hub.record.published)))


QUICK = {**DUEL, "takeovers": 1.0}
FROZEN = {**DUEL, "trouble": 0.03, "trainer_restarts": 0.0, "freezes": 0.2, "takeovers": 0.1, "steps": 1200}
"""Hubs that freeze and do not know that they were deposed."""
AMBUSHED = {**FROZEN, "orders": ("client, reset", "spec, reset"), "ambush": 0.1, "wander": 0.5, "engines": 1}
"""And two who ask for epochs."""

HUB_MUTANTS = {
    "no waiting after leadership": of_hub(without(settled_at=lambda lead: NEVER), QUICK),
    "no margin for slow clocks": of_hub(without(fence_timeout_seconds=lambda config: config.lease_seconds), DUEL, seen=48),
    "older grants are not waited for": of_hub(without(fenced_at=lambda instance: NEVER), DUEL),
    "grants of the target delay publication": of_hub(without(fenced_at=lambda instance: max(instance.below_until, instance.live_until))),
    "no second read before publishing": of_hub(_NoSecondRead, QUICK, seen=101),
    "the epoch taken before the read": of_hub(_EpochBeforeRead, DUEL, seen=40),
    "what an older term evaluated is published": Mutant(
        Rules(hub=_KeepsRounds, read_in_any_term=True), {**QUICK, "steps": 3000, "trouble": 0.1, "freezes": 0.2}, rare=True
    ),
    "granting before the note is durable": of_hub(
        without(may_grant=lambda record: True), {**QUICK, "steps": 300, "trouble": 0.1}, seen=450
    ),
    "granting an epoch before it is durable": of_hub(_GrantBeforeRecord, QUICK),
    "a target seen late leaves older grants uncounted": of_hub(_LateTargetMovesNothing, {**QUICK, "watch": 1.0}, seen=119),
    "a new leader keeps the target it remembers": of_hub(misreading(ev.Acquired, _lead_with_own_target), QUICK, seen=52),
    "instances forgotten while their grants live": of_hub(without(may_forget=lambda instance, config, now: now > instance.heard_at + 1.0)),
    "heard epochs may fall": of_hub(_HeardMayFall, {"disorder": 0.9}),
    "an engine above the record raises nothing": of_hub(without(above_record=lambda record, epoch: False), {"restores": True}, seen=29),
    "after a restore a hub believes its memory": of_hub(misreading(ev.Acquired, _lead_with_own_published), {"restores": True}),
    "a failed Record is not tried again": of_hub(deaf_to_failures_of(ev.RecordTarget), seen=27),
    "a failed Publish is not tried again": of_hub(deaf_to_failures_of(ev.Publish), seen=158),
    "a round without an answer never ends": of_hub(deaf(ev.RoundDropped)),
    "a proposal from an older epoch counts": of_hub(
        without(proposal_counts=lambda record, epoch: True), {"orders": ("engines reset together",), "engines": 3}
    ),
    "a trainer is told a target without a leadership read": of_hub(without(needs_read=lambda question: False), AMBUSHED, seen=252),
    "a trainer is told of a target that the leader may not know": of_hub(
        without(may_tell=lambda record, epoch: True),
        {**FROZEN, "orders": ("client, reset",), "ambush": 0.0, "pace": 1.0},
        seen=596,
    ),
    "nudges that never end": of_hub(_NudgesWithoutEnd, seen=22),
    "leadership reads for nobody": of_hub(_RoundsWithoutPause),
}
