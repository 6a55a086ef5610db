"""Objects of a cluster as the planner reads them."""

from datetime import UTC, datetime
from typing import Any

from epochkv_fence.protocol.pool import EngineView
from epochkv_operator.planning.context import HubView
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.pool import desired_pool
from tests.support.planning import CONTEXT, engine, one, pool

Json = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
POLICY, ROLLOUT = pool({"resetEpoch": 7, "distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}}}}), engine()
SEEN = {"observedGeneration": 1}
CONVERGED = HubView(target=7, published=7)


def workload(objects: list[Json], kind: str, name: str, **status: Any) -> Json:
    obj = one(objects, kind, name)
    return {**obj, "metadata": {**obj["metadata"], "generation": 1}, "status": {**SEEN, **status}}


ROLLED_OUT = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}


def ready(count: int) -> Json:
    return {"replicas": count, "readyReplicas": count, "updatedReplicas": count, "conditions": [ROLLED_OUT]}


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


def rank(name: str, epoch: int | None = 7, *, alive: bool = True, weights: str | None = "a" * 32, **extra: Any) -> EngineView:
    """One engine process as the hub knows it, in a pod of this name."""
    instance, converged = extra.pop("instance", name.encode()), extra.pop("converged", True)
    fields = {"engine": "rollout", "pod": name, "weights": bytes.fromhex(weights) if weights else None, **extra}
    return EngineView(instance, epoch, converged, alive, **fields)


def by_type(conditions: Any) -> Json:
    return {condition.type: (condition.status, condition.reason) for condition in conditions}


def message(conditions: Any, kind: str) -> str:
    return next(str(condition.message) for condition in conditions if condition.type == kind)


PODS = [engine_pod("p0"), engine_pod("p1")]
