"""What the operator would do once manifests are applied, and why. Pure: the operator's own `plan()` says what it wants.

What changes is told from what the operator wants now and what it would want then, both rendered here with the same settings. So
defaults, the operator's images and its keys cancel out, wherever this process does not know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_operator.api import InferenceEngine, InvalidObject, KVCachePool, parse_engine, parse_pool
from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.cli.fields import Difference, differences, reverted, top_differences
from epochkv_operator.keys import manifest, owner_reference
from epochkv_operator.kube.resources import SECRETS
from epochkv_operator.planning.context import Context, Observed
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.names import HASH_ANNOTATION, VERSION_ANNOTATION, component_name
from epochkv_operator.planning.plan import Plan, living, plan_engine, plan_pool
from epochkv_operator.planning.podspec import InvalidTemplate
from epochkv_operator.planning.pool import desired_pool

Json = dict[str, Any]
Key = tuple[str, str, str]
UNKNOWN_UID: Final = "known-after-apply"
_HIDDEN: Final = (HASH_ANNOTATION, VERSION_ANNOTATION)
_STRATEGIES: Final = ("strategy", "updateStrategy", "rolloutStrategy")
_TEMPLATES: Final = ("template", "leaderWorkerTemplate")
_IDLE: Final = "the operator would change nothing"
_MAX_CAUSES: Final = 32
"""Changed fields of an object that are tried one by one as causes."""


@dataclass(frozen=True)
class Subject:
    """A pool or an engine, as it is and as it would be."""

    before: Json | None
    """As it is; None: it does not exist."""
    after: Json
    children: tuple[Json, ...] = ()
    """Live objects that the operator made for it, or that stand where it would make one."""
    source: str | None = None
    """The file; None: it is in no file, and its pool is."""

    @property
    def key(self) -> Key:
        return key_of(self.after)


@dataclass(frozen=True)
class Step:
    """What happens to one object of the operator."""

    verb: str
    """`create`, `change` or `delete`."""
    key: Key
    before: Json | None
    after: Json | None
    changes: tuple[Difference, ...] = ()
    causes: tuple[str, ...] = ()
    """Changed fields without which the object would stay as it is."""
    rolls: int = 0
    """Pods that would be replaced."""
    at_once: str = ""
    """How many of them at the same time, as the object says it."""


@dataclass(frozen=True)
class Outcome:
    """What would happen to one pool or engine and to what the operator makes for it."""

    subject: Subject
    changes: tuple[Difference, ...] = ()
    """Of the object itself."""
    steps: tuple[Step, ...] = ()
    problem: str | None = None
    """What stands in the way."""
    notes: tuple[str, ...] = ()

    @property
    def rolls(self) -> int:
        return sum(step.rolls for step in self.steps)


@dataclass(frozen=True)
class World:
    """Pools by namespace and name, as they are and as they would be."""

    before: dict[tuple[str, str], Json] = field(default_factory=dict)
    after: dict[tuple[str, str], Json] = field(default_factory=dict)


def key_of(obj: Json) -> Key:
    return obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]


def preview(subjects: Sequence[Subject], world: World, context: Context) -> list[Outcome]:
    """The outcome for each subject, in order."""
    return [_outcome(subject, world, context) for subject in subjects]


def _outcome(subject: Subject, world: World, context: Context) -> Outcome:
    changes = tuple(top_differences((subject.before or {}).get("spec", {}), subject.after["spec"])) if subject.before is not None else ()
    try:
        wanted = _desired(subject.after, world.after, context)
        plan = _plan(subject, world.after, context)
        known = _desired(subject.before, world.before, context) if subject.before is not None else {}
    except InvalidTemplate as error:
        return Outcome(subject, changes, problem=f"{_IDLE}: InvalidTemplate: {error}")
    except InvalidObject as error:
        return Outcome(subject, changes, problem=f"{_IDLE}: {error}")
    if plan.problem is not None:
        return Outcome(subject, changes, problem=f"{_IDLE}: {plan.problem.reason}: {plan.problem.message}")
    live = {key_of(child) for child in subject.children}
    steps = []
    for key, obj in wanted.items():
        if key not in live:
            steps.append(Step("create", key, None, obj, causes=() if subject.before is None else _causes(subject, world, context, key)))
        elif found := tuple(differences(_shown(known.get(key, {})), _shown(obj))):
            steps.append(_change(subject, world, context, key, known.get(key, {}), obj, found))
    steps += [Step("delete", key_of(child), child, None, causes=tuple(_said(changes))) for child in plan.delete]
    return Outcome(subject, changes, tuple(steps), notes=_notes(subject, world))


def _change(subject: Subject, world: World, context: Context, key: Key, before: Json, after: Json, found: tuple[Difference, ...]) -> Step:
    return Step("change", key, before, after, found, _causes(subject, world, context, key), *replaced(before, after))


def replaced(before: Json, after: Json) -> tuple[int, str]:
    """How many pods a change of a workload replaces, and how many of them at the same time."""
    spec, known = after.get("spec", {}), before.get("spec", {})
    rolling: Json = next((spec[name] for name in _STRATEGIES if spec.get(name)), {})
    if all(spec.get(name) == known.get(name) for name in _TEMPLATES) or rolling.get("type") == "OnDelete":
        return 0, ""
    pods = min(_pods(known), _pods(spec))
    return pods, _at_once(rolling) if pods else ""


def _pods(spec: Json) -> int:
    """Of a workload; a LeaderWorkerSet has groups of them."""
    replicas: int = spec.get("replicas", 0) * (spec.get("leaderWorkerTemplate") or {}).get("size", 1)
    return replicas


def _at_once(rolling: Json) -> str:
    if rolling.get("type") == "Recreate":
        return "all at once"
    details = rolling.get("rollingUpdate") or rolling.get("rollingUpdateConfiguration") or {}
    surge = details.get("maxSurge", 0)
    return f"at most {details.get('maxUnavailable', 1)} at a time" + (f", with up to {surge} more beside them" if surge else "")


def _plan(subject: Subject, pools: dict[tuple[str, str], Json], context: Context) -> Plan:
    seen = Observed(tuple(child for child in subject.children if child["kind"] != SECRETS.kind))
    if subject.after["kind"] == "KVCachePool":
        return plan_pool(parse_pool(subject.after), seen, context)
    engine = parse_engine(subject.after)
    return plan_engine(engine, _pool_of(engine, pools), seen, context)


def _desired(obj: Json, pools: dict[tuple[str, str], Json], context: Context) -> dict[Key, Json]:
    if obj["kind"] == "KVCachePool":
        children = [*desired_pool(parse_pool(obj), context), _keys(obj)]
    else:
        engine = parse_engine(obj)
        children = desired_engine(engine, living(_pool_of(engine, pools)), context)
    return {key_of(child): child for child in children}


def _keys(pool: Json) -> Json:
    """The pool's Secret. The operator draws what is in it, and never changes that because of a manifest."""
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    found = manifest(namespace, component_name(name, "fence"), {}, {POOL_LABEL: name}, [owner_reference(pool)])
    return {key: value for key, value in found.items() if key != "data"}


def _pool_of(engine: InferenceEngine, pools: dict[tuple[str, str], Json]) -> KVCachePool | None:
    if engine.spec.pool_ref is None:
        return None
    found = pools.get((engine.metadata.namespace, engine.spec.pool_ref.name))
    return parse_pool(found) if found is not None else None


def _causes(subject: Subject, world: World, context: Context, key: Key) -> tuple[str, ...]:
    """Fields of the subject, and of an engine's pool, that change the child: with one of them as before, it would look otherwise."""
    wanted = _shown(_desired(subject.after, world.after, context)[key])
    found = []
    own = top_differences(subject.before["spec"], subject.after["spec"]) if subject.before is not None else []
    for one in own[:_MAX_CAUSES]:
        obj = {**subject.after, "spec": reverted(subject.after["spec"], one)}
        if _other(obj, world.after, context, key, wanted):
            found.append(f"spec.{one.path}")
    pool = _pool_key(subject.after)
    before, after = world.before.get(pool), world.after.get(pool)
    if subject.after["kind"] == "InferenceEngine" and after is not None:
        name = f"KVCachePool {pool[0]}/{pool[1]}"
        for one in (top_differences(before["spec"], after["spec"]) if before is not None else [])[:_MAX_CAUSES]:
            pools = {**world.after, pool: {**after, "spec": reverted(after["spec"], one)}}
            if _other(subject.after, pools, context, key, wanted):
                found.append(f"spec.{one.path} of {name}")
        if before is None and _other(subject.after, {k: v for k, v in world.after.items() if k != pool}, context, key, wanted):
            found.append(f"{name} is new")
    return tuple(found)


def _other(obj: Json, pools: dict[tuple[str, str], Json], context: Context, key: Key, wanted: Json) -> bool:
    try:
        return _shown(_desired(obj, pools, context).get(key, {})) != wanted
    except (InvalidObject, InvalidTemplate):  # one of two changes that need each other
        return True


def _pool_key(obj: Json) -> tuple[str, str]:
    return obj["metadata"]["namespace"], (obj["spec"].get("poolRef") or {}).get("name", "")


def _shown(obj: Json) -> Json:
    """Without the operator's own notes on the object."""
    if "metadata" not in obj:
        return obj
    metadata = dict(obj["metadata"])
    metadata["annotations"] = {key: value for key, value in metadata.get("annotations", {}).items() if key not in _HIDDEN}
    return {**obj, "metadata": metadata}


def _said(changes: Sequence[Difference]) -> list[str]:
    return [f"spec.{one.path}" for one in changes]


def _notes(subject: Subject, world: World) -> tuple[str, ...]:
    """What a person has to know beside the objects."""
    notes = []
    before, after = (subject.before or {}).get("spec", {}), subject.after["spec"]
    if subject.before is not None and after.get("resetEpoch", 0) > before.get("resetEpoch", 0):
        notes.append("all KV of the pool becomes unreachable, unless its target epoch is at or above resetEpoch already")
    if subject.before is not None and (after.get("keys") or {}).get("generation", 0) > (before.get("keys") or {}).get("generation", 0):
        notes.append("the pool's client key pair is replaced; engines read the new one without a restart")
    namespace, pool = _pool_key(subject.after)
    if pool and (namespace, pool) not in world.after:
        notes.append(f"KVCachePool {namespace}/{pool} is not known here: shown as an engine without a pool")
    return tuple(notes)
