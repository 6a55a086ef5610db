"""Reconciling a KVCachePool: its Secret, its place in the hub, its objects, its status."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from epochkv_operator.api import InferenceEngine, InvalidObject, parse_engine, parse_pool
from epochkv_operator.control.executor import Executor
from epochkv_operator.control.keys import Key, engine_key, engines_of
from epochkv_operator.control.observe import context_for, now, observe
from epochkv_operator.control.reporter import Reporter, invalid_status
from epochkv_operator.control.secrets import FenceKeys, FenceSecrets, SecretConflict
from epochkv_operator.hub.service import HubService
from epochkv_operator.kube.client import ApiError, Forbidden, Invalid, Json
from epochkv_operator.kube.resources import POOL_LABEL, POOLS
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import Store
from epochkv_operator.planning import Problem, plan_pool, pool_status, pool_weights_source
from epochkv_operator.settings import Settings

log = structlog.get_logger(__name__)


class PoolReconciler:
    """Brings pools to what they should be. Raises what another try may solve. `wake`: look at a key after a delay."""

    kind = POOLS.kind

    def __init__(
        self,
        settings: Settings,
        store: Store,
        executor: Executor,
        reporter: Reporter,
        secrets: FenceSecrets,
        hub: HubService,
        wake: Callable[[Key, float], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._executor = executor
        self._reporter = reporter
        self._secrets = secrets
        self._hub = hub
        self._wake = wake

    async def reconcile(self, key: Key) -> None:
        obj = self._store.get(key.kind, key.namespace, key.name)
        if obj is None:
            self._secrets.forget(key.namespace, key.name)
            for uid in self._hub.forget(key.namespace, key.name):
                log.info("pool gone", object=str(key), uid=uid)
            raise ObjectGone(f"{key} is gone")
        if obj["metadata"].get("deletionTimestamp"):
            return
        try:
            pool = parse_pool(obj)
        except InvalidObject as error:
            message = str(error)
            await self._reporter.report(obj, lambda newest: invalid_status(newest, message, now()))
            return
        keys, problem, retry = await self._keys(key, obj)
        if keys is not None:
            self._hub.ensure(pool, keys.client.public, pool_weights_source(self._engines(key)))
        context = context_for(self._settings, keys)
        children = observe(self._store, key.namespace, POOL_LABEL, key.name)
        refused, again = await self._executor.bring_about(str(key), children, lambda seen: plan_pool(pool, seen, context))
        problem, again = problem or refused, retry or again

        if keys is not None and not self._hub.knows(pool.metadata.uid):
            return  # a new hub is about to read the pool's record, and wakes this pool then; until then it would look leaderless

        def compute(newest: Json) -> Json:
            seen = observe(self._store, key.namespace, POOL_LABEL, key.name, self._hub.view(pool.metadata.uid), problem)
            return pool_status(pool, seen, context, newest.get("status") or {}, now())

        await self._reporter.report(obj, compute)
        if again is not None:
            raise again

    async def _keys(self, key: Key, obj: Json) -> tuple[FenceKeys | None, Problem | None, ApiError | None]:
        """The pool's keys, what to tell the user where there are none, and the error to try again on."""
        uid = obj["metadata"]["uid"]
        decided = self._secrets.decided(uid)
        try:
            return await self._secrets.ensure(obj), None, None
        except SecretConflict as error:
            return None, Problem("SecretConflict", str(error)), None
        except (Forbidden, Invalid) as error:
            known = self._secrets.known(uid)  # rights that are being changed do not make known keys wrong
            return known, None if known else Problem("SecretRefused", str(self._secrets.refusal(uid))), error
        finally:
            if not decided:  # engines wait for this, or for the news that there is something to wait for
                for engine in engines_of(self._store, key.namespace, key.name):
                    self._wake(engine_key(key.namespace, engine["metadata"]["name"]), 0.0)

    def _engines(self, key: Key) -> list[InferenceEngine]:
        """Engines of the pool that can be read; one that cannot counts as pushed (the safe side) by not counting."""
        found = []
        for engine in engines_of(self._store, key.namespace, key.name):
            try:
                found.append(parse_engine(engine))
            except InvalidObject:
                return []
        return found
