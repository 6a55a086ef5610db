"""Rules of what is removed from the store, and when (design page "fence", section 4), each taken away."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from epochkv_fence.hub.machine import Hub
from epochkv_fence.hub.reclaim import WIPE_SECONDS, Reclaimer, Reported, Wiper
from epochkv_fence.hub.record import NEVER, RULES, InstanceRecord, Leadership
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Reclaim, Reclaimed
from epochkv_fence.protocol.pool import PoolConfig
from tests.model.mutants.kind import CALM, of_hub, with_part, without
from tests.model.parts import LEASE

# ------------------------------------------------------------------------------------------------------------ the wipe


class _WipesAtTarget(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        before = self.state.record.target
        actions = super().step(event, now)
        if self.state.record.target > before and self.state.leading and self.state.config.reclaim == "RemoveAll":
            self.state.wiper.begin(self.state.record.target, now)
        return actions


def _waits_for_the_wipe(config: PoolConfig) -> Hub:
    hub = Hub(config)

    def settled_at(lead: Leadership) -> float:
        return float("inf") if hub.state.wiper.due_at() < float("inf") else lead.settled_at

    hub.state.rules = replace(RULES, settled_at=settled_at)
    return hub


class _WipesAgain(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().step(event, now)
        wiped = isinstance(event, ev.Done) and event.ok and isinstance(event.call, ev.RemoveAll) and not event.call.sweep
        if wiped and self.state.leading:
            self.state.wiper.begin(self.state.record.published, now)
        return actions


class _WipesOnce(Wiper):
    def missed(self, epoch: int, now: float) -> None:
        super().missed(epoch, now)
        self.stop()


class _Untiring(Wiper):
    def next(self, now: float) -> int | None:
        self._until = max(self._until, now + WIPE_SECONDS)
        return super().next(now)


# ------------------------------------------------------------------------------------------------------------ old epochs


class _DeletesBelowTarget(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        return [_below(action, self.state.record.target) for action in super().step(event, now)]


class _DeletesNothing(Hub):
    """Nor in the course of a sweep, which takes keys of older epochs along."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self.state.reclaimer = _NeverStarts()

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        return [_below(action, 0) for action in super().step(event, now)]


def _below(action: ev.Action, epoch: int) -> ev.Action:
    if isinstance(action, ev.Send) and isinstance(action.message, Reclaim):
        return ev.Send(action.peer, msgspec.structs.replace(action.message, below=epoch))
    return action


class _NeverStarts(Reclaimer):
    def start(self, published: int, at: float, *, sweep: bool) -> None:
        return


class _SweepsAnyEpoch(Reclaimer):
    def start(self, published: int, at: float, *, sweep: bool) -> None:
        super().start(published, at, sweep=True)


class _AsksOnce(Reclaimer):
    def next(
        self, published: int, keep: Sequence[bytes], able: Sequence[InstanceRecord], config: PoolConfig, now: float
    ) -> list[ev.Action]:
        actions = super().next(published, keep, able, config, now)
        if actions:
            self.stop()
            self._confirmed_changes = self._changes
        return actions


# --------------------------------------------------------------------------------------------- weights that nobody holds


class _NoGrace(Reported):
    def within(self, grace: float, now: float) -> list[bytes] | None:
        return super().within(LEASE, now)


class _Remembered(Reported):
    def expire(self, grace: float, now: float) -> bool:
        super().expire(grace, now)
        return False


class _NeverSweeps(Reclaimer):
    def start_weights(self, at: float) -> None:
        return


class _Checking(Reclaimer):
    checks = True

    def start_weights(self, at: float) -> None:
        self._changes += 1
        super().check_again(at)

    def check_again(self, at: float) -> None:
        if self.checks:
            super().check_again(at)


class _ChecksAgain(Hub):
    """When it was said that it is too early, and when engines say what they hold: only one of both."""

    def __init__(self, config: PoolConfig, *, early: bool) -> None:
        super().__init__(config)
        self.early = early
        self.state.reclaimer = self.checking = _Checking()

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        self.checking.checks = isinstance(event, ev.Tick) == self.early
        return super().step(event, now)


class _AnyAnswerCounts(Reclaimer):
    def answered(self, answer: Reclaimed, published: int) -> bool:
        request = self._open.get(answer.number)
        if request is not None and request.below == answer.below:
            self._confirmed_changes = max(self._confirmed_changes, request.changes)
        return super().answered(answer, published)


class _LateAnswersCount(Reclaimer):
    def answered(self, answer: Reclaimed, published: int) -> bool:
        numbers = [number for number, request in self._open.items() if request.instance == answer.instance]
        return super().answered(msgspec.structs.replace(answer, number=max(numbers, default=0)), published)


class _AsksWithoutEnd(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        reclaimer = self.state.reclaimer
        if isinstance(event, ev.Tick) and self.state.leading and reclaimer.due_at == float("inf"):
            reclaimer.start_weights(now + self.state.config.reclaim_seconds)
        return super().step(event, now)


WIPING = {"policy": "RemoveAll", "store_admin": True, "restores": False, "reconfigures": False}
FAILING = {**WIPING, "store_fails": 1.0}
DELETING = {"policy": "Delete", "restores": False, "reconfigures": False}
SWEEPING = {**DELETING, "pushes": 3.0, "trouble": 0.1}
LONG = {**SWEEPING, **CALM, "steps": 1200, "pace": 0.4}

STORE_MUTANTS = {
    "the store is wiped before publication": of_hub(_WipesAtTarget, WIPING),
    "publication waits for the store": of_hub(_waits_for_the_wipe, FAILING),
    "the store is wiped again and again": of_hub(_WipesAgain, WIPING),
    "a wipe that failed is not tried again": of_hub(with_part(wiper=_WipesOnce), {**WIPING, "store_fails": 0.6}),
    "a wipe is never given up": of_hub(with_part(wiper=_Untiring), FAILING),
    "keys are removed before publication": of_hub(_DeletesBelowTarget, DELETING),
    "a later hub sweeps the store": of_hub(with_part(reclaimer=_SweepsAnyEpoch), {**DELETING, "store_admin": True}),
    "keys are removed once": of_hub(with_part(reclaimer=_AsksOnce), {**DELETING, "busy_store": True}),
    "keys are never removed": of_hub(_DeletesNothing, DELETING),
    "weights are kept for no time": of_hub(with_part(reported=_NoGrace), LONG),
    "a new leader sweeps before it knows its engines": of_hub(without(engines_known_at=lambda lead, config: NEVER), SWEEPING),
    "an engine that cannot say holds nothing": of_hub(without(says_weights=lambda instance: True), LONG),
    "Retain lets weights be swept": of_hub(without(may_remove=lambda config: True), {**LONG, "policy": "Retain"}),
    "weights are never swept": of_hub(with_part(reclaimer=_NeverSweeps), SWEEPING, seen=23),
    "weights are swept once a leadership": of_hub(with_part(reported=_Remembered), SWEEPING, seen=44),
    "what may not be swept yet is forgotten": of_hub(partial(_ChecksAgain, early=False), SWEEPING, seen=261),
    "nobody looks again for what to sweep": of_hub(partial(_ChecksAgain, early=True), SWEEPING),
    "any answer ends a sweep": of_hub(with_part(reclaimer=_AnyAnswerCounts), {**SWEEPING, "busy_store": True}, seen=23),
    "an answer to an older sweep counts": of_hub(
        with_part(reclaimer=_LateAnswersCount), {**SWEEPING, "disorder": 0.9, "engines": 1}, seen=989
    ),
    "engines are asked to sweep without end": of_hub(_AsksWithoutEnd, DELETING),
}
