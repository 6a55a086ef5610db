"""Everything that a hub knows about one pool, and what it shows of it: a snapshot for people and metrics, and answers for trainers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from epochkv_fence import VERSION
from epochkv_fence.hub import events as ev
from epochkv_fence.hub.instances import Holdings, InstanceRecord, Instances
from epochkv_fence.hub.reclaim import Reclaimer, Reported, Wiper
from epochkv_fence.hub.record import Labels, Leadership, Record, Rounds, Waiters
from epochkv_fence.hub.rules import HubRules
from epochkv_fence.protocol.messages import BumpStatus, EngineStatus, Source, Status
from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolSnapshot, WeightsView


class HubState:
    """One pool, as the hub in this process knows it; `rules` decide what the hub may do."""

    def __init__(self, config: PoolConfig, rules: HubRules) -> None:
        self.config = config
        self.rules = rules
        self.lead = Leadership()
        self.record = Record()
        self.instances = Instances()
        self.rounds = Rounds()
        self.waiters = Waiters()
        self.labels = Labels()
        self.wiper = Wiper()
        self.reclaimer = Reclaimer()
        self.reported = Reported()

    @property
    def leading(self) -> bool:
        """This hub leads, and has read the record."""
        return self.lead.term is not None

    @property
    def open(self) -> bool:
        """A reset is under way."""
        return self.leading and (self.record.target > self.record.published or self.record.recording is not None)


# ----------------------------------------------------------------------------------------------------------------------
# What a hub shows of a pool: a snapshot for people and metrics, and answers for trainers.


STATUS_PAGE: Final = 64
STATUS_PAGE_BYTES: Final = 40_000
"""At most so many bytes of names, notes and labels go into one page, so that it always fits into a message."""


def pool_snapshot(hub: HubState, now: float) -> PoolSnapshot:
    """The pool at `now`; times are on this hub's clock (the driver turns them into Unix seconds)."""
    record, reclaimer = hub.record, hub.reclaimer
    views = sorted(
        (instance.view(record.target, hub.config, now) for instance in hub.instances.known.values()),
        key=lambda view: (view.engine, view.pod, view.rank, view.instance),
    )
    engines = with_divergence(views, hub.instances.holdings, now)
    return PoolSnapshot(
        uid=hub.config.uid,
        leading=hub.leading,
        target=record.target,
        published=record.published,
        asked=record.wanted,
        engines=engines,
        laggards=[view for view in engines if view.alive and not view.converged],
        old_epoch_requests=hub.instances.old_epoch_requests,
        started_at=record.started_at,
        behind_since=record.behind_since,
        published_at=record.published_at,
        reset_seconds=record.reset_seconds,
        reclaimed=reclaimer.done_below,
        origin=record.origin,
        reclaim_policy=hub.config.reclaim,
        reclaimed_keys=reclaimer.keys,
        reclaimed_bytes=reclaimer.num_bytes,
        wipe_failed=hub.wiper.failed,
        labels=dict(hub.labels.known),
        weights=groups(engines, hub.labels.known),
        diverged=[view for view in engines if view.diverged_seconds is not None],
    )


# -------------------------------------------------------------------------------------------------------------- weights


def groups(engines: Iterable[EngineView], labels: Mapping[bytes, str]) -> list[WeightsView]:
    """The live engines by the weights they hold. The largest group comes first; of equal groups, the one with the newest weights."""
    found = [
        WeightsView(
            weights=weights,
            label=labels.get(weights, ""),
            engines=len(members),
            since_seconds=_since(members),
            fingerprints=len({member.fingerprint for member in members}),
        )
        for weights, members in _by_weights(engines).items()
    ]
    return sorted(found, key=lambda group: (-group.engines, group.since_seconds, group.weights))


def with_divergence(engines: Sequence[EngineView], holdings: Holdings, now: float) -> list[EngineView]:
    """`engines`, each with how long it has held other weights than most live engines of its fingerprint."""
    majority = {}
    fingerprints: dict[str, list[EngineView]] = {}
    for engine in engines:
        fingerprints.setdefault(engine.fingerprint, []).append(engine)
    for fingerprint, members in fingerprints.items():
        by_weights = _by_weights(members)
        if len(by_weights) > 1:
            majority[fingerprint] = min(by_weights, key=lambda held: (-len(by_weights[held]), _since(by_weights[held]), held))
    return [_diverging(engine, majority.get(engine.fingerprint), holdings, now) for engine in engines]


def differs(engine: EngineView, majority: bytes | None) -> bool:
    """A live engine holds other weights than the majority. One that cannot say what it holds differs from nobody."""
    return majority is not None and engine.alive and engine.weights is not None and engine.weights != majority


def _diverging(engine: EngineView, majority: bytes | None, holdings: Holdings, now: float) -> EngineView:
    if not differs(engine, majority):
        return engine
    seconds = min(engine.weights_since, holdings.unequal_seconds(engine.fingerprint, now))
    return msgspec.structs.replace(engine, diverged_seconds=seconds)


def _by_weights(engines: Iterable[EngineView]) -> dict[bytes, list[EngineView]]:
    found: dict[bytes, list[EngineView]] = {}
    for engine in engines:
        if engine.alive and engine.weights is not None:
            found.setdefault(engine.weights, []).append(engine)
    return found


def _since(engines: Iterable[EngineView]) -> float:
    return max(engine.weights_since for engine in engines)


# ------------------------------------------------------------------------------------------------------------- trainers


def answers(hub: HubState, waiters: Sequence[tuple[bytes, int, int]]) -> list[ev.Action]:
    """Tell trainers that wait, as (peer, request, epoch), how far the reset is. It counts all instances once, however many ask."""
    if not waiters:
        return []
    counted = BumpStatus(
        request=0,
        epoch=0,
        target=hub.record.target,
        published=hub.record.published,
        engines=len(hub.instances.known),
        laggards=len(hub.instances.behind),
        old_epoch_requests=hub.instances.old_epoch_requests,
        lease_seconds=hub.config.lease_seconds,
    )
    return [ev.Send(peer, msgspec.structs.replace(counted, request=request, epoch=epoch)) for peer, request, epoch in waiters]


def status(hub: HubState, question: Status, now: float) -> Status:
    page = Status(
        question.request,
        hub.record.target,
        hub.record.published,
        lease_seconds=hub.config.lease_seconds,
        origin=hub.record.origin if hub.record.origin is not None else Source.SPEC,
        pool=hub.config.uid[:253],
        after=question.after,
        labels={weights.hex(): label for weights, label in hub.labels.known.items()} if question.after is None else {},
        settling_seconds=max(0.0, hub.lead.settled_at - now),
        version=VERSION,
    )
    return _status_page(page, list(hub.instances.known.values()), hub.config, now)


def _status_page(page: Status, records: Sequence[InstanceRecord], config: PoolConfig, now: float) -> Status:
    """`page` with the live instances after `page.after`, by instance; fewer where their names are long."""
    alive = sorted((record for record in records if record.alive(config, now)), key=_instance)
    start = 0 if page.after is None else bisect_right(alive, page.after, key=_instance)
    engines: list[EngineStatus] = []
    room = STATUS_PAGE_BYTES - sum(len(label.encode()) for label in page.labels.values())
    for record in alive[start : start + STATUS_PAGE]:
        beat = record.newest
        told = beat.engine, beat.pod, beat.fingerprint, beat.weights_note, beat.tiers_off, beat.tiers_note
        texts = *told, *beat.versions, *beat.versions.values()
        room -= sum(len(text.encode()) for text in texts)
        if room < 0:
            break
        engines.append(_engine_status(record, now))
    return msgspec.structs.replace(page, total=len(alive), engines=engines)


def _instance(record: InstanceRecord) -> bytes:
    return record.instance


def _engine_status(record: InstanceRecord, now: float) -> EngineStatus:
    return EngineStatus(
        instance=record.instance,
        epoch=record.epoch,
        age_seconds=record.newest.instance_age_seconds,
        silent_seconds=max(0.0, now - record.heard_at),
        since_seconds=max(0.0, now - record.weights_at),
        **record.newest.report(),
    )
