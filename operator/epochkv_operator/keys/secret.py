"""Secrets as API objects."""

from __future__ import annotations

from collections.abc import Mapping

from epochkv_operator import metrics
from epochkv_operator.api.base import MANAGED_BY, POOL_LABEL
from epochkv_operator.keys.content import Fields, encoded
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import POOLS

_OURS = {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "epochkv"}


def manifest(namespace: str, name: str, fields: Fields, labels: Mapping[str, str], owners: list[Json], *, immutable: bool = False) -> Json:
    """A Secret to create."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": {**_OURS, **labels}, "ownerReferences": owners},
        "type": "Opaque",
        "immutable": immutable,
        "data": encoded(fields),
    }


def labels_of(pool: str) -> dict[str, str]:
    """Labels of a pool's Secret."""
    return {**_OURS, POOL_LABEL: pool}


def is_labelled(found: Json, pool: str) -> bool:
    """The labels are those of the Secret of a pool of this name."""
    return labels_of(pool).items() <= (found["metadata"].get("labels") or {}).items()


def owner_reference(pool: Json) -> Json:
    """Of a pool's Secret to its pool."""
    metadata = pool["metadata"]
    return {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


def count(operation: str) -> None:
    """A write to a Secret."""
    metrics.API_WRITES.labels(kind="Secret", operation=operation).inc()
