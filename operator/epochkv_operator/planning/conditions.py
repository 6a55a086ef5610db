"""Conditions of pools and engines: type, status, a stable reason, a sentence with the remedy. Pure; transition times are added
in `status.py`.

A condition that does not apply is absent: a pool without L2 has no `MasterAvailable`, an engine without poolRef no `PoolBound`.
"""

from __future__ import annotations

from collections.abc import Iterable

from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning import epoch_conditions as epochs
from epochkv_operator.planning.context import Condition, HubEngine, Observed
from epochkv_operator.planning.names import component_selector, engine_selector, master_name, store_name
from epochkv_operator.planning.plan import living
from epochkv_operator.planning.weights import weights_converged
from epochkv_operator.planning.workload import Health, find, health, select


def pool_conditions(pool: KVCachePool, observed: Observed) -> list[Condition]:
    """`Ready` first, then what it is made of, then what only costs reuse or memory."""
    parts: list[Condition] = []
    if observed.problem is not None:
        parts.append(Condition("Ready", "False", observed.problem.reason, observed.problem.message))
    if pool.spec.distributed is not None and pool.spec.distributed.mooncake is not None:
        parts.append(_workload_condition("MasterAvailable", master_health(pool, observed)))
        parts.append(_workload_condition("StoreAvailable", store_health(pool, observed)))
    hub = observed.hub
    parts.append(epochs.epoch_converged(pool, hub))
    notes = (weights_converged(hub), epochs.drained(hub), epochs.reclaimed(pool, hub), epochs.keys_rotated(pool, hub))
    return [*_with_ready(parts, "the pool serves"), *(note for note in notes if note is not None)]


def engine_conditions(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed) -> list[Condition]:
    """`Ready` first, then what it is made of. `observed.hub` is the view of the engine's pool."""
    parts: list[Condition] = []
    if observed.problem is not None:
        parts.append(Condition("Ready", "False", observed.problem.reason, observed.problem.message))
    state = engine_health(engine, observed)
    parts.append(_workload_condition("Available", state))
    if engine.spec.pool_ref is not None:
        bound = living(pool)
        parts.append(_pool_bound(engine, bound))
        parts.append(_epoch_current(engine, bound, observed, state))
    return _with_ready(parts, "the engine serves")


def master_health(pool: KVCachePool, observed: Observed) -> Health:
    """State of the pool's masters."""
    return _pool_health(pool, observed, "Deployment", "master", master_name(pool.metadata.name), "the master")


def store_health(pool: KVCachePool, observed: Observed) -> Health:
    """State of the pool's stores."""
    distributed = pool.spec.distributed
    asked = distributed.mooncake.store.replicas if distributed is not None and distributed.mooncake is not None else None
    return _pool_health(pool, observed, "StatefulSet", "store", store_name(pool.metadata.name), "the store", asked)


def engine_health(engine: InferenceEngine, observed: Observed) -> Health:
    """State of the engine's pods."""
    metadata = engine.metadata
    workload = find(observed.children, "Deployment", metadata.name, metadata.uid)
    pods = select(observed.pods, engine_selector(metadata.name), metadata.namespace)
    return health(workload, pods, "the engine", engine.spec.replicas)


def engine_ranks(engine: InferenceEngine, observed: Observed) -> dict[str, list[HubEngine]]:
    """What the hub knows of each live pod of an engine: pod name to its ranks, empty when none of them reported."""
    pods = select(observed.pods, engine_selector(engine.metadata.name), engine.metadata.namespace)
    names = [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("deletionTimestamp") is None]
    known = observed.hub.engines if observed.hub is not None else ()
    return {name: [rank for rank in known if rank.pod == name] for name in names}


def at_target(ranks: Iterable[HubEngine], target: int) -> bool:
    """True when a pod's every rank reported the target epoch, and at least one did."""
    epochs = [rank.epoch for rank in ranks]
    return bool(epochs) and all(epoch is not None and epoch >= target for epoch in epochs)


def _pool_health(
    pool: KVCachePool, observed: Observed, kind: str, component: str, name: str, what: str, asked: int | None = None
) -> Health:
    metadata = pool.metadata
    pods = select(observed.pods, component_selector(metadata.name, component), metadata.namespace)
    return health(find(observed.children, kind, name, metadata.uid), pods, what, asked)


def _workload_condition(kind: str, state: Health) -> Condition:
    ok = state.reason in ("Available", "ScaledToZero", "Updating")
    return Condition(kind, "True" if ok else "False", state.reason, state.message)


def _pool_bound(engine: InferenceEngine, pool: KVCachePool | None) -> Condition:
    name = engine.spec.pool_ref.name if engine.spec.pool_ref is not None else ""
    if pool is None:
        return Condition(
            "PoolBound",
            "False",
            "PoolNotFound",
            f"KVCachePool {engine.metadata.namespace}/{name} does not exist: the engine serves without shared KV; create the pool",
        )
    return Condition("PoolBound", "True", "Bound", f"configured for KVCachePool {name} (uid {pool.metadata.uid})")


def _epoch_current(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed, state: Health) -> Condition:
    kind = "EpochCurrent"
    if pool is None:
        return Condition(kind, "False", "PoolNotFound", "there is no pool whose epoch the engine could follow")
    if engine.spec.replicas == 0:
        return Condition(kind, "True", "ScaledToZero", "there is no pod")
    if observed.hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", "no hub leads this pool at the moment")
    target, ranks = observed.hub.target, engine_ranks(engine, observed)
    current = [name for name, known in ranks.items() if at_target(known, target)]
    behind = sorted(set(ranks) - set(current))
    if len(current) >= state.wanted and not behind:
        return Condition(kind, "True", "Current", f"{len(current)} of {state.wanted} replicas are at epoch {target}")
    silent = [name for name in behind if not ranks[name]]
    text = f"{len(current)} of {state.wanted} replicas are at epoch {target}"
    if silent:
        return Condition(kind, "False", "NotReporting", f"{text}; not heard from: {', '.join(silent[:4])}")
    return Condition(kind, "False", "Advancing", f"{text}; behind: {', '.join(behind[:4])}" if behind else text)


def _with_ready(parts: list[Condition], good: str) -> list[Condition]:
    """`Ready` is the first part that is not True."""
    failing = next((part for part in parts if part.status != "True"), None)
    if failing is None:
        ready = Condition("Ready", "True", "Ready", good)
    else:
        ready = Condition("Ready", failing.status, failing.reason, failing.message)
    return [ready, *(part for part in parts if part.type != "Ready")]
