"""Reconciling an InferenceEngine: its objects around the pool it refers to, and its status."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from epochkv_operator.api import InferenceEngine, InvalidObject, KVCachePool, parse_engine, parse_pool
from epochkv_operator.api.base import ENGINE_LABEL
from epochkv_operator.control.executor import Executor
from epochkv_operator.control.observe import context_for, now, observe
from epochkv_operator.control.reporter import Reporter, invalid_status
from epochkv_operator.hub.port import HubPort
from epochkv_operator.hub.service import HubLook
from epochkv_operator.keys.pool_secrets import FenceSecrets
from epochkv_operator.kube.client import Json, KubeClient, NotFound
from epochkv_operator.kube.optional import OptionalKinds
from epochkv_operator.kube.resources import POOLS
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import Store
from epochkv_operator.kube.work_keys import Key, pool_of
from epochkv_operator.planning.context import Problem
from epochkv_operator.planning.engine import workload_of
from epochkv_operator.planning.plan import plan_engine
from epochkv_operator.planning.status import engine_status
from epochkv_operator.settings import Settings

#: The pool wakes its engines when it has keys; this is for the case that it was not looked at yet.
WAIT_FOR_KEYS_SECONDS = 1.0
HOLD_SECONDS = 5.0
"""For how long a new engine waits for its pool. Without one it starts alone, and starts again when the pool comes."""


@dataclass(eq=False)
class EngineReconciler:
    """Brings engines to what they should be. Raises what another try may solve. `wake`: look at a key after a delay."""

    settings: Settings
    store: Store
    executor: Executor
    reporter: Reporter
    secrets: FenceSecrets
    hub: HubPort
    client: KubeClient
    wake: Callable[[Key, float], None]
    optional: OptionalKinds
    _new: dict[Key, float] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> None:
        obj = self.store.get(key.kind, key.namespace, key.name)
        if obj is None:
            self._new.pop(key, None)
            self.reporter.forget(key)
            self.executor.gone(str(key))
            raise ObjectGone(f"{key} is gone")
        if obj["metadata"].get("deletionTimestamp"):
            return
        name = pool_of(obj)
        pool_obj = await self._pool(key.namespace, name) if name else None
        try:
            engine = parse_engine(obj)
            pool = parse_pool(pool_obj) if pool_obj is not None else None
        except InvalidObject as error:
            # An unreadable pool is not a missing one: nothing is changed until it can be read.
            message = str(error)
            await self.reporter.report(obj, lambda newest: invalid_status(newest, message, now()))
            return
        if pool is not None and pool.metadata.deletion_timestamp is None and not self.secrets.decided(pool.metadata.uid):
            await self._wait_for_keys(key, obj, engine, pool)
            return
        if pool is None and name and (left := self._hold(key, engine)) > 0:
            self.wake(key, left)
            await self._report(key, obj, engine, None, _waits(key.namespace, name))
            return
        await self._bring_about(key, obj, engine, pool)

    def _hold(self, key: Key, engine: InferenceEngine) -> float:
        """Seconds that an engine which has no pods yet may still wait for its pool."""
        kind, name = workload_of(engine)
        if self.store.get(kind, key.namespace, name) is not None:
            return 0.0
        return self._new.setdefault(key, time.monotonic()) + HOLD_SECONDS - time.monotonic()

    async def _wait_for_keys(self, key: Key, obj: Json, engine: InferenceEngine, pool: KVCachePool) -> None:
        """The pool is being reconciled; without its keys the engine would start twice, or wait for a volume."""
        refusal = self.secrets.refusal(pool.metadata.uid)
        if refusal is None:
            self.wake(key, WAIT_FOR_KEYS_SECONDS)
            return
        await self._report(key, obj, engine, pool, _not_ready(pool, refusal))

    async def _pool(self, namespace: str, name: str) -> Json | None:
        """The pool, asked for at the API server before it counts as missing.

        Events of pools and engines overtake each other, and an engine that is first made without its pool starts twice.
        """
        known = self.store.get(POOLS.kind, namespace, name)
        if known is not None:
            return known
        try:
            return await self.client.get(POOLS, namespace, name)
        except NotFound:
            return None

    async def _bring_about(self, key: Key, obj: Json, engine: InferenceEngine, pool: KVCachePool | None) -> None:
        keys = self.secrets.known(pool.metadata.uid) if pool is not None else None
        context = context_for(self.settings, keys, self.optional.served)
        children = observe(self.store, key.namespace, ENGINE_LABEL, key.name)
        problem, again = await self.executor.bring_about(
            str(key), children, lambda seen: plan_engine(engine, pool, seen, context), lambda note: self.reporter.tell_restored(obj, note)
        )
        refusal = self.secrets.refusal(pool.metadata.uid) if pool is not None else None
        if pool is not None and refusal is not None:
            problem = problem or _not_ready(pool, refusal)
        look = await self._report(key, obj, engine, pool, problem)
        if not look.known:
            return  # a new hub is about to read the pool's record, and wakes this engine then
        if look.incomplete_seconds > 0:
            self.wake(key, look.incomplete_seconds)  # what is not known by then is gone
        if again is not None:
            raise again

    async def _report(self, key: Key, obj: Json, engine: InferenceEngine, pool: KVCachePool | None, problem: Problem | None) -> HubLook:
        """Write the status, unless the hub does not know the pool yet; what the hub knows."""
        look = HubLook()

        def compute(newest: Json) -> Json:
            nonlocal look
            status = newest.get("status") or {}
            look = self.hub.look(pool.metadata.uid) if pool is not None else look
            seen = observe(self.store, key.namespace, ENGINE_LABEL, key.name, look.view, problem)
            return engine_status(engine, pool, seen, status, now()) if look.known else status

        await self.reporter.report(obj, compute)
        return look


def _waits(namespace: str, pool: str) -> Problem:
    text = f"KVCachePool {namespace}/{pool} does not exist yet: pods start when it does, or without it {HOLD_SECONDS:g} s after the engine"
    return Problem("WaitingForPool", text)


def _not_ready(pool: KVCachePool, refusal: str) -> Problem:
    return Problem("PoolNotReady", f"KVCachePool {pool.metadata.name} has no keys: {refusal}")
