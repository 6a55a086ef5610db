"""Conditions of pools and engines: type, status, a stable reason, a sentence with the remedy. Pure; `status.py` adds the times.

A condition that does not apply is absent: a pool without L2 has no `MasterAvailable`, an engine without poolRef no `PoolBound`.
Requests under older roots see only what they held, and nobody finds old KV in a store. So of the conditions about epochs only
`EpochConverged` counts for `Ready`. The others say what reuse or memory still waits for, and what to do. An engine without tiers
serves, too: `TiersUsable` says what its hits wait for.

Engines name KV by the weights that they hold, so nothing here decides who shares; engines of other weights only share less.
No text holds an age: a pool in which nothing changes is not written to.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epochkv_fence.protocol.messages import TIER_REASONS, Source
from epochkv_fence.protocol.pool import EngineView, listed
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.connection import etcd_endpoints
from epochkv_operator.planning.context import PUSH_SECONDS, Condition, HubView, Json, Observed, Problem, Serving
from epochkv_operator.planning.engine import leader_selector, workload_of
from epochkv_operator.planning.names import component_name, component_selector, engine_selector
from epochkv_operator.planning.workload import Health, ended, find, health, rollout, select, without_leader

_ASKER: Final = {Source.TRAINER: "a trainer", Source.ENGINE: "an engine whose own caches were reset"}
_NO_HUB: Final = "no hub leads this pool at the moment"
_NO_HUB_NO_LEASE: Final = f"{_NO_HUB}; engines whose lease ends serve without shared KV"
_MAX_OUTLIERS: Final = 5
MAX_KINDS: Final = 4
"""Fingerprints of which the weights are named."""


def pool_conditions(pool: KVCachePool, observed: Observed) -> list[Condition]:
    """`Ready` first, then what it is made of, then what only costs reuse or memory."""
    parts, hub = [], observed.hub
    if pool.mooncake is not None:
        parts.append(_workload_condition("MasterAvailable", master_health(pool, observed)))
        parts.append(_workload_condition("StoreAvailable", store_health(pool, observed)))
    parts.append(_epoch_converged(pool, hub))
    tiers = _tiers_usable(hub.engines if hub is not None else None)
    notes = (
        _weights_converged(hub),
        _serving_gate(observed.serving, hub),
        tiers,
        _drained(hub),
        _reclaimed(pool, hub),
        _keys_rotated(pool, hub),
        _allowed(pool, observed),
    )
    return [
        _ready(parts, observed.problem, Condition("Ready", "True", "Ready", "the pool serves")),
        *parts,
        *(note for note in notes if note is not None),
    ]


def engine_conditions(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed) -> list[Condition]:
    """`Ready` first, then what it is made of, then what only costs reuse. `observed.hub` is the view of the engine's pool."""
    state = engine_health(engine, observed)
    notes = [_progressing(engine, observed, state)]
    parts = [_workload_condition("Available", state)]
    if engine.spec.pool_ref is not None:
        parts.append(_pool_bound(f"{engine.metadata.namespace}/{engine.spec.pool_ref.name}", pool))
        parts.append(_epoch_current(engine, pool, observed, state))
        if pool is not None:
            notes.append(_engine_tiers(engine, observed, state))
    counted, good = parts, Condition("Ready", "True", "Ready", "the engine serves")
    if state.reason == "ScaledToZero":
        # Without pods, as somebody asked for, there is nothing to wait for and nothing that serves: `Available` is False.
        counted, good = parts[1:], Condition("Ready", "True", "ScaledToZero", state.message)
    return [_ready(counted, observed.problem, good), *parts, *notes]


def _progressing(engine: InferenceEngine, observed: Observed, state: Health) -> Condition:
    """How a rollout goes, by the Deployment's own rules. One that is over stays True, whatever becomes of the pods later."""
    kind, workload = "Progressing", _workload(engine, observed)
    if workload is None:
        return Condition(kind, "Unknown", "NotCreated", "the engine does not exist yet")
    if workload["spec"].get("paused"):
        resume = f"kubectl -n {engine.metadata.namespace} rollout resume deployment {workload['metadata']['name']}"
        return Condition(kind, "Unknown", "Paused", f"somebody paused the rollout: {resume}")
    found = rollout(workload, _pods(engine, observed), state)
    if found.done:
        return Condition(kind, "True", "RolledOut", found.text)
    if found.stalled is not None:
        reason, why = found.stalled
        return Condition(kind, "False", reason, f"{found.text}; {why}")
    return Condition(kind, "True", "RollingOut", found.text)


def _idle(engine: InferenceEngine, state: Health) -> bool:
    """No pod is wanted, by the spec or by whoever scaled the Deployment."""
    return state.reason == "ScaledToZero" or (state.reason == "NotCreated" and engine.spec.replicas == 0)


def master_health(pool: KVCachePool, observed: Observed) -> Health:
    state = _pool_health(pool, observed, "Deployment", "master")
    endpoints = etcd_endpoints(pool.mooncake) if observed.leaderless and pool.mooncake is not None else None
    return without_leader(state, endpoints) if endpoints else state


def store_health(pool: KVCachePool, observed: Observed) -> Health:
    return _pool_health(pool, observed, "StatefulSet", "store", pool.mooncake.store.replicas if pool.mooncake is not None else None)


def engine_health(engine: InferenceEngine, observed: Observed) -> Health:
    return health(_workload(engine, observed), _pods(engine, observed), "the engine", engine.spec.replicas)


def _workload(engine: InferenceEngine, observed: Observed) -> Json | None:
    kind, name = workload_of(engine)
    return find(observed.children, kind, name, engine.metadata.uid)


def _pods(engine: InferenceEngine, observed: Observed) -> list[Json]:
    return select(observed.pods, engine_selector(engine.metadata.name), engine.metadata.namespace)


Ranks = dict[str, list[EngineView]]
"""Data-parallel ranks of one replica, by name: their instances, none when it has not reported."""


def engine_ranks(engine: InferenceEngine, observed: Observed) -> list[Ranks]:
    """What the hub knows of each replica of an engine whose first pod runs, or will. Every rank that it should have is there."""
    pods = select(observed.pods, leader_selector(engine), engine.metadata.namespace)
    by_pod: dict[str, list[EngineView]] = {}
    for view in observed.hub.engines if observed.hub is not None else ():
        if view.namespace in ("", engine.metadata.namespace):
            by_pod.setdefault(view.pod, []).append(view)
    names = [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("deletionTimestamp") is None and not ended(pod)]
    return [_replica(engine, name, by_pod) for name in names]


def _replica(engine: InferenceEngine, leader: str, by_pod: Mapping[str, list[EngineView]]) -> Ranks:
    """LeaderWorkerSet names the pods of a group after its first one."""
    data, in_pod = engine.spec.parallelism.data, engine.spec.parallelism.engines_per_pod
    places = [(f"{leader}-{rank // in_pod}" if rank >= in_pod else leader, rank) for rank in range(data)]
    found: Ranks = {f"{pod}/{rank}" if rank else pod: [] for pod, rank in places}
    for pod in dict.fromkeys(pod for pod, _ in places):
        for view in by_pod.get(pod, ()):
            found.setdefault(view.display_name, []).append(view)
    return found


def at_target(rank: Iterable[EngineView], target: int) -> bool:
    """True when each instance of this rank reported the target epoch, and there is one."""
    epochs = [view.epoch for view in rank]
    return bool(epochs) and all(epoch is not None and epoch >= target for epoch in epochs)


def num_at_target(replicas: Iterable[Ranks], target: int) -> int:
    """Replicas whose every rank reported the target epoch."""
    return sum(all(at_target(rank, target) for rank in replica.values()) for replica in replicas)


def _pool_health(pool: KVCachePool, observed: Observed, kind: str, component: str, asked: int | None = None) -> Health:
    metadata = pool.metadata
    workload = find(observed.children, kind, component_name(metadata.name, component), metadata.uid)
    pods = select(observed.pods, component_selector(metadata.name, component), metadata.namespace)
    return health(workload, pods, f"the {component}", asked)


def _workload_condition(kind: str, state: Health) -> Condition:
    ok = state.reason in ("Available", "Updating")
    return Condition(kind, "True" if ok else "False", state.reason, state.message)


def _pool_bound(named: str, pool: KVCachePool | None) -> Condition:
    kind = "PoolBound"
    if pool is None:
        text = f"KVCachePool {named} does not exist: the engine serves without shared KV; create the pool"
        return Condition(kind, "False", "PoolNotFound", text)
    return Condition(kind, "True", "Bound", f"configured for KVCachePool {pool.metadata.name} (uid {pool.metadata.uid})")


def _epoch_current(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed, state: Health) -> Condition:
    kind = "EpochCurrent"
    if pool is None:
        return Condition(kind, "False", "PoolNotFound", "there is no pool whose epoch the engine could follow")
    if _idle(engine, state):
        return Condition(kind, "True", "ScaledToZero", "there is no pod")
    if observed.hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB)
    target, replicas = observed.hub.target, engine_ranks(engine, observed)
    current = num_at_target(replicas, target)
    behind = sorted(name for replica in replicas for name, rank in replica.items() if not at_target(rank, target))
    text = f"{current} of {state.wanted} replicas are at epoch {target}"
    if current >= state.wanted and not behind:
        return Condition(kind, "True", "Current", text)
    silent = sorted(name for replica in replicas for name, rank in replica.items() if not rank)
    if silent:
        return Condition(kind, "False", "NotReporting", f"{text}; not heard from: {', '.join(silent[:4])}")
    return Condition(kind, "False", "Advancing", f"{text}; behind: {', '.join(behind[:4])}" if behind else text)


def _engine_tiers(engine: InferenceEngine, observed: Observed, state: Health) -> Condition:
    """The same of one engine. Before a replica was heard from, nobody knows."""
    kind = "TiersUsable"
    if _idle(engine, state):
        return Condition(kind, "True", "ScaledToZero", "there is no pod")
    views = [view for replica in engine_ranks(engine, observed) for rank in replica.values() for view in rank]
    if observed.hub is not None and not any(view.alive for view in views):
        return Condition(kind, "Unknown", "NotReporting", "the hub has not heard from any replica")
    return _tiers_usable(views if observed.hub is not None else None)


def _tiers_usable(engines: Iterable[EngineView] | None) -> Condition:
    """The live ones can load from the pool's tiers, and save to them. One that cannot answers correctly, with fewer hits or none."""
    kind = "TiersUsable"
    if engines is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB)
    limited = [engine for engine in engines if engine.alive and engine.tiers_off]
    if not limited:
        return Condition(kind, "True", "Usable", "no engine that reports lacks a tier")
    by_note: dict[str, list[str]] = {}
    for engine in sorted(limited, key=lambda engine: engine.display_name):
        by_note.setdefault(engine.tiers_note or "it does not say why", []).append(engine.display_name)
    said = {engine.tiers_off for engine in limited}
    worst = next((reason for reason in TIER_REASONS if reason in said), "TiersOff")
    text = "; ".join(f"{listed(names)}: {note}" for note, names in list(by_note.items())[:_MAX_OUTLIERS])
    return Condition(kind, "False", worst, text)


def _ready(parts: Sequence[Condition], problem: Problem | None, good: Condition) -> Condition:
    """`Ready` says the problem, or else what the first part says that is not True, or else `good`."""
    if problem is not None:
        return Condition("Ready", "False", problem.reason, problem.message)
    return next((part._replace(type="Ready") for part in parts if part.status != "True"), good)


def _epoch_converged(pool: KVCachePool, hub: HubView | None) -> Condition:
    """Published equals target, and target is at least what the spec asks for."""
    kind, asked = "EpochConverged", pool.spec.reset_epoch
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB_NO_LEASE)
    found = listed(f"{engine.display_name} ({waits_for(engine)})" for engine in hub.laggards)
    waits = (
        f"; waiting for {found}"
        if found
        else f"; leases of engines that the hub does not hear end within {pool.spec.reset.fence_timeout_seconds:g} s"
    )
    if hub.doubted:
        text = f"status.epoch is {hub.doubted}, and no hub has proved that: somebody edited the status, or the hub's key is new"
        return Condition(kind, "False", "Unproved", f"{text}. {hub.published} is proved; the hub proves {hub.target} now{waits}")
    if hub.target < asked:
        return Condition(kind, "False", "Recording", f"epoch {asked} is asked for, {hub.target} is recorded")
    if hub.published < hub.target:
        return Condition(kind, "False", "WaitingForEngines", f"epoch {hub.target} is recorded, {hub.published} is published{waits}")
    text = f"no engine uses an epoch below {hub.published}"
    if epoch_ahead(asked, hub):
        asker = _ASKER.get(hub.origin, "somebody else") if hub.origin else "somebody else"
        ahead = f"spec.resetEpoch {asked} resets nothing: {asker} raised the pool to epoch {hub.target}"
        return Condition(kind, "True", "EpochAhead", f"{text}; {ahead}. Set {hub.target + 1} or higher")
    return Condition(kind, "True", "Published", text)


def waits_for(engine: EngineView) -> str:
    """Why publication waits for this engine."""
    return "Behind" if engine.alive else "Silent"


def epoch_ahead(asked: int, hub: HubView) -> bool:
    """The spec asks for an epoch that was asked for already, and not by the spec.

    0 asks for nothing: where a trainer owns the resets, the spec stays there. A target of an unknown origin that equals
    what the spec asks for is taken to be the spec's.
    """
    return asked > 0 and (asked < hub.target or (asked == hub.target and hub.origin not in (None, Source.SPEC)))


def _drained(hub: HubView | None) -> Condition:
    """No request runs any more that was admitted under an older epoch."""
    if hub is None:
        return Condition("Drained", "Unknown", "HubUnavailable", _NO_HUB_NO_LEASE)
    if not hub.old_epoch_requests:
        return Condition("Drained", "True", "Drained", f"no request runs that was admitted before epoch {hub.target}")
    where = listed([f"{engine.display_name} ({engine.old_epoch_requests})" for engine in hub.engines if engine.old_epoch_requests])
    text = f"{hub.old_epoch_requests} requests were admitted under an older epoch and run on, seeing only what they held already: {where}"
    return Condition("Drained", "False", "OldEpochRequests", f"{text}; abort them, or wait until they end")


def _reclaimed(pool: KVCachePool, hub: HubView | None) -> Condition | None:
    """Nothing is left of older epochs in the distributed store; absent without one, and with `Retain`."""
    kind, policy = "Reclaimed", pool.spec.reset.reclaim_policy
    if pool.spec.distributed is None or policy == "Retain":
        return None
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB)
    gave = f"{hub.reclaimed_keys} keys and {hub.reclaimed_bytes} bytes were freed" if hub.reclaimed_keys else "there was nothing to free"
    if hub.reclaimed >= hub.published:
        return Condition(kind, "True", "Reclaimed", f"the store holds nothing of epochs below {hub.published}; {gave}")
    if hub.wipe_failed:
        text = f"the store could not be emptied in time after epoch {hub.published} was published"
        remedy = "nobody finds the old KV, it only takes memory, and removing it goes on; is the master reachable on its admin port?"
        return Condition(kind, "False", "WipeFailed", f"{text}: {remedy}")
    if not hub.engines and (pool.spec.distributed.external is not None or hub.published_at is None):
        return Condition(kind, "False", "NoEngine", "only an engine can tell old KV from new in the store, and none is connected")
    return Condition(kind, "False", "Reclaiming", f"old KV is being removed from the store; nothing waits for it; {gave} so far")


def _keys_rotated(pool: KVCachePool, hub: HubView | None) -> Condition | None:
    """The Secret has the key pair that `spec.keys.generation` asks for, and no older one is accepted."""
    kind, asked = "KeysRotated", pool.spec.keys.generation
    if not asked:
        return None
    if hub is None or hub.keys is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB)
    if hub.keys.accepted > 1:
        secret = f"{pool.metadata.name}-fence -n {pool.metadata.namespace}"
        cut = f'kubectl patch secret {secret} --type=json -p \'[{{"op":"remove","path":"/data/previous.pub"}}]\''
        waits = f"still used by {listed(hub.keys.old_users)}" if hub.keys.old_users else "about to be refused"
        text = f"the key pair before generation {hub.keys.generation} is {waits}"
        return Condition(kind, "False", "OldKeyInUse", f"{text}; to refuse it at once: {cut}")
    if hub.keys.generation < asked:
        return Condition(kind, "False", "Rotating", f"key generation {asked} is asked for, {hub.keys.generation} is in the Secret")
    return Condition(kind, "True", "Rotated", f"only the key pair of generation {hub.keys.generation} is accepted")


def _allowed(pool: KVCachePool, observed: Observed) -> Condition | None:
    """Pods of the namespaces that the pool allows can join."""
    kind, shared = "NamespacesAllowed", observed.shared
    if pool.spec.allowed_namespaces is None:
        return None
    if shared is None:
        return Condition(kind, "Unknown", "NotReconciled", "not reconciled yet")
    text = f"pods may join in {listed(shared.namespaces)}" if shared.namespaces else "no other namespace can join"
    if shared.problem is not None:
        return Condition(kind, "False", shared.problem.reason, f"{text}; {shared.problem.message}")
    return Condition(kind, "True", "Allowed", text)


def _weights_converged(hub: HubView | None) -> Condition:
    """The live engines of each fingerprint hold the same weights."""
    kind = "WeightsConverged"
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB_NO_LEASE)
    taking = [engine.display_name for engine in hub.engines if engine.updating]
    unknown = [
        f"{engine.display_name} ({engine.weights_note or 'it has not said yet'})"
        for engine in hub.engines
        if engine.alive and not engine.updating and engine.weights is None and engine.tiers_off != "OwnCache"
    ]
    silent = f"the weights of these engines are not known, and they share nothing: {listed(unknown, _MAX_OUTLIERS)}" if unknown else ""
    if hub.diverged and hub.overdue:
        remedy = (
            f"push again to those with older weights: {listed(hub.older, _MAX_OUTLIERS)}; all serve correctly, each shares with its equals"
        )
        text = f"not all engines hold the weights that most hold: {_outliers(hub)}; {remedy}"
        return Condition(kind, "False", "Diverged", f"{text}; {silent}" if silent else text)
    if taking:
        text = f"weights are being written to {listed(taking, _MAX_OUTLIERS)}"
        return Condition(kind, "False", "Updating", f"{text}; {silent}" if silent else text)
    if silent:
        return Condition(kind, "Unknown", "Unknown", silent)
    if hub.diverged:
        text = f"for less than {PUSH_SECONDS:g} s, engines have held different weights, and none was taking new ones: {_outliers(hub)}"
        return Condition(kind, "False", "Updating", text)
    held = sorted({hub.called(engine.weights.hex()) for engine in hub.engines if engine.alive and engine.weights is not None})
    text = f"all engines hold {listed(held, MAX_KINDS)}" if held else "no engine is connected"
    return Condition(kind, "True", "Converged", text)


def _serving_gate(found: Serving | None, hub: HubView | None) -> Condition | None:
    """Pods whose engines hold other weights than those that are asked for are out of their Services."""
    kind = "ServingGate"
    if found is None:
        return None
    if found.forbidden:
        fix = "install the chart with serve.gates=true, or set spec.serve.weights to Any"
        return Condition(kind, "False", "Forbidden", f"the operator may not write the gates of pods: {found.forbidden}; {fix}")
    then = "spec.serve.strict keeps them out of their Services" if found.strict else "they serve"
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", f"{_NO_HUB}: gates stay as they are for a lease; after that {then}")
    apart = f"; out of their Services: {listed((f'{name} ({held})' for name, held in found.held), _MAX_OUTLIERS)}" if found.held else ""
    apart += f"; they stay, so that half of the pods serve: {listed(found.stays, _MAX_OUTLIERS)}" if found.stays else ""
    if found.absent:
        text = (
            f"no live engine holds {listed(found.absent)}, which spec.serve names, so no pod that serves is taken out unless it is strict"
        )
        return Condition(kind, "False", "NotHeld", f"{text}{apart}; push them, or correct spec.serve")
    if not found.unsaid:
        serves = f"pods serve that hold {listed(found.serves, MAX_KINDS)}" if found.serves else "it is not known yet which weights serve"
        return Condition(kind, "True", "Gating", f"{serves}{apart}")
    return _unsaid(found.unsaid, then, apart)


def _unsaid(unsaid: Mapping[str, Sequence[str]], then: str, apart: str) -> Condition:
    """Nobody can tell of some pods what they hold."""
    kind = "ServingGate"
    said = {why: f"{listed(pods, _MAX_OUTLIERS)}; {then}{apart}" for why, pods in unsaid.items()}
    if "NoMajority" in said:
        text = "for longer than a push takes, nobody has known which weights serve (engines differ, or have another fingerprint)"
        return Condition(
            kind, "False", "NoMajority", f"{text}, which concerns {said['NoMajority']}; push weights, or name some in spec.serve"
        )
    if "NotReporting" in said:
        return Condition(kind, "False", "NotReporting", f"for longer than a lease, no engine has reported of {said['NotReporting']}")
    return Condition(kind, "False", "WeightsUnknown", f"for longer than a lease, the weights are not known of {said['WeightsUnknown']}")


def _outliers(hub: HubView) -> str:
    found = (
        f"{one.display_name} holds {hub.called(one.weights.hex())} instead of {hub.called(one.majority.hex())}"
        for one in hub.diverged
        if one.weights and one.majority
    )
    return listed(found, _MAX_OUTLIERS)
