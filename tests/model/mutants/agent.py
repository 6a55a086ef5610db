"""Rules of the agent (design page "fence", section 3), each taken away."""

from __future__ import annotations

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
    """Forgets its epoch with its lease, and takes a lower one."""

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
    """A failed adoption is never asked for again."""

    def step(self, event: ag.Event, now: float) -> list[ag.Action]:
        return [] if isinstance(event, ag.AdoptFailed) else super().step(event, now)


class _ProposesOnce(Agent):
    def _beat(self, now: float) -> list[ag.Action]:
        return [action for action in super()._beat(now) if not (isinstance(action, ag.Send) and isinstance(action.message, Propose))]


class _TellsLater(Agent):
    """What has changed waits for the next heartbeat."""

    def step(self, event: ag.Event, now: float) -> list[ag.Action]:
        return [] if isinstance(event, ag.Poked) else super().step(event, now)


class _NoRetryWithoutLease(Agent):
    """Without an answer it never beats again."""

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
    "lease counted from receipt": Mutant(Rules(agent=_LeaseFromReceipt), "3"),
    "grants not bound to instances": Mutant(Rules(agent=_AnyInstance), "3", {"trouble": 1.0}),
    "an engine takes a lower epoch": Mutant(Rules(agent=_AnyEpoch), "3", {**DUEL, "disorder": 0.9}),
    "an engine forgets its epoch with its lease": Mutant(
        Rules(agent=_ForgetsEpoch), "3", {**DUEL, "takeovers": 1.0, "steps": 1200, "disorder": 0.9}
    ),
    "the lease moves before the epoch is adopted": Mutant(Rules(agent=_LeaseBeforeAdoption), "3"),
    "acknowledged before adopted": Mutant(Rules(agent=_AcknowledgeBeforeAdoption), "3"),
    "acknowledged inside schedule()": Mutant(Rules(settled_at_once=True), "3", {**DUEL, **CALM, "steps": 1200, "freezes": 0.3}),
    "an engine instance that leaves keeps its lease": Mutant(Rules(agent=_LeavesWithItsLease), "3", {**DUEL, "trouble": 1.0}),
    "an engine instance leaves inside schedule()": Mutant(
        Rules(leaves_inside_schedule=True),
        "3",
        {**DUEL, **CALM, "trouble": 1.0, "engines": 1, "steps": 1200, "pace": 0.2, "freezes": 1.0},
    ),
    "a failed adoption is never tried again": Mutant(Rules(agent=_FailedForGood), "3"),
    "a proposal is sent once": Mutant(Rules(agent=_ProposesOnce), "3"),
    "a change of weights waits for the next heartbeat": Mutant(Rules(agent=_TellsLater), "3"),
    "no heartbeats without a lease": Mutant(Rules(agent=_NoRetryWithoutLease), "3"),
    "heartbeats twice as often": Mutant(Rules(agent=_BeatsTwiceAsOften), "7"),
}
