"""Rules of the hub for targets, grants and publication (design page "fence", section 4), each taken away."""

from __future__ import annotations

from dataclasses import replace

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.boots import NEVER, BootRecord
from epochkv_fence.hub.machine import Hub
from epochkv_fence.hub.state import Ask, Round
from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.protocol.messages import Grant, Heartbeat, Nudge, Status
from tests.model.mutants.kind import DUEL, Mutant
from tests.model.parts import Rules


class _NoLeadWait(Hub):
    def _led_long_enough(self, now: float) -> bool:
        return True


class _NoMargin(Hub):
    def _hold(self) -> float:
        return self.config.lease_seconds

    def _lead_wait(self) -> float:
        return self.config.lease_seconds


class _NoFenceWait(Hub):
    def _fenced(self, record: BootRecord, now: float) -> bool:
        return True


class _EveryGrantDelays(Hub):
    """Grants of the target delay its publication, too."""

    def _fenced(self, record: BootRecord, now: float) -> bool:
        return now >= max(record.below_until, record.live_until)

    def _publish_at(self) -> float:
        return max(super()._publish_at(), max((self._boots[boot].live_until for boot in self._behind), default=NEVER))


class _NoSecondRead(Hub):
    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        actions = super()._begin_round(number, now)
        current = self._round
        if current is None or current.publish is None:
            return actions
        self._publishing, current.publish = current.publish, None
        if not self.round_open:
            self._round = None
        return [*actions, ev.Publish(self._publishing)]


class _EpochBeforeRead(Hub):
    _captured = 0

    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        self._captured = self.target
        return super()._begin_round(number, now)

    def _grant(self, record: BootRecord, seq: int, now: float) -> Grant:
        grant = super()._grant(record, seq, now)
        return Grant(grant.boot, grant.seq, self._captured, grant.lease_seconds)


class _KeepsRounds(Hub):
    """What was evaluated in one term is published after a read in another."""

    _kept: Round | None = None

    def _abandon(self) -> list[ev.Action]:
        self._kept = self._round or self._kept
        return super()._abandon()

    def _finish_round(self, number: int, now: float) -> list[ev.Action]:
        kept = self._kept
        if kept is not None and kept.number == number and kept.publish is not None:
            self._kept = None
            return [ev.Publish(kept.publish)]
        return super()._finish_round(number, now)


class _GrantBeforeNote(Hub):
    def _may_grant(self) -> bool:
        return True

    def round_at(self, now: float) -> float:
        return now if self._waiting and self.term is not None and self._round is None else super().round_at(now)


class _GrantBeforeRecord(Hub):
    """Grants an epoch that was asked for and is not durable yet."""

    def _asked(self, ask: Ask, now: float) -> list[ev.Action]:
        actions = super()._asked(ask, now)
        if self.term is not None and self._recording is not None:
            actions += self._raise_target(self._recording, None, now)
        return actions


class _LateTargetMovesNothing(Hub):
    def _observe(self, record: PoolRecord, now: float) -> list[ev.Action]:
        kept = {boot: known.live_until for boot, known in self._boots.items()}
        before = self.target
        actions = super()._observe(record, now)
        if self.target > before:
            for boot, live_until in kept.items():
                self._boots[boot].below_until = NEVER
                self._boots[boot].live_until = live_until
        return actions


class _NewLeaderForgetsTarget(Hub):
    """Installs its term with whatever target it remembers, not with the one read after the acquiring write."""

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        return super()._acquire(term, replace(record, target=self.target), now)


class _ForgetAtOnce(Hub):
    def _forget(self, now: float) -> list[ev.Action]:
        for boot in [boot for boot, record in self._boots.items() if now > record.heard_at + 1.0]:
            self._drop(boot, now)
        self._forget_at = now + 0.5
        return []


class _HeardMayFall(Hub):
    """A late heartbeat lowers what was heard."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        record = self._boots.get(beat.boot)
        if record is not None and beat.epoch is not None:
            record.epoch = beat.epoch
        actions = super()._heartbeat(peer, beat, now, key_index)
        record = self._boots.get(beat.boot)
        if record is not None and not record.at_least(self.target):
            self._behind[beat.boot] = None
            record.below_until = now + self._hold()
        return actions


class _NoHealing(Hub):
    def _heal(self, epoch: int, now: float) -> list[ev.Action]:
        return []


class _RecordsOnce(Hub):
    """A write of the target that failed is not tried again."""

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        return [] if isinstance(event, ev.RecordFailed) else super().step(event, now)


class _PublishesOnce(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        return [] if isinstance(event, ev.PublishFailed) else super().step(event, now)


class _ForgetsDropped(Hub):
    """A round without an answer never ends."""

    def _drop_round(self, number: int) -> list[ev.Action]:
        return []


class _EveryProposalCounts(Hub):
    """A proposal asks for one above the target, from whatever epoch it was made."""

    def _propose(self, epoch: int, now: float) -> list[ev.Action]:
        return super()._propose(self.target + 1, now)


class _KeepsOldPublished(Hub):
    """After a restore it believes its own memory of what is published."""

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        return super()._acquire(term, replace(record, published=max(record.published, self.published)), now)


class _TellsAtOnce(Hub):
    """Tells a trainer of a target as soon as its own Record is answered."""

    def _may_tell(self, epoch: int) -> bool:
        return True


class _NudgesWithoutEnd(Hub):
    def _tick(self, now: float) -> list[ev.Action]:
        self._nudge_at = now
        nudges: list[ev.Action] = [ev.Send(record.peer, Nudge(boot)) for boot, record in self._boots.items()] if self.term else []
        return [*super()._tick(now), *nudges]

    def tick_at(self) -> float:
        return min(super().tick_at(), self._last_round + 0.5)


class _RoundsWithoutPause(Hub):
    """A leadership read four times a second, whether anybody waits or not."""

    def round_at(self, now: float) -> float:
        return (
            min(super().round_at(now), self._last_round + 0.25) if self.term is not None and self._round is None else super().round_at(now)
        )

    @property
    def round_open(self) -> bool:
        return self._round is not None

    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        actions = super()._begin_round(number, now)
        if self.term is not None and self._round is None:
            self._round = Round(number, self.term, {}, 0, None)
        return actions


class _AnswersWithoutRead(Hub):
    """Tells a trainer its own target, whether it still leads or not."""

    def _question(self, peer: bytes, question: Status, now: float) -> list[ev.Action]:
        return super()._question(peer, question, now) if self.term is None else [ev.Send(peer, self._status(question, now))]


QUICK = {**DUEL, "takeovers": 1.0}
AMBUSHED = {
    **DUEL,
    "orders": ("client, reset", "spec, reset"),
    "ambush": 0.1,
    "trouble": 0.03,
    "trainer_restarts": 0.0,
    "freezes": 0.2,
    "takeovers": 0.1,
    "wander": 0.5,
    "steps": 1200,
    "engines": 1,
}
"""Hubs that freeze and do not know that they were deposed, and two who ask for epochs."""

HUB_MUTANTS = {
    "no waiting after leadership": Mutant(Rules(hub=_NoLeadWait), "4", QUICK),
    "no margin for slow clocks": Mutant(Rules(hub=_NoMargin), "4", DUEL),
    "older grants are not waited for": Mutant(Rules(hub=_NoFenceWait), "4", DUEL),
    "grants of the target delay publication": Mutant(Rules(hub=_EveryGrantDelays), "4"),
    "no second read before publishing": Mutant(Rules(hub=_NoSecondRead), "4", QUICK),
    "the epoch taken before the read": Mutant(Rules(hub=_EpochBeforeRead), "4", DUEL),
    "what an older term evaluated is published": Mutant(
        Rules(hub=_KeepsRounds, read_in_any_term=True), "4", {**QUICK, "steps": 3000, "trouble": 0.1, "freezes": 0.2}
    ),
    "granting before the note is durable": Mutant(Rules(hub=_GrantBeforeNote), "4", {**QUICK, "steps": 300, "trouble": 0.1}),
    "granting an epoch before it is durable": Mutant(Rules(hub=_GrantBeforeRecord), "4", QUICK),
    "a target seen late leaves older grants uncounted": Mutant(Rules(hub=_LateTargetMovesNothing), "4", {**QUICK, "watch": 1.0}),
    "a new leader keeps the target it remembers": Mutant(Rules(hub=_NewLeaderForgetsTarget), "4", QUICK),
    "boots forgotten while their grants live": Mutant(Rules(hub=_ForgetAtOnce), "4"),
    "heard epochs may fall": Mutant(Rules(hub=_HeardMayFall), "4", {"disorder": 0.9}),
    "an engine above the record raises nothing": Mutant(Rules(hub=_NoHealing), "4", {"restores": True}),
    "after a restore a hub believes its memory": Mutant(Rules(hub=_KeepsOldPublished), "4", {"restores": True}),
    "a failed Record is not tried again": Mutant(Rules(hub=_RecordsOnce), "4"),
    "a failed Publish is not tried again": Mutant(Rules(hub=_PublishesOnce), "4"),
    "a round without an answer never ends": Mutant(Rules(hub=_ForgetsDropped), "4"),
    "a proposal from an older epoch counts": Mutant(
        Rules(hub=_EveryProposalCounts), "4", {"orders": ("engines reset together",), "engines": 3}
    ),
    "a trainer is told a target without a leadership read": Mutant(Rules(hub=_AnswersWithoutRead), "4", AMBUSHED),
    "a trainer is told of a target that the leader may not know": Mutant(
        Rules(hub=_TellsAtOnce),
        "4",
        {
            **DUEL,
            "orders": ("client, reset",),
            "trouble": 0.03,
            "trainer_restarts": 0.0,
            "ambush": 0.0,
            "freezes": 0.2,
            "takeovers": 0.1,
            "pace": 1.0,
            "steps": 1200,
        },
    ),
    "nudges that never end": Mutant(Rules(hub=_NudgesWithoutEnd), "7"),
    "leadership reads for nobody": Mutant(Rules(hub=_RoundsWithoutPause), "7"),
}
