"""The fence hub of this process: its life, its pools, and how its changes reach the work queue without a write per
heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from epochkv_fence.authority import PoolRecord, Term
from epochkv_fence.pool import PoolConfig, PoolSnapshot
from epochkv_fence.transport import HubKeys, HubServer
from epochkv_operator import metrics
from epochkv_operator.api import KVCachePool
from epochkv_operator.control.keys import Key, pool_key
from epochkv_operator.hub.kubernetes import KubernetesAuthority, record_of
from epochkv_operator.hub.view import export, view_of
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


class HubFailed(Exception):
    """The hub's own machinery broke, or another hub leads: the process must end."""


class HubService:
    """One HubServer. `wake` is called with (key, delay in seconds) when a pool's status may have to be written."""

    def __init__(self, bind: str, keys: HubKeys, lease: LeaseHolder, statuses: StatusWriter, wake: Callable[[Key, float], None]) -> None:
        self._lease = lease
        self._wake = wake
        self._authority = KubernetesAuthority(lease, statuses)
        self._deposed = asyncio.Event()
        self._server = HubServer(bind, keys, self._authority, on_change=self._changed, on_step_down=self._deposed.set)
        self._configs: dict[str, PoolConfig] = {}
        self._keys: dict[str, Key] = {}
        self._epochs: dict[str, tuple[int, int]] = {}
        self._told_at: dict[str, float] = {}
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

    async def close(self) -> None:
        self.listening = False
        await self._server.stop()

    # ---- pools ----

    def ensure(self, pool: KVCachePool, client_public_key: str, weights_source: str) -> None:
        """Make the hub serve this pool with this configuration, and no namesake of it."""
        metadata = pool.metadata
        key = pool_key(metadata.namespace, metadata.name)
        for uid in [uid for uid, other in self._keys.items() if other == key and uid != metadata.uid]:
            self._remove(uid)
        config = PoolConfig(
            uid=metadata.uid,
            name=f"{metadata.namespace}/{metadata.name}",
            client_public_keys=(client_public_key,),
            lease_seconds=float(pool.spec.reset.lease_seconds),
            join_after_seconds=float(pool.spec.reset.join_after_seconds),
            weights_source="Model" if weights_source == "Model" else "Pushed",
            reclaim="Delete" if pool.spec.distributed is not None else "Retain",
        )
        if self._configs.get(metadata.uid) == config:
            return
        new = metadata.uid not in self._configs
        self._authority.register(metadata.uid, metadata.namespace, metadata.name)
        self._keys[metadata.uid] = key
        self._configs[metadata.uid] = config
        self._server.set_pool(config)
        if new:
            # Nobody saw it being asked for: it may have been long ago.
            self._server.request(metadata.uid, pool.spec.reset_epoch, fresh=False)

    def forget(self, namespace: str, name: str) -> list[str]:
        """The pool is gone. Returns the uids that were served under its name."""
        key = pool_key(namespace, name)
        uids = [uid for uid, other in self._keys.items() if other == key]
        for uid in uids:
            self._remove(uid)
        metrics.forget_pool(namespace, name)
        return uids

    def seen(self, pool: Json, *, fresh: bool) -> None:
        """A newer state of a pool was seen: take its epochs in. `fresh`: its resetEpoch was raised just now, not some
        time ago.
        """
        uid = pool["metadata"]["uid"]
        if uid not in self._configs:
            return
        # Only the target: our own publication may be seen here before its answer comes, and the hub times it by the answer.
        self._server.observe(uid, PoolRecord(target=record_of(pool).target))
        self._server.request(uid, int((pool.get("spec") or {}).get("resetEpoch") or 0), fresh=fresh)

    def resetting(self, pool_uid: str) -> bool:
        """Whether an epoch that was asked for is not published yet."""
        return pool_uid in self._configs and not self._server.snapshot(pool_uid).converged

    def snapshot(self, pool_uid: str) -> PoolSnapshot | None:
        return self._server.snapshot(pool_uid) if pool_uid in self._configs else None

    def knows(self, pool_uid: str) -> bool:
        """Whether the hub has read the pool's record in its term; a pool without keys is never served and counts as
        known.
        """
        return pool_uid not in self._configs or self._server.snapshot(pool_uid).leading

    def view(self, pool_uid: str) -> HubView | None:
        """What planning takes; None while the hub knows nothing about the pool that counts."""
        snapshot = self.snapshot(pool_uid)
        return view_of(snapshot) if snapshot is not None else None

    def export_metrics(self) -> None:
        for uid, key in self._keys.items():
            export(key.namespace, key.name, self._server.snapshot(uid))

    def _remove(self, uid: str) -> None:
        self._server.remove_pool(uid)
        self._authority.unregister(uid)
        self._told_at.pop(uid, None)
        self._epochs.pop(uid, None)
        del self._configs[uid], self._keys[uid]

    def _changed(self, uid: str) -> None:
        key = self._keys.get(uid)
        if key is None:
            return
        snapshot = self._server.snapshot(uid)
        epochs, before = (snapshot.target, snapshot.published), self._epochs.get(uid)
        self._epochs[uid] = epochs
        now = time.monotonic()
        if before is not None and epochs[1] > before[1] and snapshot.reset_seconds is not None:
            metrics.RESET_SECONDS.labels(namespace=key.namespace, pool=key.name).observe(snapshot.reset_seconds)
        if epochs != before:
            self._wake(key, OPEN_SECONDS if epochs[0] > epochs[1] else DONE_SECONDS)
            return
        delay = max(OPEN_SECONDS, self._told_at.get(uid, 0.0) + QUIET_SECONDS - now)
        self._told_at[uid] = now + delay
        self._wake(key, delay)
