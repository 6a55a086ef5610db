"""The fence hub of this process: its life, its pools, and how its changes reach the work queue without a write per heartbeat."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import structlog

from epochkv_fence.metrics import POOL_GAUGES
from epochkv_fence.mooncake_admin import StoreAdmin
from epochkv_fence.net.keys import KeyPair
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.pool import ENGINE_STATES, PoolConfig, PoolSnapshot
from epochkv_operator import metrics
from epochkv_operator.api import KVCachePool
from epochkv_operator.hub.authority import KubernetesAuthority, Proofs, record_of
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.lease import LeaseHolder, LeaseLost
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.kube.store import Key, pool_key
from epochkv_operator.planning.context import PUSH_SECONDS, HubView, KeysView

# ---- from the hub's snapshot of a pool to what planning and metrics take; pure ----


@dataclass
class PoolHistory:
    """What of a pool's snapshots has to be remembered between two of them.

    Attributes:
        told: target and published, as last told (`news`); None before the first.
        target: as last seen.
        base: keys and bytes that the hub had removed in all when its target was last raised.
        total: the same, now.
        led_since: when the hub was first seen leading in its term (monotonic); None: it does not lead.
        differ_since: since when live engines of one fingerprint hold different weights and none takes new ones (monotonic); None: it is
            not so.
        reclaimed: highest epoch below which nothing is left, and when that was first seen (Unix seconds).
    """

    told: tuple[int, int] | None = None
    target: int | None = None
    base: tuple[int, int] = (0, 0)
    total: tuple[int, int] = (0, 0)
    reclaimed: int = 0
    reclaimed_at: float | None = None
    led_since: float | None = None
    differ_since: float | None = None

    def take(self, snapshot: PoolSnapshot, unix_seconds: float, now: float = 0.0) -> None:
        """Take a newer snapshot in; `now` is monotonic."""
        if not snapshot.leading:
            self.led_since = None
        elif self.led_since is None:
            self.led_since = now
        if not snapshot.diverged or any(engine.updating for engine in snapshot.engines):
            self.differ_since = None
        elif self.differ_since is None:
            self.differ_since = now
        if self.target is not None and snapshot.target > self.target:
            self.base = self.total
        self.target = snapshot.target
        self.total = (snapshot.reclaimed_keys, snapshot.reclaimed_bytes)
        if snapshot.reclaimed > self.reclaimed:
            self.reclaimed, self.reclaimed_at = snapshot.reclaimed, unix_seconds

    def news(self, snapshot: PoolSnapshot) -> tuple[bool, bool]:
        """Whether the epochs are others than those told last, and whether one was published since. They count as told now."""
        before, self.told = self.told, (snapshot.target, snapshot.published)
        return self.told != before, before is not None and snapshot.published > before[1]

    def overdue_in(self, now: float) -> float | None:
        """How much longer engines may hold different weights as in a push; 0.0: it is too long, None: they do not."""
        return None if self.differ_since is None else max(0.0, self.differ_since + PUSH_SECONDS - now)


def view_of(
    snapshot: PoolSnapshot, history: PoolHistory, now: float, keys: KeysView | None = None, *, complete: bool = True
) -> HubView | None:
    """The snapshot for planning; None while the hub does not lead this pool, when it knows nothing that counts."""
    if not snapshot.leading:
        return None
    known = {one.name: getattr(snapshot, one.name) for one in fields(snapshot)}
    known |= {
        "engines": [engine for engine in snapshot.engines if engine.alive or not engine.converged],
        "reclaimed": history.reclaimed,
        "reclaimed_keys": max(0, history.total[0] - history.base[0]),
        "reclaimed_bytes": max(0, history.total[1] - history.base[1]),
    }
    overdue = history.overdue_in(now) == 0.0
    return HubView(**known, reclaimed_at=history.reclaimed_at, overdue=overdue, keys=keys, complete=complete)


def old_key_users(snapshot: PoolSnapshot) -> tuple[str, ...]:
    """Live engines that use the older of two client keys."""
    return tuple(engine.display_name for engine in snapshot.engines if engine.alive and engine.key_index > 0)


def export(namespace: str, pool: str, snapshot: PoolSnapshot, lease_seconds: float, now: float) -> None:
    """Set the pool's gauges. `now`: Unix seconds."""
    for name, (_, value) in POOL_GAUGES.items():
        metrics.GAUGES[name].labels(namespace=namespace, pool=pool).set(value(snapshot, lease_seconds, now))
    states = [engine.state for engine in snapshot.engines]
    for state in ENGINE_STATES:
        metrics.POOL_ENGINES.labels(namespace=namespace, pool=pool, state=state).set(states.count(state))


# ---- the service ----


log = structlog.get_logger(__name__)
#: A published epoch reaches the rest of the status after this.
DONE_SECONDS = 0.01
#: A reset that is still open after this is reported as such. Most are through by then, and cost one status write less.
OPEN_SECONDS = 0.25
#: Everything else about engines (requests on an old epoch, joins, losses) is written at most this often.
QUIET_SECONDS = 1.0
WATCHDOG_SECONDS = 1.0
#: For so long, what was seen of a pool does for those who ask for one engine or pod of it: each look is at all engines.
LOOK_SECONDS = 0.1


class HubSnapshot(NamedTuple):
    """What the hub knows about a pool at one moment.

    Attributes:
        known: the hub has read the pool's record in its term. A pool without keys is never served, and counts as known.
        view: what planning takes; None while the hub knows nothing that counts.
        incomplete_seconds: how much longer an engine may live that this hub has not heard from: a lease since it began to lead.
        overdue_seconds: how much longer engines may hold different weights before that is reported; 0.0: it is, or they do not.
    """

    known: bool = True
    view: HubView | None = None
    incomplete_seconds: float = 0.0
    overdue_seconds: float = 0.0


@dataclass
class _Served:
    """What is kept beside a pool of the hub."""

    key: Key
    config: PoolConfig
    keys: KeysView
    history: PoolHistory
    old_key_used_at: float
    reported_at: float = 0.0
    looked: PoolSnapshot | None = None
    looked_at: float = 0.0


class HubFailed(Exception):
    """The hub's own machinery broke, or another hub leads: the process must end."""


class HubService:
    """One HubServer. `wake` is called with (key, delay in seconds) when a pool's status may have to be written, `forgotten` with the uid of
    a pool that is served no more."""

    def __init__(
        self,
        bind: str,
        keys: KeyPair,
        lease: LeaseHolder,
        statuses: StatusWriter,
        wake: Callable[[Key, float], None],
        stores: StoreAdmin,
        forgotten: Callable[[str], None] = lambda uid: None,
    ) -> None:
        self._lease = lease
        self._wake = wake
        self._forgotten = forgotten
        self._authority = KubernetesAuthority(lease, statuses, Proofs(keys.secret))
        self._deposed = asyncio.Event()
        self._server = HubServer(bind, keys, self._authority, on_change=self._changed, on_step_down=self._deposed.set, stores=stores)
        self._served: dict[str, _Served] = {}
        self._exported: Counter[str] = Counter()
        self.listening = False

    async def start(self) -> None:
        """Bind and lead in the Lease's term. Raises `OSError`: the address cannot be bound."""
        await self._server.start()
        term = self._lease.term
        if term is None:
            raise HubFailed("the hub was started without the Lease")
        self._server.lead(term)
        self.listening = True
        log.info("hub listens", endpoint=self._server.endpoint)

    async def run(self) -> None:
        """Watch over the hub; never returns. Raises `LeaseLost`: another hub leads; `HubFailed`: a task of the hub died."""
        while True:
            try:
                async with asyncio.timeout(WATCHDOG_SECONDS):
                    await self._deposed.wait()
                raise LeaseLost("the hub found that another operator holds the Lease")
            except TimeoutError:
                if self._server.counters["tasks_failed"]:
                    raise HubFailed("a task of the hub died; its error is in the log above") from None

    async def close(self) -> None:
        self.listening = False
        await self._server.stop()

    # ---- pools ----

    def ensure(self, pool: KVCachePool, accepted: tuple[str, ...], keys: KeysView, *, new: bool = False) -> None:
        """Make the hub serve this pool with this configuration, and no namesake of it.

        `accepted`: public keys of clients, the newest first; `keys`: as the Secret has them; `new` as in `KubernetesAuthority.register`.
        """
        metadata = pool.metadata
        uid, key = metadata.uid, pool_key(metadata.namespace, metadata.name)
        for other in [other for other, served in self._served.items() if served.key == key and other != uid]:
            self._remove(other)
        config = PoolConfig(
            uid=uid,
            name=f"{metadata.namespace}/{metadata.name}",
            client_public_keys=accepted,
            lease_seconds=float(pool.spec.reset.lease_seconds),
            reclaim=pool.spec.reset.reclaim_policy if pool.spec.distributed is not None else "Retain",
            # Somebody else's store may hold what is not ours to remove.
            store_admin=pool.mooncake is not None,
        )
        served = self._served.get(uid)
        if served is None:
            self._authority.register(uid, metadata.namespace, metadata.name, new=new)
            self._server.set_pool(config)  # rejects a key that another pool has
            self._served[uid] = _Served(key, config, keys, PoolHistory(), time.monotonic())
            self._server.request(uid, pool.spec.reset_epoch)
            return
        if len(accepted) > len(served.config.client_public_keys):
            served.old_key_used_at = time.monotonic()
        served.keys = keys
        if served.config != config:
            self._server.set_pool(config)
            served.config = config

    def forget(self, namespace: str, name: str) -> list[str]:
        """The pool is gone. Returns the uids that were served under its name."""
        key = pool_key(namespace, name)
        uids = [uid for uid, served in self._served.items() if served.key == key]
        for uid in uids:
            self._remove(uid)
        metrics.forget_pool(namespace, name)
        return uids

    def seen(self, pool: Json) -> None:
        """A state of a pool was seen, however late: take its epochs in. One that no reconcile has brought here yet (`ensure`) has its
        epochs taken in with that."""
        uid = pool["metadata"]["uid"]
        if uid not in self._served:
            return
        # Not what is published: ours may be seen here before its answer comes, and the hub times it by the answer. Not the note of
        # grants, which anybody may forge.
        self._server.observe(uid, replace(record_of(pool), published=0, granting=False))
        self._server.request(uid, int((pool.get("spec") or {}).get("resetEpoch") or 0))

    def resetting(self, pool_uid: str) -> bool:
        """Whether an epoch that was asked for is not published yet."""
        return pool_uid in self._served and not self._server.snapshot(pool_uid).converged

    def snapshot(self, pool_uid: str, newest: Json | None = None) -> HubSnapshot:
        """What reconcilers ask for, by one call. `newest`: of the pool itself: its status may be doubted, and its gates compare times, so
        nothing older than the call will do."""
        served, now = self._served.get(pool_uid), time.monotonic()
        if served is None:
            return HubSnapshot()
        if newest is not None or served.looked is None or now >= served.looked_at + LOOK_SECONDS:
            served.looked, served.looked_at = self._server.snapshot(pool_uid), now
            served.history.take(served.looked, time.time(), now)
        snapshot = served.looked
        led_since = served.history.led_since
        incomplete = led_since + served.config.lease_seconds - now if led_since is not None else 0.0
        keys = served.keys._replace(old_users=old_key_users(snapshot) if served.keys.accepted > 1 else ())
        view = view_of(snapshot, served.history, now, keys, complete=incomplete <= 0)
        if view is not None:
            doubted = self._doubted(newest, snapshot.published) if newest is not None else 0
            proof, granted = self._authority.proof(pool_uid, view.published), self._authority.granted(pool_uid)
            view = replace(view, proof=proof, granted=granted, doubted=doubted)
        return HubSnapshot(snapshot.leading, view, max(0.0, incomplete), served.history.overdue_in(now) or 0.0)

    def _doubted(self, pool: Json, served: int) -> int:
        """The epoch in a pool's status, if nobody has proved it, nor published it since; else 0."""
        said = record_of(pool).published
        return said if said > max(self._authority.believed(pool).published, served) else 0

    def old_key_idle_seconds(self, pool_uid: str) -> float:
        """For how long no live engine instance has used the older of two keys; call it every few seconds while there are two."""
        served, now = self._served.get(pool_uid), time.monotonic()
        if served is None or not (snapshot := self._server.snapshot(pool_uid)).leading:
            return 0.0
        if old_key_users(snapshot):
            served.old_key_used_at = now
        return now - served.old_key_used_at

    def export_metrics(self) -> None:
        """Set the gauges of every pool and add what the hub has counted since; as a scrape begins."""
        before, self._exported = self._exported, Counter(self._server.counters)
        metrics.count_messages(self._exported, before)
        for uid, served in self._served.items():
            snapshot = self._server.snapshot(uid)
            served.history.take(snapshot, time.time(), time.monotonic())
            export(served.key.namespace, served.key.name, snapshot, served.config.lease_seconds, time.time())

    def _remove(self, uid: str) -> None:
        self._server.remove_pool(uid)
        self._authority.unregister(uid)
        self._forgotten(uid)
        del self._served[uid]

    def _changed(self, uid: str) -> None:
        served = self._served.get(uid)
        if served is None:
            return
        snapshot, key, now = self._server.snapshot(uid), served.key, time.monotonic()
        served.looked = None
        served.history.take(snapshot, time.time(), now)
        moved, published = served.history.news(snapshot)
        if published and snapshot.reset_seconds is not None:
            metrics.RESET_SECONDS.labels(namespace=key.namespace, pool=key.name).observe(snapshot.reset_seconds)
        if moved:
            self._wake(key, OPEN_SECONDS if snapshot.target > snapshot.published else DONE_SECONDS)
            return
        delay = max(OPEN_SECONDS, served.reported_at + QUIET_SECONDS - now)
        served.reported_at = now + delay
        self._wake(key, delay)
