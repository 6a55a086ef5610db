"""Rules of the fence, each taken away: the check of the checker.

The state machines have one small method per rule; a mutant overrides it. Rules that belong to the authority or to the
driver are flags of the simulator.
"""

from __future__ import annotations

from dataclasses import replace

from epochkv_fence import hub_events as ev
from epochkv_fence.agent import Agent
from epochkv_fence.authority import Origin, PoolRecord, Term
from epochkv_fence.boots import BootRecord, Gate
from epochkv_fence.hub import Hub
from epochkv_fence.messages import Grant, Heartbeat, Mode
from epochkv_fence.pool import PoolConfig
from tests.model.fence_simulator import Faults


class _LeaseFromReceipt(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        return None if reason == "expired" else reason

    def _lease_end(self, grant: Grant, now: float) -> float:
        return now + grant.lease_seconds


class _AnyBoot(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        if reason != "other_boot":
            return reason
        return super()._refusal(Grant(self.boot, grant.seq, grant.epoch, grant.mode, grant.lease_seconds), now)


class _AnyEpoch(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        return None if reason == "lower_epoch" else reason


class _LeaseBeforeAdoption(Agent):
    def _granted(self, grant: Grant, now: float) -> list[object]:  # type: ignore[override]
        actions = super()._granted(grant, now)
        if actions:
            self.lease_until = max(self.lease_until, self._lease_end(grant, now))
        return list(actions)


class _AcknowledgeBeforeAdoption(Agent):
    def _granted(self, grant: Grant, now: float) -> list[object]:  # type: ignore[override]
        actions = super()._granted(grant, now)
        if actions:
            self._acknowledged = (grant.epoch, grant.mode)
            return [*self._beat(now), *actions]
        return list(actions)


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


class _NoSecondRead(Hub):
    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        actions = super()._begin_round(number, now)
        current = self._round
        if current is None or current.publish is None:
            return actions
        self._publishing, current.publish = current.publish, None
        return [*actions, ev.Publish(self._publishing)]


class _EpochBeforeRead(Hub):
    _captured = 0

    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        self._captured = self.target
        return super()._begin_round(number, now)

    def _grant(self, record: BootRecord, seq: int, now: float) -> Grant:
        grant = super()._grant(record, seq, now)
        return Grant(grant.boot, grant.seq, self._captured, grant.mode, grant.lease_seconds)


class _GrantBeforeNote(Hub):
    def _may_grant(self) -> bool:
        return True

    def round_at(self, now: float) -> float:
        return now if self._waiting and self.term is not None and self._round is None else super().round_at(now)


class _LateTargetMovesNothing(Hub):
    def _observe(self, record: PoolRecord, now: float) -> list[ev.Action]:
        kept = {boot: known.live_until for boot, known in self._boots.items()}
        before = self.target
        actions = super()._observe(record, now)
        if self.target > before:
            for boot, live_until in kept.items():
                self._boots[boot].below_until = float("-inf")
                self._boots[boot].live_until = live_until
        return actions


class _NewLeaderForgetsTarget(Hub):
    """Installs its term with whatever target it remembers, not with the one read after the acquiring write."""

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        return super()._acquire(term, replace(record, target=self.target), now)


class _ForgetAtOnce(Hub):
    def _forget(self, now: float) -> list[ev.Action]:
        for boot in [boot for boot, record in self._boots.items() if now > record.heard_at + 1.0]:
            del self._boots[boot]
            self._behind.pop(boot, None)
        self._forget_at = now + 0.5
        return []


class _EveryoneJoins(Hub):
    def __init__(self, config: PoolConfig) -> None:
        super().__init__(replace(config, weights_source="Model"))


class _FreshMeansNothing(Hub):
    """Takes the moment at which an old ask is found for the moment at which it was made."""

    def _asked(self, ask: object, now: float) -> list[ev.Action]:
        ask.at = now  # type: ignore[attr-defined]
        return super()._asked(ask, now)  # type: ignore[arg-type]


class _KeptOverEpochs(Hub):
    """Keeps `Use` although it was granted for another epoch."""

    def _raise_target(self, target: int, origin: Origin | None, now: float) -> list[ev.Action]:
        actions = super()._raise_target(target, origin, now)
        self._gate = _GateThatKeeps(self._gate.asked_at, self._gate.marked)
        return actions


class _GateThatKeeps(Gate):
    def mode(self, boot: BootRecord, target: int, config: PoolConfig) -> Mode:
        return Mode.USE if boot.mode is Mode.USE else super().mode(boot, target, config)


class _AgeAtGrant(Hub):
    """Looks at how old a boot is when it is granted, not at how old it was when the epoch was asked for."""

    def _grant(self, record: BootRecord, seq: int, now: float) -> Grant:
        if self._gate.asked_at is not None:
            self._gate.asked_at = now
        return super()._grant(record, seq, now)


class _HeardMayFall(Hub):
    """A late heartbeat lowers what was heard."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        record = self._boots.get(beat.boot)
        if record is not None and beat.epoch is not None:
            record.epoch = beat.epoch
        actions = super()._heartbeat(peer, beat, now, key_index)
        if not self._boots[beat.boot].at_least(self.target):
            self._behind[beat.boot] = None
            self._boots[beat.boot].below_until = now + self._hold()
        return actions


MUTANTS: dict[str, tuple[int, Faults]] = {
    "grants without a leadership read": (14, Faults(verify_always=True)),
    "the read before the heartbeats are collected": (146, Faults(read_before_collecting=True)),
    "the read compares the holder, not the term": (2607, Faults(holder_only=True)),
    "a new leader reads the record from a cache": (147, Faults(stale_load=True)),
    "a late Record lowers the target": (439, Faults(record_lowers=True)),
    "lease counted from receipt": (16, Faults(agent=_LeaseFromReceipt)),
    "grants not bound to boots": (11, Faults(agent=_AnyBoot)),
    "an engine takes a lower epoch": (18, Faults(agent=_AnyEpoch)),
    "the lease moves before the epoch is adopted": (101, Faults(agent=_LeaseBeforeAdoption)),
    "acknowledged before adopted": (861, Faults(agent=_AcknowledgeBeforeAdoption)),
    "no waiting after leadership": (14, Faults(hub=_NoLeadWait)),
    "no margin for slow clocks": (733, Faults(hub=_NoMargin)),
    "older grants are not waited for": (15, Faults(hub=_NoFenceWait)),
    "no second read before publishing": (14, Faults(hub=_NoSecondRead)),
    "the epoch taken before the read": (85, Faults(hub=_EpochBeforeRead)),
    "granting before the note is durable": (81, Faults(hub=_GrantBeforeNote)),
    "a target seen late leaves older grants uncounted": (139, Faults(hub=_LateTargetMovesNothing)),
    "a new leader keeps the target it remembers": (6, Faults(hub=_NewLeaderForgetsTarget)),
    "boots forgotten while their grants live": (101, Faults(hub=_ForgetAtOnce)),
    "every boot joins": (2, Faults(hub=_EveryoneJoins)),
    "an old ask counts as made now": (344, Faults(hub=_FreshMeansNothing)),
    "Use is kept over epochs": (194, Faults(hub=_KeptOverEpochs)),
    "age taken when granted": (7, Faults(hub=_AgeAtGrant)),
    "heard epochs may fall": (1, Faults(hub=_HeardMayFall)),
}
"""Rule taken away -> (a seed that showed it when this was written, the mutant)."""
