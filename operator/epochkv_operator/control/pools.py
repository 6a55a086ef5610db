"""Reconciling a KVCachePool: its Secret, its place in the hub, its objects, its status.

It does not drive resets. It hands `spec.resetEpoch` to the hub (`hub/service.py`), which records the epoch (`hub/kubernetes.py`)
and follows it until it is published (`epochkv_fence/hub/resets.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from epochkv_operator.api import InvalidObject, KVCachePool, parse_pool
from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.control.executor import Executor
from epochkv_operator.control.observe import context_for, now, observe
from epochkv_operator.control.reporter import Reporter, invalid_status
from epochkv_operator.hub.port import HubPort
from epochkv_operator.hub.service import AcceptedKeys, HubLook
from epochkv_operator.keys.content import FenceKeys
from epochkv_operator.keys.pool_secrets import FenceSecrets, SecretConflict
from epochkv_operator.kube.client import ApiError, Forbidden, Invalid, Json
from epochkv_operator.kube.optional import OptionalKinds
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import Store
from epochkv_operator.kube.work_keys import Key, engine_key, engines_of
from epochkv_operator.planning.conditions import epoch_ahead
from epochkv_operator.planning.context import HubView, Problem
from epochkv_operator.planning.plan import plan_pool
from epochkv_operator.planning.status import pool_status
from epochkv_operator.settings import Settings
from epochkv_operator.stores.keeper import ScaleIns

log = structlog.get_logger(__name__)
#: How often it is looked whether anybody still uses the older of two client keys.
OLD_KEY_SECONDS = 1.0


@dataclass(eq=False)
class PoolReconciler:
    """Brings pools to what they should be. Raises what another try may solve. `wake`: look at a key after a delay."""

    settings: Settings
    store: Store
    executor: Executor
    reporter: Reporter
    secrets: FenceSecrets
    hub: HubPort
    scale_ins: ScaleIns
    wake: Callable[[Key, float], None]
    optional: OptionalKinds
    _judged: dict[str, int] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> None:
        obj = self.store.get(key.kind, key.namespace, key.name)
        if obj is None:
            self._forget(key)
            raise ObjectGone(f"{key} is gone")
        if obj["metadata"].get("deletionTimestamp"):
            return
        try:
            pool = parse_pool(obj)
        except InvalidObject as error:
            message = str(error)
            await self.reporter.report(obj, lambda newest: invalid_status(newest, message, now()))
            return
        keys, problem, retry = await self._keys(key, obj)
        if keys is not None:
            keys, trouble, late = await self._serve(key, obj, pool, keys)
            problem, retry = problem or trouble, retry or late
        context = context_for(self.settings, keys, self.optional.served)
        children = replace(
            observe(self.store, key.namespace, POOL_LABEL, key.name), scale_in=self.scale_ins.look(pool, obj.get("status") or {})
        )
        refused, again = await self.executor.bring_about(
            str(key), children, lambda seen: plan_pool(pool, seen, context), lambda note: self.reporter.tell_restored(obj, note)
        )
        problem, again = problem or refused, retry or again

        look = HubLook()

        def compute(newest: Json) -> Json:
            nonlocal look
            status, look = newest.get("status") or {}, self.hub.look(pool.metadata.uid, newest)
            seen = observe(self.store, key.namespace, POOL_LABEL, key.name, look.view, problem)
            seen = replace(seen, scale_in=children.scale_in)
            return pool_status(pool, seen, context, status, now()) if look.known or keys is None else status

        await self.reporter.report(obj, compute)
        if not look.known and keys is not None:
            return  # a new hub is about to read the pool's record, and wakes this pool then; until then it would look leaderless
        self._tell_ahead(obj, pool, look.view)
        if look.incomplete_seconds > 0:
            self.wake(key, look.incomplete_seconds)  # what is not known by then is gone
        if look.overdue_seconds > 0:
            self.wake(key, look.overdue_seconds)
        if again is not None:
            raise again

    def _forget(self, key: Key) -> None:
        """The pool is gone."""
        self.secrets.forget(key.namespace, key.name)
        self.reporter.forget(key)
        self.executor.gone(str(key))
        for uid in self.hub.forget(key.namespace, key.name):
            self._judged.pop(uid, None)
            self.scale_ins.forget(uid)
            log.info("pool gone", object=str(key), uid=uid)

    async def _keys(self, key: Key, obj: Json) -> tuple[FenceKeys | None, Problem | None, ApiError | None]:
        """The pool's keys, what to tell the user where there are none, and the error to try again on."""
        uid = obj["metadata"]["uid"]
        decided = self.secrets.decided(uid)
        try:
            ensured = await self.secrets.ensure(obj)
            if ensured.note:
                self.reporter.tell(obj, reason="SecretRestored", action="Secret", note=ensured.note)
            return ensured.keys, None, None
        except SecretConflict as error:
            return None, Problem("SecretConflict", str(error)), None
        except (Forbidden, Invalid) as error:
            known = self.secrets.known(uid)  # rights that are being changed do not make known keys wrong
            return known, None if known else Problem("SecretRefused", str(self.secrets.refusal(uid))), error
        finally:
            if not decided:  # engines wait for this, or for the news that there is something to wait for
                for engine in engines_of(self.store, key.namespace, key.name):
                    self.wake(engine_key(key.namespace, engine["metadata"]["name"]), 0.0)

    async def _serve(self, key: Key, obj: Json, pool: KVCachePool, keys: FenceKeys) -> tuple[FenceKeys, Problem | None, ApiError | None]:
        """Have the hub serve the pool, and take the next step of replacing its client key, if one is due. Returns as `_keys`."""
        uid, generation = pool.metadata.uid, pool.spec.keys.generation
        due = keys.previous is None and keys.generation < generation
        if due:
            self.secrets.draw(uid)

        def serve(now: FenceKeys) -> None:
            accepted = AcceptedKeys(self.secrets.accepted(uid), len(now.accepted), now.generation)
            self.hub.ensure(pool, accepted, new=self.secrets.new(uid))

        # The new key before anybody can have it: an engine that reads the Secret the moment it changes must not be refused.
        serve(keys)
        try:
            if due:
                keys = await self.secrets.rotate(obj, generation)
            elif keys.previous is not None and self._unused(key, pool):
                keys = await self.secrets.retire(obj)
        except SecretConflict as error:
            return keys, Problem("SecretConflict", str(error)), None
        except (Forbidden, Invalid) as error:
            return keys, Problem("SecretRefused", f"the pool's keys cannot be replaced: {error.message}"), error
        serve(keys)
        if keys.previous is not None:
            self.wake(key, OLD_KEY_SECONDS)
        return keys, None, None

    def _unused(self, key: Key, pool: KVCachePool) -> bool:
        """Nobody alive has used the older key for as long as a lease can last."""
        return self.hub.old_key_idle_seconds(pool.metadata.uid) >= pool.spec.reset.hold_seconds

    def _tell_ahead(self, obj: Json, pool: KVCachePool, view: HubView | None) -> None:
        """One Event for each `spec.resetEpoch` that resets nothing, because the pool was at that epoch already."""
        uid, asked = pool.metadata.uid, pool.spec.reset_epoch
        if view is None or view.target < asked:
            return
        seen_before = (obj.get("status") or {}).get("observedGeneration") == pool.metadata.generation
        before = self._judged.get(uid, asked if seen_before else 0)
        self._judged[uid] = asked
        if asked > before and epoch_ahead(asked, view):
            note = f"spec.resetEpoch {asked} resets nothing: the pool is at epoch {view.target} already. Set {view.target + 1} or higher"
            self.reporter.tell(obj, reason="EpochAhead", action="Reset", note=note)
