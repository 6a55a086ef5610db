"""Engines that nobody provisioned: the pool's ConfigMap and Secret are all they need, status shows them, leases count them out."""

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import Pool, WeightsDiverged
from epochkv_fence.connection import Connection
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster import operator_harness
from tests.cluster.fence_engines import FIRST_WEIGHTS, FenceEngine
from tests.cluster.operator_harness import CHILDREN, LEASES, POOLS, Namespace, OperatorProcess, becomes, condition, leading_operator
from tests.cluster.test_operator_reset import published

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}


def mounted(space: Namespace, directory: Path) -> Connection:
    """What `status.endpoints` names, as files; the Secret lies beside the ConfigMap instead of where a pod mounts it."""
    endpoints = eventually(lambda: space.status("policy").get("endpoints"), "endpoints in status")
    secret = eventually(lambda: space.get(CHILDREN["secrets"], endpoints["secret"]), "the Secret")
    config = eventually(lambda: space.get(CHILDREN["configmaps"], endpoints["configMap"]), "the ConfigMap")
    for name, value in secret["data"].items():
        (directory / name).write_bytes(base64.b64decode(value))
    document = json.loads(config["data"]["connection.json"])
    assert Connection.load(document).hub.credentials_dir == "/etc/epochkv/fence"
    document["hub"]["credentials_dir"] = "."
    (directory / "connection.json").write_text(json.dumps(document))
    return Connection.load(directory)


def joined(connection: Connection, name: str, *, rank: int = 0) -> FenceEngine:
    hub, keys, pool = connection.hub.endpoint, connection.client_keys, connection.pool.uid
    return FenceEngine(hub, keys(), name, pod="", rank=rank, credentials=keys, pool=pool)


def external(space: Namespace) -> dict[str, dict[str, Any]]:
    return {engine["name"]: engine for engine in space.status("policy").get("externalEngines") or []}


def test_they_join_and_leave(namespace: Namespace, operator: OperatorProcess, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        pool = namespace.create_pool("policy", **POOL)
        connection = mounted(namespace, tmp_path)
        assert (connection.pool.name, connection.pool.uid) == ("policy", pool["metadata"]["uid"])
        assert len(connection.root_secret()) == 32
        ranks = [stack.enter_context(joined(connection, "ray-rollout", rank=rank)) for rank in range(2)]
        twins = [stack.enter_context(joined(connection, "eval")) for _ in range(2)]
        eventually(lambda: [entry.get("weights") for entry in external(namespace).values()] == ["3f2a9c1e"] * 4, "four")
        names = external(namespace)
        assert {"ray-rollout", "ray-rollout/1"} < set(names)
        assert {name.partition("#")[0] for name in names} == {"ray-rollout", "ray-rollout/1", "eval"}
        assert {name.partition("#")[2] for name in names if name.startswith("eval")} == {
            engine.agent._agent.instance.hex()[:8] for engine in twins
        }
        expected = {"name": "ray-rollout/1", "epoch": 0, "weights": "3f2a9c1e", "rank": 1, "oldEpochRequests": 0}
        assert names["ray-rollout/1"] | {"epoch": 0} == expected

        assert twins[1].agent.stop(5.0)
        eventually(lambda: "eval" in external(namespace), "the last of its name needs no suffix")
        assert ranks[1].agent.stop(5.0)
        left = eventually(lambda: found if len(found := external(namespace)) == 2 else None, "gone with its lease")
        assert set(left) == {"ray-rollout", "eval"}
        namespace.bump("policy", 1)
        eventually(lambda: namespace.status("policy").get("epoch") == 1, "those that left hold nothing up")


def test_an_engine_that_lost_nothing_brings_a_restored_pool_back_up(namespace: Namespace, tmp_path: Path) -> None:
    """The pool object comes back from a backup with an older status, under live engines of the same pool (etcd was restored): they
    report a higher epoch than is recorded, and the pool heals itself. The API server refuses that status from anybody else, so the
    operator meets it as what a new operator process reads.
    """
    with leading_operator(namespace, tmp_path, lease_duration_seconds=operator_harness.TAKEOVER_SECONDS) as operator:
        namespace.create_pool("policy", **POOL)
        connection = mounted(namespace, tmp_path)
        with joined(connection, "ray") as engine:
            namespace.bump("policy", 3)
            eventually(lambda: engine.epoch == 3, "there")
            eventually(lambda: namespace.status("policy").get("epoch") == 3, "published")
            operator.process.kill()
            restore(namespace, "policy", 1)
            assert (namespace.status("policy")["epoch"], namespace.pool("policy")["spec"]["resetEpoch"]) == (1, 1)
            operator.start().wait_ready()
            eventually(lambda: namespace.status("policy").get("epoch") == 3, "healed", 60)
            status = eventually(lambda: s if (s := namespace.status("policy")).get("reset", {}).get("epoch") == 3 else None, "reported")
            assert status["reset"]["origin"] == "Engine"
            assert engine.epoch == 3
            assert 2 not in engine.adopted


def restore(space: Namespace, name: str, epoch: int) -> None:
    """The pool as it was at an older epoch, past the rules of the CRD: they are taken off and put back."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvcachepools.epochkv.io"

    def schemas(crd: dict[str, Any]) -> list[dict[str, Any]]:
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        return [schema, schema["properties"]["spec"]]

    crd = space.request("GET", path)
    rules = [schema.pop("x-kubernetes-validations") for schema in schemas(crd)]
    space.request("PUT", path, crd)

    def lowered() -> bool:
        pool = f"/apis/epochkv.io/v1alpha1/namespaces/{space.name}/kvcachepools/{name}"
        status = {"targetEpoch": epoch, "epoch": epoch, "reset": None}
        for part, body in (("", {"spec": {"resetEpoch": epoch}}), ("/status", {"status": status})):
            answer, _ = space.plane.api.request("PATCH", pool + part, body, "application/merge-patch+json", 15)
            if not 200 <= answer < 300:
                return False
        return True

    try:
        eventually(lowered, "the epoch lowered")
    finally:
        crd = space.request("GET", path)
        for schema, known in zip(schemas(crd), rules, strict=True):
            schema["x-kubernetes-validations"] = known
        space.request("PUT", path, crd)


def test_an_engine_of_a_deleted_pool_raises_no_epoch_of_the_next(namespace: Namespace, operator: OperatorProcess, tmp_path: Path) -> None:
    """It lives on, and is given the new pool's keys, as by a kubelet that refreshes a mounted Secret."""
    old = namespace.create_pool("policy", resetEpoch=7, **POOL)
    with joined(mounted(namespace, tmp_path), "survivor") as survivor:
        eventually(lambda: survivor.epoch == 7 and survivor.leased, "epoch 7")
        root = Connection.load(tmp_path).root_secret()
        namespace.delete(POOLS, "policy")
        eventually(lambda: namespace.pool("policy") is None, "the pool is gone")
        new = namespace.create_pool("policy", **POOL)

        def renewed() -> bool:
            secret = namespace.get(CHILDREN["secrets"], "policy-fence")
            return secret is not None and secret["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]

        eventually(renewed, "a Secret of the new pool")
        assert mounted(namespace, tmp_path).root_secret() != root
        eventually(lambda: survivor.agent.counters["key_changes"] > 0, "it has the new keys", 60)
        eventually(lambda: not survivor.leased, "its old pool's lease is over")
        before = survivor.agent.counters["refused_by_hub"]
        eventually(lambda: survivor.agent.counters["refused_by_hub"] > before, "it is of another pool")
        namespace.bump("policy", 1)
        eventually(lambda: namespace.status("policy").get("epoch") == 1, "epoch 1")
        assert namespace.status("policy")["targetEpoch"] == 1
        assert external(namespace) == {}
        assert not survivor.leased
        assert survivor.epoch == 7
        assert old["metadata"]["uid"] != new["metadata"]["uid"]


# ---------------------------------------------------------------------------------------------------------- trainers


@contextlib.contextmanager
def trained(operator: OperatorProcess, space: Namespace, directory: Path, engines: int = 2) -> Iterator[tuple[Pool, list[FenceEngine]]]:
    """A pool with external engines, and a trainer connected to it."""
    operator.wait_ready()
    space.create_pool("policy", **POOL)
    connection = mounted(space, directory)
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(joined(connection, f"ray-{number}")) for number in range(engines)]
        eventually(lambda: all(engine.epoch == 0 for engine in found), "joined")
        yield stack.enter_context(Pool.connect(connection, timeout_s=30)), found


def test_a_trainers_reset_is_in_the_pools_status(namespace: Namespace, operator: OperatorProcess, tmp_path: Path) -> None:
    with trained(operator, namespace, tmp_path) as (pool, engines):
        done = pool.reset(timeout_s=30)
        assert (done.epoch, done.published, done.noop) == (1, True, False)
        # Published means: every engine is there, and the pool object says so already.
        assert {engine.epoch for engine in engines} == {1}
        assert namespace.status("policy")["epoch"] == 1
        status = eventually(lambda: published(namespace, 1), "reported")
        assert status["reset"]["origin"] == "Trainer"
        assert namespace.pool("policy")["spec"]["resetEpoch"] == 0, "the spec is its owner's"
        assert condition(status, "EpochConverged")["reason"] == "Published"
        said = eventually(lambda: namespace.events("EpochPublished"), "an Event")
        assert "asked for by Trainer" in said[0]["note"]
        seen = pool.status()
        assert (seen.target, seen.published, seen.origin) == (1, 1, "Trainer")
        assert {engine.name for engine in seen.engines} == {"ray-0", "ray-1"}
        again = pool.reset(epoch=1, timeout_s=30)
        assert (again.noop, again.published) == (True, True)
        # The spec's turn: origins change hands.
        namespace.bump("policy", 2)
        status = eventually(lambda: published(namespace, 2), "reported")
        assert status["reset"]["origin"] == "Spec"
        assert pool.status().origin == "Spec"


def test_a_push_is_proved_and_labelled_without_an_epoch(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator, trained(operator, namespace, tmp_path) as (pool, engines):
        first, second = FIRST_WEIGHTS, bytes(range(16))
        with pool.weight_update("step-1", timeout_s=30):
            for engine in engines:
                engine.push(second)
        # Labelled means: it is on record already.
        labels = {first.hex(): "before-step-1", second.hex(): "step-1"}
        assert namespace.status("policy")["weightsLabels"] == [{"id": id, "label": label} for id, label in labels.items()]
        found = eventually(
            lambda: w if (w := namespace.status("policy").get("weights") or [{}])[0].get("label") == "step-1" else None, "shown"
        )
        assert [(entry["id"], entry["engines"]) for entry in found] == [(second.hex(), 2)]
        assert namespace.status("policy")["targetEpoch"] == 0, "no epoch was needed for it"
        # Half a push: the one that it missed is named, by the client and by the condition.
        with pytest.raises(WeightsDiverged, match="ray-1") as raised, pool.weight_update("step-2", timeout_s=1):
            engines[0].push(first)
        assert list(raised.value.engines) == ["ray-1"]
        said = becomes(namespace.status, "policy", "WeightsConverged", reason="Updating")
        assert "ray-1 holds 00010203 (step-1) instead of 3f2a9c1e (before-step-1)" in said["message"]
        engines[0].push("rank 1: no answer within 10 s")
        unknown = becomes(namespace.status, "policy", "WeightsConverged", status="Unknown")
        assert "share nothing: ray-0 (rank 1: no answer within 10 s)" in unknown["message"]
        # Back to the weights before, which keep their label over a change of operator.
        engines[0].push(second)
        assert pool.wait_weights(timeout_s=30).groups[0].label == "step-1"
        operator.process.kill()
        namespace.delete(LEASES, "epochkv-operator")
        operator.start().wait_ready()
        eventually(lambda: pool.status().labels == labels, "remembered")
