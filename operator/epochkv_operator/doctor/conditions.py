"""Conditions that are not as they should be: since when, and what mends them. Times are the API server's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from epochkv_fence.common import duration
from epochkv_fence.doctor.finding import Finding, Say
from epochkv_operator.doctor.cluster import Cluster, gathered, place
from epochkv_operator.kube.client import Json
from epochkv_operator.planning.names import component_name

PATIENCE_SECONDS: Final = 60.0
"""What starts, rolls or resets takes so long without being stuck."""
DRAIN_SECONDS: Final = 600.0
TIERS: Final = "TiersUsable"
COSTS_ONLY: Final = ("Drained", "Reclaimed", "KeysRotated", "WeightsConverged")
"""While one of these is not True, nothing is wrong or missing: hits or memory are, or it is still on its way."""
ALWAYS_WRONG: Final = ("Diverged", "TiersBroken", "LayoutUnsupported")
KINDS: Final = {"KVCachePool": "kvp", "InferenceEngine": "ie"}
FIXES: Final = {
    "PoolNotFound": "kubectl -n {ns} get kvp   # create the pool that spec.poolRef names",
    "HubUnavailable": "kubectl get leases -A -l app.kubernetes.io/managed-by=epochkv-operator   # who leads?",
    "WaitingForEngines": "kubectl -n {ns} get kvp {name} -o jsonpath='{{.status.reset.laggards}}'   # then: kubectl -n {ns} delete pod POD",
    "Advancing": "kubectl -n {ns} get pods -l epochkv.io/engine={name}",
    "NotReporting": "kubectl -n {ns} logs -l epochkv.io/engine={name} --tail=200 | grep -i epochkv",
    "SecretConflict": "kubectl -n {ns} delete secret {secret}",
    "SecretRefused": "kubectl -n {ns} describe quota; kubectl -n {ns} get events --field-selector reason=FailedCreate",
    "Diverged": "epochkv weights   # with the pool's connection file; push again to the engines that the message names",
    "CarriedRequests": "kubectl -n {ns} get ie   # abort these requests, or wait for them",
    "CrashLooping": "kubectl -n {ns} logs -l {labels} --previous --tail=50",
    "ImagePullFailed": "kubectl -n {ns} get events --field-selector reason=Failed",
    "Unschedulable": "kubectl -n {ns} get events --field-selector reason=FailedScheduling",
    "PodSecurityDenied": "kubectl label namespace {ns} pod-security.kubernetes.io/enforce=privileged --overwrite   # for RDMA",
    "CreateFailed": "kubectl -n {ns} describe quota",
    "Invalid": "kubectl -n {ns} edit {kind} {name}",
}


async def look_at_conditions(cluster: Cluster) -> list[Finding]:
    objects = [*await cluster.pools(), *await cluster.engines()]
    found = [finding for obj in objects for finding in judge_object(obj, cluster.now())]
    return gathered(found, "conditions", "{} pools and engines are as they should be") or [
        Say("conditions").ok("there are no pools or engines")
    ]


async def look_at_tiers(cluster: Cluster) -> list[Finding]:
    objects = [*await cluster.pools(), *await cluster.engines()]
    found = [finding for obj in objects for finding in judge_tiers(obj, cluster.now())]
    return gathered(found, "tiers", "{} pools and engines use all their tiers") or [Say("tiers").ok("no pool or engine reports")]


def judge_object(obj: Json, now: datetime) -> list[Finding]:
    """Everything but `TiersUsable`."""
    say, metadata = Say("conditions", place(obj)), obj["metadata"]
    look = f"kubectl -n {metadata['namespace']} describe {KINDS[obj['kind']]} {metadata['name']}"
    if metadata.get("deletionTimestamp"):
        return [say.warning(f"it has been deleted for {ago(metadata['deletionTimestamp'], now)}, and is still there", look)]
    status = obj.get("status") or {}
    if not status.get("conditions"):
        age = _seconds(metadata.get("creationTimestamp"), now)
        tell = say.wrong if age > PATIENCE_SECONDS else say.warning
        logs = "kubectl logs -A -l app.kubernetes.io/part-of=epochkv,app.kubernetes.io/component=operator --tail=50"
        return [tell("it has no status: no operator has looked at it; does one run, and serve this namespace?", logs)]
    found = list(_bad_conditions(obj, say, now))
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        text = f"its status is of generation {status.get('observedGeneration', 0)}, and it is at {metadata['generation']}: look again"
        found.append(say.warning(text, look))
    return found or [say.ok("it is as it should be")]


def judge_tiers(obj: Json, now: datetime) -> list[Finding]:
    say = Say("tiers", place(obj))
    for one in _conditions(obj):
        if one["type"] != TIERS:
            continue
        if one["status"] == "True":
            return [say.ok("it uses all its tiers")]
        since = f"for {ago(one.get('lastTransitionTime'), now)}"
        if one["status"] == "Unknown":
            return [say.warning(f"not known {since} ({one['reason']}): {one['message']}", fix_of(obj, one))]
        tell = say.wrong if one["reason"] in ALWAYS_WRONG else say.warning
        metadata = obj["metadata"]
        label = f"epochkv.io/{'pool' if obj['kind'] == 'KVCachePool' else 'engine'}={metadata['name']}"
        restart = f"kubectl -n {metadata['namespace']} rollout restart deployment -l {label},app.kubernetes.io/component=engine"
        return [
            tell(f"tiers are not used {since} ({one['reason']}): {one['message']}", f"{restart}   # after the change that the line says")
        ]
    return []


def _bad_conditions(obj: Json, say: Say, now: datetime) -> Iterator[Finding]:
    bad = [one for one in _conditions(obj) if one["status"] != "True" and one["type"] != TIERS]
    for one in bad:
        if one["type"] == "Ready" and one["reason"] in {other["reason"] for other in bad if other is not one}:
            continue  # it repeats what is not True
        seconds = _seconds(one.get("lastTransitionTime"), now)
        if one["type"] == "Drained" and seconds < DRAIN_SECONDS:
            continue  # requests of before a reset run to their end
        costs = one["type"] in COSTS_ONLY and one["reason"] not in ALWAYS_WRONG
        tell = say.warning if costs or seconds < PATIENCE_SECONDS else say.wrong
        text = f"{one['type']}={one['status']} for {ago(one.get('lastTransitionTime'), now)} ({one['reason']}): {one['message']}"
        yield tell(text, fix_of(obj, one))


def fix_of(obj: Json, condition: Json) -> str:
    """The command for a reason; for others the object itself says more."""
    metadata = obj["metadata"]
    kind = KINDS[obj["kind"]]
    template = FIXES.get(condition["reason"], "kubectl -n {ns} describe {kind} {name}")
    labels = f"epochkv.io/{'engine' if kind == 'ie' else 'pool'}={metadata['name']}"
    secret = component_name(metadata["name"], "fence")
    return template.format(ns=metadata["namespace"], name=metadata["name"], kind=kind, labels=labels, secret=secret)


def ago(moment: str | None, now: datetime) -> str:
    """How long ago, in short."""
    return duration(_seconds(moment, now))


def _conditions(obj: Json) -> list[Json]:
    found: list[Json] = (obj.get("status") or {}).get("conditions") or []
    return found


def _seconds(moment: str | None, now: datetime) -> float:
    return max(0.0, (now - datetime.fromisoformat(moment)).total_seconds()) if moment else 0.0
