"""Pods that cannot run, pools without engines, engines without their pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_operator.api.base import ENGINE_LABEL, POOL_LABEL
from epochkv_operator.doctor.cluster import PART_OF, Cluster, gathered, place
from epochkv_operator.doctor.conditions import ago
from epochkv_operator.doctor.operators import find_operators
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import PODS
from epochkv_operator.planning.workload import pod_trouble

START_SECONDS: Final = 600.0
"""A big model may take so long to load."""


async def look_at_pods(cluster: Cluster) -> list[Finding]:
    try:
        homes = {operator.namespace for operator in await find_operators(cluster)}
    except CannotLook:
        homes = set()
    pods = await cluster.objects(PODS, cluster.scope.namespace, PART_OF)
    if cluster.scope.namespace is not None:
        for home in sorted(homes - {cluster.scope.namespace}):
            pods = pods + await cluster.objects(PODS, home, PART_OF)
    found = [finding for pod in pods for finding in judge_pod(pod, cluster.now())]
    return gathered(found, "pods", "{} pods run") or [Say("pods").ok("there are no pods")]


def judge_pod(pod: Json, now: datetime) -> list[Finding]:
    metadata, status = pod["metadata"], pod.get("status") or {}
    namespace, name = metadata["namespace"], metadata["name"]
    say = Say("pods", f"{_owner(metadata)} in {namespace}")
    look = f"kubectl -n {namespace} describe pod {name}"
    trouble = pod_trouble(pod)
    if trouble is not None:
        fixes = {
            "CrashLooping": f"kubectl -n {namespace} logs {name} --previous --tail=50",
            "ImagePullFailed": _image_fix(metadata) or look,
        }
        return [say.wrong(f"{trouble[0]}: {trouble[1]}", fixes.get(trouble[0], look))]
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ())
    if ready or status.get("phase") == "Succeeded":
        return [say.ok(f"pod {name} runs")]
    begun = metadata.get("deletionTimestamp") or metadata.get("creationTimestamp")
    word = "has been ending" if metadata.get("deletionTimestamp") else "is not ready"
    text = f"pod {name} {word}, {ago(begun, now)} after {'its deletion' if metadata.get('deletionTimestamp') else 'it was made'}"
    late = (now - datetime.fromisoformat(begun)).total_seconds() > START_SECONDS if begun else False
    return [say.wrong(text, look) if late else say.warning(f"{text}; it may still be on its way", look)]


def _owner(metadata: Json) -> str:
    labels = metadata.get("labels") or {}
    if ENGINE_LABEL in labels:
        return f"engine {labels[ENGINE_LABEL]}"
    component = labels.get("app.kubernetes.io/component", "pod")
    return f"{component} of pool {labels[POOL_LABEL]}" if POOL_LABEL in labels else str(component)


def _image_fix(metadata: Json) -> str:
    labels, namespace = metadata.get("labels") or {}, metadata["namespace"]
    if ENGINE_LABEL in labels:
        return f"""kubectl -n {namespace} patch ie {labels[ENGINE_LABEL]} --type=merge -p '{{"spec":{{"image":"IMAGE"}}}}'"""
    if POOL_LABEL in labels:
        patch = """'{"spec":{"distributed":{"mooncake":{"image":"IMAGE"}}}}'"""
        return f"kubectl -n {namespace} patch kvp {labels[POOL_LABEL]} --type=merge -p {patch}"
    return ""


async def look_at_pairs(cluster: Cluster) -> list[Finding]:
    return judge_pairs(await cluster.pools(), await cluster.engines())


def judge_pairs(pools: Sequence[Json], engines: Sequence[Json]) -> list[Finding]:
    """Who refers to whom, and who reports to whose hub."""
    found = [*_without_pool(pools, engines), *_without_engines(pools, engines)]
    if found:
        return found
    alone = sum(_pool_of(engine) is None for engine in engines)
    text = f"pools without engines: none of {len(pools)}; engines without their pool: none of {len(engines)}"
    return [Say("pairs").ok(f"{text}; {alone} {'names' if alone == 1 else 'name'} none on purpose" if alone else text)]


def _without_pool(pools: Sequence[Json], engines: Sequence[Json]) -> Iterable[Finding]:
    known = {(pool["metadata"]["namespace"], pool["metadata"]["name"]) for pool in pools}
    for engine in engines:
        name, namespace = _pool_of(engine), engine["metadata"]["namespace"]
        if name is not None and (namespace, name) not in known:
            elsewhere = sorted(where for where, other in known if other == name)
            hint = f" (one of that name is in {', '.join(elsewhere)}, and pools are used in their own namespace)" if elsewhere else ""
            text = f"its pool {namespace}/{name} does not exist, so it shares nothing{hint}"
            yield Say("pairs", place(engine)).wrong(text, f"kubectl -n {namespace} get kvp   # create {name}, or make the engine again")


def _without_engines(pools: Sequence[Json], engines: Sequence[Json]) -> Iterable[Finding]:
    wanted = {(engine["metadata"]["namespace"], _pool_of(engine)) for engine in engines if engine["spec"].get("replicas", 1)}
    for pool in pools:
        namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
        heard = ((pool.get("status") or {}).get("engines") or {}).get("total", 0)
        if not heard and (namespace, name) not in wanted:
            fix = f"kubectl -n {namespace} get ie   # create one with poolRef: {{name: {name}}}, or delete the pool"
            yield Say("pairs", place(pool)).warning("no engine refers to it, and none is connected", fix)


def _pool_of(engine: Json) -> str | None:
    reference = engine["spec"].get("poolRef")
    return str(reference["name"]) if reference else None
