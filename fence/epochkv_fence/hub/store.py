"""What a hub does to the store: the wipe after publication, and the removal of keys that nobody finds any more.

Of the hub's state machine; `hub` says when. The rules are in `hub_rules`.
"""

from __future__ import annotations

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.rules import HubRules


class HubStore(HubRules):
    """The part of `hub.Hub` that gives the store's memory back."""

    def _clean_after(self, now: float) -> None:
        """An epoch is published. What nobody was ever granted for holds no keys."""
        if self.term is None:
            return
        if self.config.reclaim == "RemoveAll" and self._noted:
            self._wiper.begin(self.published, now)
        else:
            self._reclaim_after(now)

    def _reclaim_after(self, at: float) -> None:
        if self.config.reclaim != "Retain" and self.term is not None:
            self._reclaimer.start(self.published, at)

    def _sweep_weights_after(self, at: float) -> None:
        """There may be keys of weights that nobody holds."""
        if self.config.reclaim != "Retain" and self.term is not None:
            self._reclaimer.start_weights(at)

    def _engines_changed(self, now: float) -> None:
        """Engines came or went, or hold other weights, or say now what they hold."""
        if self.config.reclaim != "Retain" and self.term is not None:
            self._reclaimer.look_again(max(now, self._led_at + self.config.grace_seconds))

    def _clean(self, now: float) -> list[ev.Action]:
        """What time brings."""
        actions: list[ev.Action] = []
        if now >= self._wiper.due_at():
            actions += self._wipe(now)
        if now >= self._reported.look_at() and self._reported.expire(self.config.grace_seconds, now):
            self._sweep_weights_after(now)
        if now >= self._reclaimer.due_at:
            actions += self._reclaim(now)
        return actions

    def _wipe(self, now: float) -> list[ev.Action]:
        if self._wiper.give_up(now):
            self._reclaim_after(now)
            return [ev.Changed()]
        epoch = self._wiper.next(now)
        return [] if epoch is None else [ev.Wipe(epoch)]

    def _reclaim(self, now: float) -> list[ev.Action]:
        able = [record for record in self._boots.values() if self._can_reclaim(record, now)]
        actions = self._reclaimer.next(self.published, self._kept(now), able, self.config, now)
        if not self._knows_engines(now):
            self._reclaimer.look_again(self._led_at + self.config.grace_seconds)
        return actions

    def _store_answered(self, event: ev.Wiped | ev.WipeFailed | ev.Swept | ev.SweepFailed, now: float) -> list[ev.Action]:
        match event:
            case ev.Wiped(epoch, keys, num_bytes):
                self._reclaimer.count(keys, num_bytes)
                if self._wiper.answered(epoch):
                    self._reclaim_after(now + self.config.reclaim_seconds)
                return [ev.Changed()]
            case ev.WipeFailed(epoch):
                self._wiper.missed(epoch, now)
                return []
            case ev.Swept(below, keys, num_bytes):
                return [ev.Changed()] if self._reclaimer.swept(below, keys, num_bytes, self.published) else []
            case ev.SweepFailed(below):
                self._reclaimer.sweep_failed(below)
                return []
