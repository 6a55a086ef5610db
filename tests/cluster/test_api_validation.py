"""What a real API server accepts and refuses, and what it says: every promise about bad input is kept before the operator sees it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.controlplane import ControlPlane
from tests.cluster.operator_harness import ENGINES, POOLS, Namespace
from tests.support.api.cases import MOONCAKE, Case, Change
from tests.support.api.corpus import CASES, CHANGES

COLLECTIONS = {"KVCachePool": POOLS, "InferenceEngine": ENGINES}
STRICT = "?fieldValidation=Strict"
Json = dict[str, Any]


def manifest(kind: str, name: str, spec: Json | None) -> Json:
    obj: Json = {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": {"name": name}}
    return obj if spec is None else {**obj, "spec": spec}


def send(space: Namespace, method: str, path: str, body: Json, content_type: str = "application/json") -> tuple[int, Json]:
    status, answer = space.plane.api.request(method, path.format(space.name), body, content_type, timeout=15)
    return status, json.loads(answer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind[:3]}-{case.id}")
def test_create(plane: ControlPlane, case: Case) -> None:
    path = f"{COLLECTIONS[case.kind]}{STRICT}&dryRun=All"
    status, answer = send(Namespace(plane, "default"), "POST", path, manifest(case.kind, case.name, case.spec))
    if case.says is None:
        assert status == 201, answer.get("message")
        return
    assert status in (400, 422), answer
    for fragment in case.says:
        assert fragment in answer["message"]
    assert "hunter2" not in answer["message"]
    # The API server itself says so once more, where it skipped rules.
    assert "<nil>" not in answer["message"].replace("<nil>: Invalid value: null: some validation rules were not checked", "")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.kind[:3]}-{change.id}")
def test_update(namespace: Namespace, change: Change) -> None:
    collection = COLLECTIONS[change.kind]
    old = namespace.create(f"{collection}{STRICT}", manifest(change.kind, "changing", change.old))
    new = manifest(change.kind, "changing", change.new)
    new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
    status, answer = send(namespace, "PUT", f"{collection}/changing{STRICT}&dryRun=All", new)
    if change.says is None:
        assert status == 200, answer.get("message")
        return
    assert status == 422, answer
    for fragment in change.says:
        assert fragment in answer["message"]


def test_defaults_are_filled_in(namespace: Namespace) -> None:
    pool = namespace.create_pool("defaults", distributed=MOONCAKE)
    assert pool["spec"] == {
        "resetEpoch": 0,
        "reset": {"leaseSeconds": 30, "reclaimPolicy": "Delete"},
        "keys": {"generation": 0},
        "distributed": {
            "mooncake": {
                "master": {"replicas": 1, "highAvailability": {"backend": "None"}},
                "store": {"replicas": 1, "segmentSize": "256Mi"},
                "transport": {"protocol": "TCP"},
            }
        },
        "networkPolicy": {"mode": "Enabled"},
    }
    engine = namespace.create_engine("defaults", model={"name": "tiny"})
    assert engine["spec"] == {
        "model": {"name": "tiny"},
        "replicas": 1,
        "parallelism": {"tensor": 1, "pipeline": 1, "data": 1, "expert": False, "nodes": 1},
        "updateStrategy": {"maxUnavailable": 1, "maxSurge": 0},
    }


def patch_status(space: Namespace, pool: str, status: Json | None) -> tuple[int, Json]:
    return send(space, "PATCH", f"{POOLS}/{pool}/status{STRICT}", {"status": status}, "application/merge-patch+json")


def test_epochs_in_status_never_go_down(namespace: Namespace) -> None:
    namespace.create_pool("monotone", local={"capacity": "1Gi"})
    assert patch_status(namespace, "monotone", {"targetEpoch": 5, "epoch": 4})[0] == 200
    refused: list[tuple[Json | None, str]] = [
        ({"targetEpoch": 4}, "status.targetEpoch never goes down"),
        ({"epoch": 3}, "status.epoch never goes down"),
        ({"epoch": 6}, "status.epoch cannot pass status.targetEpoch"),
        ({"epoch": None}, "status.epoch never goes down and is never removed"),
        ({"targetEpoch": None}, "never removed"),
        (None, "never removed"),
    ]
    for status, text in refused:
        code, answer = patch_status(namespace, "monotone", status)
        assert code == 422, (status, answer)
        assert text in answer["message"]
    code, answer = patch_status(namespace, "monotone", {"epoch": 5})
    assert (code, answer["status"]) == (200, {"targetEpoch": 5, "epoch": 5, "observedGeneration": -1})


def test_kubectl_lists_scales_and_selects(namespace: Namespace) -> None:
    """Short names, columns, scale subresource, category and the server-side field selector."""
    kubectl = namespace.kubectl
    namespace.create_pool("wide", distributed=MOONCAKE, resetEpoch=2)
    namespace.create_engine("rollout", model={"name": "tiny"}, poolRef={"name": "wide"})
    namespace.create_engine("other", model={"name": "tiny"}, poolRef={"name": "elsewhere"})
    status = {"targetEpoch": 2, "epoch": 1, "engines": {"summary": "1/2"}, "weightsSummary": "3f2a9c1e 1/2"}
    assert patch_status(namespace, "wide", status)[0] == 200
    table = kubectl("get", "kvp", "wide").splitlines()
    assert table[0].split() == ["NAME", "READY", "EPOCH", "TARGET", "ENGINES", "WEIGHTS", "STORES", "AGE"]
    assert table[1].split()[1:6] == ["1", "2", "1/2", "3f2a9c1e", "1/2"]
    assert kubectl("get", "ie").splitlines()[0].split()[:4] == ["NAME", "READY", "POOL", "DESIRED"]
    kubectl("scale", "kvp/wide", "--replicas=3")
    kubectl("scale", "ie/rollout", "--replicas=5")
    assert kubectl("get", "kvp/wide", "-o", "jsonpath={.spec.distributed.mooncake.store.replicas}") == "3"
    assert kubectl("get", "ie/rollout", "-o", "jsonpath={.spec.replicas}") == "5"
    assert kubectl("get", "ie", "--field-selector=spec.poolRef.name=wide", "-o", "name").split() == ["inferenceengine.epochkv.io/rollout"]
    listed = kubectl("get", "inference", "-o", "name").split()
    assert {"kvcachepool.epochkv.io/wide", "inferenceengine.epochkv.io/other"} <= set(listed)
    message = kubectl("scale", "kvp/wide", "--replicas=0", ok=False)
    assert "greater than or equal to 1" in message


def test_the_samples_are_accepted(plane: ControlPlane) -> None:
    made = Namespace(plane, "default").kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", str(Path(__file__).parents[2] / "config/samples")
    )
    assert sorted(line.split()[0] for line in made.splitlines()) == [
        *("horizontalpodautoscaler.autoscaling/rollout", "inferenceengine.epochkv.io/rollout", "job.batch/trainer"),
        *("kvcachepool.epochkv.io/policy", "pod/trainer"),
    ]
