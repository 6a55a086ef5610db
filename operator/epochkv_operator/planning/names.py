"""Names, labels and owner references of everything the operator makes."""

import hashlib
import json
from typing import Any

from epochkv_operator.api.base import API_VERSION, ENGINE_LABEL, OURS, POOL_LABEL
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.api.resources import BY_KIND
from epochkv_operator.planning.context import Context, Json

COMPONENT_LABEL = "app.kubernetes.io/component"
SCRAPE_LABEL = "epochkv.io/scrape"
HASH_ANNOTATION = "epochkv.io/applied-hash"
VERSION_ANNOTATION = "epochkv.io/operator-version"
CONNECTION_ANNOTATION = "epochkv.io/connection-hash"
KEYS_ANNOTATION = "epochkv.io/keys-hash"
ENGINE_PORT = 8000
MASTER_RPC_PORT = 50051
MASTER_ADMIN_PORT = 9003
STORE_REST_PORT = 8088
STORE_HEALTH_PORT = 9300
CREDENTIALS_DIR = "/etc/epochkv/fence"


def component_name(pool: str, component: str) -> str:
    """Name of the objects of one component of a pool: `master`, `store`, `connection`, or `fence`, its Secret."""
    return f"{pool}-{component}"


def copy_name(namespace: str, pool: str, component: str) -> str:
    """The same in a namespace that the pool allows. No other pool's has it, and it is at most 62 characters long."""
    return component_name(f"{pool}-{digest(f'{namespace}/{pool}')[:10]}", component)


def pool_labels(pool: str, component: str) -> dict[str, str]:
    return {**_common("epochkv-pool", pool, component), POOL_LABEL: pool}


def engine_labels(engine: InferenceEngine) -> dict[str, str]:
    """Labels of an object of an engine. With a poolRef also the pool's, which network policies go by."""
    labels = {**_common("epochkv-engine", engine.metadata.name, "engine"), ENGINE_LABEL: engine.metadata.name}
    if engine.spec.pool_ref is not None:
        labels[POOL_LABEL] = engine.spec.pool_ref.name
    return labels


def component_selector(pool: str, component: str) -> dict[str, str]:
    """Selector of the pods of one component of a pool."""
    return {POOL_LABEL: pool, COMPONENT_LABEL: component}


def engine_selector(engine: str) -> dict[str, str]:
    """Selector of the pods of an engine; without the pool, because selectors cannot change."""
    return {ENGINE_LABEL: engine, COMPONENT_LABEL: "engine"}


def engine_account(engine: str) -> str:
    """The ServiceAccount of an engine's pods. Every namespace has a `default` of its own."""
    return f"{engine}-engine" if engine == "default" else engine


def selector_text(labels: dict[str, str]) -> str:
    """A selector as the scale subresource wants it."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def pool_object(kind: str, pool: KVCachePool, component: str, context: Context, body: Json, more: dict[str, str] | None = None) -> Json:
    """An object of one component of a pool. `more`: labels beside ours."""
    name = pool.metadata.name
    return _owned_object(kind, component_name(name, component), pool, {**(more or {}), **pool_labels(name, component)}, context, body)


def engine_object(
    kind: str,
    engine: InferenceEngine,
    context: Context,
    body: Json,
    name: str | None = None,
    annotations: dict[str, str] | None = None,
    more: dict[str, str] | None = None,
) -> Json:
    """An object of an engine, which has the engine's name unless it is given one. `more`: labels beside ours."""
    labels = {**(more or {}), **engine_labels(engine)}
    return _owned_object(kind, name or engine.metadata.name, engine, labels, context, body, annotations)


def controller(kind: str, name: str, uid: str) -> Json:
    """The owner reference to a pool or engine."""
    return {"apiVersion": API_VERSION, "kind": kind, "name": name, "uid": uid, "controller": True}


def controller_of(child: Json) -> Json:
    """The owner reference of what controls a live object; empty when nothing does."""
    owners: list[Json] = child["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def digest(value: Any) -> str:
    """Short stable digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _owned_object(
    kind: str,
    name: str,
    owner: KVCachePool | InferenceEngine,
    labels: dict[str, str],
    context: Context,
    body: Json,
    annotations: dict[str, str] | None = None,
) -> Json:
    """A complete child: metadata, owner reference and, over all of it, the hash that says what was applied."""
    obj: Json = {
        "apiVersion": BY_KIND[kind].api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.metadata.namespace,
            "labels": labels,
            "ownerReferences": [controller(owner.kind, owner.metadata.name, owner.metadata.uid)],
        },
        **body,
    }
    return stamped(obj, context, annotations)


def stamped(obj: Json, context: Context, annotations: dict[str, str] | None = None) -> Json:
    """The object with these annotations, the hash of it all, and who applies it. An upgrade touches nothing that it builds as before:
    the version is no part of the hash."""
    if annotations:
        obj["metadata"]["annotations"] = annotations
    obj["metadata"]["annotations"] = {**(annotations or {}), HASH_ANNOTATION: digest(obj), VERSION_ANNOTATION: context.operator_version}
    return obj


def _common(name: str, instance: str, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/instance": instance, COMPONENT_LABEL: component, **OURS}
