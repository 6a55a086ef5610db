"""The cluster that a person's kubeconfig leads to: reads, and writes that the API server only pretends to do (`dryRun=All`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.kube.client import APPLY_PATCH, MERGE_PATCH, KubeClient, NotFound, missing_kubeconfig
from epochkv_operator.kube.resources import CHILDREN, Resource, by_kind

Json = dict[str, Any]
DEADLINE_SECONDS: Final = 30.0
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


class NoCluster(Exception):
    """The kubeconfig does not lead to a cluster; the text says why, and what to do."""


async def connect(context: str | None) -> tuple[KubeClient, str]:
    """A client as `kubectl` would have it, and the namespace of the kubeconfig's context. Close the client afterwards.

    Raises:
        NoCluster: there is no kubeconfig, or it has no such context.
    """
    file = os.environ.get("KUBECONFIG") or kubernetes_config.KUBE_CONFIG_DEFAULT_LOCATION
    configuration = kubernetes_client.Configuration()
    if (missing := missing_kubeconfig()) is not None:
        raise NoCluster(f"{missing}: set KUBECONFIG, or leave out --live")
    try:
        contexts, current = kubernetes_config.list_kube_config_contexts(file)
        await kubernetes_config.load_kube_config(
            config_file=file, context=context, client_configuration=configuration, persist_config=False
        )
    except (kubernetes_config.ConfigException, OSError) as error:
        raise NoCluster(f"{file}: {error}: set KUBECONFIG, or leave out --live") from error
    chosen = next((one for one in contexts if one["name"] == context), None) if context else current
    configuration.client_session_kwargs = {"trust_env": False}
    return KubeClient(configuration, DEADLINE_SECONDS), ((chosen or {}).get("context") or {}).get("namespace") or "default"


async def found(client: KubeClient, resource: Resource, namespace: str, name: str) -> Json | None:
    """The live object, or None. Raises `ApiError`."""
    try:
        return {"kind": resource.kind, "apiVersion": resource.api_version, **await client.get(resource, namespace, name)}
    except NotFound:
        return None


async def children(client: KubeClient, namespace: str, label: str, value: str) -> list[Json]:
    """Live objects that the operator made, by its label. Raises `ApiError`."""
    selector = f"app.kubernetes.io/managed-by={MANAGED_BY},{label}={value}"
    return [item for resource in CHILDREN for item in (await client.list(resource, namespace, selector))[0]]


async def as_applied(client: KubeClient, obj: Json, live: Json | None) -> Json:
    """What the API server would hold after `kubectl apply` of a manifest of the user's: defaults filled in, rules checked.

    A field that the user took out of the file goes, as with kubectl: by its note of what was applied last, else by who owns the field.

    Raises:
        ApiError: it would be refused.
    """
    noted = ((live or {}).get("metadata", {}).get("annotations") or {}).get(_LAST_APPLIED)
    if noted is not None:
        return await _pretend(client, _patch_for(noted, obj), obj, MERGE_PATCH, {"fieldManager": "kubectl-client-side-apply"})
    return await _pretend(client, obj, obj, APPLY_PATCH, {"fieldManager": _manager(live), "force": "true"})


async def as_applied_by_operator(client: KubeClient, obj: Json) -> Json:
    """What the API server would hold after the operator's own apply. Raises `ApiError` as it would to the operator."""
    return await _pretend(client, obj, obj, APPLY_PATCH, {"fieldManager": MANAGED_BY, "force": "true"})


async def _pretend(client: KubeClient, body: Json, obj: Json, content_type: str, query: Mapping[str, str]) -> Json:
    resource, metadata = by_kind(obj["kind"]), obj["metadata"]
    return await client.request(
        "PATCH",
        resource.path(metadata["namespace"], metadata["name"]),
        query={"dryRun": "All", "fieldValidation": "Strict", **query},
        body=body,
        content_type=content_type,
    )


def _patch_for(noted: str, obj: Json) -> Json:
    """The merge patch of `kubectl apply`: what the file has, and null for what it had."""
    try:
        before = json.loads(noted)
    except ValueError:
        before = {}
    return _with_removals(before, obj)


def _with_removals(before: Any, after: Json) -> Json:
    patch = dict(after)
    for key, value in (before if isinstance(before, dict) else {}).items():
        if key not in after:
            patch[key] = None
        elif isinstance(value, dict) and isinstance(after[key], dict):
            patch[key] = _with_removals(value, after[key])
    return patch


def _manager(live: Json | None) -> str:
    """Who applies the object now, server-side: the same one may remove its fields."""
    entries = (live or {}).get("metadata", {}).get("managedFields") or []
    managers = {entry["manager"] for entry in entries if entry.get("operation") == "Apply" and not entry.get("subresource")}
    return managers.pop() if len(managers) == 1 else "kubectl"
