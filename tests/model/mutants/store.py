"""Rules of what is removed from the store, and when (design page "fence", section 4), each taken away."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.machine import Hub
from epochkv_fence.hub.reclaim import Reclaimer
from epochkv_fence.hub.wipe import Wiper
from epochkv_fence.protocol.authority import Origin
from epochkv_fence.protocol.messages import Reclaim, Reclaimed
from epochkv_fence.protocol.pool import PoolConfig
from tests.model.mutants.kind import CALM, Mutant
from tests.model.parts import Rules

# ------------------------------------------------------------------------------------------------------------ the wipe


class _WipesAtTarget(Hub):
    """The store is wiped as soon as an epoch is the target."""

    def _raise_target(self, target: int, origin: Origin | None, now: float) -> list[ev.Action]:
        actions = super()._raise_target(target, origin, now)
        if actions and self.term is not None and self.config.reclaim == "RemoveAll":
            self._wiper.begin(target, now)
        return actions


class _WaitsForTheWipe(Hub):
    """The next epoch is not published before the store was wiped for this one."""

    def _may_publish(self, now: float) -> bool:
        return super()._may_publish(now) and not self._wiper.open

    def round_at(self, now: float) -> float:
        return super().round_at(now) if not self._wiper.open else max(super().round_at(now), now + 0.5)


class _WipesAgain(Hub):
    """A store that was wiped is wiped again."""

    def _store_answered(self, event: ev.Wiped | ev.WipeFailed | ev.Swept | ev.SweepFailed, now: float) -> list[ev.Action]:
        actions = super()._store_answered(event, now)
        if isinstance(event, ev.Wiped) and self.term is not None:
            self._wiper.begin(self.published, now)
        return actions


class _WipesOnce(Hub):
    """A wipe that failed is the last thing that is done for its epoch."""

    def _store_answered(self, event: ev.Wiped | ev.WipeFailed | ev.Swept | ev.SweepFailed, now: float) -> list[ev.Action]:
        actions = super()._store_answered(event, now)
        if isinstance(event, ev.WipeFailed):
            self._wiper.stop()
        return actions


class _Untiring(Wiper):
    def give_up(self, now: float) -> bool:
        return False


class _WipesForEver(Hub):
    """A wipe is never given up."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self._wiper = _Untiring()


# ------------------------------------------------------------------------------------------------------------ old epochs


class _DeletesBelowTarget(Hub):
    """Old keys are removed before the new epoch is published."""

    def _reclaim(self, now: float) -> list[ev.Action]:
        return [self._below_target(action) for action in super()._reclaim(now)]

    def _below_target(self, action: ev.Action) -> ev.Action:
        if isinstance(action, ev.Send) and isinstance(action.message, Reclaim):
            return ev.Send(action.peer, msgspec.structs.replace(action.message, below=self.target))
        return action


class _DeletesOnce(Hub):
    """One request is enough, whatever was removed and whatever lands later."""

    def _reclaim(self, now: float) -> list[ev.Action]:
        actions = super()._reclaim(now)
        if actions:
            self._reclaimer.stop()
            self._reclaimer._confirmed_changes = self._reclaimer._changes
        return actions


class _NeverDeletes(Hub):
    """Nor in the course of a sweep, which takes keys of older epochs along."""

    def _reclaim_after(self, at: float) -> None:
        return

    def _reclaim(self, now: float) -> list[ev.Action]:
        return [self._below_nothing(action) for action in super()._reclaim(now)]

    def _below_nothing(self, action: ev.Action) -> ev.Action:
        if isinstance(action, ev.Send) and isinstance(action.message, Reclaim):
            return ev.Send(action.peer, msgspec.structs.replace(action.message, below=0))
        return action


# --------------------------------------------------------------------------------------------- weights that nobody holds


class _NoGrace(Hub):
    """Only the keys of what engines hold now are kept."""

    def _kept(self, now: float) -> list[bytes]:
        kept = super()._kept(now)
        held = {record.newest.weights for record in self._boots.values() if record.alive(self.config, now)}
        return [weights for weights in kept if weights in held]


class _SweepsAtOnce(Hub):
    """A new leader takes those that it has heard from for all that there are."""

    def _knows_engines(self, now: float) -> bool:
        return True


class _SweepsUnknown(Hub):
    """An engine that cannot say what it holds counts as holding nothing."""

    def _knows_weights(self, now: float) -> bool:
        return True


class _SweepsRetained(Hub):
    """The policy Retain holds for older epochs only."""

    def _sweep_weights_after(self, at: float) -> None:
        if self.term is not None:
            self._reclaimer.start_weights(at)


class _NeverSweeps(Hub):
    def _sweep_weights_after(self, at: float) -> None:
        return


class _SweepsOnceALeadership(Hub):
    """Weights that become nobody's later are not looked for."""

    def _clean(self, now: float) -> list[ev.Action]:
        self._reported.expire(self.config.grace_seconds, now)
        return super()._clean(now)


class _ForgetsToSweep(Hub):
    """What may not be removed yet is not remembered."""

    def _reclaim(self, now: float) -> list[ev.Action]:
        able = [record for record in self._boots.values() if self._can_reclaim(record, now)]
        return self._reclaimer.next(self.published, self._kept(now), able, self.config, now)


class _DoesNotLookAgain(Hub):
    """When every engine can say again what it holds, nobody looks."""

    def _engines_changed(self, now: float) -> None:
        return


class _AnyAnswerCounts(Reclaimer):
    def answered(self, answer: Reclaimed, published: int) -> bool:
        request = self._open.get(answer.number)
        if request is not None and request.below == answer.below:
            self._confirmed_changes = max(self._confirmed_changes, request.changes)
        return super().answered(answer, published)


class _LateAnswersCount(Reclaimer):
    def answered(self, answer: Reclaimed, published: int) -> bool:
        numbers = [number for number, request in self._open.items() if request.boot == answer.boot]
        return super().answered(msgspec.structs.replace(answer, number=max(numbers, default=0)), published)


def _with_reclaimer(kind: Callable[[], Reclaimer]) -> Callable[[PoolConfig], Hub]:
    class _Hub(Hub):
        def __init__(self, config: PoolConfig) -> None:
            super().__init__(config)
            self._reclaimer = kind()

    return _Hub


class _AsksWithoutEnd(Hub):
    """Engines are asked again although none of them found anything."""

    def _tick(self, now: float) -> list[ev.Action]:
        if self.term is not None and self._reclaimer.due_at == float("inf"):
            self._reclaimer.start_weights(now + self.config.reclaim_seconds)
        return super()._tick(now)

    def tick_at(self) -> float:
        return min(super().tick_at(), self._forget_at)


WIPING = {"policy": "RemoveAll", "store_admin": True, "restores": False, "reconfigures": False}
FAILING = {**WIPING, "store_fails": 1.0}
DELETING = {"policy": "Delete", "restores": False, "reconfigures": False}
SWEEPING = {**DELETING, "pushes": 3.0, "trouble": 0.1}
LONG = {**SWEEPING, **CALM, "steps": 1200, "pace": 0.4}

STORE_MUTANTS = {
    "the store is wiped before publication": Mutant(Rules(hub=_WipesAtTarget), "4", WIPING),
    "publication waits for the store": Mutant(Rules(hub=_WaitsForTheWipe), "4", FAILING),
    "the store is wiped again and again": Mutant(Rules(hub=_WipesAgain), "7", WIPING),
    "a wipe that failed is not tried again": Mutant(Rules(hub=_WipesOnce), "4", {**WIPING, "store_fails": 0.6}),
    "a wipe is never given up": Mutant(Rules(hub=_WipesForEver), "4", FAILING),
    "keys are removed before publication": Mutant(Rules(hub=_DeletesBelowTarget), "4", DELETING),
    "keys are removed once": Mutant(Rules(hub=_DeletesOnce), "4", {**DELETING, "busy_store": True}),
    "keys are never removed": Mutant(Rules(hub=_NeverDeletes), "4", DELETING),
    "weights are kept for no time": Mutant(Rules(hub=_NoGrace), "4", LONG),
    "a new leader sweeps before it knows its engines": Mutant(Rules(hub=_SweepsAtOnce), "4", SWEEPING),
    "an engine that cannot say holds nothing": Mutant(Rules(hub=_SweepsUnknown), "4", LONG),
    "Retain lets weights be swept": Mutant(Rules(hub=_SweepsRetained), "4", {**LONG, "policy": "Retain"}),
    "weights are never swept": Mutant(Rules(hub=_NeverSweeps), "4", SWEEPING),
    "weights are swept once a leadership": Mutant(Rules(hub=_SweepsOnceALeadership), "4", SWEEPING),
    "what may not be swept yet is forgotten": Mutant(Rules(hub=_ForgetsToSweep), "4", SWEEPING),
    "nobody looks again for what to sweep": Mutant(Rules(hub=_DoesNotLookAgain), "4", SWEEPING),
    "any answer ends a sweep": Mutant(Rules(hub=_with_reclaimer(_AnyAnswerCounts)), "4", {**SWEEPING, "busy_store": True}),
    "an answer to an older sweep counts": Mutant(
        Rules(hub=_with_reclaimer(_LateAnswersCount)), "4", {**SWEEPING, "disorder": 0.9, "engines": 1}
    ),
    "engines are asked to sweep without end": Mutant(Rules(hub=_AsksWithoutEnd), "7", DELETING),
}
