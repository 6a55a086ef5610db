"""Which object has to be looked at when another one changes, and what objects are looked up by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from epochkv_operator.api.base import ENGINE_LABEL, POOL_LABEL
from epochkv_operator.kube.resources import ENGINES, POOLS
from epochkv_operator.kube.store import Store

Json = dict[str, Any]


BY_POOL: Final = "spec.poolRef.name"
"""Index of engines."""


class Key(NamedTuple):
    """A pool or an engine to reconcile. By name, not uid: a recreated namesake is the same place in the cluster."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def pool_key(namespace: str, name: str) -> Key:
    return Key(POOLS.kind, namespace, name)


def engine_key(namespace: str, name: str) -> Key:
    return Key(ENGINES.kind, namespace, name)


def key_of(kind: str, obj: Json) -> Key:
    """The key of a pool or an engine itself."""
    return Key(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def pool_of(engine: Json) -> str | None:
    """Name of the pool an engine refers to."""
    name = (engine.get("spec", {}).get("poolRef") or {}).get("name")
    return str(name) if name else None


def indexed(kind: str, obj: Json) -> Iterator[tuple[str, str]]:
    """`store.Indexer`: children and pods by the operator's labels, engines by their pool."""
    if kind == ENGINES.kind:
        if (pool := pool_of(obj)) is not None:
            yield BY_POOL, pool
        return
    labels = obj["metadata"].get("labels") or {}
    yield from ((label, labels[label]) for label in (POOL_LABEL, ENGINE_LABEL) if labels.get(label))


def engines_of(store: Store, namespace: str, pool: str) -> list[Json]:
    """Engines that refer to a pool, whether or not it exists."""
    return store.found(ENGINES.kind, namespace, BY_POOL, pool)


def only_epochs_differ(before: Json, after: Json) -> bool:
    """Whether two states of a pool differ in its status and `spec.resetEpoch` alone, of which no object of an engine is made."""

    def rest(pool: Json) -> tuple[Any, ...]:
        metadata = pool["metadata"]
        spec = {name: value for name, value in (pool.get("spec") or {}).items() if name != "resetEpoch"}
        return spec, *(metadata.get(name) for name in ("labels", "annotations", "finalizers", "deletionTimestamp", "ownerReferences"))

    return rest(before) == rest(after)


def affected(store: Store, kind: str, obj: Json) -> Iterator[Key]:
    """Keys to reconcile after this object changed, appeared or vanished."""
    metadata = obj["metadata"]
    namespace, name = metadata.get("namespace", ""), metadata["name"]
    if kind == POOLS.kind:
        yield pool_key(namespace, name)
        for engine in engines_of(store, namespace, name):
            yield engine_key(namespace, engine["metadata"]["name"])
        return
    if kind == ENGINES.kind:
        yield engine_key(namespace, name)
        pool = pool_of(obj)
        if pool:
            yield pool_key(namespace, pool)
        return
    labels = metadata.get("labels") or {}
    if labels.get(ENGINE_LABEL):
        yield engine_key(namespace, labels[ENGINE_LABEL])
    elif labels.get(POOL_LABEL):
        yield pool_key(namespace, labels[POOL_LABEL])
