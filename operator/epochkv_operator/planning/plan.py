"""From what is wanted and what is there to what has to be done. Pure: planning again on the result yields nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.compare import difference
from epochkv_operator.planning.context import Context, Json, Observed, Problem
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.merge import InvalidTemplate
from epochkv_operator.planning.pool import desired_pool

PRUNED_KINDS = (
    "ConfigMap",
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Service",
    "ServiceAccount",
    "StatefulSet",
)


@dataclass(frozen=True)
class Plan:
    """What to do, in order: apply, then delete (with the uid of the object given, as a precondition)."""

    apply: tuple[Json, ...] = ()
    """Complete manifests for server-side apply."""
    delete: tuple[Json, ...] = ()
    """Live objects to delete."""
    details: tuple[str, ...] = ()
    """Why each step, in words; empty exactly when there is nothing to do."""
    problem: Problem | None = None
    """Set when the spec cannot be carried out; then nothing is changed."""


def plan_pool(pool: KVCachePool, observed: Observed, context: Context) -> Plan:
    """Steps for a pool. A pool that is being deleted needs none: the garbage collector takes its objects."""
    return _plan(pool, lambda: desired_pool(pool, context), observed.children)


def plan_engine(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed, context: Context) -> Plan:
    """Steps for an engine. `pool` as in `desired_engine`; one that is being deleted counts as gone."""
    return _plan(engine, lambda: desired_engine(engine, living(pool), context), observed.children)


def living(pool: KVCachePool | None) -> KVCachePool | None:
    """The pool, or None when it is gone or going."""
    return None if pool is None or pool.metadata.deletion_timestamp is not None else pool


def owned_by(owner: KVCachePool | InferenceEngine, children: Sequence[Json]) -> list[Json]:
    """The live objects that this very owner (by uid) controls."""
    return [child for child in children if _controller(child).get("uid") == owner.metadata.uid]


def _plan(owner: KVCachePool | InferenceEngine, desire: Callable[[], list[Json]], children: Sequence[Json]) -> Plan:
    if owner.metadata.deletion_timestamp is not None:
        return Plan()
    try:
        desired = desire()
    except InvalidTemplate as error:
        return Plan(problem=Problem("InvalidTemplate", str(error)))
    live = {(child["kind"], child["metadata"]["namespace"], child["metadata"]["name"]): child for child in children}
    apply, details = [], []
    for obj in desired:
        known = live.get((obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]))
        foreign = _foreign(owner, known)
        if foreign is not None:
            return Plan(problem=foreign)
        why = "it does not exist" if known is None else difference(obj, known)
        if why is not None:
            apply.append(obj)
            details.append(f"apply {_name(obj)}: {why}")
    wanted = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    surplus = [
        child
        for child in owned_by(owner, children)
        if child["kind"] in PRUNED_KINDS
        and (child["kind"], child["metadata"]["name"]) not in wanted
        and child["metadata"].get("deletionTimestamp") is None
    ]
    details += [f"delete {_name(child)}: the spec has no use for it any more" for child in surplus]
    return Plan(tuple(apply), tuple(surplus), tuple(details))


def _foreign(owner: KVCachePool | InferenceEngine, child: Json | None) -> Problem | None:
    """A live object of the wanted name that something else controls, such as the master of a pool where an engine wants its Deployment."""
    controller = _controller(child) if child is not None else {}
    if child is None or controller.get("uid") == owner.metadata.uid:
        return None
    if not controller:
        holder = "is not controlled by this operator: delete it, or give it another name"
    elif (controller.get("kind"), controller.get("name")) == (owner.kind, owner.metadata.name):
        holder = f"belongs to a deleted {owner.kind} of the same name and is about to be garbage-collected: wait"
    else:
        holder = f"belongs to {controller.get('kind')} {controller.get('name')}: rename one of the two"
    return Problem("NameConflict", f"{_name(child)} {holder}")


def _controller(child: Json) -> Json:
    owners: list[Json] = child["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def _name(obj: Json) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
