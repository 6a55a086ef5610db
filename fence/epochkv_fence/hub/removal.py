"""When the hub has keys removed from the store: after a publication, and when no engine holds certain weights any more."""

from __future__ import annotations

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.boots import BootRecord
from epochkv_fence.hub.state import HubState


def after_publication(hub: HubState, now: float) -> None:
    """An epoch is published. Where no hub ever granted anything, the store holds no keys to wipe."""
    if hub.leading and hub.config.reclaim == "RemoveAll" and hub.record.noted:
        hub.wiper.begin(hub.record.published, now)
    else:
        older_epochs(hub, now)


def older_epochs(hub: HubState, at: float) -> None:
    """The store may hold keys of epochs below the published one."""
    if hub.leading and hub.rules.may_remove(hub.config):
        hub.reclaimer.start(hub.record.published, at)


def unheld_weights(hub: HubState, at: float) -> None:
    """The store may hold keys of weights that no engine holds."""
    if hub.leading and hub.rules.may_remove(hub.config):
        hub.reclaimer.start_weights(at)


def engines_changed(hub: HubState, now: float) -> None:
    """Engines came, went, or reported other weights, so the hub may know more about which weights somebody holds."""
    if hub.leading and hub.rules.may_remove(hub.config):
        hub.reclaimer.look_again(max(now, hub.rules.engines_known_at(hub.lead, hub.config)))


def stop(hub: HubState) -> None:
    """Another hub leads, or the policy changes."""
    hub.reclaimer.stop()
    hub.wiper.stop()


def tick(hub: HubState, now: float) -> list[ev.Action]:
    actions: list[ev.Action] = []
    if now >= hub.wiper.due_at():
        actions += _wipe(hub, now)
    if now >= hub.reported.look_at() and hub.reported.expire(hub.config.grace_seconds, now):
        unheld_weights(hub, now)
    if now >= hub.reclaimer.due_at:
        actions += _ask_engine(hub, now)
    return actions


def _wipe(hub: HubState, now: float) -> list[ev.Action]:
    if hub.wiper.give_up(now):
        older_epochs(hub, now)
        return [ev.Changed()]
    epoch = hub.wiper.next(now)
    return [] if epoch is None else [ev.Wipe(epoch)]


def _ask_engine(hub: HubState, now: float) -> list[ev.Action]:
    able = [boot for boot in _who_removes(hub) if hub.rules.can_reclaim(boot, hub.record, hub.config, now)]
    known_at = hub.rules.engines_known_at(hub.lead, hub.config)
    actions = hub.reclaimer.next(hub.record.published, _kept(hub, now), able, hub.config, now)
    if now < known_at:
        hub.reclaimer.look_again(known_at)
    return actions


def _who_removes(hub: HubState) -> list[BootRecord]:
    """Engines with a client of the store. Where the hub knows none and cannot sweep, what any engine says is all there is."""
    known = list(hub.boots.known.values())
    removing = [boot for boot in known if boot.newest.removes]
    return removing if removing or hub.config.store_admin else known


def _kept(hub: HubState, now: float) -> list[bytes]:
    """The weights that some engine may hold, so that their keys stay. Empty: the hub cannot tell now."""
    held = hub.reported.within(hub.config.grace_seconds, now)
    if held is None or now < hub.rules.engines_known_at(hub.lead, hub.config):
        return []
    return held if all(hub.rules.says_weights(boot) for boot in hub.boots.known.values() if boot.alive(hub.config, now)) else []


def answered(hub: HubState, event: ev.Wiped | ev.WipeFailed | ev.Swept | ev.SweepFailed, now: float) -> list[ev.Action]:
    match event:
        case ev.Wiped(epoch, keys, num_bytes):
            hub.reclaimer.count(keys, num_bytes)
            if hub.wiper.answered(epoch):
                older_epochs(hub, now + hub.config.reclaim_seconds)
            return [ev.Changed()]
        case ev.WipeFailed(epoch):
            hub.wiper.missed(epoch, now)
            return []
        case ev.Swept(below, keys, num_bytes):
            return [ev.Changed()] if hub.reclaimer.swept(below, keys, num_bytes, hub.record.published) else []
        case ev.SweepFailed(below):
            hub.reclaimer.sweep_failed(below)
            return []
