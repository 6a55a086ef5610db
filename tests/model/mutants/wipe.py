"""Rules of reclaim (design page "fence", section 4): hold, drain, wipe; delete until nothing is left. Each taken away."""

from __future__ import annotations

from epochkv_fence import hub_events as ev
from epochkv_fence.boots import BootRecord
from epochkv_fence.hub import Hub
from epochkv_fence.messages import Mode, Reclaim
from epochkv_fence.pool_state import Round
from tests.model.mutants.kind import CALM, Mutant
from tests.model.parts import Rules


class _WipesAtOnce(Hub):
    def _quiet(self, record: BootRecord, now: float) -> bool:
        return True

    def _evaluate_at(self) -> float:
        return super()._publish_at()


class _UnknownIsDrained(Hub):
    def _drained(self, record: BootRecord) -> bool:
        beat = record.newest
        return beat.epoch is not None and beat.epoch >= self.target and beat.mode is Mode.BYPASS and not beat.loading


class _LoadsDoNotCount(Hub):
    def _drained(self, record: BootRecord) -> bool:
        return record.newest.epoch is not None and record.newest.epoch >= self.target and record.newest.mode is Mode.BYPASS


class _UseIsDrained(Hub):
    """No load open just now is enough, whatever the mode."""

    def _drained(self, record: BootRecord) -> bool:
        return record.at_least(self.target) and record.newest.loading == 0


class _UseWhileWiping(Hub):
    def _holds_loads(self, now: float) -> bool:
        return False


class _UseBeforeItLanded(Hub):
    """A wipe that was given up may still land when loads are released."""

    def _holds_loads(self, now: float) -> bool:
        return self._wiper.needed and self.target > self.published

    def _may_publish(self, now: float) -> bool:
        return self._fence_holds(now) and not self._wiper.open


class _OthersDoNotWipe(Hub):
    """A wipe that the hub before asked for may still begin when a new one, under another policy, lets engines load."""

    def _others_may_wipe(self, now: float) -> bool:
        return False


class _LandsAnyTime(Hub):
    def _wipe(self, current: Round, now: float) -> list[ev.Action]:
        return [ev.Wipe(action.epoch) if isinstance(action, ev.Wipe) else action for action in super()._wipe(current, now)]


class _WipeWithoutRead(Hub):
    """The wipe rests on no leadership read."""

    def _begin_round(self, number: int, now: float) -> list[ev.Action]:
        actions = super()._begin_round(number, now)
        current = self._round
        if current is None or current.wipe is None:
            return actions
        actions += self._wipe(current, now)
        current.wipe = None
        if not self.round_open:
            self._round = None
        return actions


class _WipeForEver(Hub):
    """A wipe is never given up."""

    def tick_at(self) -> float:
        return super().tick_at()

    def _tick(self, now: float) -> list[ev.Action]:
        self._wiper.allowed_at = None
        return super()._tick(now)


class _OneWipe(Hub):
    """One wipe is enough, whatever it found."""

    def _store_answered(self, event: ev.Wiped | ev.WipeFailed | ev.Swept | ev.SweepFailed, now: float) -> list[ev.Action]:
        if isinstance(event, ev.Wiped):
            event = ev.Wiped(event.epoch, 0, event.num_bytes)
        return super()._store_answered(event, now)


class _StaysInBypass(Hub):
    """After a wipe nobody is given `Use` again."""

    def _mode(self, record: BootRecord, now: float) -> Mode:
        return Mode.BYPASS if self.config.reclaim == "RemoveAll" else super()._mode(record, now)


class _DeletesBelowTarget(Hub):
    """Old keys are removed before the new epoch is published."""

    def _reclaim(self, now: float) -> list[ev.Action]:
        return [self._below_target(action) for action in super()._reclaim(now)]

    def _below_target(self, action: ev.Action) -> ev.Action:
        if isinstance(action, ev.Send) and isinstance(action.message, Reclaim):
            return ev.Send(action.peer, Reclaim(action.message.boot, self.target))
        return action


class _DeletesOnce(Hub):
    """One answer is enough, whatever was removed and whatever lands later."""

    def _reclaim(self, now: float) -> list[ev.Action]:
        actions = super()._reclaim(now)
        if actions:
            self._reclaimer.stop()
        return actions


class _NeverDeletes(Hub):
    def _reclaim_after(self, at: float) -> None:
        return


WIPING = {"policy": "RemoveAll", "store_admin": True, "restores": False, "pushed": False}
BUSY = {**WIPING, "busy_store": True}
LATE = {**BUSY, **CALM, "store_fails": 0.6, "steps": 3000, "disorder": 0.1, "pace": 0.4, "idle": 0.0}
DELETING = {"policy": "Delete", "restores": False, "reconfigures": False, "pushed": False}

WIPE_MUTANTS = {
    "the store is wiped without draining": Mutant(Rules(hub=_WipesAtOnce), "4", BUSY),
    "loading unknown counts as drained": Mutant(Rules(hub=_UnknownIsDrained), "4", {**BUSY, "blind_loads": True}),
    "open loads do not hold the wipe": Mutant(Rules(hub=_LoadsDoNotCount), "4", BUSY),
    "an engine in use counts as drained": Mutant(Rules(hub=_UseIsDrained), "4", {**BUSY, "reconfigures": True}),
    "Use while the store is wiped": Mutant(Rules(hub=_UseWhileWiping), "4", BUSY),
    "Use while a wipe may land": Mutant(Rules(hub=_UseBeforeItLanded), "4", LATE),
    "Use while an older hub's wipe may land": Mutant(Rules(hub=_OthersDoNotWipe), "4", {**LATE, "reconfigures": True, "takeovers": 0.3}),
    "a wipe may land at any time": Mutant(Rules(hub=_LandsAnyTime), "4", LATE),
    "a wipe without a leadership read": Mutant(Rules(hub=_WipeWithoutRead), "4", {**BUSY, "takeovers": 1.0}),
    "a wipe is never given up": Mutant(Rules(hub=_WipeForEver), "4", {**WIPING, "store_fails": 1.0}),
    "one wipe is enough": Mutant(Rules(hub=_OneWipe), "4", BUSY),
    "nobody shares again after a wipe": Mutant(Rules(hub=_StaysInBypass), "4", WIPING),
    "keys are removed before publication": Mutant(Rules(hub=_DeletesBelowTarget), "4", DELETING),
    "keys are removed once": Mutant(Rules(hub=_DeletesOnce), "4", {**DELETING, "busy_store": True}),
    "keys are never removed": Mutant(Rules(hub=_NeverDeletes), "4", DELETING),
}
