"""Conditions as tables: what is observed, and what a user reads."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest

from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import EngineView, WeightsView
from epochkv_operator.planning.conditions import engine_conditions, pool_conditions
from epochkv_operator.planning.context import HubView, KeysView, Observed, Problem
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.pool import desired_pool
from epochkv_operator.planning.status import engine_status, pool_status, weights_summary
from tests.support.planning import CONTEXT, engine, pool
from tests.unit.operator import cluster_state as state
from tests.unit.operator.cluster_state import CONVERGED, NOW, PODS, POLICY, ROLLOUT, Json, by_type, message, pod, pool_children, rank, ready

DENIED = {"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'}
QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: requests.memory=9Gi, limited: 8Gi"}
OVERDUE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "no progress for 4500 s"}
ROLLING = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
RUNNING = {"containerStatuses": [{"name": "engine", "ready": False, "state": {"running": {}}}]}
PENDING = {"phase": "Pending"}
NO_IMAGE = state.waiting("engine", "ImagePullBackOff", "not found")
ONE = {"replicas": 1}
NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "models" not found.'
CRASHED = state.waiting("engine", "CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, restartCount=4)
L1 = pool("l1")
late = partial(rank, epoch=6, converged=False)
ETCD = {"backend": "Etcd", "etcd": {"endpoints": ["etcd-0:2379", "etcd-1:2379"]}}
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory.\nThreshold 100Mi"}
SHUT_DOWN = {"phase": "Failed", "reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}


def unscheduled(message: str, reason: str = "Unschedulable") -> Json:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


def runs_again(restarts: int, seconds: float) -> Json:
    """A container that runs, is not ready, and ran for so long before."""
    start = NOW - timedelta(seconds=seconds)
    message = "Traceback:\n  in main\nValueError: no such model\n"
    times = {"startedAt": start.isoformat(), "finishedAt": NOW.isoformat()}
    last = {"exitCode": 1, "reason": "Error", "message": message, **times}
    running = {"name": "engine", "ready": False, "restartCount": restarts, "state": {"running": {}}, "lastState": {"terminated": last}}
    return {"containerStatuses": [running]}


def counts(updated: int, replicas: int = 2, running: int = 2, *said: Json) -> Json:
    return {"replicas": replicas, "readyReplicas": running, "updatedReplicas": updated, "conditions": list(said)}


@pytest.mark.parametrize(
    ("master", "pods", "reason", "says"),
    [
        (ready(1), [], "Available", "1 of 1 replicas of the master are ready"),
        (ONE, [PENDING], "Starting", "are ready: pod policy-master-x is pending"),
        (ONE, [state.waiting("master", "ContainerCreating")], "Starting", "kubectl -n rl describe pod policy-master-x"),
        (ONE, [READY, PENDING], "Starting", "are ready: pod policy-master-x is pending"),
        (ONE, [RUNNING], "Starting", "pod policy-master-x runs, but its readiness probe does not succeed yet"),
        ({**ready(1), "observedGeneration": 0}, [], "Starting", "the master"),
        (ONE, [state.waiting("m", "ErrImageNeverPull")], "ImagePullFailed", "ErrImageNeverPull"),
        (ONE, [state.waiting("m", "CreateContainerConfigError", "no secret")], "StartFailed", "no secret"),
        (ONE, [CRASHED], "CrashLooping", "restarted 4 times, last exit 137 (OOMKilled)"),
        (ONE, [runs_again(2, 30.0)], "CrashLooping", "last exit 1 (Error); its log ended: ValueError: no such model"),
        # One that ran for long, or failed once, may come up this time.
        (ONE, [runs_again(2, 900.0)], "Starting", "last exit 1 (Error); its log ended: ValueError: no such model, and it"),
        (ONE, [runs_again(1, 30.0)], "Starting", "was restarted 1 time, last exit 1"),
        (ONE, [unscheduled("Insufficient memory")], "Unschedulable", "fits on no node: Insufficient memory"),
        (ONE, [unscheduled("", "SchedulingGated")], "SchedulingGated", "is held by a scheduling gate"),
        (ONE, [unscheduled(NO_CLAIM)], "Unschedulable", "waits for a claim that is missing or has no volume (kubectl -n rl get pvc): 0/1"),
        (counts(0, 0, 0, DENIED), [], "PodSecurityDenied", "violates PodSecurity"),
        (counts(0, 0, 0, QUOTA), [], "CreateFailed", "exceeded quota"),
        (counts(0, 1, 0, OVERDUE), [], "RolloutStuck", "no progress"),
    ],
)
def test_master_available(master: Json, pods: list[Json], reason: str, says: str) -> None:
    """`pods`: their statuses."""
    conditions = pool_conditions(POLICY, Observed(pool_children(master), [state.master_pod(**status) for status in pods], CONVERGED))
    status = "True" if reason == "Available" else "False"
    assert by_type(conditions)["MasterAvailable"] == (status, reason)
    assert says in message(conditions, "MasterAvailable")
    assert by_type(conditions)["Ready"] == (status, "Ready" if status == "True" else reason)


@pytest.mark.parametrize(("running", "pods", "reason"), [(2, [], "NoLeader"), (1, [], "NoLeader"), (1, [CRASHED], "CrashLooping")])
def test_masters_of_which_none_leads(running: int, pods: list[Json], reason: str) -> None:
    wanted = pool({"distributed": {"mooncake": {"master": {"replicas": 2, "highAvailability": ETCD}, "store": {"segmentSize": "1Gi"}}}})
    master = state.workload(desired_pool(wanted, CONTEXT), "Deployment", "policy-master", **counts(2, running=running))
    children = [master, *pool_children()[1:]]
    pods = [state.master_pod(**status) for status in pods]
    conditions = pool_conditions(wanted, Observed(children, pods, CONVERGED, leaderless=True))
    assert by_type(conditions)["MasterAvailable"] == by_type(conditions)["Ready"] == ("False", reason)
    assert reason != "NoLeader" or "does etcd-0:2379;etcd-1:2379 answer" in message(conditions, "MasterAvailable")
    assert by_type(pool_conditions(wanted, Observed(children, pods, CONVERGED)))["MasterAvailable"][1] != "NoLeader"


def test_troubles_of_other_pods_are_not_ours() -> None:
    """Pods of another pool, namespace or component, and pods that are going."""
    trouble = state.waiting("master", "ImagePullBackOff")
    mine = state.master_pod(**trouble)
    others = [
        {**mine, "metadata": {**mine["metadata"], "namespace": "other"}},
        pod("a", {"epochkv.io/pool": "other", "app.kubernetes.io/component": "master"}, **trouble),
        pod("b", {"epochkv.io/pool": "policy", "app.kubernetes.io/component": "engine"}, **trouble),
        {**mine, "metadata": {**mine["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ]
    conditions = pool_conditions(POLICY, Observed(pool_children({"replicas": 1}), others, CONVERGED))
    assert by_type(conditions)["MasterAvailable"] == ("False", "Starting")


def test_pods_that_ended_are_counted_and_do_not_tell_how_the_living_are() -> None:
    """Evicted and shut-down pods stay until somebody deletes them; what a kubelet last said of their containers stays, too."""
    gone = [
        revision("a", 1, **EVICTED, **RUNNING),
        revision("b", 1, **SHUT_DOWN, **CRASHED),
        *(revision("c", 3, phase="Succeeded", message="done"), revision("d", 2, phase="Failed"), revision("e", 1, **EVICTED)),
    ]
    text = "; pods that ended and were not deleted: 1 Completed, 2 Evicted, 1 Failed, 1 Terminated (the last: done)"

    def said(status: Json, *living: Json, kind: str = "Available") -> tuple[str, str]:
        hub = HubView(7, 7, [rank(pod["metadata"]["name"]) for pod in living])
        conditions = engine_conditions(ROLLOUT, POLICY, Observed(state.engine_children(status), [*gone, *living], hub))
        return by_type(conditions)[kind][1], message(conditions, kind)

    missing, pending = revision("y", 2, **NO_IMAGE), revision("y", 2, **PENDING)
    assert said(ready(2), *PODS) == ("Available", "2 of 2 replicas of the engine are ready" + text)
    assert said(ready(2), *PODS, kind="EpochCurrent") == ("Current", "2 of 2 replicas are at epoch 7")
    assert said(counts(2, 2, 1), missing)[0] == "ImagePullFailed"
    assert said(counts(2, 2, 1), pending)[1].startswith("1 of 2 replicas of the engine are ready: pod y is pending;")
    # The youngest pod of all has ended, and was of another revision.
    assert said(counts(1, 2, 1, ROLLING), missing, kind="Progressing")[0] == "ImagePullFailed"
    shown = message(engine_conditions(ROLLOUT, None, Observed(state.engine_children(ready(2)), gone[:1])), "Available")
    assert shown.endswith(": 1 Evicted (the last: The node was low on resource: memory. Threshold 100Mi)")


def test_children_of_a_namesake_do_not_count() -> None:
    children = pool_children()
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        child["metadata"] = {**child["metadata"], "ownerReferences": [{**owner, "uid": "of-a-deleted-namesake"}]}
    conditions = by_type(pool_conditions(POLICY, Observed(children, (), CONVERGED)))
    assert conditions["MasterAvailable"] == conditions["StoreAvailable"] == ("False", "NotCreated")


@pytest.mark.parametrize(
    ("hub", "status", "reason", "says"),
    [
        (None, "Unknown", "HubUnavailable", "serve without shared KV"),
        (HubView(6, 6), "False", "Recording", "epoch 7 is asked for, 6 is recorded"),
        (HubView(7, 6), "False", "WaitingForEngines", "7 is recorded, 6 is published"),
        (HubView(7, 6, [late("a"), late("b", alive=False), rank("c")]), "False", "WaitingForEngines", "waiting for a (Behind), b (Silent)"),
        (HubView(7, 6, [late(str(n)) for n in range(15)]), "False", "WaitingForEngines", "and 5 more"),
        (CONVERGED, "True", "Published", "no engine uses an epoch below 7"),
        (HubView(7, 7, origin=Source.SPEC), "True", "Published", "no engine uses an epoch below 7"),
        # A trainer or an engine asked for more than the spec, or was first with the same.
        (HubView(9, 9), "True", "EpochAhead", "7 resets nothing: somebody else raised the pool to epoch 9. Set 10 or higher"),
        (HubView(9, 9, origin=Source.TRAINER), "True", "EpochAhead", "epoch below 9; spec.resetEpoch 7 resets nothing: a trainer raised"),
        (HubView(7, 7, origin=Source.TRAINER), "True", "EpochAhead", "7 resets nothing: a trainer raised the pool to epoch 7. Set 8"),
        (HubView(7, 7, origin=Source.ENGINE), "True", "EpochAhead", "an engine whose own caches were reset raised the pool to epoch 7"),
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
    children = [state.workload(desired_engine(alone, None, CONTEXT), "Deployment", "rollout", **ready(1))]
    said = by_type(engine_conditions(alone, None, Observed(children)))
    assert said == {"Ready": ("True", "Ready"), "Available": ("True", "Available"), "Progressing": ("True", "RolledOut")}
    assert "TiersUsable" not in by_type(engine_conditions(engine(), None, Observed((), PODS, HubView(7, 7, [rank("p0")]))))


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
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(state.engine_children(ready(2)), pods, hub))
    assert by_type(conditions)["EpochCurrent"] == (status, reason)
    assert by_type(conditions)["PoolBound"] == ("True", "Bound")
    assert by_type(conditions)["Ready"][0] == status


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_data_parallel_rank_has_to_report(nodes: int) -> None:
    """Of groups, the ranks of the second pod report for themselves."""
    wanted = engine({"model": {"name": "m"}, "poolRef": {"name": "policy"}, "parallelism": {"tensor": 3, "data": 4, "nodes": nodes}})
    kind, name = ("Deployment", "rollout") if nodes == 1 else ("LeaderWorkerSet", "rollout-nodes")
    made = state.workload(desired_engine(wanted, POLICY, LWS), kind, name, **ready(1))
    pods = [state.engine_pod("p")] if nodes == 1 else [member(0, index) for index in range(2)]
    homes = ["p"] * 4 if nodes == 1 else ["rollout-nodes-0"] * 2 + ["rollout-nodes-0-1"] * 2

    def told(*epochs: int | None, before: Json | None = None) -> tuple[Any, Json]:
        """What is said once ranks 0, 1, ... have these epochs; `None`: this one does not report. `before`: to a hub that is new."""
        views = [rank(homes[index], epoch, rank=index) for index, epoch in enumerate(epochs) if epoch is not None]
        observed = Observed([made], pods, HubView(7, 7, [*views, rank("another")], complete=before is None))
        return engine_conditions(wanted, POLICY, observed), engine_status(wanted, POLICY, observed, before or {}, NOW)

    conditions, status = told(7, 7, 7, 7)
    assert by_type(conditions)["EpochCurrent"] == ("True", "Current")
    assert (status["epochReplicas"], status["epoch"], status["weights"]) == (1, 7, "aaaaaaaa 4/4")
    assert told(7, 7, 7, None, before=status)[1] == status, "it has not heard from everybody yet"
    conditions, status = told(7, 7, 7, None)
    assert by_type(conditions)["EpochCurrent"] == by_type(conditions)["Ready"] == ("False", "NotReporting")
    assert message(conditions, "EpochCurrent") == f"0 of 1 replicas are at epoch 7; not heard from: {homes[3]}/3"
    assert (status["epochReplicas"], status["epoch"]) == (0, 7)
    conditions, status = told(7, 6, 7, 7)
    assert by_type(conditions)["EpochCurrent"] == ("False", "Advancing")
    assert message(conditions, "EpochCurrent").endswith(f"; behind: {homes[1]}/1")
    assert (status["epochReplicas"], status["epoch"]) == (0, 6)


def test_pool_not_found() -> None:
    """The engine serves; the condition says what is missing and what to do."""
    conditions = engine_conditions(ROLLOUT, None, Observed(state.engine_children(ready(2)), PODS))
    lacking = dict.fromkeys(("Ready", "PoolBound", "EpochCurrent"), ("False", "PoolNotFound"))
    assert by_type(conditions) == {**lacking, "Available": ("True", "Available"), "Progressing": ("True", "RolledOut")}
    assert "KVCachePool rl/policy does not exist" in message(conditions, "PoolBound")
    assert "create the pool" in message(conditions, "PoolBound")


def test_drained() -> None:
    running = [rank("p0", old_epoch_requests=2), rank("p1"), rank("p2", old_epoch_requests=1)]
    old = "3 requests were admitted under an older epoch and run on, seeing only what they held already: p0 (2), p2 (1); abort"
    for engines, expected, says in (
        (running, ("False", "OldEpochRequests"), old),
        (running[1:2], ("True", "Drained"), "no request runs that was admitted before epoch 7"),
        ([], ("True", "Drained"), "epoch 7"),
    ):
        conditions = pool_conditions(POLICY, Observed(pool_children(), (), HubView(7, 7, engines)))
        assert by_type(conditions)["Drained"] == expected
        assert says in message(conditions, "Drained")
        assert by_type(conditions)["Ready"] == ("True", "Ready")


STORED: Json = {"distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}}}}
WIPED: Json = {**STORED, "reset": {"reclaimPolicy": "RemoveAll"}}
FREED = HubView(7, 7, reclaimed=7, reclaimed_keys=12, reclaimed_bytes=4096)


@pytest.mark.parametrize(
    ("spec", "hub", "expected", "says"),
    [
        (STORED, FREED, ("True", "Reclaimed"), "below 7; 12 keys and 4096 bytes were freed"),
        (STORED, HubView(7, 7, reclaimed=7), ("True", "Reclaimed"), "nothing to free"),
        (STORED, HubView(7, 7, reclaimed=6), ("False", "NoEngine"), "none is connected"),  # an earlier hub published
        (STORED, HubView(7, 7, published_at=1.0, reclaimed=6, reclaimed_keys=3), ("False", "Reclaiming"), "3 keys and 0 bytes were freed"),
        (WIPED, HubView(7, 7, reclaimed=6, wipe_failed=True), ("False", "WipeFailed"), "is the master reachable on its admin port?"),
        ({"distributed": {"external": {"masterAddress": "a:1"}}}, HubView(7, 7, reclaimed=6), ("False", "NoEngine"), "none is connected"),
        ({**STORED, "reset": {"reclaimPolicy": "Retain"}}, HubView(7, 7), None, ""),
        ({"local": {"capacity": "1Gi"}}, HubView(7, 7), None, ""),
    ],
)
def test_reclaimed(spec: Json, hub: HubView, expected: Any, says: str) -> None:
    conditions = pool_conditions(pool(spec), Observed(hub=hub))
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
    conditions = by_type(engine_conditions(idle, POLICY, Observed(state.engine_children({}, 0, idle), (), CONVERGED)))
    assert conditions["Ready"] == conditions["EpochCurrent"] == conditions["TiersUsable"] == ("True", "ScaledToZero")
    assert conditions["Available"] == ("False", "ScaledToZero"), "nothing serves"


def test_a_problem_of_the_plan_comes_first() -> None:
    trouble = Problem("InvalidTemplate", "spec.template.spec.containers[engine].command belongs to the operator: use spec.args")
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(state.engine_children(ready(2)), PODS, None, trouble))
    assert by_type(conditions)["Ready"] == ("False", "InvalidTemplate")
    assert [condition.type for condition in conditions] == ["Ready", "Available", "PoolBound", "EpochCurrent", "Progressing", "TiersUsable"]
    assert message(conditions, "Ready") == trouble.message
    assert by_type(pool_conditions(POLICY, Observed(pool_children(), (), CONVERGED, trouble)))["Ready"] == ("False", "InvalidTemplate")


def revision(name: str, number: int, second: int | None = None, /, **status: object) -> Json:
    """A pod of the n-th ReplicaSet; later ones are younger, unless `second` says when it was made."""
    made = state.engine_pod(name, **status)
    made["metadata"]["labels"]["pod-template-hash"] = f"hash{number}"
    made["metadata"]["creationTimestamp"] = f"2026-03-01T12:00:0{number if second is None else second}Z"
    return made


@pytest.mark.parametrize(
    ("status", "pods", "expected", "says"),
    [
        (ready(2), [], ("True", "RolledOut"), "2 of 2 replicas run the current spec"),
        # A pod that is lost later is no rollout: `Available` says it.
        (counts(2, 2, 1, state.ROLLED_OUT), [revision("a", 1, **CRASHED)], ("True", "RolledOut"), "2 of 2"),
        ({**counts(2, 2, 2, state.ROLLED_OUT), "observedGeneration": 0}, [], ("True", "RollingOut"), "run the current spec"),
        (counts(1, 2, 2, ROLLING), [], ("True", "RollingOut"), "1 of 2 replicas run the current spec, 1 an older one"),
        (counts(1, 2, 1, ROLLING), [revision("a", 1), revision("b", 2, **RUNNING)], ("True", "RollingOut"), "pod b runs, but"),
        (counts(1, 2, 1, ROLLING), [revision("a", 1), revision("b", 2, **NO_IMAGE)], ("False", "ImagePullFailed"),
         "1 an older one; pod b cannot pull img:1: not found"),
        # What ails the old pods is about to go away.
        (counts(1, 2, 0, ROLLING), [revision("a", 1, **CRASHED), revision("b", 2, **RUNNING)], ("True", "RollingOut"), "pod b runs"),
        # Made in one second: times do not say which is the newer revision.
        (counts(1, 2, 1, ROLLING), [revision("z", 1, 2), revision("b", 2, **NO_IMAGE)], ("False", "ImagePullFailed"),
         "pod b cannot pull img:1: not found"),
        (counts(1, 2, 1, OVERDUE), [revision("b", 2, **RUNNING)], ("False", "RolloutStuck"), "no progress for 4500 s"),
        (counts(1, 2, 1, OVERDUE), [revision("b", 2, **CRASHED)], ("False", "CrashLooping"), "last exit 137 (OOMKilled)"),
    ],
)  # fmt: skip
def test_a_rollout(status: Json, pods: list[Json], expected: tuple[str, str], says: str) -> None:
    conditions = engine_conditions(ROLLOUT, POLICY, Observed(state.engine_children(status), pods, CONVERGED))
    assert by_type(conditions)["Progressing"] == expected
    assert says in message(conditions, "Progressing")


def test_before_the_workload_and_while_somebody_holds_it() -> None:
    nothing = Observed((), (), CONVERGED, Problem("KindNotServed", "no LeaderWorkerSet"))
    assert by_type(engine_conditions(ROLLOUT, POLICY, nothing))["Progressing"] == ("Unknown", "NotCreated")
    [deployment] = state.engine_children(counts(1, 2, 2, ROLLING))
    held = engine_conditions(ROLLOUT, POLICY, Observed([{**deployment, "spec": {**deployment["spec"], "paused": True}}]))
    assert by_type(held)["Progressing"] == ("Unknown", "Paused")
    assert message(held, "Progressing").endswith("kubectl -n rl rollout resume deployment rollout")


def test_a_rollout_does_not_make_an_engine_unready() -> None:
    conditions = engine_conditions(engine("no-pool"), None, Observed(state.engine_children(counts(1, 2, 2, ROLLING))))
    assert (by_type(conditions)["Ready"], by_type(conditions)["Progressing"]) == (("True", "Ready"), ("True", "RollingOut"))


SPANNING = engine({"model": {"name": "big"}, "poolRef": {"name": "policy"}, "replicas": 2, "parallelism": {"tensor": 8, "nodes": 2}})
LWS = replace(CONTEXT, served=frozenset({"LeaderWorkerSet"}))


def member(number: int, index: int, **status: object) -> Json:
    of_groups = {"worker-index": str(index), "template-revision-hash": "r1"}
    labels = {f"leaderworkerset.sigs.k8s.io/{name}": value for name, value in of_groups.items()}
    labels |= {"epochkv.io/engine": "rollout", "app.kubernetes.io/component": "engine"}
    return pod(f"rollout-nodes-{number}" + (f"-{index}" if index else ""), labels, **status)


def spanning(status: Json, *pods: Json) -> Observed:
    """LeaderWorkerSets do not say which generation their status is about. The first pod of each group is of the current template."""
    made = state.workload(desired_engine(SPANNING, POLICY, LWS), "LeaderWorkerSet", "rollout-nodes", **status)
    del made["status"]["observedGeneration"]
    for leader in [one for one in pods if one["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"]:
        leader["metadata"]["annotations"] = made["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["annotations"]
    hub = replace(CONVERGED, engines=[rank("rollout-nodes-0"), rank("rollout-nodes-1")])
    return Observed([made], pods, hub)


@pytest.mark.parametrize(
    ("status", "pods", "available", "progressing"),
    [
        ({**ready(2), "conditions": [{"type": "Available", "status": "True"}]}, [], ("True", "Available"), ("True", "RolledOut")),
        ({}, [], ("False", "Starting"), ("True", "RollingOut")),
        (counts(1, 2, 2, {"type": "UpdateInProgress", "status": "True"}), [], ("True", "Updating"), ("True", "RollingOut")),
        (counts(2, 2, 1, ROLLING), [member(1, 1, **state.waiting("engine", "ErrImagePull"))], *[("False", "ImagePullFailed")] * 2),
    ],
)
def test_an_engine_that_spans_nodes(status: Json, pods: list[Json], available: tuple[str, str], progressing: tuple[str, str]) -> None:
    conditions = by_type(engine_conditions(SPANNING, POLICY, spanning(status, member(0, 0), member(0, 1), member(1, 0), *pods)))
    assert (conditions["Available"], conditions["Progressing"]) == (available, progressing)


def test_a_status_that_is_about_the_older_spec_ends_no_rollout() -> None:
    observed = spanning(ready(2), member(0, 0), member(1, 0))
    observed.pods[1]["metadata"]["annotations"] = {}
    conditions = engine_conditions(SPANNING, POLICY, observed)
    assert (by_type(conditions)["Available"], by_type(conditions)["Progressing"]) == (("True", "Updating"), ("True", "RollingOut"))
    assert "1 of 2 replicas run the current spec" in message(conditions, "Progressing")


def test_replicas_of_an_engine_that_spans_nodes_are_groups() -> None:
    """What an autoscaler reads: groups, and one pod of each. Only that one speaks with the hub."""
    everyone = [member(number, index) for number in range(2) for index in range(2)]
    status = engine_status(SPANNING, POLICY, spanning(ready(2), *everyone), {}, NOW)
    assert (status["replicas"], status["readyReplicas"], status["epochReplicas"]) == (2, 2, 2)
    leaders = "app.kubernetes.io/component=engine,epochkv.io/engine=rollout,leaderworkerset.sigs.k8s.io/worker-index=0"
    assert status["selector"] == leaders


MAMBA, FAIL = "no tier is used: KV cache group 0", "loads are off: the MultiConnector's kv_load_failure_policy is 'fail'"


def lacks(name: str, reason: str = "", note: str = "", **extra: Any) -> EngineView:
    return rank(name, tiers_off=reason, tiers_note=note, **extra)


def of_engine(hub: HubView | None, pods: Sequence[Json] = PODS, **changes: Any) -> tuple[str, str, str]:
    found = {item.type: item for item in engine_conditions(engine(**changes), L1, Observed((), pods, hub))}
    return found["TiersUsable"].status, found["TiersUsable"].reason, found["TiersUsable"].message


def of_pool(hub: HubView | None, kind: str = "TiersUsable") -> tuple[str, str, str]:
    found = {item.type: item for item in pool_conditions(L1, Observed(hub=hub))}
    if hub is not None:
        assert found["Ready"].status == "True", "whoever lacks tiers, or holds whatever weights, serves correctly"
    return found[kind].status, found[kind].reason, found[kind].message


@pytest.mark.parametrize(
    ("engines", "reason", "says"),
    [
        ([lacks("p0"), lacks("p1", "TiersOff", "why", alive=False)], "Usable", ""),
        ([lacks("p1", "LayoutUnsupported", MAMBA), lacks("p0", "LayoutUnsupported", MAMBA)], "LayoutUnsupported", f"p0, p1: {MAMBA}"),
        ([lacks("p0", "SavesOnly", FAIL), lacks("p1", "TiersOff", "why")], "TiersOff", f"p0: {FAIL}; p1: why"),
        ([lacks("p0", "TiersOff", "why"), lacks("p1", "TiersBroken", "an error")], "TiersBroken", "p0: why; p1: an error"),
        ([lacks("p0", "L1Only", "L2 is off"), lacks("p0", "L1Only", "L2 is off", rank=1)], "L1Only", "p0, p0/1: L2 is off"),
        ([lacks("p0", "SomethingNewer", "why")], "TiersOff", "p0: why"),
        ([lacks("p0", "TiersOff")], "TiersOff", "p0: it does not say why"),
    ],
)
def test_engines_that_lack_tiers_are_named_with_what_to_change(engines: list[EngineView], reason: str, says: str) -> None:
    hub = HubView(7, 7, engines)
    for status, found, text in (of_engine(hub), of_pool(hub)):
        assert (status, found) == ("True" if reason == "Usable" else "False", reason)
        assert text == says or not says


def test_nobody_knows_before_a_replica_was_heard_from() -> None:
    assert of_engine(None)[:2] == of_pool(None)[:2] == ("Unknown", "HubUnavailable")
    silent = lacks("p0", alive=False)
    for engines in ([], [silent], [lacks("elsewhere", "TiersOff", "why")]):
        assert of_engine(HubView(7, 7, engines))[:2] == ("Unknown", "NotReporting")


def test_a_lack_of_tiers_leaves_readiness_alone_and_fits_into_a_message() -> None:
    ready, *others = engine_conditions(ROLLOUT, L1, Observed((), PODS, HubView(7, 7, [lacks("p0", "TiersOff", "why"), lacks("p1")])))
    plain = engine_conditions(ROLLOUT, L1, Observed((), PODS, HubView(7, 7, [lacks("p0"), lacks("p1")])))
    assert [ready, *others[:-1]] == plain[:-1]
    assert of_pool(HubView(7, 7, [lacks(f"e{n}", "TiersOff", f"{n} " + "x" * 1000) for n in range(20)]))[2].count("; ") == 4


A, B = "3f2a9c1e" + "0" * 24, "77aa00ff" + "1" * 24


def held(name: str, weights: str | None = A, **extra: Any) -> EngineView:
    return rank(name, weights=weights, **extra)


def apart(name: str, holds: str, most_hold: str) -> EngineView:
    return held(name, holds, majority=bytes.fromhex(most_hold))


def group(id: str, engines: int, seconds_ago: float = 0.0, label: str = "") -> WeightsView:
    return WeightsView(bytes.fromhex(id), label, engines, seconds_ago)


def view(engines: Sequence[EngineView], groups: Sequence[WeightsView] = (), **more: Any) -> HubView:
    return HubView(7, 7, engines, weights=groups, **more)


EQUAL = view([held("p0"), held("p1")], [group(A, 2, 10)])
LATE = view([held("p0"), apart("p1", B, A)], [group(A, 1, 5, "step-42"), group(B, 1, 900)])
TAKING = held("p2", None, weights_note="they are being written", stats={"weights_updating": 1.0})
APART = replace(LATE, engines=[*LATE.engines, held("p2", None, weights_note="asleep")])
MUTE = view([held("p0", None, weights_note="rank 1: no answer"), held("p1", None), held("dead", None, alive=False)])
NOT_KNOWN = "the weights of these engines are not known, and they share nothing"


@pytest.mark.parametrize(
    ("hub", "reason", "says"),
    [
        (None, "HubUnavailable", "no hub leads this pool"),
        (view([]), "Converged", "no engine is connected"),
        (EQUAL, "Converged", "all engines hold 3f2a9c1e"),
        # Two kinds of engines: their digests are never equal, and need not be.
        (view([held("p0"), held("p1", B, fingerprint="tp4")]), "Converged", "all engines hold 3f2a9c1e, 77aa00ff"),
        (LATE, "Updating", "less than 60 s, engines have held different weights, and none was taking new ones: p1 holds 77aa00ff instead"),
        (
            replace(LATE, overdue=True),
            "Diverged",
            "not all engines hold the weights that most hold: p1 holds 77aa00ff instead of 3f2a9c1e (step-42); push again to"
            " those with older weights: p1; all serve",
        ),
        (MUTE, "Unknown", f"{NOT_KNOWN}: p0 (rank 1: no answer), p1 (it has not said yet)"),
        # That some are apart is known, whatever the others hold.
        (replace(APART, overdue=True), "Diverged", f"each shares with its equals; {NOT_KNOWN}: p2 (asleep)"),
        (APART, "Unknown", "p2 (asleep)"),
        (replace(LATE, engines=[apart(f"p{n}", B, A) for n in range(9)], overdue=True), "Diverged", "and 4 more; push again"),
        (replace(LATE, engines=[*LATE.engines, TAKING]), "Updating", "weights are being written to p2"),
        (view([held("p0"), TAKING, held("p3", None)]), "Updating", "written to p2; the weights of these engines are not known"),
    ],
)
def test_weights_converged(hub: HubView | None, reason: str, says: str) -> None:
    found = of_pool(hub, "WeightsConverged")
    status = {"Converged": "True", "Updating": "False", "Diverged": "False"}.get(reason, "Unknown")
    assert found[:2] == (status, reason)
    assert says in found[2]


@pytest.mark.parametrize(
    ("engines", "column"),
    [
        ([], ""),
        ([*[held(f"p{n}") for n in range(15)], apart("late", B, A)], "3f2a9c1e 15/16"),
        ([held("p0", None), held("p1", None)], "unknown 0/2"),
        ([held("p0"), held("dead", B, alive=False)], "3f2a9c1e 1/1"),
        # Of as many, the hub has chosen the newer.
        ([held("p0"), apart("p1", B, A)], "3f2a9c1e 1/2"),
        ([apart("p0", A, B), held("p1", B)], "77aa00ff 1/2"),
        ([held("p0"), held("p1", B, fingerprint="tp4"), held("p2", B, fingerprint="tp4")], "3f2a9c1e 1/1, 77aa00ff 2/2"),
    ],
)
def test_the_column(engines: list[EngineView], column: str) -> None:
    assert weights_summary(engines, view(engines)) == column


def status(hub: HubView | None, previous: Json, now: datetime = NOW) -> Json:
    return pool_status(L1, Observed(hub=hub), CONTEXT, previous, now)


def test_the_list_and_the_column_are_in_the_status() -> None:
    found = status(LATE, {})
    newer, older = ({"engines": 1, "since": f"2026-03-01T{time}Z"} for time in ("11:59:55", "11:45:00"))
    assert found["weights"] == [{"id": A, "label": "step-42", **newer}, {"id": B, **older}]
    assert found["weightsSummary"] == "3f2a9c1e 1/2"
    many = [group(f"{number:032x}", 1) for number in range(20)]
    assert len(status(replace(LATE, weights=many), {})["weights"]) == 8


def test_times_are_written_once_whatever_clock_and_hub_come_after() -> None:
    """Ages are told anew with every look; a pool in which nothing changes is not written to."""
    first = status(LATE, {})
    later = NOW + timedelta(hours=1)
    drifted = [found._replace(since_seconds=found.since_seconds + 3598.0) for found in LATE.weights]
    assert status(replace(LATE, weights=drifted), first, later) == first
    successor = [found._replace(since_seconds=0.0) for found in LATE.weights]  # a new hub has known them since it began
    assert status(replace(LATE, weights=successor), first, later) == first
    rolled_back = status(replace(LATE, weights=[group(A, 2)]), first, later)
    assert [found["id"] for found in rolled_back["weights"]] == [A]
    back = status(replace(LATE, weights=successor), rolled_back, later)
    assert [found["since"] for found in back["weights"]] == ["2026-03-01T11:59:55Z", "2026-03-01T13:00:00Z"]


# ---------------------------------------------------------------------------------------------------- whole statuses
NOON, UNIX = "2026-03-01T12:00:00.123Z", NOW.timestamp()


def test_reset_of_a_status_that_knows_more_is_left_alone() -> None:
    """The authority writes target and origin first; a view from before must not put the older reset back."""
    before = {"targetEpoch": 8, "epoch": 7, "weightsLabels": [{"id": "a" * 32, "label": "a"}], "reset": {"epoch": 8, "origin": "Trainer"}}
    stale = HubView(7, 7, started_at=UNIX, published_at=UNIX, origin=Source.SPEC)
    status = pool_status(POLICY, Observed(pool_children(), (), stale), CONTEXT, before, NOW)
    assert (status["reset"], status["targetEpoch"], status["weightsLabels"]) == (before["reset"], 8, before["weightsLabels"])
    # A hub that does not know the origin.
    newer = HubView(8, 8, started_at=UNIX, published_at=UNIX, reset_seconds=0.009)
    status = pool_status(POLICY, Observed(pool_children(), (), newer), CONTEXT, before, NOW)
    assert status["reset"] == {"epoch": 8, "origin": "Trainer", "startTime": NOON, "completionTime": NOON, "durationMilliseconds": 9}


def test_external_engines_of_one_name_are_told_apart() -> None:
    ranks = [rank("", engine="ray", rank=number, instance=bytes([number])) for number in range(2)]
    twins = [rank("", epoch, engine="sim", instance=instance) for epoch, instance in ((7, b"\xaa" * 16), (6, b"\xbb" * 16))]
    status = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 6, [*ranks, *twins])), CONTEXT, {}, NOW)
    assert [engine["name"] for engine in status["externalEngines"]] == ["ray", "ray/1", "sim#aaaaaaaa", "sim#bbbbbbbb"]
    assert [engine["epoch"] for engine in status["externalEngines"]] == [7, 7, 7, 6]
    assert status["engines"]["summary"] == "3/4"


def test_what_was_reclaimed_survives_a_new_operator() -> None:
    done = replace(FREED, reclaimed_at=UNIX)
    first = pool_status(POLICY, Observed(pool_children(), (), done), CONTEXT, {}, NOW)
    assert first["reclaim"] == {"policy": "Delete", "epoch": 7, "keys": 12, "bytes": 4096, "completionTime": "2026-03-01T12:00:00Z"}
    again = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, first, NOW)
    assert again["reclaim"] == first["reclaim"]
    assert next(item for item in again["conditions"] if item["type"] == "Reclaimed")["status"] == "True"
    later = pool_status(POLICY, Observed(pool_children(), (), HubView(8, 8)), CONTEXT, first, NOW)
    assert later["reclaim"] == {"policy": "Delete", "epoch": 7, "keys": 0, "bytes": 0}


def test_transition_times_move_only_on_change() -> None:
    observed = Observed(pool_children(), (), HubView(7, 6, reclaimed=6))
    first = pool_status(POLICY, observed, CONTEXT, {}, NOW)
    later = NOW + timedelta(seconds=90)
    assert pool_status(POLICY, observed, CONTEXT, first, later) == first
    nothing_left = replace(CONVERGED, reclaimed=7)
    done = pool_status(POLICY, Observed(pool_children(), (), nothing_left), CONTEXT, first, later)
    times = {condition["type"]: condition["lastTransitionTime"] for condition in done["conditions"]}
    others = {"MasterAvailable", "StoreAvailable", "WeightsConverged", "TiersUsable", "Drained", "Reclaimed"}
    assert {kind for kind, time in times.items() if time == "2026-03-01T12:01:30Z"} == {"Ready", "EpochConverged"}
    assert {kind for kind, time in times.items() if time == "2026-03-01T12:00:00Z"} == others


def test_pool_status_in_full() -> None:
    gone = late("ray-1", epoch=None, engine="trainer-a", rank=3, old_epoch_requests=1, alive=False, weights="c" * 32)
    engines = [rank("p0", 8, old_epoch_requests=2), late("p1", epoch=7), gone, rank("", 8, engine="trainer-b", weights="b" * 32)]
    hub = HubView(8, 7, engines, started_at=UNIX)
    status = pool_status(POLICY, Observed(pool_children(), PODS, hub), CONTEXT, {"targetEpoch": 7, "epoch": 7, "granting": True}, NOW)
    assert (status["targetEpoch"], status["epoch"], status["granting"]) == (8, 7, True)
    assert status["engines"] == {"total": 4, "converged": 2, "external": 2, "oldEpochRequests": 3, "summary": "2/4"}
    assert status["externalEngines"] == [
        {"name": "ray-1/3", "pod": "ray-1", "rank": 3, "oldEpochRequests": 1},
        {"name": "trainer-b", "weights": "bbbbbbbb", "epoch": 8, "rank": 0, "oldEpochRequests": 0},
    ]
    laggards = [{"name": "p1", "reason": "Behind"}, {"name": "ray-1/3", "reason": "Silent"}]
    assert status["reset"] == {"epoch": 8, "startTime": NOON, "laggards": laggards}
    assert status["master"] == {"replicas": 1, "readyReplicas": 1, "address": "policy-master.rl.svc:50051"}
    assert status["store"]["selector"] == "app.kubernetes.io/component=store,epochkv.io/pool=policy"
    hub_and_master = {"hub": CONTEXT.settings.endpoint, "master": "policy-master.rl.svc:50051"}
    assert status["endpoints"] == {**hub_and_master, "configMap": "policy-connection", "secret": "policy-fence"}


def test_a_hub_that_knows_less_takes_nothing_away() -> None:
    """After a restart the hub has heard of no engine and led no reset; without a hub nothing is known at all."""
    reset = {"epoch": 9, "startTime": "a", "completionTime": "b", "durationMilliseconds": 3}
    before = {"targetEpoch": 9, "epoch": 9, "granting": True, "engines": {"total": 2, "summary": "2/2"}, "reset": reset}
    fresh = pool_status(POLICY, Observed(pool_children(), (), HubView(0, 0)), CONTEXT, before, NOW)
    assert (fresh["targetEpoch"], fresh["epoch"], fresh["granting"], fresh["reset"]) == (9, 9, True, before["reset"])
    none = pool_status(POLICY, Observed(pool_children()), CONTEXT, before, NOW)
    assert {key: none[key] for key in before} == before


def test_a_hub_that_has_just_begun_to_lead_reports_nobody_as_gone() -> None:
    """An operator that restarts would otherwise say that all engines left, and a moment later that they came."""
    some = [rank("p0", old_epoch_requests=3), rank("", engine="ray", weights="b" * 32, tiers_off="TiersOff", tiers_note="why")]
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

    children = state.engine_children(ready(2))
    limited = rank("p1", tiers_off="TiersOff", tiers_note="why")
    before = engine_status(ROLLOUT, POLICY, Observed(children, PODS, HubView(7, 7, [rank("p0"), limited])), {}, NOW)
    young = HubView(7, 7, [rank("p0")], complete=False)
    assert engine_status(ROLLOUT, POLICY, Observed(children, PODS, young), before, later) == before
    lost = engine_status(ROLLOUT, POLICY, Observed(children, PODS, HubView(7, 7, [rank("p0")])), before, later)
    assert {item["type"]: item["reason"] for item in lost["conditions"]}["EpochCurrent"] == "NotReporting"
    # What has nothing to do with the hub is told at once.
    trouble = state.engine_children({"replicas": 2, "updatedReplicas": 2})
    failing = [state.engine_pod("p0", **state.waiting("engine", "ImagePullBackOff")), PODS[1]]
    told = engine_status(ROLLOUT, POLICY, Observed(trouble, failing, young), before, later)
    assert {item["type"]: item["reason"] for item in told["conditions"]}["Ready"] == "ImagePullFailed"


def test_times_of_a_reset_are_written_once() -> None:
    """Wall clocks are adjusted all the time; and another hub's clock says nothing about how long a reset took."""
    opened = HubView(7, 6, [late("p0")], started_at=UNIX)
    first = pool_status(POLICY, Observed(pool_children(), (), opened), CONTEXT, {}, NOW)
    slewed = replace(opened, published=7, engines=[rank("p0")], started_at=UNIX + 0.002, published_at=UNIX, reset_seconds=0.009)
    done = pool_status(POLICY, Observed(pool_children(), (), slewed), CONTEXT, first, NOW)
    assert done["reset"] == {"epoch": 7, "startTime": NOON, "completionTime": NOON, "durationMilliseconds": 9}
    again = replace(slewed, published_at=UNIX + 0.003)
    assert pool_status(POLICY, Observed(pool_children(), (), again), CONTEXT, done, NOW)["reset"] == done["reset"]
    successor = replace(slewed, started_at=UNIX + 20, published_at=UNIX + 21)
    after = pool_status(POLICY, Observed(pool_children(), (), successor), CONTEXT, first, NOW)
    assert after["reset"] == {"epoch": 7, "startTime": NOON, "completionTime": "2026-03-01T12:00:21.123Z"}
    # The hub that published it died before it could say so: no reset looks open for ever.
    later = NOW + timedelta(seconds=30)
    seen = Observed(pool_children(), (), HubView(7, 7))
    orphan = pool_status(POLICY, seen, CONTEXT, first, later)
    assert orphan["reset"] == {"epoch": 7, "startTime": NOON, "completionTime": "2026-03-01T12:00:30.123Z"}
    assert pool_status(POLICY, seen, CONTEXT, orphan, later + timedelta(hours=1))["reset"] == orphan["reset"]


def test_limits_of_lists_and_messages() -> None:
    crowd = [late("", engine=f"e{n:03}") for n in range(100)]
    hub = HubView(7, 6, crowd, started_at=UNIX)
    trouble = Problem("InvalidTemplate", "x" * 9999)
    status = pool_status(POLICY, Observed(pool_children(), (), hub, trouble), CONTEXT, {}, NOW)
    assert len(status["externalEngines"]) == 64
    assert len(status["reset"]["laggards"]) == 16
    assert max(len(condition["message"]) for condition in status["conditions"]) <= 4096
