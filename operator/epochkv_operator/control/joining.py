"""Pods that the operator did not make and that join a pool by their label (`charts/epochkv/templates/join.yaml`).

The API server adds to such a pod what it needs, where the pool's connection is in the pod's namespace. So a pool is there for another
namespace as long as that has a copy of the pool's ConfigMap and Secret: `Copies` keeps them where `spec.allowedNamespaces` says so, and
nowhere else. Their names have the pool's namespace in them, and a pod says which namespace it means: pools of one name never meet, and
nobody gets pods that were meant for somebody else. Nothing of another namespace can own a copy, so each names its pool, and goes when that
pool, or its word, is gone. The ConfigMap is there first and goes last: where there is none, there is nothing of ours. Pods join by it while
it has a label, and the Secret is there for longer than that.

`explain` tells the user of a pod with the label why it did not join.
"""

import contextlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from epochkv_fence.protocol.pool import listed
from epochkv_operator import metrics
from epochkv_operator.api.base import POOL_NAMESPACE, SHARED_LABEL
from epochkv_operator.api.pool import AllowedNamespaces, KVCachePool
from epochkv_operator.api.resources import CONFIGMAPS, NAMESPACES, POOLS, SECRETS, Resource
from epochkv_operator.keys import KEY, ROOT, FenceKeys, content, copied
from epochkv_operator.kube.client import ApiError, Forbidden, Json, KubeClient, NotFound
from epochkv_operator.kube.store import BY_HOME, Key, Store, home, pool_key
from epochkv_operator.planning.context import Context, Problem, Shared
from epochkv_operator.planning.names import copy_name, digest
from epochkv_operator.planning.plan import ABSENT, difference
from epochkv_operator.planning.pool import shared_connection
from epochkv_operator.planning.serving import JOINED
from epochkv_operator.planning.workload import ended, pod_trouble
from epochkv_operator.settings import Settings

log = structlog.get_logger(__name__)
CHECK_SECONDS: Final = 60.0
"""After which the Secret of a copy is read again, or a namespace that is not there: no watch shows either."""
SLOW_SECONDS: Final = 5.0  # a namespace in which a look that failed took so long is not asked again for `CHECK_SECONDS`
LIST_SECONDS: Final = 10.0
"""For how long a list of namespaces counts."""
START_SECONDS: Final = 120.0
"""After which a pod that joined and is pending may wait for something of ours."""
CONNECTOR: Final = "epochkv-connector"
"""The init container of pods that joined."""
REJECTED: Final = "epochkv.io/rejected"
"""Annotation that the admission policy leaves on a pod that cannot join: why."""


@dataclass(eq=False)
class Copies:
    """A pool's ConfigMap and Secret in other namespaces."""

    _client: KubeClient
    _store: Store
    _settings: Settings
    _told: dict[Key, tuple[AllowedNamespaces, Shared]] = field(default_factory=dict)
    _looked: dict[Key, dict[str, tuple[float, Problem | None]]] = field(default_factory=dict)
    """When a namespace was looked at, and what was wrong there that trying again does not mend."""
    _matched: dict[Key, tuple[float, str, set[str]]] = field(default_factory=dict)
    _known: dict[Key, set[str]] = field(default_factory=dict)
    """Namespaces that the pool allows, and others while something of ours may be there."""

    def told(self, key: Key, pool: KVCachePool) -> Shared | None:
        """What became of the pool's list when it was last looked at; None: nobody has looked at this one."""
        allowed, shared = self._told.get(key, (None, None))
        return shared if allowed == pool.spec.allowed_namespaces else None

    def places(self, key: Key) -> list[str]:
        """Namespaces that have a copy."""
        found = self._store.found(CONFIGMAPS.kind, "", BY_HOME, f"{key.namespace}/{key.name}")
        return [obj["metadata"]["namespace"] for obj in found]

    def left(self, key: Key, pod: Json) -> bool:
        """Whether the pool allows the pod's namespace no more. A copy that is lost does not say so, nor a list of namespaces that fails."""
        return key in self._known and pod["metadata"]["namespace"] not in self._known[key]

    async def keep(self, key: Key, pool: KVCachePool, keys: FenceKeys | None, context: Context) -> ApiError | None:
        """Bring the copies to what the pool allows; without keys none is made. Returns the error to try again on."""
        wanted, problem, again = await self._wanted(key, pool)
        if again is None:
            self._known[key] = {*wanted, *self.places(key), *self._known.get(key, ())}
            again = await self._withdraw_from(key, self._known[key] - wanted)
        if keys is None:
            return again
        done: list[str] = []
        for namespace in sorted(wanted):
            began = time.monotonic()
            try:
                found = await self._look(key, pool, keys, namespace, context)
            except ApiError as error:
                reason = "Forbidden" if isinstance(error, Forbidden) else "WriteFailed"
                found = Problem(reason, f"{namespace}: {error.message or error}")
                if time.monotonic() < began + SLOW_SECONDS:
                    again = again or error
                else:  # gates of the pool wait for this look
                    self._looked[key][namespace] = time.monotonic(), found
            if found is None:
                done.append(namespace)
            problem = problem or found
        self._told.pop(key, None)
        if pool.spec.allowed_namespaces is not None:
            self._told[key] = pool.spec.allowed_namespaces, Shared(done, problem)
        return again

    async def withdraw(self, key: Key) -> None:
        """The pool is gone. Raises `ApiError`: another try may solve it."""
        if (failed := await self._withdraw_from(key, {*self.places(key), *self._known.get(key, ())})) is not None:
            raise failed
        for known in (self._told, self._looked, self._matched, self._known):
            known.pop(key, None)

    async def _wanted(self, key: Key, pool: KVCachePool) -> tuple[set[str], Problem | None, ApiError | None]:
        if (allowed := pool.spec.allowed_namespaces) is None:
            return set(), None, None
        wanted, served, problem, again = set(allowed.names or ()), self._settings.watch_namespaces, None, None
        if served and (beyond := sorted(wanted.difference(served))):
            problem = Problem("NamespaceNotServed", f"this operator does not serve {listed(beyond)}: add it to the chart's watchNamespaces")
            wanted.intersection_update(served)
        if allowed.selector is not None and served:
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

    async def _look(self, key: Key, pool: KVCachePool, keys: FenceKeys, namespace: str, context: Context) -> Problem | None:
        """Bring one namespace up to date, unless that was just done, or has just turned out to be impossible."""
        wanted = content(keys, pool.metadata.uid)
        hidden = {name: value for name, value in wanted.items() if name not in (KEY, ROOT)}
        config = shared_connection(pool, namespace, digest([hidden, keys.revision]), context)
        live = self._store.get(CONFIGMAPS.kind, namespace, config["metadata"]["name"])
        looked, problem = self._looked.setdefault(key, {}).get(namespace, (0.0, None))
        why = ABSENT if live is None else difference(config, live)
        if looked and time.monotonic() < looked + CHECK_SECONDS and (problem is not None or why is None):
            return problem
        try:
            problem = await self._write(CONFIGMAPS, _closed(config)) if live is None else None
            problem = problem or await self._write(SECRETS, copied(key.namespace, key.name, namespace, wanted))
            if problem is None and why is not None:
                problem = await self._write(CONFIGMAPS, config)
                log.info("pool shared", pool=f"{key.namespace}/{key.name}", namespace=namespace, reason=why)
        except NotFound:
            problem = Problem("NamespaceNotFound", f"there is no namespace {namespace}")
        self._looked[key][namespace] = (time.monotonic(), problem)
        return problem

    async def _write(self, resource: Resource, wanted: Json) -> Problem | None:
        """Make the object, or change what is there as it was read. One that is not ours stays."""
        namespace, name = wanted["metadata"]["namespace"], wanted["metadata"]["name"]
        try:
            found = await self._client.get(resource, namespace, name)
        except NotFound:
            answer, done = await self._client.create(resource, namespace, wanted), "create"
        else:
            if home(found) != home(wanted):
                text = f"{resource.kind} {namespace}/{name} is there and not of this pool: delete it"
                return Problem("NameTaken", text)
            if resource is SECRETS and (found.get("data") or {}) == wanted["data"]:
                return None
            seen = {field: found["metadata"][field] for field in ("uid", "resourceVersion")}
            answer = await self._client.replace(resource, namespace, {**wanted, "metadata": {**wanted["metadata"], **seen}})
            done = "replace"
        metrics.API_WRITES.labels(kind=resource.kind, operation=done).inc()
        if resource is CONFIGMAPS:
            self._store.upsert(resource.kind, answer)
        return None

    async def _withdraw_from(self, key: Key, namespaces: Iterable[str]) -> ApiError | None:
        """One that refuses holds up no other. Returns the error to try again on. One that hangs leaves the rest to that try."""
        failed, began = None, time.monotonic()
        for namespace in sorted(namespaces, key=lambda _: random.random()):
            try:
                await self._withdraw(key, namespace)
            except ApiError as error:
                failed = failed or error
                if time.monotonic() > began + SLOW_SECONDS:
                    break
        return failed

    async def _withdraw(self, key: Key, namespace: str) -> None:
        """First nobody joins any more, then the keys go: also where somebody has deleted the ConfigMap before them."""
        name, secret = (copy_name(key.namespace, key.name, component) for component in ("connection", "fence"))
        self._looked.get(key, {}).pop(namespace, None)
        config = self._store.get(CONFIGMAPS.kind, namespace, name)
        ours = config if config is not None and home(config) == key else None
        with contextlib.suppress(NotFound):
            if ours is not None and SHARED_LABEL in ours["metadata"]["labels"]:
                await self._client.replace(CONFIGMAPS, namespace, _closed(ours))
        with contextlib.suppress(NotFound):
            keys = await self._client.get(SECRETS, namespace, secret)
            if home(keys) == key:
                await self._client.delete(SECRETS, namespace, secret, keys["metadata"]["uid"])
        with contextlib.suppress(NotFound):
            if ours is not None:
                await self._client.delete(CONFIGMAPS, namespace, name, ours["metadata"]["uid"])
        self._known.get(key, set()).discard(namespace)
        log.info("pool no longer shared", pool=f"{key.namespace}/{key.name}", namespace=namespace)


def _closed(config: Json) -> Json:
    """The ConfigMap as one by which no pod joins."""
    labels = {label: value for label, value in config["metadata"]["labels"].items() if label != SHARED_LABEL}
    return {**config, "metadata": {**config["metadata"], "labels": labels}}


def explain(pod: Json, store: Store) -> str:
    """Why a pod with the label of a pool did not join it; empty: it did, or it is set up by hand, or it has ended."""
    metadata, pool = pod["metadata"], home(pod)
    notes, namespace = metadata.get("annotations") or {}, metadata["namespace"]
    if pool is None or JOINED in notes or pod.get("x-mounts-keys") or ended(pod):
        return ""
    without, again = f"it runs without KVCachePool {pool.name}", "A pod that is made anew joins"
    if REJECTED in notes:
        return f"{without}: {notes[REJECTED]}. Correct it: the next pod joins"

    def has_copy(of: Key) -> bool:
        return store.get(CONFIGMAPS.kind, namespace, copy_name(of.namespace, of.name, "connection")) is not None

    if pool.namespace != namespace and not has_copy(pool):
        allow = f"name {namespace} in its spec.allowedNamespaces"
        return f"{without} of namespace {pool.namespace}: it is not there, or does not let pods of {namespace} join. {allow}. {again}"
    if pool.namespace == namespace and store.get(POOLS.kind, namespace, pool.name) is None:
        others = sorted({one["metadata"]["namespace"] for one in store.every(POOLS.kind) if one["metadata"]["name"] == pool.name})
        allowing = [one for one in others if has_copy(pool_key(one, pool.name))]
        of = f" ({listed(allowing)} has one, and lets pods of {namespace} join)" if allowing else ""
        mean = f"make it, or name the namespace of the pool that is meant in annotation {POOL_NAMESPACE} of the pod{of}"
        return f"{without}: namespace {namespace} has no such pool. {mean[0].upper()}{mean[1:]}. {again}"
    return (
        f"{without}: it was made before the pool or its label was there, or the cluster has no policy that lets pods join"
        f" (chart value join.enabled, Kubernetes 1.36 or later). {again}; without the policy, docs/join.md says what to write by hand"
    )


def held_up(pod: Json, of: Key, pool: Json | None, refusal: str | None) -> str:
    """What of ours a pod waits for that joined; empty: nothing. `refusal`: why its pool has no keys. Guests start without a pool."""
    if of.namespace == pod["metadata"]["namespace"]:
        if pool is None:
            return f"it waits for volumes of KVCachePool {of.name}, which is gone: make it again, or delete the pod: the next runs without"
        if refusal is not None:
            return f"it waits for volumes of KVCachePool {of.name}, which has no keys: {refusal}"
    ours = [one for one in (pod.get("status") or {}).get("initContainerStatuses") or () if one["name"] == CONNECTOR]
    trouble = pod_trouble({**pod, "status": {"initContainerStatuses": ours}})
    return trouble[1] if trouble is not None else ""


def silent(pod: Json, lease_seconds: float) -> str:
    """What may be wrong with a pod that joined and of which no engine has reported."""
    container = pod["metadata"]["annotations"][JOINED]
    return (
        f"it joined, has been ready for {lease_seconds:g} s, and no engine of it has reported to the pool's hub. Lines with EpochKV say"
        f" why: kubectl logs {pod['metadata']['name']} -c {container}. Without one, that container has no vLLM engine of its own,"
        " VLLM_PLUGINS leaves epochkv out, or PYTHONPATH lost /epochkv (a script, python -I, Ray's runtime_env, uv run)"
    )
