"""Statuses as they are written: assembled from conditions and observations, with times that move only when something changed.

`now` is an argument. The result is a complete status, cut to what the schema takes. The writer compares it with the live one and
writes only a difference.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from epochkv_fence.protocol.pool import SHOWN_DIGITS, EngineView, listed
from epochkv_operator.api.base import ENGINE_LABEL
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.conditions import (
    MAX_KINDS,
    engine_conditions,
    engine_health,
    engine_ranks,
    master_health,
    num_at_target,
    pool_conditions,
    store_health,
    waits_for,
)
from epochkv_operator.planning.connection import master_address
from epochkv_operator.planning.context import Condition, Context, HubView, Json, Observed, timestamp
from epochkv_operator.planning.engine import leader_selector
from epochkv_operator.planning.names import component_name, component_selector, selector_text

_HEARD = ("engines", "externalEngines", "weights", "weightsSummary")


def pool_status(pool: KVCachePool, observed: Observed, context: Context, previous: Json, now: datetime) -> Json:
    """The status of a pool. `previous` is its live status (empty at first); epochs in it are never lowered.

    The epochs are the hub authority's to write. They are repeated here only so that a whole status can be written: the maximum
    of what is there and what the hub says.
    """
    if observed.hub is not None:
        # What an earlier hub found reclaimed is so: nobody writes below the published epoch any more but what the next sweep finds.
        done = min(max(observed.hub.reclaimed, (previous.get("reclaim") or {}).get("epoch") or 0), observed.hub.published)
        observed = replace(observed, hub=replace(observed.hub, reclaimed=done))
    # A hub that has just begun to lead has not heard from everybody yet: what it does not know is no news.
    known_before = (previous.get("engines") or {}).get("total", 0)
    partial = observed.hub is not None and not observed.hub.complete and len(observed.hub.engines) < known_before
    found = conditions(pool_conditions(pool, observed), previous, pool.metadata.generation, now)
    if observed.hub is not None and not observed.hub.complete:  # gates stay as they are, too
        found = [one if one["type"] != "ServingGate" else _kept([one], previous, ("ServingGate",))[0] for one in found]
    if observed.shared is None:
        allowed = conditions_by_type(previous).get("NamespacesAllowed")
        found = [allowed if allowed and one["type"] == allowed["type"] else one for one in found]
    status: Json = {
        "conditions": _kept(found, previous, ("WeightsConverged", "TiersUsable", "Drained", "Reclaimed")) if partial else found,
        "observedGeneration": pool.metadata.generation,
    }
    _add_epochs(status, observed.hub, previous)
    if observed.hub is not None:
        found_outside = external(observed, pool.metadata.namespace)
        status["engines"] = _engines(observed.hub, len(found_outside))
        status["externalEngines"] = _external(found_outside)
        status["weights"] = _weights_groups(observed.hub, previous, now)
        status["weightsSummary"] = weights_summary(observed.hub.engines, observed.hub)
        if partial:
            status |= {key: previous[key] for key in _HEARD if key in previous}
        if observed.hub.keys is not None:
            status["keys"] = {"generation": observed.hub.keys.generation, "accepted": observed.hub.keys.accepted}
        if pool.spec.distributed is not None:
            status["reclaim"] = _reclaim(pool, observed.hub, previous)
    else:
        status |= {key: previous[key] for key in (*_HEARD, "keys", "reclaim") if key in previous}
    if observed.serving is not None and observed.serving.weights:
        served = [{"namespace": kind[0], "fingerprint": kind[1], "id": held} for kind, held in sorted(observed.serving.weights.items())]
        status["servedWeights"] = served[:256]
    reset = _reset(observed.hub, previous, now, partial=partial)
    if reset:
        status["reset"] = reset
    if pool.mooncake is not None:
        master, store = master_health(pool, observed), store_health(pool, observed)
        status["master"] = {"replicas": master.replicas, "readyReplicas": master.ready, "address": master_address(pool)}
        status["store"] = {
            "replicas": store.replicas,
            "readyReplicas": store.ready,
            "selector": selector_text(component_selector(pool.metadata.name, "store")),
        }
    name, address = pool.metadata.name, master_address(pool)
    joins = {"configMap": component_name(name, "connection"), "secret": component_name(name, "fence")}
    status["endpoints"] = {"hub": context.settings.endpoint, **joins, **({} if address is None else {"master": address})}
    return status


def engine_status(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed, previous: Json, now: datetime) -> Json:
    """The status of an engine. `observed.hub` is the view of its pool."""
    state, replicas = engine_health(engine, observed), engine_ranks(engine, observed)
    found = conditions(engine_conditions(engine, pool, observed), previous, engine.metadata.generation, now)
    silent = pool is not None and not all(rank for replica in replicas for rank in replica.values())
    partial = silent and observed.hub is not None and not observed.hub.complete
    status: Json = {
        "conditions": _kept(found, previous, ("EpochCurrent", "TiersUsable", *_ready_too(found))) if partial else found,
        "observedGeneration": engine.metadata.generation,
        "replicas": state.replicas,
        "readyReplicas": state.ready,
        "updatedReplicas": state.updated,
        "selector": selector_text(leader_selector(engine)),
    }
    if pool is not None and observed.hub is not None:
        status["epochReplicas"] = num_at_target(replicas, observed.hub.target)
        every = [view for replica in replicas for rank in replica.values() for view in rank]
        epochs = [view.epoch for view in every if view.epoch is not None]
        if epochs:
            status["epoch"] = min(epochs)
        status["weights"] = weights_summary(every, observed.hub)
        if partial:
            status |= {key: previous[key] for key in ("epochReplicas", "epoch", "weights") if key in previous}
    return status


def conditions(wanted: Sequence[Condition], previous: Json, generation: int, now: datetime) -> list[Json]:
    """Conditions as written. `lastTransitionTime` is kept from `previous` unless the status of that type changed."""
    known = conditions_by_type(previous)

    def written(condition: Condition) -> Json:
        before = known.get(condition.type, {})
        same = before.get("status") == condition.status
        since = before["lastTransitionTime"] if same else timestamp(now)
        shown = condition._replace(message=condition.message[:4096])
        return {**shown._asdict(), "observedGeneration": generation, "lastTransitionTime": since}

    return [written(condition) for condition in wanted]


def conditions_by_type(status: Json) -> dict[str, Json]:
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def weights_summary(engines: Iterable[EngineView], hub: HubView) -> str:
    """`3f2a9c1e 15/16`: what most of these engines hold and how many, per fingerprint; empty without a live one."""
    most = {engine.majority.hex() for engine in hub.diverged if engine.majority}  # of as many, the hub has chosen
    kinds: dict[str, list[EngineView]] = {}
    for engine in engines:
        if engine.alive:
            kinds.setdefault(engine.fingerprint, []).append(engine)
    found: list[str] = []
    for _, kind in sorted(kinds.items()):
        held = Counter(engine.weights.hex() for engine in kind if engine.weights is not None)
        chosen = max(held, key=lambda weights: (held[weights], weights in most, weights), default=None)
        found.append(f"{chosen[:SHOWN_DIGITS]} {held[chosen]}/{len(kind)}" if chosen is not None else f"unknown 0/{len(kind)}")
    return listed(found, MAX_KINDS)


def _weights_groups(hub: HubView, previous: Json, now: datetime) -> list[Json]:
    """`status.weights`. The time of weights that the live status shows already is kept: hubs and their clocks come and go."""
    before = {group["id"]: group["since"] for group in previous.get("weights") or []}
    return [
        {
            "id": group.id,
            **({"label": group.label} if group.label else {}),
            "engines": group.engines,
            "since": before.get(group.id) or timestamp(now - timedelta(seconds=group.since_seconds)),
        }
        for group in hub.weights[:8]
    ]


def _kept(found: Sequence[Json], previous: Json, kinds: Sequence[str]) -> list[Json]:
    """Conditions as they were before, of these kinds, and of all whose status and reason have not changed."""
    known = conditions_by_type(previous)

    def keep(condition: Json) -> Json:
        before = known.get(condition["type"])
        if before is None or before["reason"] == "PoolNotFound":  # there is one now, or this says the same
            return condition
        same = (before["status"], before["reason"]) == (condition["status"], condition["reason"])
        return {**before, "observedGeneration": condition["observedGeneration"]} if same or condition["type"] in kinds else condition

    return [keep(condition) for condition in found]


def _ready_too(found: Sequence[Json]) -> tuple[str, ...]:
    """`Ready`, when it is False for the same reason as `EpochCurrent`."""
    reasons = {condition["type"]: condition["reason"] for condition in found}
    return ("Ready",) if reasons["Ready"] == reasons.get("EpochCurrent") else ()


def _add_epochs(status: Json, hub: HubView | None, previous: Json) -> None:
    said = {"targetEpoch": hub.target, "epoch": hub.published} if hub is not None else {}
    for key in ("targetEpoch", "epoch"):
        values = [value for value in (previous.get(key), said.get(key)) if value is not None]
        if values:
            status[key] = max(values)
    status |= {key: previous[key] for key in ("weightsLabels", "granting", "proof") if previous.get(key)}
    if hub is not None and hub.granted:
        status["granting"] = True
    if hub is not None and hub.proof and status.get("epoch") == hub.published:
        status["proof"] = hub.proof


def _engines(hub: HubView, num_external: int) -> Json:
    converged = sum(engine.epoch is not None and engine.epoch >= hub.target for engine in hub.engines)
    total = len(hub.engines)
    return {
        "total": total,
        "converged": converged,
        "external": num_external,
        "oldEpochRequests": hub.old_epoch_requests,
        "summary": f"{converged}/{total}",
    }


def external(observed: Observed, namespace: str) -> list[EngineView]:
    """Engines that no InferenceEngine pod of this namespace stands behind."""
    assert observed.hub is not None
    ours = {
        pod["metadata"]["name"]
        for pod in observed.pods
        if pod["metadata"]["namespace"] == namespace and ENGINE_LABEL in (pod["metadata"].get("labels") or {})
    }
    return [engine for engine in observed.hub.engines if engine.pod not in ours or engine.namespace not in ("", namespace)]


def _external(found: Sequence[EngineView]) -> list[Json]:
    """What `status.externalEngines` says. Instances that report under one name are told apart by their ids; a process that was restarted is
    one of them for a lease."""
    namesakes = Counter(engine.display_name for engine in found)
    entries: dict[str, Json] = {}
    for engine in found:
        suffix = f"#{engine.instance.hex()[:8]}" if namesakes[engine.display_name] > 1 else ""
        name = engine.display_name[: 253 - len(suffix)] + suffix
        entry: Json = {"name": name, "rank": engine.rank, "oldEpochRequests": engine.old_epoch_requests}
        entry |= {key: value for key, value in (("pod", engine.pod), ("namespace", engine.namespace)) if value}
        if engine.alive and engine.weights is not None:
            entry["weights"] = engine.weights.hex()[:SHOWN_DIGITS]
        if engine.epoch is not None:
            entry["epoch"] = engine.epoch
        entries.setdefault(name, entry)
    return [entries[name] for name in sorted(entries)][:64]


def _reclaim(pool: KVCachePool, hub: HubView, previous: Json) -> Json:
    """What was freed. A hub that did not do it knows nothing of the counts, so what an earlier one wrote stays."""
    before, policy = previous.get("reclaim") or {}, pool.spec.reset.reclaim_policy
    if policy == "Retain":
        return {"policy": policy}
    if before.get("epoch", 0) >= max(hub.published, 1) and not hub.reclaimed_keys:
        return {**before, "policy": policy}
    reclaim: Json = {"policy": policy, "epoch": hub.reclaimed, "keys": hub.reclaimed_keys, "bytes": hub.reclaimed_bytes}
    if hub.reclaimed_at is not None and hub.reclaimed >= hub.published:
        reclaim["completionTime"] = timestamp(hub.reclaimed_at)
    return reclaim


def _reset(hub: HubView | None, previous: Json, now: datetime, *, partial: bool = False) -> Json:
    """The latest reset.

    A hub that did not lead the reset does not know its times, so what an earlier hub wrote stays. What the hub's authority wrote
    about a target that this view does not know yet stays, too. Times are never written again: their clock is adjusted all the time.
    """
    before: Json = previous.get("reset") or {}
    if before.get("epoch", 0) > max(previous.get("targetEpoch", 0), hub.target if hub is not None else 0):
        before = {}  # nobody asked for that
    if hub is None or before.get("epoch", 0) > hub.target:
        return before
    completed = hub.published_at if hub.published >= hub.target else None
    if hub.started_at is None or (completed is None and hub.published >= hub.target):
        return _closed(before, hub, now)
    durable = before if before.get("epoch") == hub.target else {}
    started = durable.get("startTime", timestamp(hub.started_at, milliseconds=True))
    reset: Json = {"epoch": hub.target, "startTime": started}
    origin = durable.get("origin") or (hub.origin.value if hub.origin is not None else None)
    if origin:
        reset["origin"] = origin
    if completed is not None and "completionTime" in durable:
        reset |= {key: durable[key] for key in ("completionTime", "durationMilliseconds") if key in durable}
    elif completed is not None:
        reset["completionTime"] = timestamp(completed, milliseconds=True)
        # The same start but for a clock's adjustments: another hub's reset began earlier, and its clock cannot be continued.
        ours = abs(datetime.fromisoformat(started).timestamp() - hub.started_at) < 0.5
        if ours and hub.reset_seconds is not None:
            reset["durationMilliseconds"] = round(hub.reset_seconds * 1e3)
    elif hub.laggards:
        reasons = {engine.display_name[:253]: waits_for(engine) for engine in hub.laggards}
        reset["laggards"] = [{"name": name, "reason": reason} for name, reason in sorted(reasons.items())][:16]
    elif partial and "laggards" in durable:
        reset["laggards"] = durable["laggards"]
    return reset


def _closed(before: Json, hub: HubView, now: datetime) -> Json:
    """An older hub's reset, once it is published: without laggards, and complete by now if that hub died before it could say when."""
    if before and before.get("epoch", 0) <= hub.published:
        return {"completionTime": timestamp(now, milliseconds=True)} | {key: value for key, value in before.items() if key != "laggards"}
    return before
