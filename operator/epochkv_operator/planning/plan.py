"""From what is wanted and what is there to what has to be done. Pure: planning again on the result yields nothing."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from epochkv_fence import quantity
from epochkv_fence.protocol.pool import listed
from epochkv_operator.api.base import ENGINE_LABEL, MANAGED_BY_LABEL, POOL_LABEL
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.api.resources import BY_KIND, CHILDREN
from epochkv_operator.planning.context import Context, Json, KindNotServed, Observed, Problem
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.names import COMPONENT_LABEL, HASH_ANNOTATION, VERSION_ANNOTATION, controller_of
from epochkv_operator.planning.podspec import InvalidTemplate
from epochkv_operator.planning.pool import desired_pool

_ITEM_KEYS: Final = ("mountPath", "name", "containerPort", "uid", "ip")
"""What the items of a list are told apart by. A volume may be mounted twice."""
_WHOLE: Final = (".spec.selector", ".spec.podSelector", ".spec.ingress")
"""Where a field that somebody adds lets others in, or leaves out those that are meant. The API server adds none there."""
ABSENT: Final = "it does not exist"
_QUANTITIES: Final = ("limits", "requests", "sizeLimit", "divisor")


class Plan(NamedTuple):
    """What to do, in order: apply, then delete (with the uid of the object given, as a precondition)."""

    apply: tuple[Json, ...] = ()
    """Complete manifests for server-side apply."""
    delete: tuple[Json, ...] = ()
    """Live objects to delete."""
    details: tuple[str, ...] = ()
    """Why each step, in words and in the order of the steps."""
    problem: Problem | None = None
    """Set when the spec cannot be carried out; then nothing is changed."""


def plan_pool(pool: KVCachePool, observed: Observed, context: Context) -> Plan:
    """Steps for a pool. A pool that is being deleted needs none: the garbage collector takes its objects."""
    return _plan(pool, lambda: desired_pool(pool, context), observed.children, context.served)


def plan_engine(engine: InferenceEngine, pool: KVCachePool | None, observed: Observed, context: Context) -> Plan:
    """Steps for an engine. `pool` as in `desired_engine`."""
    return _plan(engine, lambda: desired_engine(engine, pool, context), observed.children, context.served)


def _plan(owner: KVCachePool | InferenceEngine, desire: Callable[[], list[Json]], children: Sequence[Json], served: frozenset[str]) -> Plan:
    if owner.metadata.deletion_timestamp is not None:
        return Plan()
    try:
        desired = desire()
    except (InvalidTemplate, KindNotServed) as error:
        return Plan(problem=Problem(type(error).__name__, str(error)))
    live = {_name(child): child for child in children}
    apply, details = [], []
    for obj in desired:
        known = live.get(_name(obj))
        foreign = _foreign(owner, obj, known)
        if foreign is not None:
            return Plan(problem=foreign)
        kept = obj
        if known is not None and known.get("x-scaled-by-others"):  # only then is it safe to drop: nobody resets it to 1
            kept = {**obj, "spec": {key: value for key, value in obj["spec"].items() if key != "replicas"}}
        why = ABSENT if known is None else difference(kept, known)
        if why is not None:
            apply.append(kept)
            details.append(f"apply {_name(obj)}: {why}")
    wanted = {_name(obj) for obj in desired}
    surplus = [
        child
        for child in children
        if controller_of(child).get("uid") == owner.metadata.uid
        and (BY_KIND[child["kind"]] in CHILDREN or child["kind"] in served)
        and _name(child) not in wanted
        and child["metadata"].get("deletionTimestamp") is None
    ]
    details += [f"delete {_name(child)}: the spec has no use for it any more" for child in surplus]
    return Plan(tuple(apply), tuple(surplus), tuple(details))


def _foreign(owner: KVCachePool | InferenceEngine, desired: Json, child: Json | None) -> Problem | None:
    """A live object of the wanted name that something else controls, such as the master of a pool where an engine wants its Deployment."""
    controller = controller_of(child) if child is not None else {}
    if child is None or controller.get("uid") == owner.metadata.uid or (not controller and _left_behind(desired, child)):
        return None
    if not controller:
        holder = "is not controlled by this operator: delete it, or give it another name"
    elif (controller.get("kind"), controller.get("name")) == (owner.kind, owner.metadata.name):
        holder = f"belongs to a deleted {owner.kind} of the same name and is about to be garbage-collected: wait"
    else:
        holder = f"belongs to {controller.get('kind')} {controller.get('name')}: rename one of the two"
    return Problem("NameConflict", f"{_name(child)} {holder}")


def _left_behind(desired: Json, child: Json) -> bool:
    """This operator made the live object for a namesake, which was deleted without it (`--cascade=orphan`): its labels and the annotation
    say so."""
    metadata = child["metadata"]
    labels, wanted = metadata.get("labels") or {}, desired["metadata"]["labels"]
    ours = (MANAGED_BY_LABEL, COMPONENT_LABEL, ENGINE_LABEL if ENGINE_LABEL in wanted else POOL_LABEL)
    made = HASH_ANNOTATION in (metadata.get("annotations") or {})
    return made and all(labels.get(label) == wanted[label] for label in ours)


def _name(obj: Json) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"


def difference(desired: Json, live: Json) -> str | None:
    """Where `live` differs from `desired`, as paths, or None when applying `desired` would change nothing.

    Fields that an earlier version applied and this one does not are invisible here; the hash over the whole desired object, kept as an
    annotation, gives those away.
    """
    known = (live["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
    # The notes of who applied are no reason to. Items of a list come without apiVersion and kind, and the caller has matched those already.
    annotations = {
        key: value for key, value in desired["metadata"]["annotations"].items() if key not in (VERSION_ANNOTATION, HASH_ANNOTATION)
    }
    metadata = {**desired["metadata"], "annotations": annotations}
    wanted = {key: value for key, value in desired.items() if key not in ("apiVersion", "kind")} | {"metadata": metadata}
    found = _differing(wanted, live, "")
    if known != desired["metadata"]["annotations"][HASH_ANNOTATION]:
        return f"what the operator wants has changed: {listed((path[1:] for path in found), 3)}".removesuffix(": ")
    first = next(found, None)
    return f"{first[1:]} was changed by somebody else" if first is not None else None


def _differing(desired: Any, live: Any, path: str) -> Iterator[str]:
    if live is None:
        if desired not in ({}, [], "", 0, False, None):
            yield path
    elif isinstance(desired, dict) and isinstance(live, dict):
        for key, value in desired.items():
            if value != (other := live.get(key)):
                yield from _differing(value, other, f"{path}.{key}")
        if path.startswith(_WHOLE):
            yield from (f"{path}.{key}" for key in live if key not in desired)
    elif isinstance(desired, list) and isinstance(live, list):
        yield from _differing_items(desired, live, path)
    elif desired != live and not _same_quantity(desired, live, path):
        yield path


def _differing_items(desired: list[Any], live: list[Any], path: str) -> Iterator[str]:
    key = next((key for key in _ITEM_KEYS if desired and all(isinstance(item, dict) and key in item for item in desired)), None)
    if key is not None:
        known = {item.get(key): item for item in live if isinstance(item, dict)}
        pairs = [(item, known.get(item[key]), str(item[key])) for item in desired]
    elif len(desired) == len(live):
        pairs = [(item, other, str(index)) for index, (item, other) in enumerate(zip(desired, live, strict=True))]
    else:
        yield path
        return
    for item, other, name in pairs:
        if other is None:
            yield f"{path}[{name}]"
        elif item != other:
            yield from _differing(item, other, f"{path}[{name}]")


def _same_quantity(desired: Any, live: Any, path: str) -> bool:
    if not any(part in _QUANTITIES for part in path.split(".")):
        return False
    try:
        return quantity.parse(str(desired)) == quantity.parse(str(live))  # a template may have 0.5
    except ValueError:
        return False
