"""What the cluster looked like when last heard of: every watched object, by kind and uid, and by all that is asked for; and which pools
and engines have to be reconciled when one changes.

Fed by watch events, by answers to writes and, where watches lost something, by LISTs. They may overtake each other, so each
carries a resourceVersion and the newest one wins. Deletions leave a tombstone for a while, or a slow LIST would bring the object
back. Decisions that need *all* objects of a moment are not taken from here.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from epochkv_operator.api.base import ENGINE_LABEL, GATED, GROUP, MANAGED_BY, MANAGED_BY_LABEL, POOL_LABEL, POOL_NAMESPACE, has_gate
from epochkv_operator.api.resources import CONFIGMAPS, ENGINES, PODS, POOLS

Json = dict[str, Any]
TOMBSTONE_SECONDS = 600.0


def resource_version(obj: Json) -> int:
    return int(obj["metadata"].get("resourceVersion") or 0)


def slim(kind: str, obj: Json) -> Json:
    """The object without what nobody asks for: managedFields (most of its bytes), except one fact, whether an autoscaler owns the replica
    count; large values of a ConfigMap, which are not ours; and the spec and others' annotations of a pod, of which there are many, except
    whether it mounts the keys of its pool, and whether it has our gate."""
    metadata = dict(obj["metadata"])
    fields = metadata.pop("managedFields", None) or []
    scaled = any(
        entry.get("subresource") == "scale" and "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {}) for entry in fields
    )
    slimmed = {**obj, "metadata": metadata}
    if kind == PODS.kind:
        spec = slimmed.pop("spec", None) or {}
        if notes := metadata.get("annotations"):
            metadata["annotations"] = {name: note for name, note in notes.items() if name.startswith(f"{GROUP}/")}
        pool = (metadata.get("labels") or {}).get(POOL_LABEL)
        volumes = spec.get("volumes") or ()
        sources = [*volumes, *(one for volume in volumes for one in (volume.get("projected") or {}).get("sources") or ())]
        names = [str(one["secret"].get("secretName") or one["secret"].get("name")) for one in sources if one.get("secret")]
        if any(name.startswith(f"{pool}-") and name.endswith("-fence") for name in names):
            slimmed["x-mounts-keys"] = True
        if has_gate(obj):
            slimmed[GATED] = True
    if kind == CONFIGMAPS.kind:
        for name in ("data", "binaryData"):
            slimmed |= {name: {key: text for key, text in obj[name].items() if len(text) <= 2**16}} if obj.get(name) else {}
    if scaled:
        slimmed["x-scaled-by-others"] = True
    return slimmed


Group = tuple[str, str, str, str]
"""Kind, namespace, name of an index, value."""
Indexer = Callable[[str, Json], Iterable[tuple[str, str, str]]]
"""Under which (namespace, index, value) an object of a kind is looked up."""


class Store:
    """Objects by (kind, uid), by (kind, namespace, name), and by what `indexer` says of them.

    A lookup costs what it finds, whatever else there is. Callers must not change what they are given.
    One thread owns it and changes it. Others may look up.
    """

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self._objects: dict[str, dict[str, Json]] = {}
        self._names: dict[tuple[str, str, str], str] = {}
        self._groups: dict[Group, dict[str, None]] = {}
        self._grouped: dict[str, tuple[Group, ...]] = {}
        self._tombstones: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def upsert(self, kind: str, obj: Json) -> bool:
        """Take a state of an object in. False when it is not newer than what is known."""
        metadata = obj["metadata"]
        uid, version = metadata["uid"], resource_version(obj)
        tombstone = self._tombstones.get(uid)
        if tombstone is not None and version <= tombstone[1]:
            return False
        known = self._objects.setdefault(kind, {}).get(uid)
        if known is not None and resource_version(known) >= version:
            return False
        self._objects[kind][uid] = slim(kind, obj)
        self._index(kind, metadata, uid)
        self._regroup(uid, ((kind, *entry) for entry in self._indexer(kind, obj)))
        return True

    def remove(self, kind: str, obj: Json, version: int | None = None) -> bool:
        """The object is gone, at this version or at its own. False when it was not known."""
        now, uid = time.monotonic(), obj["metadata"]["uid"]
        self._tombstones[uid] = (now, resource_version(obj) if version is None else version)
        self._tombstones.move_to_end(uid)  # the oldest one is the first
        while now - next(iter(self._tombstones.values()))[0] > TOMBSTONE_SECONDS:
            self._tombstones.popitem(last=False)
        known = self._objects.get(kind, {}).pop(uid, None)
        if known is None:
            return False
        self._regroup(uid, ())
        name = (kind, known["metadata"].get("namespace", ""), known["metadata"]["name"])
        if self._names.get(name) == uid:
            del self._names[name]
        return True

    def behind(self, kind: str, shown: Mapping[str, int]) -> int:
        """How many of these objects (version by uid) are not known, or in an older state only. Those that were deleted since are."""
        known, count = self._objects.get(kind, {}), 0
        for uid, version in shown.items():
            obj = known.get(uid)
            seen = resource_version(obj) if obj is not None else self._tombstones.get(uid, (0.0, 0))[1]
            count += seen < version
        return count

    def retain(self, kind: str, shown: Container[str], list_version: int, namespace: str | None = None) -> list[Json]:
        """A LIST (of one namespace, or of all) showed these uids and no other. Returns the objects that have vanished."""
        vanished: list[Json] = []
        for uid, obj in list(self._objects.get(kind, {}).items()):
            inside = namespace is None or obj["metadata"].get("namespace") == namespace
            if inside and uid not in shown and resource_version(obj) <= list_version:
                self.remove(kind, obj, list_version)
                vanished.append(obj)
        return vanished

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        uid = self._names.get((kind, namespace, name))
        return self._objects.get(kind, {}).get(uid) if uid else None

    def by_uid(self, kind: str, uid: str) -> Json | None:
        return self._objects.get(kind, {}).get(uid)

    def every(self, kind: str) -> list[Json]:
        return list(self._objects.get(kind, {}).values())

    def found(self, kind: str, namespace: str, index: str, value: str) -> list[Json]:
        """Objects that the indexer puts under this value of a namespace."""
        objects = self._objects.get(kind, {})
        uids = tuple(self._groups.get((kind, namespace, index, value), ()))  # at once: another thread may ask
        return [obj for obj in map(objects.get, uids) if obj is not None]

    def _regroup(self, uid: str, groups: Iterable[Group]) -> None:
        """The object is found under these values from now on, and under no other."""
        for group in self._grouped.pop(uid, ()):
            members = self._groups[group]
            del members[uid]
            if not members:
                del self._groups[group]
        now = tuple(groups)
        for group in now:
            self._groups.setdefault(group, {})[uid] = None
        if now:
            self._grouped[uid] = now

    def _index(self, kind: str, metadata: Json, uid: str) -> None:
        name = (kind, metadata.get("namespace", ""), metadata["name"])
        current = self._objects[kind].get(self._names.get(name, ""))
        # A namesake that was recreated has a higher version; a late event of the old one must not take its place.
        if current is None or resource_version(current) <= resource_version(self._objects[kind][uid]):
            self._names[name] = uid


BY_POOL: Final = "spec.poolRef.name"
"""Index of engines."""
BY_HOME: Final = POOL_NAMESPACE
"""Index of what belongs to a pool of another namespace, by that pool, over all namespaces (`""`)."""


class Key(NamedTuple):
    """A pool, an engine or a pod to reconcile. By name, not uid: a recreated namesake is the same place in the cluster."""

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


def home(obj: Json) -> Key | None:
    """The pool that an object's label means: one of its own namespace, unless it names another one."""
    metadata = obj["metadata"]
    pool = (metadata.get("labels") or {}).get(POOL_LABEL)
    return pool_key((metadata.get("annotations") or {}).get(POOL_NAMESPACE, metadata.get("namespace", "")), pool) if pool else None


def indexed(kind: str, obj: Json) -> Iterator[tuple[str, str, str]]:
    """`store.Indexer`: children and pods by the operator's labels, engines by their pool, guests and copies by the pool of elsewhere."""
    namespace = obj["metadata"].get("namespace", "")
    if kind == ENGINES.kind:
        if (pool := pool_of(obj)) is not None:
            yield namespace, BY_POOL, pool
        return
    if (meant := home(obj)) is not None:
        yield (namespace, POOL_LABEL, meant.name) if meant.namespace == namespace else ("", BY_HOME, f"{meant.namespace}/{meant.name}")
    if engine := (obj["metadata"].get("labels") or {}).get(ENGINE_LABEL):
        yield namespace, ENGINE_LABEL, engine


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
        if pool := pool_of(obj):
            yield pool_key(namespace, pool)
        return
    labels = metadata.get("labels") or {}
    if labels.get(ENGINE_LABEL):
        yield engine_key(namespace, labels[ENGINE_LABEL])
    joins = kind == PODS.kind and labels.get(MANAGED_BY_LABEL) != MANAGED_BY
    if joins:
        yield Key(PODS.kind, namespace, name)
    if (meant := home(obj)) is not None and (has_gate(obj) or not (joins or labels.get(ENGINE_LABEL))):
        yield meant
