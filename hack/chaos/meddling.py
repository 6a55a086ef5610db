"""Somebody meddles with what the operator made: deletes children, and changes fields of theirs that the operator owns."""

from __future__ import annotations

import random
from typing import Any

from hack.chaos.manifests import JSON_PATCH, MERGE_PATCH, POOL_OF, Edit, Json, Wanted
from tests.cluster.operator_harness import CHILDREN

SECRETS_SHARE = 0.15


def child(rng: random.Random, wanted: Wanted) -> tuple[str, str] | None:
    """Kind and name of an object that the operator should have made by now."""
    found: list[tuple[str, str]] = []
    for name in sorted(wanted.engines):
        found += [(kind, name) for kind in ("deployments", "services", "serviceaccounts", "poddisruptionbudgets")]
        pool = wanted.pools.get(POOL_OF[name] or "")
        if pool is not None and "distributed" in pool:
            found.append(("networkpolicies", name))
    for name, spec in sorted(wanted.pools.items()):
        found.append(("configmaps", f"{name}-connection"))
        if "mooncake" not in spec.get("distributed", {}):
            continue
        found += [("deployments", f"{name}-master"), ("statefulsets", f"{name}-store")]
        for kind in ("services", "poddisruptionbudgets", "networkpolicies"):
            found += [(kind, f"{name}-master"), (kind, f"{name}-store")]
    return rng.choice(found) if found else None


def delete_child(rng: random.Random, wanted: Wanted) -> Edit | None:
    """Delete one, or a pool's Secret, which no watch shows."""
    if rng.random() < SECRETS_SHARE and wanted.pools:
        name = f"{rng.choice(sorted(wanted.pools))}-fence"
        return Edit(f"delete secrets/{name}", "delete child", CHILDREN["secrets"], name)
    if (chosen := child(rng, wanted)) is None:
        return None
    kind, name = chosen
    return Edit(f"delete {kind}/{name}", "delete child", CHILDREN[kind], name)


def edit_child(rng: random.Random, wanted: Wanted) -> Edit | None:
    """Change a field that the operator owns. What it does not own stays as people set it, and so does an owner that they remove."""
    if (chosen := child(rng, wanted)) is None:
        return None
    kind, name = chosen
    what, body, content_type = rng.choice((*ANYWHERE, *MEDDLING[kind]))
    return Edit(f"edit {kind}/{name}: {what}", "patch child", CHILDREN[kind], name, body, content_type)


def _merge(what: str, body: Json) -> tuple[str, Any, str]:
    return what, body, MERGE_PATCH


def _replace(what: str, path: str, value: Any) -> tuple[str, Any, str]:
    return what, [{"op": "replace", "path": path, "value": value}], JSON_PATCH


ANYWHERE = (
    _merge("its label managed-by", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}),
    _merge("all its labels", {"metadata": {"labels": None}}),
    _merge("its hash", {"metadata": {"annotations": {"epochkv.io/applied-hash": "0"}}}),
    _merge("no annotations", {"metadata": {"annotations": None}}),
)
_WORKLOAD = (
    _merge("replicas", {"spec": {"replicas": 4}}),
    _merge("revisionHistoryLimit", {"spec": {"revisionHistoryLimit": 9}}),
    _replace("image", "/spec/template/spec/containers/0/image", "example/other:1"),
    _replace("no environment", "/spec/template/spec/containers/0/env", []),
    _replace("no ports", "/spec/template/spec/containers/0/ports", []),
)
MEDDLING: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "deployments": (*_WORKLOAD, _merge("strategy", {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}})),
    "statefulsets": _WORKLOAD,
    "services": (_replace("port", "/spec/ports/0/port", 81), _merge("selector", {"spec": {"selector": {"epochkv.io/engine": None}}})),
    "configmaps": (_merge("data", {"data": {"connection.json": "{}"}}), _merge("no data", {"data": None})),
    "serviceaccounts": (_merge("token", {"automountServiceAccountToken": True}),),
    "poddisruptionbudgets": (_merge("maxUnavailable", {"spec": {"maxUnavailable": 2}}),),
    "networkpolicies": (_merge("let all in", {"spec": {"ingress": [{}]}}), _merge("types", {"spec": {"policyTypes": ["Egress"]}})),
}
"""By collection: what of it is changed, the body, and its type."""
