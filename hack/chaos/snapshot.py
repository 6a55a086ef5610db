"""A namespace as the operator is responsible for it, comparable with another one: without uids, times, versions and random names.

Two namespaces with the same manifests must have equal snapshots, however they came to be what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.planning.names import CONNECTION_ANNOTATION, HASH_ANNOTATION
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, Namespace

Json = dict[str, Any]
Snapshot = dict[str, Any]
"""`collection/name` -> what counts of the object."""

ALL: Final = (POOLS, ENGINES, *CHILDREN.values())
BELOW: Final = ("/apis/apps/v1/namespaces/{}/replicasets", "/api/v1/namespaces/{}/pods")
NOT_OURS: Final = frozenset({"configmaps/kube-root-ca.crt", "serviceaccounts/default"})
POD_NAME = re.compile(r"\b([a-z][a-z0-9-]*?)-[a-z0-9]{6,10}-[a-z0-9]{5}\b")
UNFINISHED_ROLLOUT = re.compile(r"\d+ of (\d+) replicas run the current spec, \d+ an older one")
"""How far it is hangs on the templates that came before, where pods never become ready."""
UNSTABLE: Final = frozenset({"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "namespace"})
TIMES: Final = frozenset({"lastTransitionTime", "since"})
TOLD_BY_ITS_HUB: Final = frozenset({"startTime", "completionTime", "durationMilliseconds"})
"""Of a reset: a hub that dies before it has written them leaves no other that knows."""
FOUND_BY_ENGINES: Final = frozenset({"Reclaimed"})
"""Conditions, and counts in `status.reclaim`: what engines found in the store below older epochs. A fresh install has no engine."""
HASHES: Final = frozenset({HASH_ANNOTATION, CONNECTION_ANNOTATION})
"""They are made of uids and keys. That they are right is seen by an operator that starts, and has nothing to write."""
UNCOUNTED: Final = frozenset({"deployment.kubernetes.io/revision", "chaos"})
"""Annotations of the Deployment controller, and of `pods.Kubelet`."""


def snapshot(space: Namespace, paths: tuple[str, ...] = ALL) -> Snapshot:
    """All pools, engines and objects of the kinds that the operator makes; other people's, too: leftovers are found."""
    found = _listed(space, paths)
    uids = {obj["metadata"]["uid"]: key for key, obj in found.items()}
    return {key: _portable(_counted(key, obj), space.name, uids) for key, obj in sorted(found.items()) if key not in NOT_OURS}


def equal(space: Namespace, wanted: Snapshot) -> bool:
    """Whether a namespace has this snapshot; statuses, which are the last to follow, are compared first."""
    own = snapshot(space, (POOLS, ENGINES))
    if any(own.get(key) != obj for key, obj in wanted.items() if key in own or key.startswith(("kvcachepools/", "inferenceengines/"))):
        return False
    return snapshot(space) == wanted


def everything(space: Namespace) -> dict[str, Json]:
    """The same objects as they are, and what controllers made of them: to look into when something differs."""
    return _listed(space, (*ALL, *BELOW))


def _listed(space: Namespace, paths: tuple[str, ...]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for path in paths:
        collection = path.rsplit("/", 1)[1]
        for item in space.request("GET", path.format(space.name))["items"]:
            found[f"{collection}/{item['metadata']['name']}"] = item
    return found


def differences(found: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Where two snapshots differ, as `path: found, not wanted`."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            here = f"{path}.{key}" if path else str(key)
            if key not in found or key not in wanted:
                yield f"{here}: {'missing' if key not in found else f'there, and should not be: {_short(found[key])}'}"
            else:
                yield from differences(found[key], wanted[key], here)
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif found != wanted:
        yield f"{path}: {_short(found)}, not {_short(wanted)}"


def _counted(key: str, obj: Json) -> Json:
    """The object without what differs between equal installations."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in UNSTABLE}
    collection = key.split("/", 1)[0]
    if collection in ("kvcachepools", "inferenceengines"):
        status = _status(obj.get("status") or {}, obj["metadata"]["generation"])
        if status.get("updatedReplicas") != status.get("replicas"):
            status["updatedReplicas"] = "some"
        return {"metadata": {"name": metadata["name"]}, "spec": obj["spec"], "status": status}
    counted = {name: value for name, value in obj.items() if name not in ("status", "metadata", "apiVersion", "kind")}
    if collection == "secrets":
        counted["data"] = {name: value if name == "generation" else "random" for name, value in (obj.get("data") or {}).items()}
    if collection == "services" and obj["spec"].get("clusterIP") != "None":
        counted["spec"] = {name: value for name, value in obj["spec"].items() if not name.startswith("clusterIP")}
    own = [entry["fieldsV1"] for entry in obj["metadata"].get("managedFields") or () if _is_ours(entry)]
    return {"metadata": metadata, **counted, "owned by the operator": own}


def _is_ours(entry: Json) -> bool:
    return (entry.get("manager"), entry.get("operation"), entry.get("subresource")) == (MANAGED_BY, "Apply", None)


def _status(value: Any, generation: int) -> Any:
    """A status without times; `observedGeneration` only says whether it is the newest."""
    if isinstance(value, list):
        return [_status(item, generation) for item in value]
    if not isinstance(value, dict):
        return value
    found: Json = {}
    for name, item in value.items():
        if name in TIMES or name in TOLD_BY_ITS_HUB or name == "granting":
            continue
        if name == "proof":  # signed for this pool's uid
            found[name] = item.partition(":")[0]
        elif name == "reclaim":
            found[name] = item.get("policy")
        elif name == "conditions":
            found[name] = [_status(condition, generation) for condition in item if condition["type"] not in FOUND_BY_ENGINES]
        elif name == "observedGeneration":
            found[name] = "newest" if item == generation else f"{item} of {generation}"
        else:
            found[name] = _status(item, generation)
    return found


def _portable(obj: Json, namespace: str, uids: dict[str, str]) -> Any:
    """Without names that another installation has not: the namespace's, uids of living objects, random parts of pods' names."""
    text = json.dumps(obj, sort_keys=True).replace(namespace, "NAMESPACE")
    for uid, key in uids.items():
        text = text.replace(uid, f"uid of {key}")
    return _masked(json.loads(text))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "hash" if name in HASHES else _masked(item) for name, item in value.items() if name not in UNCOUNTED}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if isinstance(value, str) and " " in value:
        return UNFINISHED_ROLLOUT.sub(r"some of \1 replicas run the current spec", POD_NAME.sub(r"\1-POD", value))
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else f"{text[:300]}..."
