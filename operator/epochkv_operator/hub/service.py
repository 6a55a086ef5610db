"""The fence hub of this process: its life, its pools, and how its changes reach the work queue without a write per
heartbeat.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from epochkv_fence.authority import AuthorityError, PoolGone, PoolRecord, Term
from epochkv_fence.pool import PoolConfig, PoolSnapshot
from epochkv_fence.store_admin import StoreAdmin
from epochkv_fence.transport import HubKeys, HubServer
from epochkv_operator import metrics
from epochkv_operator.api import KVCachePool
from epochkv_operator.control.keys import Key, pool_key
from epochkv_operator.hub.kubernetes import KubernetesAuthority, record_of
from epochkv_operator.hub.sightings import Sightings
from epochkv_operator.hub.view import Told, export, key_view, view_of
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.lease import LeaseHolder
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.planning import HubView

log = structlog.get_logger(__name__)
#: A published epoch reaches the rest of the status after this.
DONE_SECONDS = 0.01
#: A reset that is still open after this is reported as such. Most are through by then, and cost one status write less.
OPEN_SECONDS = 0.25
#: Everything else about engines (carried requests, joins, losses) is written at most this often.
QUIET_SECONDS = 1.0
WATCHDOG_SECONDS = 1.0
#: Between two reads of one pool, while engines become old enough one after the other; also after a failed one.
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class AcceptedKeys:
    """Client keys of a pool: public ones, the newest first; how many of them are in the Secret, and the generation of that pair."""

    public: tuple[str, ...]
    in_secret: int = 1
    generation: int = 0


@dataclass
class _Served:
    """What is kept beside a pool of the hub."""

    key: Key
    config: PoolConfig
    keys: AcceptedKeys
    told: Told
    old_key_used_at: float
    told_at: float = 0.0
    look_at: float = math.inf  # when a boot becomes old enough to join what is asked for after the next read


class HubFailed(Exception):
    """The hub's own machinery broke, or another hub leads: the process must end."""


class HubService:
    """One HubServer. `wake` is called with (key, delay in seconds) when a pool's status may have to be written."""

    def __init__(
        self,
        bind: str,
        keys: HubKeys,
        lease: LeaseHolder,
        statuses: StatusWriter,
        wake: Callable[[Key, float], None],
        stores: StoreAdmin,
    ) -> None:
        self._lease = lease
        self._wake = wake
        self._authority = KubernetesAuthority(lease, statuses, on_read=self.read)
        self._deposed = asyncio.Event()
        self._server = HubServer(bind, keys, self._authority, on_change=self._changed, on_step_down=self._deposed.set, stores=stores)
        self._served: dict[str, _Served] = {}
        self._sightings = Sightings()
        self._counts = metrics.HubCounts()
        self._look = asyncio.Event()
        self.listening = False

    async def start(self) -> None:
        """Bind and lead in the Lease's term.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._server.start()
        term = self._lease.term
        if term is None:
            raise HubFailed("the hub was started without the Lease")
        self._server.lead(Term(term.holder, term.transitions))
        self.listening = True
        log.info("hub listens", endpoint=self._server.endpoint)

    async def run(self) -> None:
        """Watch over the hub; never returns.

        Raises:
            HubFailed: another hub leads, or a task of the hub died.
        """
        while True:
            try:
                async with asyncio.timeout(WATCHDOG_SECONDS):
                    await self._deposed.wait()
                raise HubFailed("another operator holds the Lease")
            except TimeoutError:
                if self._server.counters["tasks_failed"]:
                    raise HubFailed("a task of the hub died; its error is in the log above") from None

    async def look(self) -> None:
        """Read each pool once more when a boot has become old enough to join; never returns."""
        while True:
            now = time.monotonic()
            self._look.clear()
            due = min((served.look_at for served in self._served.values()), default=math.inf)
            try:
                async with asyncio.timeout(max(0.0, due - now) if due < math.inf else None):
                    await self._look.wait()
                continue
            except TimeoutError:
                pass
            for uid, served in list(self._served.items()):
                if served.look_at <= time.monotonic():
                    served.look_at = time.monotonic() + LOOK_SECONDS
                    try:
                        await self._authority.load(uid)
                    except PoolGone:
                        served.look_at = math.inf
                    except AuthorityError as error:
                        log.debug("pool not read", pool=served.config.name, error=str(error))

    async def close(self) -> None:
        self.listening = False
        await self._server.stop()

    # ---- pools ----

    def ensure(self, pool: KVCachePool, keys: AcceptedKeys, weights_source: str) -> None:
        """Make the hub serve this pool with this configuration, and no namesake of it."""
        metadata, distributed = pool.metadata, pool.spec.distributed
        uid, key = metadata.uid, pool_key(metadata.namespace, metadata.name)
        for other in [other for other, served in self._served.items() if served.key == key and other != uid]:
            self._remove(other)
        config = PoolConfig(
            uid=uid,
            name=f"{metadata.namespace}/{metadata.name}",
            client_public_keys=keys.public,
            lease_seconds=float(pool.spec.reset.lease_seconds),
            join_after_seconds=float(pool.spec.reset.join_after_seconds),
            weights_source="Model" if weights_source == "Model" else "Pushed",
            reclaim=pool.spec.reset.reclaim_policy if distributed is not None else "Retain",
            # Somebody else's store may hold what is not ours to remove.
            store_admin=distributed is not None and distributed.mooncake is not None,
        )
        served = self._served.get(uid)
        if served is None:
            self._authority.register(uid, metadata.namespace, metadata.name)
            self._served[uid] = _Served(key, config, keys, Told(), time.monotonic())
            self._server.set_pool(config)
            self._ask(uid, pool.spec.reset_epoch, pool.spec.weights_version, pool.spec.weights_ready)
            return
        if len(keys.public) > len(served.keys.public):
            served.old_key_used_at = time.monotonic()
        served.keys = keys
        if served.config != config:
            served.config = config
            self._server.set_pool(config)

    def forget(self, namespace: str, name: str) -> list[str]:
        """The pool is gone. Returns the uids that were served under its name."""
        key = pool_key(namespace, name)
        uids = [uid for uid, served in self._served.items() if served.key == key]
        for uid in uids:
            self._remove(uid)
        metrics.forget_pool(namespace, name)
        return uids

    def seen(self, pool: Json) -> None:
        """A state of a pool was seen, however late: take its epochs in."""
        uid = pool["metadata"]["uid"]
        if uid not in self._served:
            return
        # Only the target: our own publication may be seen here before its answer comes, and the hub times it by the answer.
        record = record_of(pool)
        self._server.observe(uid, PoolRecord(target=record.target, origin=record.origin))
        spec = pool.get("spec") or {}
        self._ask(uid, int(spec.get("resetEpoch") or 0), spec.get("weightsVersion"), spec.get("weightsReady"))

    def read(self, pool: Json, began_at: float) -> None:
        """A read that began then showed this state, and no older one would have done."""
        uid = pool["metadata"]["uid"]
        served = self._served.get(uid)
        if served is None:
            return
        self._sightings.shown(uid, int((pool.get("spec") or {}).get("resetEpoch") or 0), began_at)
        self.seen(pool)
        self._plan_look(uid, served, self._server.snapshot(uid), LOOK_SECONDS)

    def resetting(self, pool_uid: str) -> bool:
        """Whether an epoch that was asked for is not published yet."""
        return pool_uid in self._served and not self._server.snapshot(pool_uid).converged

    def snapshot(self, pool_uid: str) -> PoolSnapshot | None:
        return self._server.snapshot(pool_uid) if pool_uid in self._served else None

    def knows(self, pool_uid: str) -> bool:
        """Whether the hub has read the pool's record in its term; a pool without keys is never served and counts as
        known.
        """
        return pool_uid not in self._served or self._server.snapshot(pool_uid).leading

    def view(self, pool_uid: str) -> HubView | None:
        """What planning takes; None while the hub knows nothing about the pool that counts."""
        served, snapshot = self._served.get(pool_uid), self.snapshot(pool_uid)
        if served is None or snapshot is None:
            return None
        served.told.take(snapshot, time.time(), time.monotonic())
        keys = key_view(snapshot, served.keys.generation, served.keys.in_secret)
        complete = self.incomplete_seconds(pool_uid) <= 0
        return view_of(snapshot, served.told, served.config.weights_source, keys, complete=complete)

    def incomplete_seconds(self, pool_uid: str) -> float:
        """How much longer an engine may live without having been heard from by this hub: a lease since it began to lead."""
        served = self._served.get(pool_uid)
        if served is None or served.told.led_since is None:
            return 0.0
        return served.told.led_since + served.config.lease_seconds - time.monotonic()

    def old_key_idle_seconds(self, pool_uid: str) -> float:
        """For how long no live boot has used the older of two keys; call it every few seconds while there are two."""
        served, snapshot = self._served.get(pool_uid), self.snapshot(pool_uid)
        now = time.monotonic()
        if served is None or snapshot is None or not snapshot.leading:
            return 0.0
        if any(engine.alive and engine.key_index > 0 for engine in snapshot.engines):
            served.old_key_used_at = now
        return now - served.old_key_used_at

    def export_metrics(self) -> None:
        """Set the gauges of every pool and add what the hub has counted since; as a scrape begins."""
        self._counts.take(dict(self._server.counters))
        for uid, served in self._served.items():
            snapshot = self._server.snapshot(uid)
            served.told.take(snapshot, time.time(), time.monotonic())
            export(served.key.namespace, served.key.name, snapshot, served.told)

    def _ask(self, uid: str, epoch: int, version: str | None, ready: str | None) -> None:
        since = self._sightings.since(uid, epoch)
        self._server.request(
            uid,
            epoch,
            fresh=since is not None,
            since=since,
            weights_version=version or "",
            weights_ready=not version or version == ready,
        )

    def _plan_look(self, uid: str, served: _Served, snapshot: PoolSnapshot, pause: float = 0.0) -> None:
        """When to read the pool next, for those boots that were too young at the read before.

        Their ages are discounted like the hub does it, for clocks that run at another rate.
        """
        now, config = time.monotonic(), served.config
        read_at = self._sightings.at(uid)
        due = math.inf
        if config.weights_source == "Pushed":
            ages = (engine.age_seconds + engine.silent_seconds for engine in snapshot.engines if engine.alive)
            old_enough = (now - age / config.max_clock_rate + config.join_after_seconds for age in ages)
            due = min((at for at in old_enough if read_at is None or at > read_at), default=math.inf)
        served.look_at = max(due, now + pause)
        self._look.set()

    def _remove(self, uid: str) -> None:
        self._server.remove_pool(uid)
        self._authority.unregister(uid)
        self._sightings.forget(uid)
        del self._served[uid]

    def _changed(self, uid: str) -> None:
        served = self._served.get(uid)
        if served is None:
            return
        snapshot, key, told = self._server.snapshot(uid), served.key, served.told
        before = told.epochs
        told.take(snapshot, time.time(), time.monotonic())
        self._plan_look(uid, served, snapshot)
        now = time.monotonic()
        if before is not None and snapshot.published > before[1] and snapshot.reset_seconds is not None:
            metrics.RESET_SECONDS.labels(namespace=key.namespace, pool=key.name).observe(snapshot.reset_seconds)
        if told.epochs != before:
            self._wake(key, OPEN_SECONDS if snapshot.target > snapshot.published else DONE_SECONDS)
            return
        delay = max(OPEN_SECONDS, served.told_at + QUIET_SECONDS - now)
        served.told_at = now + delay
        self._wake(key, delay)
