"""Pods that the operator did not make and that join a pool by their label (`charts/epochkv/templates/join.yaml`).

The API server adds to such a pod what it needs, where the pool's connection is in the pod's namespace. So a pool is there for another
namespace as long as that has a copy of the pool's ConfigMap and Secret: `Copies` keeps them where `spec.allowedNamespaces` says so, and
nowhere else. Nothing of another namespace can own them, so each names its pool, and goes when that pool, or its word, is gone. The
ConfigMap is written last and deleted last: where there is none, there is nothing of ours.

`explain` tells the user of a pod with the label why it did not join.
"""

from __future__ import annotations

import time
from typing import Final

import structlog

from epochkv_operator import metrics
from epochkv_operator.api.base import POOL_LABEL, SHARED_ANNOTATION
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.keys import FenceKeys, content, copied, is_copy
from epochkv_operator.kube.client import ApiError, Forbidden, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import CONFIGMAPS, NAMESPACES, POOLS, SECRETS
from epochkv_operator.kube.store import BY_SHARING, Key, Store
from epochkv_operator.planning.context import Context, Problem, Shared, listed
from epochkv_operator.planning.names import component_name, digest
from epochkv_operator.planning.plan import difference
from epochkv_operator.planning.pool import shared_connection
from epochkv_operator.settings import Settings

log = structlog.get_logger(__name__)
CHECK_SECONDS: Final = 60.0
"""After which the Secret of a copy is read again: no watch shows it."""
LIST_SECONDS: Final = 10.0
"""For how long a list of namespaces counts."""
JOINED: Final = "epochkv.io/joined"
REJECTED: Final = "epochkv.io/rejected"
"""Annotations that the admission policy leaves on a pod."""


class Copies:
    """A pool's ConfigMap and Secret in other namespaces."""

    def __init__(self, client: KubeClient, store: Store, settings: Settings) -> None:
        self._client = client
        self._store = store
        self._served = settings.watch_namespaces
        self._checked: dict[Key, dict[str, float]] = {}
        self._matched: dict[Key, tuple[float, str, set[str]]] = {}

    async def keep(self, key: Key, pool: KVCachePool, keys: FenceKeys, context: Context) -> tuple[Shared | None, ApiError | None]:
        """Bring the copies to what the pool allows. Returns what became of it, and the error to try again on."""
        wanted, problem, again = await self._wanted(key, pool)
        for namespace in self._places(key):
            if namespace not in wanted and (again is None or pool.spec.allowed_namespaces is None):
                await self._withdraw(key, namespace)
        done: list[str] = []
        for namespace in sorted(wanted):
            found = self._taken(key, namespace)
            try:
                if found is None:
                    await self._write(key, pool, keys, namespace, context)
                    done.append(namespace)
                elif self._is_ours(key, self._store.get(CONFIGMAPS.kind, namespace, component_name(key.name, "connection"))):
                    await self._withdraw(key, namespace)
            except NotFound:
                found = Problem("NamespaceNotFound", f"there is no namespace {namespace}")
            except ApiError as error:
                reason = "Forbidden" if isinstance(error, Forbidden) else "WriteFailed"
                found, again = Problem(reason, f"{namespace}: {error.message or error}"), again or error
            problem = problem or found
        return (Shared(done, problem) if pool.spec.allowed_namespaces is not None else None), again

    async def withdraw(self, key: Key) -> None:
        """The pool is gone.

        Raises:
            ApiError: another try may solve it.
        """
        for namespace in self._places(key):
            await self._withdraw(key, namespace)
        self._checked.pop(key, None)
        self._matched.pop(key, None)

    def _places(self, key: Key) -> list[str]:
        return [obj["metadata"]["namespace"] for obj in self._store.found(CONFIGMAPS.kind, "", BY_SHARING, f"{key.namespace}/{key.name}")]

    async def _wanted(self, key: Key, pool: KVCachePool) -> tuple[set[str], Problem | None, ApiError | None]:
        allowed = pool.spec.allowed_namespaces
        if allowed is None:
            return set(), None, None
        wanted, problem, again = set(allowed.names or ()), None, None
        if self._served and (beyond := sorted(wanted.difference(self._served))):
            problem = Problem("NamespaceNotServed", f"this operator does not serve {listed(beyond)}: add it to the chart's watchNamespaces")
            wanted.intersection_update(self._served)
        if allowed.selector is not None and self._served:
            problem = Problem("SelectorNotServed", "this operator serves some namespaces only and cannot look for labels: use names")
        elif allowed.selector is not None:
            try:
                wanted |= await self._matching(key, str(allowed.selector))
            except ApiError as error:
                problem, again = Problem("NamespacesNotListed", f"{error.message or error}"), error
        return wanted - {pool.metadata.namespace}, problem, again

    async def _matching(self, key: Key, selector: str) -> set[str]:
        """Namespaces with these labels, as some seconds ago: a pool is looked at whenever an engine of it has news."""
        until, known, names = self._matched.get(key, (0.0, "", set()))
        if time.monotonic() >= until or known != selector:
            found, _ = await self._client.list(NAMESPACES, None, selector)
            names = {obj["metadata"]["name"] for obj in found if not obj["metadata"].get("deletionTimestamp")}
            self._matched[key] = (time.monotonic() + LIST_SECONDS, selector, names)
        return names

    def _taken(self, key: Key, namespace: str) -> Problem | None:
        """Why the pool cannot be in this namespace: its names are somebody else's there."""
        if self._store.get(POOLS.kind, namespace, key.name) is not None:
            return Problem("NameTaken", f"{namespace} has a KVCachePool {key.name} of its own: rename one of the two")
        found = self._store.get(CONFIGMAPS.kind, namespace, component_name(key.name, "connection"))
        if found is None or self._is_ours(key, found):
            return None
        other = (found["metadata"].get("annotations") or {}).get(SHARED_ANNOTATION, "another pool")
        return Problem("NameTaken", f"{namespace} has the KVCachePool {key.name} of {other} already: rename one of the two")

    @staticmethod
    def _is_ours(key: Key, found: Json | None) -> bool:
        annotations = (found or {}).get("metadata", {}).get("annotations") or {}
        return bool(annotations.get(SHARED_ANNOTATION) == f"{key.namespace}/{key.name}")

    async def _write(self, key: Key, pool: KVCachePool, keys: FenceKeys, namespace: str, context: Context) -> None:
        wanted = content(keys, pool.metadata.uid)
        hidden = {name: value for name, value in wanted.items() if name not in ("client.key", "root.secret")}
        config = shared_connection(pool, namespace, digest([hidden, keys.revision]), context)
        live = self._store.get(CONFIGMAPS.kind, namespace, config["metadata"]["name"])
        why = "it does not exist" if live is None else difference(config, live)
        checked = self._checked.setdefault(key, {})
        if why is None and time.monotonic() < checked.get(namespace, 0.0) + CHECK_SECONDS:
            return
        await self._write_secret(pool, wanted, namespace)
        checked[namespace] = time.monotonic()
        if why is not None:
            self._store.upsert(CONFIGMAPS.kind, await self._client.apply(CONFIGMAPS, namespace, config))
            metrics.API_WRITES.labels(kind=CONFIGMAPS.kind, operation="apply").inc()
            log.info("pool shared", pool=f"{pool.metadata.namespace}/{pool.metadata.name}", namespace=namespace, reason=why)

    async def _write_secret(self, pool: KVCachePool, wanted: dict[str, str], namespace: str) -> None:
        body = copied(pool.metadata.namespace, pool.metadata.name, namespace, wanted)
        try:
            found = await self._client.get(SECRETS, namespace, body["metadata"]["name"])
        except NotFound:
            await self._client.create(SECRETS, namespace, body)
            metrics.API_WRITES.labels(kind=SECRETS.kind, operation="create").inc()
            return
        if not is_copy(found, pool.metadata.namespace, pool.metadata.name):
            raise Forbidden(403, "NameTaken", f"Secret {body['metadata']['name']} is there and not of this pool: delete it", "PUT secrets")
        if (found.get("data") or {}) != body["data"]:
            version = {"resourceVersion": found["metadata"]["resourceVersion"]}
            await self._client.replace(SECRETS, namespace, {**body, "metadata": {**body["metadata"], **version}})
            metrics.API_WRITES.labels(kind=SECRETS.kind, operation="replace").inc()

    async def _withdraw(self, key: Key, namespace: str) -> None:
        name = component_name(key.name, "fence")
        try:
            secret = await self._client.get(SECRETS, namespace, name)
            if is_copy(secret, key.namespace, key.name):
                await self._client.delete(SECRETS, namespace, name, secret["metadata"]["uid"])
                metrics.API_WRITES.labels(kind=SECRETS.kind, operation="delete").inc()
        except NotFound:
            pass
        config = self._store.get(CONFIGMAPS.kind, namespace, component_name(key.name, "connection"))
        if config is not None and self._is_ours(key, config):
            try:
                await self._client.delete(CONFIGMAPS, namespace, config["metadata"]["name"], config["metadata"]["uid"])
            except NotFound:
                return
            metrics.API_WRITES.labels(kind=CONFIGMAPS.kind, operation="delete").inc()
            log.info("pool no longer shared", pool=f"{key.namespace}/{key.name}", namespace=namespace)


def explain(pod: Json, there: bool) -> str:
    """Why a pod with the label of a pool did not join it; empty: it did, or it is set up by hand, or it has ended.

    Args:
        there: the pod's namespace has that pool, or a copy of its connection.
    """
    metadata = pod["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    pool, namespace = labels.get(POOL_LABEL), metadata["namespace"]
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if not pool or JOINED in notes or pod.get("x-mounts-keys") or ended:
        return ""
    without, again = f"it runs without KVCachePool {pool}", "A pod that is made anew joins"
    if REJECTED in notes:
        return f"{without}: {notes[REJECTED]}. Correct it: the next pod joins"
    if not there:
        allow = f"make the pool, or name {namespace} in spec.allowedNamespaces of the pool that is meant"
        return f"{without}: namespace {namespace} has no such pool, and none of another namespace allows it. {allow}. {again}"
    return (
        f"{without}: it was made before the pool was there, or the cluster has no policy that lets pods join"
        f" (chart value join.enabled, Kubernetes 1.36 or later). {again}; without the policy, docs/join.md says what to write by hand"
    )
