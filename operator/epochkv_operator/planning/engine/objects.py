"""Every object of an engine: the workload, a Service to the pods that answer, a budget for drains, a service account, policies."""

from __future__ import annotations

from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.api.serving import is_zero
from epochkv_operator.planning import podspec
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.engine.arguments import serves_tls
from epochkv_operator.planning.engine.nodes import PREFIX, leader_worker_set, placement
from epochkv_operator.planning.engine.pod import pod_template
from epochkv_operator.planning.engine.startup import progress_deadline
from epochkv_operator.planning.monitoring import engine_monitor
from epochkv_operator.planning.names import ENGINE_PORT, engine_account, engine_object, engine_selector
from epochkv_operator.planning.network import engine_policy

_LEADER = {f"{PREFIX}worker-index": "0"}


def workload_of(engine: InferenceEngine) -> tuple[str, str]:
    """Kind and name of what makes the pods. LeaderWorkerSet makes a Service of its own name, so it must not have the engine's."""
    name = engine.metadata.name
    return ("LeaderWorkerSet", f"{name}-nodes") if engine.spec.parallelism.nodes > 1 else ("Deployment", name)


def leader_selector(engine: InferenceEngine) -> dict[str, str]:
    """Selector of one pod of each replica: the one that answers requests and speaks with the hub."""
    selector = engine_selector(engine.metadata.name)
    return {**selector, **_LEADER} if engine.spec.parallelism.nodes > 1 else selector


def desired_engine(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> list[Json]:
    """Every object of an engine.

    `pool` is the pool that `spec.poolRef` names. None: no pool is named, or it does not exist *in a complete listing*. The engine
    then serves without connector. Passing None because the pool is merely not known yet would restart every engine twice.

    Raises:
        InvalidTemplate: an override in `spec.template` that belongs to the operator.
        KindNotServed: the engine spans nodes, and the cluster has no LeaderWorkerSet.
    """
    lost, selector = engine.spec.update_strategy.max_unavailable, engine_selector(engine.metadata.name)
    service = podspec.service(leader_selector(engine), "http", ENGINE_PORT)
    # A budget that allows nothing would keep nodes from being drained for ever.
    budget = podspec.budget(selector, 1 if is_zero(lost) else lost)
    return [
        engine_object("ServiceAccount", engine, context, {"automountServiceAccountToken": False}, engine_account(engine.metadata.name)),
        _workload(engine, pool, context),
        engine_object("Service", engine, context, {"spec": service}),
        engine_object("PodDisruptionBudget", engine, context, budget),
        *(engine_policy(engine, pool, context) if pool is not None else []),
        *engine_monitor(engine, leader_selector(engine), context, tls=serves_tls(engine.spec)),
    ]


def _workload(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    kind, name = workload_of(engine)
    if kind == "Deployment":
        return engine_object(kind, engine, context, {"spec": _deployment(engine, pool, context)}, name)
    return engine_object(kind, engine, context, leader_worker_set(engine, pool, context), name, placement(engine))


def _deployment(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    template = pod_template(engine, pool, context)
    return {
        "replicas": engine.spec.replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": progress_deadline(template["spec"]),
        "selector": {"matchLabels": engine_selector(engine.metadata.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": engine.spec.update_strategy.model_dump()},
        "template": template,
    }
