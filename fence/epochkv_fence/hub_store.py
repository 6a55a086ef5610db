"""What a hub does to the store: the wipe that an epoch waits for, and the removal of old keys.

Of the hub's state machine; `hub` says when. The rules are in `hub_rules`.
"""

from __future__ import annotations

from epochkv_fence import hub_events as ev
from epochkv_fence.boots import BootRecord
from epochkv_fence.hub_rules import HubRules
from epochkv_fence.pool_state import Round


class HubStore(HubRules):
    """The part of `hub.Hub` that empties stores."""

    # ------------------------------------------------------------------ RemoveAll: hold, drain, wipe, publish

    def _begin_wipe(self) -> None:
        """Decided once per target and term, so that a policy changed in between meets no grant of `Use` of the target. What
        nobody was ever granted for holds no keys."""
        self._wiper.begin(self.config.reclaim == "RemoveAll" and self._noted and self.target > self.published)
        self._reading = {}
        for record in self._boots.values():
            self._note_reading(record)

    def _note_reading(self, record: BootRecord) -> None:
        if not self._wiper.open or self._drained(record):
            self._reading.pop(record.boot, None)
        else:
            self._reading[record.boot] = None

    def _wipe(self, current: Round, now: float) -> list[ev.Action]:
        """After the read; it begins in the store while no later hub can have released loads, nor this one, or never."""
        before = min(current.began + self._wipe_lands(), self._wiper.give_up_at())
        if current.wipe is None or current.wipe != self.target or not self._wiper.open or now >= before:
            return []
        self._wiper.start(self.target, before)
        return [ev.Wipe(self.target, before)]

    def _store_answered(self, event: ev.Wiped | ev.WipeFailed | ev.Swept | ev.SweepFailed, now: float) -> list[ev.Action]:
        match event:
            case ev.Wiped(epoch, keys, num_bytes):
                self._reclaimer.count(keys, num_bytes)
                self._wiper.answered(epoch, keys, self.target)
                return [ev.Changed()]
            case ev.WipeFailed(epoch):
                self._wiper.failed(epoch, now)
                return []
            case ev.Swept(below, keys, num_bytes):
                return [ev.Changed()] if self._reclaimer.swept(below, keys, num_bytes, self.published) else []
            case ev.SweepFailed(below):
                self._reclaimer.sweep_failed(below)
                return []

    # ------------------------------------------------------------------ Delete: keys of older epochs

    def _reclaim_after(self, at: float) -> None:
        if self.config.reclaim != "Retain" and self.term is not None:
            self._reclaimer.start(self.published, at)

    def _reclaim(self, now: float) -> list[ev.Action]:
        able = [record for record in self._boots.values() if self._can_reclaim(record, now)]
        return self._reclaimer.next(self.published, able, self.config, now)
