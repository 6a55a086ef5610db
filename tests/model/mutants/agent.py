"""Rules of the agent (design page "fence", section 3), and those that other parts than the state machines keep, each taken away."""

from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.agent import Agent
from epochkv_fence.protocol.messages import Grant, Propose
from tests.model.mutants.kind import CALM, DUEL, Mutant
from tests.model.parts import Rules


class _LeaseFromReceipt(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        return None if reason == "expired" else reason

    def _lease_end(self, grant: Grant, now: float) -> float:
        return now + grant.lease_seconds


class _AnyInstance(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        if reason != "other_instance":
            return reason
        return super()._refusal(Grant(self.instance, grant.seq, grant.epoch, grant.lease_seconds), now)


class _AnyEpoch(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        return None if reason == "lower_epoch" else reason


class _ForgetsEpoch(Agent):
    def _refusal(self, grant: Grant, now: float) -> str | None:
        reason = super()._refusal(grant, now)
        return None if reason == "lower_epoch" and now >= self.lease_until else reason


class _LeaseBeforeAdoption(Agent):
    def _granted(self, grant: Grant, now: float) -> list[ag.Action]:
        actions = super()._granted(grant, now)
        if actions:
            self.lease_until = max(self.lease_until, self._lease_end(grant, now))
        return actions


class _AcknowledgeBeforeAdoption(Agent):
    def _granted(self, grant: Grant, now: float) -> list[ag.Action]:
        actions = super()._granted(grant, now)
        if actions:
            self._acknowledged = grant.epoch
            return [*self._beat(now), *actions]
        return actions


class _FailedForGood(Agent):
    def step(self, event: ag.Event, now: float) -> list[ag.Action]:
        return [] if isinstance(event, ag.AdoptFailed) else super().step(event, now)


class _ProposesOnce(Agent):
    def _beat(self, now: float) -> list[ag.Action]:
        return [action for action in super()._beat(now) if not (isinstance(action, ag.Send) and isinstance(action.message, Propose))]


class _TellsLater(Agent):
    def step(self, event: ag.Event, now: float) -> list[ag.Action]:
        return [] if isinstance(event, ag.Poked) else super().step(event, now)


class _NoRetryWithoutLease(Agent):
    def _beat(self, now: float) -> list[ag.Action]:
        actions = super()._beat(now)
        if now >= self.lease_until and self.lease_seconds is not None:
            self._beat_due = float("inf")
        return actions


class _BeatsTwiceAsOften(Agent):
    def _period(self, now: float) -> float:
        return super()._period(now) / 2


class _LeavesWithItsLease(Agent):
    def _leave(self) -> list[ag.Action]:
        kept = self.lease_until
        actions = super()._leave()
        self.lease_until = kept
        return actions


AGENT_MUTANTS = {
    "lease counted from receipt": Mutant(Rules(agent=_LeaseFromReceipt)),
    "grants not bound to instances": Mutant(Rules(agent=_AnyInstance), {"trouble": 1.0}, seen=31),
    "an engine takes a lower epoch": Mutant(Rules(agent=_AnyEpoch), {**DUEL, "disorder": 0.9}, seen=110),
    "an engine forgets its epoch with its lease": Mutant(
        Rules(agent=_ForgetsEpoch), {**DUEL, "takeovers": 1.0, "steps": 1200, "disorder": 0.9}, rare=True
    ),
    "the lease moves before the epoch is adopted": Mutant(Rules(agent=_LeaseBeforeAdoption)),
    "acknowledged before adopted": Mutant(Rules(agent=_AcknowledgeBeforeAdoption), seen=53),
    "acknowledged inside schedule()": Mutant(Rules(settled_at_once=True), {**DUEL, **CALM, "steps": 1200, "freezes": 0.3}, seen=1287),
    "an engine instance that leaves keeps its lease": Mutant(Rules(agent=_LeavesWithItsLease), {**DUEL, "trouble": 1.0}, seen=384),
    "an engine instance leaves inside schedule()": Mutant(
        Rules(leaves_inside_schedule=True),
        {**DUEL, **CALM, "trouble": 1.0, "engines": 1, "steps": 1200, "pace": 0.2, "freezes": 1.0},
        seen=159,
    ),
    "a failed adoption is never tried again": Mutant(Rules(agent=_FailedForGood), seen=138),
    "a proposal is sent once": Mutant(Rules(agent=_ProposesOnce), seen=232),
    "a change of weights waits for the next heartbeat": Mutant(Rules(agent=_TellsLater), seen=27),
    "no heartbeats without a lease": Mutant(Rules(agent=_NoRetryWithoutLease)),
    "heartbeats twice as often": Mutant(Rules(agent=_BeatsTwiceAsOften)),
}


# ------------------------------------------ rules that other parts keep: authority, driver, connector, client, owner
SERVING = {"trouble": 0.1, "takeovers": 0.1}
ALONE = {"restores": False, "trouble": 0.3}
TOGETHER = ("engines reset together", "one engine reset")
TRAINING = {"orders": ("client, reset",), "restores": False}
LABELLING = {"orders": ("client, label",), "pushes": 1.0, "restores": False, "idle": 0.0, "trouble": 0.03, "freezes": 0.03}

OUTSIDE_MUTANTS = {
    "grants without a leadership read": Mutant(Rules(verify_always=True), {**DUEL, "watch": 1.0, "freezes": 1.0}, seen=57),
    "the read before the heartbeats are collected": Mutant(
        Rules(read_before_collecting=True), {**DUEL, "ambush": 0.1, "trouble": 1.0, "steps": 3000}, seen=111
    ),
    "the read compares the holder, not the term": Mutant(
        Rules(holder_only=True), {**DUEL, "takeovers": 1.0, "ambush": 0.1, "steps": 3000, "trouble": 0.3}, rare=True
    ),
    "a new leader reads the record from a cache": Mutant(Rules(stale_load=True), {**DUEL, "takeovers": 1.0}, seen=145),
    "a late Record lowers the target": Mutant(Rules(record_lowers=True)),
    "a new leader learns a longer lease late": Mutant(
        Rules(config_late=True), {**DUEL, "reconfigures": True, "takeovers": 1.0, "steps": 1200}, rare=True
    ),
    "loads are never invalidated": Mutant(Rules(loads_never_invalidated=True), {**SERVING, "busy_store": True}, seen=28),
    "the lease is not checked after a load": Mutant(Rules(lease_unchecked_after_load=True), {**SERVING, "busy_store": True}, seen=121),
    "saves under the names of old pins": Mutant(Rules(saves_under_old_pins=True), SERVING),
    "an engine shares without a lease": Mutant(Rules(serves_without_lease=True), SERVING),
    "a local reset keeps the names of its epoch": Mutant(Rules(local_reset_keeps_root=True), {**ALONE, "orders": TOGETHER}),
    "a local reset without a lease waits for no epoch": Mutant(
        Rules(local_reset_without_floor=True), {**ALONE, "orders": (*TOGETHER, "spec, reset")}
    ),
    "a trainer goes on before publication": Mutant(Rules(trainer_resumes_unpublished=True), TRAINING),
    "a trainer asks above a target of before": Mutant(
        Rules(trainer_remembers_target=True), {**TRAINING, "orders": ("client, reset", "spec, reset")}
    ),
    "labels replace those on record": Mutant(Rules(labels_replace=True), {**LABELLING, "takeovers": 1.0}),
}
