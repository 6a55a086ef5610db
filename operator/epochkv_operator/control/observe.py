"""What planning is given: the children and pods of one object as the store has them, and the operator's own settings."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from epochkv_operator import __version__
from epochkv_operator.keys.content import FenceKeys
from epochkv_operator.kube.resources import CHILDREN, OPTIONAL, PODS
from epochkv_operator.kube.store import Store
from epochkv_operator.planning.context import Context, HubView, Observed, Problem
from epochkv_operator.settings import Settings


def observe(store: Store, namespace: str, label: str, value: str, hub: HubView | None = None, problem: Problem | None = None) -> Observed:
    """Everything in a namespace that carries a label of the operator."""
    children = [obj for resource in (*CHILDREN, *OPTIONAL) for obj in store.found(resource.kind, namespace, label, value)]
    return Observed(tuple(children), tuple(store.found(PODS.kind, namespace, label, value)), hub, problem)


def context_for(settings: Settings, keys: FenceKeys | None, served: frozenset[str] = frozenset()) -> Context:
    """The settings that end up in objects. `keys` of the pool, when it has any; `served`: kinds of other projects that there are."""
    return Context(
        hub_endpoint=settings.endpoint,
        operator_namespace=settings.namespace,
        operator_version=__version__,
        store_image=settings.store_image,
        engine_image=settings.engine_image,
        served=served,
        monitor_labels=settings.monitor_labels,
        credentials_revision=_revision(keys) if keys is not None else "",
    )


def now() -> datetime:
    return datetime.now(UTC)


def _revision(keys: FenceKeys) -> str:
    """Changes when engines must restart: another hub, or a Secret that was made anew, with another root secret. A rotated client
    key is read again by running engines. Of public keys only: it is shown in pod templates.
    """
    return hashlib.sha256(f"{keys.hub_public} {keys.first}".encode()).hexdigest()[:12]
