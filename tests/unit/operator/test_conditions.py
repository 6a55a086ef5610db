"""Conditions and statuses, as tables: what is observed, and what a user reads."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from epochkv_operator.planning.conditions import engine_conditions, pool_conditions
from epochkv_operator.planning.context import HubEngine, HubView, KeysView, Observed, Problem, ReclaimView
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.pool import desired_pool
from epochkv_operator.planning.status import engine_status, pool_status
from tests.support.planning import CONTEXT, engine, one, pool

Json = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
POLICY, ROLLOUT = pool({"resetEpoch": 7, "distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}}}}), engine()
SEEN = {"observedGeneration": 1}
CONVERGED = HubView(target=7, published=7)


def workload(objects: list[Json], kind: str, name: str, **status: Any) -> Json:
    obj = one(objects, kind, name)
    return {**obj, "metadata": {**obj["metadata"], "generation": 1}, "status": {**SEEN, **status}}


def ready(count: int) -> Json:
    return {"replicas": count, "readyReplicas": count, "updatedReplicas": count}


def pool_children(master: Json | None = None, store: Json | None = None) -> list[Json]:
    objects = desired_pool(POLICY, CONTEXT)
    return [
        workload(objects, "Deployment", "policy-master", **(ready(1) if master is None else master)),
        workload(objects, "StatefulSet", "policy-store", **(ready(1) if store is None else store)),
    ]


def engine_children(status: Json, replicas: int = 2, wanted: Any = None) -> list[Json]:
    deployment = workload(desired_engine(wanted or ROLLOUT, POLICY, CONTEXT), "Deployment", "rollout", **status)
    return [{**deployment, "spec": {**deployment["spec"], "replicas": replicas}}]


def pod(name: str, labels: Json, **status: Any) -> Json:
    return {"kind": "Pod", "metadata": {"name": name, "namespace": "rl", "labels": labels}, "status": status}


def engine_pod(name: str, **status: Any) -> Json:
    return pod(name, {"epochkv.io/engine": "rollout", "app.kubernetes.io/component": "engine"}, **status)


def master_pod(**status: Any) -> Json:
    return pod("policy-master-x", {"epochkv.io/pool": "policy", "app.kubernetes.io/component": "master"}, **status)


def waiting(container: str, reason: str, message: str = "", **extra: Any) -> Json:
    state = {"name": container, "image": "img:1", "state": {"waiting": {"reason": reason, "message": message}}, **extra}
    return {"containerStatuses": [state]}


def rank(name: str, epoch: int | None = 7, **extra: Any) -> HubEngine:
    return HubEngine(engine="rollout", pod=name, rank=extra.pop("rank", 0), epoch=epoch, weights=extra.pop("weights", "a" * 32), **extra)


def by_type(conditions: Any) -> Json:
    return {condition.type: (condition.status, condition.reason) for condition in conditions}


def message(conditions: Any, kind: str) -> str:
    return next(str(condition.message) for condition in conditions if condition.type == kind)


DENIED = {
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
        (HubView(9, 9), "True", "EpochAhead", "somebody else asked for; spec.resetEpoch 7 resets nothing: it is below; to reset, set 10"),
        (HubView(9, 9, origin="Trainer"), "True", "EpochAhead", "no engine uses an epoch below 9, which a trainer asked for"),
        (HubView(7, 7, origin="Trainer"), "True", "EpochAhead", "spec.resetEpoch 7 resets nothing: that epoch was out already; to reset"),
        (HubView(7, 7, origin="Engine"), "True", "EpochAhead", "set 8 or higher"),
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
        assert found - {"Reclaimed"} == {"Ready", "EpochConverged", "WeightsConverged", "Drained"}
        assert ("Reclaimed" in found) == (spec == "external")
    alone = engine("no-pool")
    children = [workload(desired_engine(alone, None, CONTEXT), "Deployment", "rollout", **ready(1))]
    assert by_type(engine_conditions(alone, None, Observed(children))) == {
        "Ready": ("True", "Ready"),
        "Available": ("True", "Available"),
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


PODS = [engine_pod("p0"), engine_pod("p1")]


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
    }
    assert "KVCachePool rl/policy does not exist" in message(conditions, "PoolBound")
    assert "create the pool" in message(conditions, "PoolBound")


def test_drained() -> None:
    running = [rank("p0", carried=2), rank("p1"), rank("p2", carried=1)]
    for engines, expected, says in (
        (running, ("False", "CarriedRequests"), "3 requests were admitted under an older epoch"),
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


def test_reset_of_a_status_that_knows_more_is_left_alone() -> None:
    """The authority writes target and origin first; a view from before must not put the older reset back."""
    before = {"targetEpoch": 8, "epoch": 7, "weightsLabels": [{"id": "a" * 32, "label": "a"}], "reset": {"epoch": 8, "origin": "Trainer"}}
    stale = HubView(7, 7, reset_epoch=7, reset_started=NOW, reset_completed=NOW, origin="Spec")
    status = pool_status(POLICY, Observed(pool_children(), (), stale), CONTEXT, before, NOW)
    assert (status["reset"], status["targetEpoch"], status["weightsLabels"]) == (before["reset"], 8, before["weightsLabels"])
    newer = HubView(
        8, 8, reset_epoch=8, reset_started=NOW, reset_completed=NOW, reset_milliseconds=9
    )  # a hub that does not know the origin
    status = pool_status(POLICY, Observed(pool_children(), (), newer), CONTEXT, before, NOW)
    assert status["reset"] == {
        "epoch": 8,
        "origin": "Trainer",
        "startTime": "2026-03-01T12:00:00.123Z",
        "completionTime": "2026-03-01T12:00:00.123Z",
        "durationMilliseconds": 9,
    }


def test_external_engines_of_one_name_are_told_apart() -> None:
    ranks = [HubEngine("ray", "", number, 7, boot=f"{number:08x}") for number in range(2)]
    twins = [HubEngine("sim", "", 0, epoch, boot=boot) for epoch, boot in ((7, "aaaaaaaa"), (6, "bbbbbbbb"))]
    status = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 6, [*ranks, *twins])), CONTEXT, {}, NOW)
    assert [(engine["name"], engine["epoch"]) for engine in status["externalEngines"]] == [
        ("ray", 7),
        ("ray/1", 7),
        ("sim#aaaaaaaa", 7),
        ("sim#bbbbbbbb", 6),
    ]
    assert status["engines"]["summary"] == "3/4"


def test_what_was_reclaimed_survives_a_new_operator() -> None:
    done = HubView(7, 7, reclaim=ReclaimView(7, 12, 4096, NOW))
    first = pool_status(POLICY, Observed(pool_children(), (), done), CONTEXT, {}, NOW)
    assert first["reclaim"] == {"policy": "Delete", "epoch": 7, "keys": 12, "bytes": 4096, "completionTime": "2026-03-01T12:00:00Z"}
    again = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, first, NOW)
    assert again["reclaim"] == first["reclaim"]
    assert next(item for item in again["conditions"] if item["type"] == "Reclaimed")["status"] == "True"
    later = pool_status(POLICY, Observed(pool_children(), (), HubView(8, 8)), CONTEXT, first, NOW)
    assert later["reclaim"] == {"policy": "Delete", "epoch": 7, "keys": 0, "bytes": 0}


def test_scaled_to_zero_is_ready() -> None:
    idle = engine({"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, "replicas": 0})
    conditions = by_type(engine_conditions(idle, POLICY, Observed(engine_children({}, 0, idle), (), CONVERGED)))
    assert conditions["Available"] == conditions["EpochCurrent"] == ("True", "ScaledToZero")
    assert conditions["Ready"] == ("True", "Ready")


def test_a_problem_of_the_plan_comes_first() -> None:
    trouble = Problem("InvalidTemplate", "spec.template.spec.containers[engine].command belongs to the operator: use spec.args")
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(engine_children(ready(2)), PODS, None, trouble))
    assert by_type(conditions)["Ready"] == ("False", "InvalidTemplate")
    assert [condition.type for condition in conditions] == ["Ready", "Available", "PoolBound", "EpochCurrent"]
    assert message(conditions, "Ready") == trouble.message
    assert by_type(pool_conditions(POLICY, Observed(pool_children(), (), CONVERGED, trouble)))["Ready"] == ("False", "InvalidTemplate")


def test_transition_times_move_only_on_change() -> None:
    observed = Observed(pool_children(), (), HubView(7, 6, reclaim=ReclaimView(epoch=6)))
    first = pool_status(POLICY, observed, CONTEXT, {}, NOW)
    later = NOW + timedelta(seconds=90)
    assert pool_status(POLICY, observed, CONTEXT, first, later) == first
    nothing_left = replace(CONVERGED, reclaim=ReclaimView(epoch=7))
    done = pool_status(POLICY, Observed(pool_children(), (), nothing_left), CONTEXT, first, later)
    times = {condition["type"]: condition["lastTransitionTime"] for condition in done["conditions"]}
    assert times == {
        "Ready": "2026-03-01T12:01:30Z",
        "EpochConverged": "2026-03-01T12:01:30Z",
        "MasterAvailable": "2026-03-01T12:00:00Z",
        "StoreAvailable": "2026-03-01T12:00:00Z",
        "WeightsConverged": "2026-03-01T12:00:00Z",
        "Drained": "2026-03-01T12:00:00Z",
        "Reclaimed": "2026-03-01T12:00:00Z",
    }


def test_pool_status_in_full() -> None:
    hub = HubView(
        target=8,
        published=7,
        engines=[
            rank("p0", 8, carried=2),
            rank("p1", 7),
            HubEngine("trainer-a", "ray-1", 3, None, 1),
            HubEngine("trainer-b", "", 0, 8, weights="b" * 32),
        ],
        laggards=[("p1", "Behind"), ("ray-1/3", "NotAssigned")],
        reset_epoch=8,
        reset_started=NOW,
    )
    status = pool_status(POLICY, Observed(pool_children(), PODS, hub), CONTEXT, {"targetEpoch": 7, "epoch": 7, "granting": True}, NOW)
    assert (status["targetEpoch"], status["epoch"], status["granting"]) == (8, 7, True)
    assert status["engines"] == {"total": 4, "converged": 2, "carriedRequests": 3, "summary": "2/4"}
    assert status["externalEngines"] == [
        {"name": "ray-1/3", "rank": 3, "carried": 1},
        {"name": "trainer-b", "weights": "bbbbbbbb", "epoch": 8, "rank": 0, "carried": 0},
    ]
    assert status["reset"] == {
        "epoch": 8,
        "startTime": "2026-03-01T12:00:00.123Z",
        "laggards": [{"name": "p1", "reason": "Behind"}, {"name": "ray-1/3", "reason": "NotAssigned"}],
    }
    assert status["master"] == {"replicas": 1, "readyReplicas": 1, "address": "policy-master.rl.svc:50051"}
    assert status["store"]["selector"] == "app.kubernetes.io/component=store,epochkv.io/pool=policy"
    assert status["endpoints"] == {
        "hub": CONTEXT.hub_endpoint,
        "master": "policy-master.rl.svc:50051",
        "configMap": "policy-connection",
        "secret": "policy-fence",
    }
    done = replace(hub, published=8, laggards=[], reset_completed=NOW + timedelta(milliseconds=57), reset_milliseconds=57)
    after = pool_status(POLICY, Observed(pool_children(), PODS, done), CONTEXT, status, NOW)
    assert after["reset"] == {
        "epoch": 8,
        "startTime": "2026-03-01T12:00:00.123Z",
        "completionTime": "2026-03-01T12:00:00.180Z",
        "durationMilliseconds": 57,
    }


def test_a_hub_that_knows_less_takes_nothing_away() -> None:
    """After a restart the hub has heard of no engine and led no reset; without a hub nothing is known at all."""
    before = {
        "targetEpoch": 9,
        "epoch": 9,
        "granting": True,
        "engines": {"total": 2, "summary": "2/2"},
        "reset": {"epoch": 9, "startTime": "a", "completionTime": "b", "durationMilliseconds": 3},
    }
    fresh = pool_status(POLICY, Observed(pool_children(), (), HubView(0, 0)), CONTEXT, before, NOW)
    assert (fresh["targetEpoch"], fresh["epoch"], fresh["granting"], fresh["reset"]) == (9, 9, True, before["reset"])
    none = pool_status(POLICY, Observed(pool_children()), CONTEXT, before, NOW)
    assert {key: none[key] for key in before} == before


def test_a_hub_that_has_just_begun_to_lead_reports_nobody_as_gone() -> None:
    """An operator that restarts would otherwise say that all engines left, and a moment later that they came."""
    some = [rank("p0", carried=3), HubEngine("ray", "", 0, 7)]
    before = pool_status(POLICY, Observed(pool_children(), PODS, HubView(7, 7, some)), CONTEXT, {}, NOW)
    later = NOW + timedelta(seconds=5)
    for known in ([], some[:1]):
        young = HubView(7, 7, known, complete=False)
        assert pool_status(POLICY, Observed(pool_children(), PODS, young), CONTEXT, before, later) == before
    told = pool_status(POLICY, Observed(pool_children(), PODS, HubView(7, 7, some, complete=False)), CONTEXT, before, later)
    assert told == before
    gone = pool_status(POLICY, Observed(pool_children(), PODS, HubView(7, 7)), CONTEXT, before, later)
    assert gone["engines"]["total"] == 0
    assert {item["type"]: item["status"] for item in gone["conditions"]}["WeightsConverged"] == "True"

    children = engine_children(ready(2))
    before = engine_status(ROLLOUT, POLICY, Observed(children, PODS, HubView(7, 7, [rank("p0"), rank("p1")])), {}, NOW)
    young = HubView(7, 7, [rank("p0")], complete=False)
    assert engine_status(ROLLOUT, POLICY, Observed(children, PODS, young), before, later) == before
    lost = engine_status(ROLLOUT, POLICY, Observed(children, PODS, HubView(7, 7, [rank("p0")])), before, later)
    assert {item["type"]: item["reason"] for item in lost["conditions"]}["EpochCurrent"] == "NotReporting"
    # What has nothing to do with the hub is told at once.
    trouble = engine_children({"replicas": 2, "updatedReplicas": 2})
    failing = [engine_pod("p0", **waiting("engine", "ImagePullBackOff")), PODS[1]]
    told = engine_status(ROLLOUT, POLICY, Observed(trouble, failing, young), before, later)
    assert {item["type"]: item["reason"] for item in told["conditions"]}["Ready"] == "ImagePullFailed"


def test_times_of_a_reset_are_written_once() -> None:
    """Wall clocks are adjusted all the time; and another hub's clock says nothing about how long a reset took."""
    opened = HubView(7, 6, reset_epoch=7, reset_started=NOW, laggards=[("p0", "Behind")])
    first = pool_status(POLICY, Observed(pool_children(), (), opened), CONTEXT, {}, NOW)
    slewed = replace(
        opened, published=7, laggards=[], reset_started=NOW + timedelta(milliseconds=2), reset_completed=NOW, reset_milliseconds=9
    )
    done = pool_status(POLICY, Observed(pool_children(), (), slewed), CONTEXT, first, NOW)
    assert done["reset"] == {
        "epoch": 7,
        "startTime": "2026-03-01T12:00:00.123Z",
        "completionTime": "2026-03-01T12:00:00.123Z",
        "durationMilliseconds": 9,
    }
    again = replace(slewed, reset_completed=NOW + timedelta(milliseconds=3))
    assert pool_status(POLICY, Observed(pool_children(), (), again), CONTEXT, done, NOW)["reset"] == done["reset"]
    successor = replace(slewed, reset_started=NOW + timedelta(seconds=20), reset_completed=NOW + timedelta(seconds=21))
    after = pool_status(POLICY, Observed(pool_children(), (), successor), CONTEXT, first, NOW)
    assert after["reset"] == {"epoch": 7, "startTime": "2026-03-01T12:00:00.123Z", "completionTime": "2026-03-01T12:00:21.123Z"}
    # The hub that published it died before it could say so: no reset looks open for ever.
    later = NOW + timedelta(seconds=30)
    orphan = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, first, later)
    assert orphan["reset"] == {"epoch": 7, "startTime": "2026-03-01T12:00:00.123Z", "completionTime": "2026-03-01T12:00:30.123Z"}
    assert (
        pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, orphan, later + timedelta(hours=1))["reset"]
        == orphan["reset"]
    )


def test_limits_of_lists_and_messages() -> None:
    crowd = [HubEngine(f"e{n:03}", "", 0, 7) for n in range(100)]
    hub = HubView(7, 6, crowd, laggards=[(f"e{n:03}", "Slow" * 40) for n in range(40)], reset_epoch=7, reset_started=NOW)
    trouble = Problem("InvalidTemplate", "x" * 9999)
    status = pool_status(POLICY, Observed(pool_children(), (), hub, trouble), CONTEXT, {}, NOW)
    assert len(status["externalEngines"]) == 64
    assert len(status["reset"]["laggards"]) == 16
    assert max(len(entry["reason"]) for entry in status["reset"]["laggards"]) <= 64
    assert max(len(condition["message"]) for condition in status["conditions"]) <= 4096


def test_engine_status() -> None:
    hub = HubView(7, 6, [rank("p0"), rank("p1", 6), rank("elsewhere", 1)])
    status = engine_status(ROLLOUT, POLICY, Observed(engine_children(ready(2)), PODS, hub), {}, NOW)
    assert {key: status[key] for key in ("replicas", "readyReplicas", "updatedReplicas", "epochReplicas", "epoch")} == {
        "replicas": 2,
        "readyReplicas": 2,
        "updatedReplicas": 2,
        "epochReplicas": 1,
        "epoch": 6,
    }
    assert status["selector"] == "app.kubernetes.io/component=engine,epochkv.io/engine=rollout"
    assert "epochReplicas" not in engine_status(ROLLOUT, None, Observed(engine_children(ready(2)), PODS), {}, NOW)
