"""Fields of an earlier version: refused by the API server whatever the client asks for, and no trap for what was stored with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.api import parse_engine, parse_pool
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.operator_harness import ENGINES, POOLS, Namespace, install_crds
from tests.cluster.test_api_validation import kubectl, manifest, send
from tests.support.api.cases import LOCAL
from tests.support.api.corpus import GONE_OF_POOLS

Json = dict[str, Any]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
#: Their schemas as they were, by path below `spec`.
BEFORE: dict[str, dict[str, Json]] = {
    "kvcachepools": {
        "weightsVersion": {"type": "string", "maxLength": 253},
        "weightsReady": {"type": "string", "maxLength": 253},
        "reset.joinAfterSeconds": {"type": "integer", "format": "int32", "default": 60},
        "reset.onLocalReset": {"type": "string", "enum": ["Private", "Propose"], "default": "Private"},
    },
    "inferenceengines": {"weightsSource": {"type": "string", "enum": ["Model", "Pushed"], "default": "Pushed"}},
}
GONE = [
    *(("KVCachePool", path, spec) for path, specs in GONE_OF_POOLS.items() for spec in specs[:1]),
    ("InferenceEngine", "weightsSource", {"model": {"name": "tiny"}, "weightsSource": "Model"}),
]
IDS = [path for _, path, _ in GONE]
OLD_POOL: Json = {
    "local": LOCAL,
    "resetEpoch": 3,
    "weightsVersion": "a",
    "weightsReady": "a",
    "reset": {"joinAfterSeconds": 0, "leaseSeconds": 5},
}
OLD_STATUS: Json = {
    "targetEpoch": 3,
    "epoch": 3,
    "weightsVersion": "a",
    "weightUpdate": {"serial": 1, "id": "0" * 32, "open": False},
    "engines": {"total": 1, "converged": 1, "bypassed": 1, "summary": "1/1"},
    "externalEngines": [{"name": "ray", "mode": "Use", "epoch": 3}],
    "reset": {"epoch": 3, "origin": "Trainer", "weightsVersion": "a", "listed": True},
}


@pytest.mark.parametrize(("kind", "path", "spec"), GONE, ids=IDS)
@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Strict"])
def test_refused_whatever_validation_a_client_asks_for(plane: ControlPlane, kind: str, path: str, spec: Json, validation: str) -> None:
    collection = (POOLS if kind == "KVCachePool" else ENGINES).format("default")
    status, answer = send(plane, "POST", f"{collection}?fieldValidation={validation}", manifest(kind, "old", spec))
    assert status == 422, answer
    assert f"spec.{path}: Forbidden: spec.{path} is no longer supported: " in answer["message"]
    assert "remove it" in answer["message"]


@pytest.mark.parametrize(("kind", "path", "spec"), GONE, ids=IDS)
@pytest.mark.parametrize("flags", [[], ["--validate=false"], ["--server-side", "--validate=false"]], ids=["plain", "lax", "server-side"])
def test_refused_by_kubectl_apply(plane: ControlPlane, kind: str, path: str, spec: Json, flags: list[str]) -> None:
    message = kubectl(plane, "apply", *flags, "-f", "-", stdin=json.dumps(manifest(kind, "old", spec)), ok=False)
    assert f"spec.{path} is no longer supported: " in message


def test_refused_in_a_patch_of_an_object_without_them(plane: ControlPlane, namespace: Namespace) -> None:
    namespace.create_pool("policy", local=LOCAL)
    for patch in ('{"spec":{"resetEpoch":1,"weightsVersion":"b"}}', '{"spec":{"reset":{"joinAfterSeconds":60}}}'):
        message = kubectl(plane, "-n", namespace.name, "patch", "kvp/policy", "--type=merge", "-p", patch, ok=False)
        assert "is no longer supported: weights name themselves" in message
    assert namespace.pool("policy")["spec"]["resetEpoch"] == 0


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """A cluster in which pools and an engine were stored under CRDs that had the fields, and which has ours now."""
    with ControlPlane(tmp_path_factory.mktemp("up") / "cp") as plane:
        for file in sorted((Path(__file__).parents[2] / "crds").glob("*.yaml")):
            crd = as_before(yaml.safe_load(file.read_text()))
            plane.api.apply(f"{CRDS}/{crd['metadata']['name']}", crd)
            plural = crd["spec"]["names"]["plural"]
            eventually(lambda p=plural: plane.api.ok(f"/apis/epochkv.io/v1alpha1/{p}"), f"{plural} served")
        space = Namespace(plane, "default")
        for name in ("policy", "applied", "deleted"):
            kubectl(plane, "apply", "-f", "-", stdin=json.dumps(manifest("KVCachePool", name, OLD_POOL)))
            space.patch(POOLS, name, {"status": OLD_STATUS}, "/status")
        space.create_engine("rollout", model={"name": "tiny"}, poolRef={"name": "policy"})
        install_crds(plane)
        new = manifest("KVCachePool", "new", {"local": LOCAL, "weightsVersion": "a"})
        probe = f"{POOLS.format('default')}?dryRun=All&fieldValidation=Strict"
        eventually(lambda: send(plane, "POST", probe, new)[0] == 422, "the new schema in force")
        yield space


def as_before(crd: Json) -> Json:
    """The CRD with the fields as they were, and a status that takes anything."""
    crd = copy.deepcopy(crd)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["status"]["x-kubernetes-preserve-unknown-fields"] = True
    for path, old in BEFORE[crd["spec"]["names"]["plural"]].items():
        *steps, name = path.split(".")
        holder = schema["spec"]
        for step in steps:
            holder = holder["properties"][step]
        assert name in holder["properties"], f"{path} is not declared any more, so nobody refuses it"
        holder["properties"][name] = old
    if "reset" in schema["spec"]["properties"]:
        schema["spec"]["properties"]["reset"]["default"] |= {"joinAfterSeconds": 60, "onLocalReset": "Private"}
    return crd


def test_what_was_stored_with_them_is_still_there_and_read(upgraded: Namespace) -> None:
    pool, engine = upgraded.pool("policy"), upgraded.get(ENGINES, "rollout")
    assert (pool["spec"]["weightsVersion"], pool["spec"]["reset"]["joinAfterSeconds"]) == ("a", 0)
    assert engine is not None
    assert engine["spec"]["weightsSource"] == "Pushed", "a default that was stored"
    assert parse_pool(pool).spec.reset_epoch == 3
    assert parse_engine(engine).spec.model.name == "tiny"


def test_what_was_stored_with_them_can_be_changed_in_every_other_field(upgraded: Namespace) -> None:
    plane = upgraded.plane
    upgraded.bump("policy", 4)
    pool = upgraded.pool("policy")
    pool["spec"]["reset"]["leaseSeconds"] = 6
    pool["metadata"].pop("managedFields", None)
    kubectl(plane, "replace", "-f", "-", stdin=json.dumps(pool))
    kubectl(plane, "annotate", "kvp/policy", "note=x")
    upgraded.patch(POOLS, "policy", {"status": {"targetEpoch": 4, "engines": {"summary": "2/2"}}}, "/status")
    kubectl(plane, "scale", "ie/rollout", "--replicas=3")
    upgraded.patch(ENGINES, "rollout", {"status": {"replicas": 3}}, "/status")
    found = upgraded.pool("policy")
    assert (found["spec"]["resetEpoch"], found["spec"]["reset"]["leaseSeconds"], found["spec"]["weightsVersion"]) == (4, 6, "a")
    assert found["status"] == {
        "targetEpoch": 4,
        "epoch": 3,
        "engines": {"total": 1, "converged": 1, "summary": "2/2", "carriedRequests": 0},
        "externalEngines": [{"name": "ray", "epoch": 3}],
        "reset": {"epoch": 3, "origin": "Trainer"},
    }, "what the status had of them is gone"


def test_what_was_stored_with_them_refuses_another_value(upgraded: Namespace) -> None:
    message = kubectl(upgraded.plane, "patch", "kvp/applied", "--type=merge", "-p", '{"spec":{"weightsVersion":"b"}}', ok=False)
    assert "spec.weightsVersion is no longer supported: weights name themselves; remove it" in message
    message = kubectl(upgraded.plane, "patch", "ie/rollout", "--type=merge", "-p", '{"spec":{"weightsSource":"Model"}}', ok=False)
    assert "spec.weightsSource is no longer supported: " in message


def test_what_was_stored_with_them_loses_them_with_the_next_manifest(upgraded: Namespace) -> None:
    """`kubectl apply` of the same manifest goes on working, and of one without the fields takes them away."""
    kubectl(upgraded.plane, "apply", "-f", "-", stdin=json.dumps(manifest("KVCachePool", "applied", {**OLD_POOL, "resetEpoch": 5})))
    assert upgraded.pool("applied")["spec"]["weightsVersion"] == "a"
    kubectl(upgraded.plane, "apply", "-f", "-", stdin=json.dumps(manifest("KVCachePool", "applied", {"local": LOCAL, "resetEpoch": 6})))
    spec = upgraded.pool("applied")["spec"]
    assert not {"weightsVersion", "weightsReady"} & set(spec)
    assert "joinAfterSeconds" not in spec["reset"]
    assert spec["resetEpoch"] == 6


def test_what_was_stored_with_them_can_be_deleted(upgraded: Namespace) -> None:
    upgraded.delete(POOLS, "deleted")
    eventually(lambda: upgraded.pool("deleted") is None, "deleted")
