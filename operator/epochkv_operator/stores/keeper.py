"""Follows the scale-ins of all pools: asks masters, remembers how far each is, and wakes the pool when there is news.

It runs beside the reconcilers, which only read what it found: a master that does not answer holds up nothing. What a later process needs
(when a scale-in began, its job) is in `status.store.scaleIn`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import structlog

from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.kube.resources import PODS, STATEFULSETS
from epochkv_operator.kube.store import Key, Store, pool_key
from epochkv_operator.planning.context import ScaleIn
from epochkv_operator.planning.names import component_name, component_selector, controller_of
from epochkv_operator.stores.admin import MasterAdmin, MasterSilent
from epochkv_operator.stores.steps import Seen, begin, step

log = structlog.get_logger(__name__)
LOOK_SECONDS = 1.0
Json = dict[str, Any]


def _now() -> datetime:
    return datetime.now(UTC)


class ScaleIns:
    """One for each process.

    Args:
        urls: admin URLs of the masters of a pool, by its uid.
        wake: look at a pool after a delay.
        may_not: why nothing may be asked of a master now, such as because another process leads; None: it may.
    """

    def __init__(
        self, store: Store, urls: Callable[[str], list[str]], wake: Callable[[Key, float], None], may_not: Callable[[], str | None]
    ) -> None:
        self._store, self._urls, self._wake, self._may_not = store, urls, wake, may_not
        self._states: dict[str, ScaleIn] = {}
        self._pools: dict[str, KVCachePool] = {}
        """Those with a scale-in that is not over."""
        self._begun = asyncio.Event()

    def look(self, pool: KVCachePool, status: Json) -> ScaleIn | None:
        """The latest scale-in of a pool, which begins here when stores are to leave. `status` is the pool's own. Asks nobody."""
        uid, workload = pool.metadata.uid, self._workload(pool)
        mooncake = pool.mooncake
        if mooncake is None or not mooncake.store.drain_timeout_seconds or workload is None or workload.get("x-scaled-by-others"):
            self.forget(uid)
            return None
        live, wanted, seconds = _replicas(workload), mooncake.store.replicas, mooncake.store.drain_timeout_seconds
        state = self._states.get(uid) or remembered(status, live, _now())
        if wanted < live and (state is None or state.completed is not None):
            state = begin(live, wanted, _now(), seconds)
            log.info("stores leave", object=str(_key(pool)), stores=live, wanted=wanted, timeout_seconds=seconds)
        if state is not None:
            self._states[uid] = state
        if state is not None and state.completed is None:
            self._pools[uid] = pool
            self._begun.set()
        return state

    def forget(self, pool_uid: str) -> None:
        self._states.pop(pool_uid, None)
        self._pools.pop(pool_uid, None)

    async def run(self) -> None:
        """Follow them all, for ever."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            while self._pools:
                await asyncio.gather(*(self._follow(pool) for pool in list(self._pools.values())))
                await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self, pool: KVCachePool) -> None:
        try:
            async with asyncio.timeout(60.0):
                await self._step(pool)
        except Exception as error:  # of one pool; the others are followed on
            log.warning("cannot follow a scale-in, trying again", object=str(_key(pool)), exc_info=error)

    async def _step(self, pool: KVCachePool) -> None:
        uid = pool.metadata.uid
        admin = MasterAdmin(lambda: self._urls(uid))
        before, silent, segments, job = self._states[uid], "", None, None
        try:
            segments = await admin.segments()
            job = await admin.job(before.job) if before.job else None
        except MasterSilent as error:
            silent = str(error)
        pool = self._pools.get(uid, pool)  # a newer one, by now
        workload, mooncake = self._workload(pool), pool.mooncake
        if workload is None or mooncake is None or uid not in self._pools or self._may_not() is not None:
            return
        seen = Seen(_replicas(workload), mooncake.store.replicas, self._pods(pool), segments, job, silent)
        found = step(before, seen, _now(), mooncake.store.drain_timeout_seconds)
        state = found.state
        try:
            if found.action == "Drain":
                state = replace(state, job=await admin.drain(found.segments))
                log.info("stores are drained", object=str(_key(pool)), segments=found.segments, job=state.job, bytes=state.bytes)
            elif found.action == "Cancel":
                log.info("stores are wanted back", object=str(_key(pool)), job=state.job, cancelled=await admin.cancel(state.job))
        except MasterSilent as error:
            state = replace(state, silent=str(error))
        if uid not in self._pools or state == before:
            return
        self._states[uid] = state
        if state.completed is not None:
            del self._pools[uid]
            log.info("scale-in is over", object=str(_key(pool)), stores=state.wanted, moved=state.moved, of=state.bytes, late=state.lossy)
        self._wake(_key(pool), 0.0)

    def _workload(self, pool: KVCachePool) -> Json | None:
        """The StatefulSet of the pool's stores."""
        name = component_name(pool.metadata.name, "store")
        found = self._store.get(STATEFULSETS.kind, pool.metadata.namespace, name)
        return found if found is not None and controller_of(found).get("uid") == pool.metadata.uid else None

    def _pods(self, pool: KVCachePool) -> dict[int, str]:
        """Address of each store pod by its ordinal, empty while it is not ready: then it has no segment, or will not have it for long."""
        name, wanted = pool.metadata.name, component_selector(pool.metadata.name, "store")
        found: dict[int, str] = {}
        for pod in self._store.found(PODS.kind, pool.metadata.namespace, POOL_LABEL, name):
            ordinal = pod["metadata"]["name"].rpartition("-")[2]
            if wanted.items() <= pod["metadata"]["labels"].items() and ordinal.isdecimal():
                status = pod.get("status") or {}
                ready = any(item.get("type") == "Ready" and item.get("status") == "True" for item in status.get("conditions") or [])
                found[int(ordinal)] = status.get("podIP") or "" if ready else ""
        return found


def remembered(status: Json, live: int, now: datetime) -> ScaleIn | None:
    """What `planning.status` wrote; None when there is nothing, or nothing that can be read.

    Anybody may have written it since: it decides no number of pods, and gives no more time than a scale-in that begins now.
    """
    known = (status.get("store") or {}).get("scaleIn") or {}
    try:
        high, low, started = int(known["from"]), int(known["to"]), min(now, datetime.fromisoformat(known["startTime"]))
        completed = datetime.fromisoformat(known["completionTime"]) if known.get("completionTime") else None
        moved, held = int(known.get("movedBytes", 0)), int(known.get("bytes", 0))
    except (KeyError, TypeError, ValueError):
        return None
    lossy, job = known.get("outcome") == "TimedOut", str(known.get("job") or "")
    return ScaleIn(high, low, live, low, started, started, job, moved=moved, bytes=held, lossy=lossy, completed=completed)


def _replicas(workload: Json) -> int:
    return int(workload["spec"].get("replicas", 1))


def _key(pool: KVCachePool) -> Key:
    return pool_key(pool.metadata.namespace, pool.metadata.name)
