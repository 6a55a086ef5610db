"""`Progressing`: how a rollout goes, told as a Deployment tells it, with the reason of the pod that holds it up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epochkv_operator.planning.conditions import engine_conditions
from epochkv_operator.planning.context import Observed, Problem
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.status import engine_status
from tests.support.planning import CONTEXT, engine, pool
from tests.unit.operator.cluster_state import (
    CONVERGED,
    NOW,
    POLICY,
    ROLLED_OUT,
    ROLLOUT,
    Json,
    by_type,
    engine_children,
    engine_pod,
    message,
    pod,
    rank,
    ready,
    waiting,
    workload,
)

ROLLING = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}
OVERDUE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "no progress for 4500 s"}
DENIED = {"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'}
QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: requests.memory=9Gi, limited: 8Gi"}
RUNNING = {"containerStatuses": [{"name": "engine", "ready": False, "state": {"running": {}}}]}
CROWDED = {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/3 nodes: Insufficient memory"}
CRASHED = waiting("engine", "CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, restartCount=4)


def counts(updated: int, replicas: int = 2, running: int = 2, *said: Json) -> Json:
    return {"replicas": replicas, "readyReplicas": running, "updatedReplicas": updated, "conditions": list(said)}


def revision(name: str, number: int, second: int | None = None, /, **status: object) -> Json:
    """A pod of the n-th ReplicaSet; later ones are younger, unless `second` says when it was made."""
    made = engine_pod(name, **status)
    made["metadata"]["labels"]["pod-template-hash"] = f"hash{number}"
    made["metadata"]["creationTimestamp"] = f"2026-03-01T12:00:0{number if second is None else second}Z"
    return made


@pytest.mark.parametrize(
    ("status", "pods", "expected", "says"),
    [
        (ready(2), [], ("True", "RolledOut"), "2 of 2 replicas run the current spec"),
        # A pod that is lost later is no rollout: `Available` says it.
        (counts(2, 2, 1, ROLLED_OUT), [revision("a", 1, **CRASHED)], ("True", "RolledOut"), "2 of 2"),
        ({**counts(2, 2, 2, ROLLED_OUT), "observedGeneration": 0}, [], ("True", "RollingOut"), "run the current spec"),
        (counts(1, 2, 2, ROLLING), [], ("True", "RollingOut"), "1 of 2 replicas run the current spec, 1 an older one"),
        (counts(1, 3, 2, ROLLED_OUT), [], ("True", "RollingOut"), "2 an older one"),
        (counts(1, 2, 1, ROLLING), [revision("a", 1), revision("b", 2, **RUNNING)], ("True", "RollingOut"), "pod b runs, but"),
        (
            counts(1, 2, 1, ROLLING),
            [revision("a", 1), revision("b", 2, **waiting("engine", "ImagePullBackOff", "not found"))],
            ("False", "ImagePullFailed"),
            "1 an older one; pod b cannot pull img:1: not found",
        ),
        # What ails the old pods is about to go away.
        (counts(1, 2, 0, ROLLING), [revision("a", 1, **CRASHED), revision("b", 2, **RUNNING)], ("True", "RollingOut"), "pod b runs"),
        # Made in one second: times do not say which is the newer revision.
        (
            counts(1, 2, 1, ROLLING),
            [revision("z", 1, 2), revision("b", 2, **waiting("engine", "ImagePullBackOff", "not found"))],
            ("False", "ImagePullFailed"),
            "pod b cannot pull img:1: not found",
        ),
        (counts(1, 2, 1, OVERDUE), [revision("b", 2, **RUNNING)], ("False", "RolloutStuck"), "no progress for 4500 s"),
        (counts(1, 2, 1, OVERDUE), [revision("b", 2, **CRASHED)], ("False", "CrashLooping"), "last exit 137 (OOMKilled)"),
        (counts(0, 0, 0, ROLLING, DENIED), [], ("False", "PodSecurityDenied"), "violates PodSecurity"),
    ],
)  # fmt: skip
def test_a_rollout(status: Json, pods: list[Json], expected: tuple[str, str], says: str) -> None:
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(engine_children(status), pods, CONVERGED))
    assert by_type(conditions)["Progressing"] == expected
    assert says in message(conditions, "Progressing")


def test_before_the_workload_and_while_somebody_holds_it() -> None:
    nothing = Observed((), (), CONVERGED, Problem("KindNotServed", "no LeaderWorkerSet"))
    assert by_type(engine_conditions(ROLLOUT, POLICY, nothing))["Progressing"] == ("Unknown", "NotCreated")
    [deployment] = engine_children(counts(1, 2, 2, ROLLING))
    held = engine_conditions(ROLLOUT, POLICY, Observed([{**deployment, "spec": {**deployment["spec"], "paused": True}}]))
    assert by_type(held)["Progressing"] == ("Unknown", "Paused")
    assert message(held, "Progressing").endswith("kubectl rollout resume deployment rollout")


def test_a_rollout_does_not_make_an_engine_unready() -> None:
    conditions = engine_conditions(engine("no-pool"), None, Observed(engine_children(counts(1, 2, 2, ROLLING))))
    assert (by_type(conditions)["Ready"], by_type(conditions)["Progressing"]) == (("True", "Ready"), ("True", "RollingOut"))


@pytest.mark.parametrize(
    ("status", "pods"),
    [
        (counts(1, 2, 1, ROLLING), [revision("b", 2, **CRASHED)]),
        (counts(0, 0, 0, ROLLING, QUOTA), []),
        (counts(1, 2, 1, ROLLING), [revision("b", 2, conditions=[CROWDED])]),
    ],
    ids=["killed", "quota", "unschedulable"],
)
def test_messages_about_memory_say_what_was_added(status: Json, pods: list[Json]) -> None:
    """The amounts in them are not those that the user wrote."""
    with_l1 = engine_conditions(ROLLOUT, pool("l1-l2"), Observed(engine_children(status), pods))
    added = (
        "(1Gi of each memory amount are the L1 of KVCachePool policy (spec.local.capacity), which are added to what spec.resources says)"
    )
    for kind in ("Ready", "Available", "Progressing"):
        assert message(with_l1, kind).endswith(added)
    assert "1Gi" not in message(with_l1, "PoolBound")
    without = engine_conditions(ROLLOUT, POLICY, Observed(engine_children(status), pods))
    assert "spec.local" not in message(without, "Available")
    unrelated = engine_conditions(ROLLOUT, pool("l1-l2"), Observed(engine_children(counts(1, 2, 1, ROLLING, DENIED))))
    assert "spec.local" not in message(unrelated, "Available")


def test_what_the_api_server_says_about_memory_is_explained_too() -> None:
    refused = Problem("ApplyRefused", "Deployment rollout: resources.requests: Invalid value: 9Gi: must be less than memory limit of 3Gi")
    conditions = engine_conditions(ROLLOUT, pool("l1-l2"), Observed(engine_children(ready(2)), (), CONVERGED, refused))
    assert message(conditions, "Ready").startswith(refused.message + " (1Gi of each memory amount")


SPANNING = engine({"model": {"name": "big"}, "poolRef": {"name": "policy"}, "replicas": 2, "parallelism": {"tensor": 8, "nodes": 2}})
LWS = replace(CONTEXT, served=frozenset({"LeaderWorkerSet"}))


def group(number: int, index: int, **status: object) -> Json:
    labels = {
        "epochkv.io/engine": "rollout",
        "app.kubernetes.io/component": "engine",
        "leaderworkerset.sigs.k8s.io/worker-index": str(index),
        "leaderworkerset.sigs.k8s.io/template-revision-hash": "r1",
    }
    return pod(f"rollout-nodes-{number}" + (f"-{index}" if index else ""), labels, **status)


def spanning(status: Json, *pods: Json) -> Observed:
    """LeaderWorkerSets do not say which generation their status is about."""
    made = workload(desired_engine(SPANNING, POLICY, LWS), "LeaderWorkerSet", "rollout-nodes", **status)
    del made["status"]["observedGeneration"]
    hub = replace(CONVERGED, engines=[rank("rollout-nodes-0"), rank("rollout-nodes-1")])
    return Observed([made], pods, hub)


@pytest.mark.parametrize(
    ("status", "pods", "available", "progressing"),
    [
        ({**ready(2), "conditions": [{"type": "Available", "status": "True"}]}, [], ("True", "Available"), ("True", "RolledOut")),
        ({}, [], ("False", "Starting"), ("True", "RollingOut")),
        (counts(2, 2, 1, {"type": "Progressing", "status": "True"}), [], ("False", "Starting"), ("True", "RollingOut")),
        (counts(1, 2, 2, {"type": "UpdateInProgress", "status": "True"}), [], ("True", "Updating"), ("True", "RollingOut")),
        (
            counts(2, 2, 1, {"type": "Progressing", "status": "True"}),
            [group(1, 1, **waiting("engine", "ErrImagePull"))],
            ("False", "ImagePullFailed"),
            ("False", "ImagePullFailed"),
        ),
    ],
)
def test_an_engine_that_spans_nodes(status: Json, pods: list[Json], available: tuple[str, str], progressing: tuple[str, str]) -> None:
    conditions = by_type(engine_conditions(SPANNING, POLICY, spanning(status, group(0, 0), group(0, 1), group(1, 0), *pods)))
    assert (conditions["Available"], conditions["Progressing"]) == (available, progressing)


def test_replicas_of_an_engine_that_spans_nodes_are_groups() -> None:
    """What an autoscaler reads: groups, and one pod of each. Only that one speaks with the hub."""
    everyone = [group(number, index) for number in range(2) for index in range(2)]
    status = engine_status(SPANNING, POLICY, spanning(ready(2), *everyone), {}, NOW)
    assert (status["replicas"], status["readyReplicas"], status["epochReplicas"]) == (2, 2, 2)
    leaders = "app.kubernetes.io/component=engine,epochkv.io/engine=rollout,leaderworkerset.sigs.k8s.io/worker-index=0"
    assert status["selector"] == leaders
    assert {condition["type"]: condition["status"] for condition in status["conditions"]}["EpochCurrent"] == "True"
