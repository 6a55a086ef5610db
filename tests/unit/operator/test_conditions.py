"""Conditions and statuses, as tables: what is observed, and what a user reads."""

from __future__ import annotations

from typing import Any

import pytest

from epochkv_operator.planning.conditions import engine_conditions, pool_conditions
from epochkv_operator.planning.context import HubView, KeysView, Observed, Problem, ReclaimView
from epochkv_operator.planning.engine import desired_engine
from tests.support.planning import CONTEXT, engine, pool
from tests.unit.operator.cluster_state import (
    CONVERGED,
    PODS,
    POLICY,
    ROLLOUT,
    Json,
    by_type,
    engine_children,
    engine_pod,
    master_pod,
    message,
    pod,
    pool_children,
    rank,
    ready,
    waiting,
    workload,
)

DENIED: Json = {
    "replicas": 0,
    "conditions": [
        {
            "type": "ReplicaFailure",
            "status": "True",
            "reason": "FailedCreate",
            "message": 'pods "x" is forbidden: violates PodSecurity "restricted:latest"',
        }
    ],
}
STUCK = {
    "replicas": 1,
    "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "no progress"}],
}
UNSCHEDULABLE = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]}


@pytest.mark.parametrize(
    ("master", "pods", "reason", "says"),
    [
        (ready(1), [], "Available", "1 of 1 replicas of the master are ready"),
        ({"replicas": 1}, [], "Starting", "0 of 1 replicas"),
        ({"replicas": 1}, [master_pod(phase="Pending")], "Starting", "are ready: pod policy-master-x is pending"),
        (
            {"replicas": 1},
            [master_pod(**waiting("master", "ContainerCreating"))],
            "Starting",
            "waits for its image, volumes or network; kubectl describe pod policy-master-x",
        ),
        (
            {"replicas": 1},
            [master_pod(containerStatuses=[{"name": "master", "ready": False, "state": {"running": {}}}])],
            "Starting",
            "pod policy-master-x runs, but its readiness probe does not succeed yet",
        ),
        ({**ready(1), "observedGeneration": 0}, [], "Starting", "the master"),
        (
            {"replicas": 1},
            [master_pod(**waiting("master", "ImagePullBackOff", "not found"))],
            "ImagePullFailed",
            "cannot pull img:1: not found",
        ),
        ({"replicas": 1}, [master_pod(**waiting("master", "ErrImageNeverPull"))], "ImagePullFailed", "ErrImageNeverPull"),
        ({"replicas": 1}, [master_pod(**waiting("master", "CreateContainerConfigError", "no secret"))], "StartFailed", "no secret"),
        (
            {"replicas": 1},
            [
                master_pod(
                    **waiting(
                        "master", "CrashLoopBackOff", restartCount=4, lastState={"terminated": {"exitCode": 0, "reason": "Completed"}}
                    )
                )
            ],
            "CrashLooping",
            "restarted 4 times, last exit 0 (Completed)",
        ),
        ({"replicas": 1}, [master_pod(**UNSCHEDULABLE)], "Unschedulable", "fits on no node: 0/1 nodes"),
        (DENIED, [], "PodSecurityDenied", "violates PodSecurity"),
        ({**DENIED, "conditions": [{**DENIED["conditions"][0], "message": "exceeded quota"}]}, [], "CreateFailed", "exceeded quota"),
        (STUCK, [], "RolloutStuck", "no progress"),
    ],
)
def test_master_available(master: Json, pods: list[Json], reason: str, says: str) -> None:
    conditions = pool_conditions(POLICY, Observed(pool_children(master), pods, CONVERGED))
    status = "True" if reason == "Available" else "False"
    assert by_type(conditions)["MasterAvailable"] == (status, reason)
    assert says in message(conditions, "MasterAvailable")
    assert by_type(conditions)["Ready"] == (status, "Ready" if status == "True" else reason)


def test_a_store_whose_pods_are_refused_says_where_to_look() -> None:
    """A StatefulSet tells of refused pods in Events only, so nothing in its status can be quoted."""
    conditions = pool_conditions(POLICY, Observed(pool_children(store={"replicas": 0}), (), CONVERGED))
    assert by_type(conditions)["StoreAvailable"] == ("False", "Starting")
    assert "it has no pod; if that lasts, kubectl describe statefulset policy-store says why" in message(conditions, "StoreAvailable")


def test_troubles_of_other_pods_are_not_ours() -> None:
    """Pods of another pool, namespace or component, and pods that are going."""
    trouble = waiting("master", "ImagePullBackOff")
    mine = master_pod(**trouble)
    others = [
        {**mine, "metadata": {**mine["metadata"], "namespace": "other"}},
        pod("a", {"epochkv.io/pool": "other", "app.kubernetes.io/component": "master"}, **trouble),
        pod("b", {"epochkv.io/pool": "policy", "app.kubernetes.io/component": "engine"}, **trouble),
        {**mine, "metadata": {**mine["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ]
    conditions = pool_conditions(POLICY, Observed(pool_children({"replicas": 1}), others, CONVERGED))
    assert by_type(conditions)["MasterAvailable"] == ("False", "Starting")


def test_children_of_a_namesake_do_not_count() -> None:
    children = pool_children()
    for child in children:
        child["metadata"] = {
            **child["metadata"],
            "ownerReferences": [{**child["metadata"]["ownerReferences"][0], "uid": "of-a-deleted-namesake"}],
        }
    conditions = by_type(pool_conditions(POLICY, Observed(children, (), CONVERGED)))
    assert conditions["MasterAvailable"] == conditions["StoreAvailable"] == ("False", "NotCreated")


@pytest.mark.parametrize(
    ("hub", "status", "reason", "says"),
    [
        (None, "Unknown", "HubUnavailable", "serve without shared KV"),
        (HubView(6, 6), "False", "Recording", "epoch 7 is asked for, 6 is recorded"),
        (HubView(7, 6), "False", "WaitingForEngines", "7 is recorded, 6 is published"),
        (HubView(7, 6, laggards=[("a", "LeaseRunning")]), "False", "WaitingForEngines", "waiting for a (LeaseRunning)"),
        (HubView(7, 6, laggards=[(str(n), "Slow") for n in range(9)]), "False", "WaitingForEngines", "and 5 more"),
        (CONVERGED, "True", "Published", "no engine uses an epoch below 7"),
        (HubView(9, 8), "False", "WaitingForEngines", "9 is recorded"),
        (HubView(7, 7, origin="Spec"), "True", "Published", "no engine uses an epoch below 7"),
        # A trainer or an engine asked for more than the spec, or was first with the same.
        (HubView(9, 9), "True", "EpochAhead", "7 resets nothing: somebody else raised the pool to epoch 9. Set 10 or higher"),
        (
            HubView(9, 9, origin="Trainer"),
            "True",
            "EpochAhead",
            "no engine uses an epoch below 9; spec.resetEpoch 7 resets nothing: a trainer raised",
        ),
        (HubView(7, 7, origin="Trainer"), "True", "EpochAhead", "7 resets nothing: a trainer raised the pool to epoch 7. Set 8"),
        (
            HubView(7, 7, origin="Engine"),
            "True",
            "EpochAhead",
            "an engine whose own caches were reset raised the pool to epoch 7. Set 8 or higher",
        ),
    ],
)
def test_epoch_converged(hub: HubView | None, status: str, reason: str, says: str) -> None:
    conditions = pool_conditions(POLICY, Observed(pool_children(), (), hub))
    assert by_type(conditions)["EpochConverged"] == (status, reason)
    assert by_type(conditions)["Ready"][0] == status
    assert says in message(conditions, "EpochConverged")


def test_conditions_that_do_not_apply_are_absent() -> None:
    hub = HubView(0, 0)
    for spec in ("l1", "external"):
        found = set(by_type(pool_conditions(pool(spec), Observed(hub=hub))))
        assert found - {"Reclaimed"} == {"Ready", "EpochConverged", "WeightsConverged", "TiersUsable", "Drained"}
        assert ("Reclaimed" in found) == (spec == "external")
    alone = engine("no-pool")
    children = [workload(desired_engine(alone, None, CONTEXT), "Deployment", "rollout", **ready(1))]
    assert by_type(engine_conditions(alone, None, Observed(children))) == {
        "Ready": ("True", "Ready"),
        "Available": ("True", "Available"),
        "Progressing": ("True", "RolledOut"),
    }


@pytest.mark.parametrize(
    ("status", "pods", "reason"),
    [
        (ready(2), [], "Available"),
        ({"replicas": 2, "readyReplicas": 1, "updatedReplicas": 2}, [], "Starting"),
        ({"replicas": 2, "readyReplicas": 2, "updatedReplicas": 1}, [], "Updating"),
        ({"replicas": 2, "updatedReplicas": 2}, [engine_pod("p", **waiting("engine", "ImagePullBackOff"))], "ImagePullFailed"),
        (DENIED, [], "PodSecurityDenied"),
    ],
)
def test_engine_available(status: Json, pods: list[Json], reason: str) -> None:
    conditions = by_type(engine_conditions(ROLLOUT, POLICY, Observed(engine_children(status), pods, CONVERGED)))
    assert conditions["Available"] == ("True" if reason in ("Available", "Updating") else "False", reason)


@pytest.mark.parametrize(
    ("hub", "pods", "status", "reason"),
    [
        (None, PODS, "Unknown", "HubUnavailable"),
        (HubView(7, 7, [rank("p0"), rank("p1")]), PODS, "True", "Current"),
        (HubView(7, 6, [rank("p0"), rank("p1", 6)]), PODS, "False", "Advancing"),
        (HubView(7, 6, [rank("p0"), rank("p1", None)]), PODS, "False", "Advancing"),
        (HubView(7, 6, [rank("p0"), rank("p1"), rank("p1", 6, rank=1)]), PODS, "False", "Advancing"),
        (HubView(7, 7, [rank("p0")]), PODS, "False", "NotReporting"),
        (HubView(7, 7, [rank("p0"), rank("gone")]), [PODS[0]], "False", "Advancing"),  # the second pod does not exist yet
    ],
)
def test_epoch_current(hub: HubView | None, pods: list[Json], status: str, reason: str) -> None:
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(engine_children(ready(2)), pods, hub))
    assert by_type(conditions)["EpochCurrent"] == (status, reason)
    assert by_type(conditions)["PoolBound"] == ("True", "Bound")
    assert by_type(conditions)["Ready"][0] == status


@pytest.mark.parametrize("going", [False, True], ids=["missing", "being-deleted"])
def test_pool_not_found(going: bool) -> None:
    """The engine serves; the condition says what is missing and what to do."""
    target = pool("l1-l2", deletionTimestamp="2026-01-01T00:00:00Z") if going else None
    conditions = engine_conditions(ROLLOUT, target, Observed(engine_children(ready(2)), PODS))
    assert by_type(conditions) == {
        "Ready": ("False", "PoolNotFound"),
        "Available": ("True", "Available"),
        "PoolBound": ("False", "PoolNotFound"),
        "EpochCurrent": ("False", "PoolNotFound"),
        "Progressing": ("True", "RolledOut"),
    }
    assert "KVCachePool rl/policy does not exist" in message(conditions, "PoolBound")
    assert "create the pool" in message(conditions, "PoolBound")


def test_drained() -> None:
    running = [rank("p0", old_epoch_requests=2), rank("p1"), rank("p2", old_epoch_requests=1)]
    for engines, expected, says in (
        (running, ("False", "OldEpochRequests"), "3 requests were admitted under an older epoch"),
        (running[1:2], ("True", "Drained"), "no request runs that was admitted before epoch 7"),
        ([], ("True", "Drained"), "epoch 7"),
    ):
        conditions = pool_conditions(POLICY, Observed(pool_children(), (), HubView(7, 7, engines)))
        assert by_type(conditions)["Drained"] == expected
        assert says in message(conditions, "Drained")
        assert by_type(conditions)["Ready"] == ("True", "Ready")


STORED = {"mooncake": {"store": {"segmentSize": "1Gi"}}}


@pytest.mark.parametrize(
    ("spec", "reclaim", "expected", "says"),
    [
        ({"distributed": STORED}, ReclaimView(7, 12, 4096), ("True", "Reclaimed"), "below 7; 12 keys and 4096 bytes were given back"),
        ({"distributed": STORED}, ReclaimView(7), ("True", "Reclaimed"), "nothing to give back"),
        ({"distributed": STORED}, ReclaimView(6, 3), ("False", "Reclaiming"), "3 keys and 0 bytes were given back so far"),
        (
            {"distributed": STORED, "reset": {"reclaimPolicy": "RemoveAll"}},
            ReclaimView(6, wipe_failed=True),
            ("False", "WipeFailed"),
            "is the master reachable on its admin port?",
        ),
        ({"distributed": {"external": {"masterAddress": "a:1"}}}, ReclaimView(6), ("False", "NoEngine"), "none is connected"),
        ({"distributed": STORED, "reset": {"reclaimPolicy": "Retain"}}, ReclaimView(0), None, ""),
        ({"local": {"capacity": "1Gi"}}, ReclaimView(0), None, ""),
    ],
)
def test_reclaimed(spec: Json, reclaim: ReclaimView, expected: Any, says: str) -> None:
    conditions = pool_conditions(pool(spec), Observed(hub=HubView(7, 7, reclaim=reclaim)))
    assert by_type(conditions).get("Reclaimed") == expected
    if says:
        assert says in message(conditions, "Reclaimed")


@pytest.mark.parametrize(
    ("keys", "expected", "says"),
    [
        (None, ("Unknown", "HubUnavailable"), ""),
        (KeysView(1), ("False", "Rotating"), "key generation 2 is asked for, 1 is in the Secret"),
        (KeysView(2), ("True", "Rotated"), "only the key pair of generation 2"),
        (KeysView(2, 2, ("ray-1", "p0")), ("False", "OldKeyInUse"), "still used by ray-1, p0"),
        (KeysView(2, 2), ("False", "OldKeyInUse"), "kubectl patch secret policy-fence -n rl --type=json"),
    ],
)
def test_keys_rotated(keys: KeysView | None, expected: Any, says: str) -> None:
    conditions = pool_conditions(pool({"local": {"capacity": "1Gi"}, "keys": {"generation": 2}}), Observed(hub=HubView(7, 7, keys=keys)))
    assert by_type(conditions)["KeysRotated"] == expected
    assert says in message(conditions, "KeysRotated")
    assert by_type(conditions)["Ready"] == ("True", "Ready")


def test_scaled_to_zero_is_ready_and_does_not_serve() -> None:
    idle = engine({"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, "replicas": 0})
    conditions = by_type(engine_conditions(idle, POLICY, Observed(engine_children({}, 0, idle), (), CONVERGED)))
    assert conditions["Ready"] == conditions["EpochCurrent"] == ("True", "ScaledToZero")
    assert conditions["Available"] == ("False", "ScaledToZero"), "nothing serves"


def test_a_problem_of_the_plan_comes_first() -> None:
    trouble = Problem("InvalidTemplate", "spec.template.spec.containers[engine].command belongs to the operator: use spec.args")
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(engine_children(ready(2)), PODS, None, trouble))
    assert by_type(conditions)["Ready"] == ("False", "InvalidTemplate")
    assert [condition.type for condition in conditions] == ["Ready", "Available", "PoolBound", "EpochCurrent", "Progressing", "TiersUsable"]
    assert message(conditions, "Ready") == trouble.message
    assert by_type(pool_conditions(POLICY, Observed(pool_children(), (), CONVERGED, trouble)))["Ready"] == ("False", "InvalidTemplate")
