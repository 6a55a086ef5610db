"""Gathers what a preview needs: from files alone, or from files and a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from epochkv_operator import __version__
from epochkv_operator.api import InvalidObject, parse_engine, parse_pool
from epochkv_operator.api.base import ENGINE_LABEL, POOL_LABEL
from epochkv_operator.cli import cluster
from epochkv_operator.cli.files import FilesError, Manifest
from epochkv_operator.cli.preview import UNKNOWN_UID, Outcome, Step, Subject, World, key_of, preview
from epochkv_operator.kube.client import ApiError, Forbidden, Invalid, KubeClient, NotFound
from epochkv_operator.kube.resources import ENGINES, POOLS, SECRETS, by_kind
from epochkv_operator.planning.context import Context
from epochkv_operator.planning.names import VERSION_ANNOTATION
from epochkv_operator.settings import Settings

Json = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """Everything a preview is computed from."""

    subjects: tuple[Subject, ...]
    world: World
    context: Context
    warnings: tuple[str, ...] = ()

    def outcomes(self) -> list[Outcome]:
        return preview(self.subjects, self.world, self.context)


def context_of(operator_namespace: str) -> Context:
    """Settings of the operator as they are unless it was told otherwise."""
    settings = Settings(operator_namespace)
    return Context(settings.endpoint, operator_namespace, __version__, settings.store_image, settings.engine_image)


def from_files(manifests: Sequence[Manifest], operator_namespace: str) -> Seen:
    """Every object is new."""
    subjects = tuple(Subject(None, _completed(manifest.obj), source=manifest.source) for manifest in manifests)
    return Seen(_pools_first(subjects), World(after=_pools([one.after for one in subjects])), context_of(operator_namespace))


async def from_cluster(client: KubeClient, manifests: Sequence[Manifest], operator_namespace: str) -> Seen:
    """What is there, and what would be there once the manifests are applied.

    Engines of a pool that changes are part of it, in whatever file they are.

    Raises:
        FilesError: the API server would refuse a manifest.
        ApiError: the cluster cannot be asked.
    """
    subjects: list[Subject] = []
    problems: list[str] = []
    for manifest in manifests:
        resource = by_kind(manifest.obj["kind"])
        _, namespace, name = manifest.key
        live = await cluster.found(client, resource, namespace, name)
        try:
            after = await cluster.as_applied(client, manifest.obj, live)
        except (Invalid, NotFound) as error:
            problems.append(f"{manifest.source}: {_refusal(error, namespace)}")
            continue
        after = _completed({"kind": resource.kind, "apiVersion": resource.api_version, **after}, new=live is None)
        subjects.append(Subject(live, after, source=manifest.source))
    if problems:
        raise FilesError(*problems)
    subjects += await _engines_of_changed_pools(client, subjects)
    world = await _world(client, subjects)
    subjects = [replace(one, children=tuple(await _children(client, one.after))) for one in subjects]
    context = _learned(context_of(operator_namespace), subjects)
    subjects = [replace(one, children=(*one.children, *await _strangers(client, one, world, context))) for one in subjects]
    return Seen(_pools_first(subjects), world, context, _version_warnings(subjects))


async def checked(client: KubeClient, outcomes: Sequence[Outcome], world: World) -> list[Outcome]:
    """With what the API server would say to the operator: a quota, limits below requests, a policy."""
    return [await _checked(client, outcome, world) for outcome in outcomes]


async def _checked(client: KubeClient, outcome: Outcome, world: World) -> Outcome:
    unchecked: set[str] = set()
    for step in outcome.steps:
        if step.after is None:
            continue
        try:
            await cluster.as_applied_by_operator(client, step.after)
        except Forbidden as error:
            if "exceeded quota" in error.message or "denied" in error.message:
                return replace(outcome, problem=_refused(step, error, outcome.subject, world))
            unchecked.add(by_kind(step.key[0]).plural)
        except Invalid as error:
            return replace(outcome, problem=_refused(step, error, outcome.subject, world))
    if unchecked:
        kinds = ", ".join(sorted(unchecked))
        return replace(outcome, notes=(*outcome.notes, f"not tried at the API server, because you may not patch {kinds}"))
    return outcome


def _refused(step: Step, error: ApiError, subject: Subject, world: World) -> str:
    """The API server's words. Amounts of memory in them are not the user's own: the operator adds L1."""
    text = f"the API server would refuse {step.key[0]} {step.key[2]}: {error.message}"
    _, namespace, _ = subject.key
    name = (subject.after["spec"].get("poolRef") or {}).get("name", "")
    local = (world.after.get((namespace, name), {}).get("spec") or {}).get("local")
    if local is None or "memory" not in error.message:
        return text
    return f"{text}. {local['capacity']} of each memory amount are the L1 of KVCachePool {namespace}/{name} (spec.local.capacity)"


def _completed(obj: Json, *, new: bool = True) -> Json:
    metadata = obj["metadata"]
    return {**obj, "metadata": {**metadata, "uid": UNKNOWN_UID if new else metadata["uid"]}}


def _pools_first(subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    return tuple(sorted(subjects, key=lambda one: (one.after["kind"] != "KVCachePool", one.key[1:])))


def _pools(objects: Sequence[Json]) -> dict[tuple[str, str], Json]:
    return {key_of(obj)[1:]: obj for obj in objects if obj["kind"] == "KVCachePool"}


def _refusal(error: ApiError, namespace: str) -> str:
    if isinstance(error, NotFound):
        if error.message.startswith("namespaces"):
            return f"namespace {namespace} does not exist: create it first, or plan without --live"
        return "the cluster does not have EpochKV's kinds: install the chart first, or plan without --live"
    return error.message


async def _engines_of_changed_pools(client: KubeClient, subjects: Sequence[Subject]) -> list[Subject]:
    known = {one.key for one in subjects}
    found = []
    for pool in subjects:
        if pool.after["kind"] != "KVCachePool" or (pool.before is not None and pool.before["spec"] == pool.after["spec"]):
            continue
        _, namespace, name = pool.key
        for engine in (await client.list(ENGINES, namespace))[0]:
            of = (engine["spec"].get("poolRef") or {}).get("name")
            if of == name and key_of(engine) not in known and not engine["metadata"].get("deletionTimestamp"):
                found.append(Subject(engine, engine))
    return found


async def _world(client: KubeClient, subjects: Sequence[Subject]) -> World:
    before = _pools([one.before for one in subjects if one.before is not None])
    after = _pools([one.after for one in subjects])
    for subject in subjects:
        _, namespace, _ = subject.key
        name = (subject.after["spec"].get("poolRef") or {}).get("name")
        if name and (namespace, name) not in after:
            live = await cluster.found(client, POOLS, namespace, name)
            if live is not None:
                before[namespace, name] = after[namespace, name] = live
    return World(before, after)


async def _children(client: KubeClient, obj: Json) -> list[Json]:
    kind, namespace, name = key_of(obj)
    return await cluster.children(client, namespace, POOL_LABEL if kind == "KVCachePool" else ENGINE_LABEL, name)


async def _strangers(client: KubeClient, subject: Subject, world: World, context: Context) -> list[Json]:
    """Live objects of wanted names that the operator did not make: it would not take them over. With them the pool's Secret."""
    [outcome] = preview([subject], world, context)
    found = [await _found(client, step, subject) for step in outcome.steps if step.verb == "create"]
    return [obj for obj in found if obj is not None]


async def _found(client: KubeClient, step: Step, subject: Subject) -> Json | None:
    try:
        return await cluster.found(client, by_kind(step.key[0]), *step.key[1:])
    except Forbidden:  # a pool that was there has its Secret, which not everybody may read
        if step.key[0] != SECRETS.kind:
            raise
        return step.after if subject.before is not None else None


def _learned(context: Context, subjects: Sequence[Subject]) -> Context:
    """Settings of the running operator, as far as they show in what it made."""
    for subject in subjects:
        if subject.before is None:
            continue
        for child in subject.children:
            kind, _, name = key_of(child)
            if kind == "ConfigMap" and name.endswith("-connection"):
                context = replace(context, hub_endpoint=_endpoint(child) or context.hub_endpoint)
            elif kind == "Deployment":
                context = _with_image(context, subject.before, child)
    return context


def _endpoint(config_map: Json) -> str | None:
    try:
        endpoint = json.loads(config_map["data"]["connection.json"])["hub"]["endpoint"]
    except (KeyError, TypeError, ValueError):
        return None
    return str(endpoint)


def _with_image(context: Context, owner: Json, deployment: Json) -> Context:
    try:
        own = parse_pool(owner).mooncake if owner["kind"] == "KVCachePool" else parse_engine(owner).spec
    except InvalidObject:
        return context
    main = "master" if owner["kind"] == "KVCachePool" else "engine"
    image = next((one["image"] for one in deployment["spec"]["template"]["spec"]["containers"] if one["name"] == main), None)
    if own is None or own.image is not None or image is None:
        return context
    return replace(context, store_image=image) if main == "master" else replace(context, engine_image=image)


def _version_warnings(subjects: Sequence[Subject]) -> tuple[str, ...]:
    versions = {
        version
        for subject in subjects
        for child in subject.children
        if (version := (child["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION)) not in (None, __version__)
    }
    return tuple(
        f"the operator that made these objects is {version}, and this epochkv is {__version__}: its plan may differ"
        for version in sorted(versions)
    )
