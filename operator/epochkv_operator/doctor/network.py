"""Network policies: that those of the pools and the operator are there, and by a dial, whether they keep us out.

Mooncake's admin port accepts a flush from anybody who reaches it. A cluster whose network does not enforce policies shows when a
connection from a place that no policy names is taken.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_fence.doctor.looking import dial
from epochkv_operator.doctor.cluster import MANAGED, PART_OF, Cluster, gathered, place
from epochkv_operator.doctor.operators import Operator, find_operators
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import NETWORK_POLICIES, PODS
from epochkv_operator.planning.names import COMPONENT_LABEL, MASTER_ADMIN_PORT, component_name

HUB_PORT: Final = 7700
PROBE_SECONDS: Final = 1.5
MAX_PROBED: Final = 8


async def look_at_policies(cluster: Cluster) -> list[Finding]:
    policies = await cluster.objects(NETWORK_POLICIES, cluster.scope.namespace, MANAGED)
    names = {(policy["metadata"]["namespace"], policy["metadata"]["name"]) for policy in policies}
    pools, engines = await cluster.pools(), await cluster.engines()
    found = [finding for pool in pools for finding in judge_pool_policies(pool, engines, names)]
    try:
        operators = await find_operators(cluster)
    except CannotLook:
        operators = []
    for operator in operators:
        if operator.deployment is not None:
            found += judge_hub_policies(operator, await cluster.objects(NETWORK_POLICIES, operator.namespace))
    found += await _probe(cluster, pools, operators)
    return gathered(found, "network", "{} checks of policies found nothing") or [Say("network").ok("no pool has ports of its own")]


def judge_pool_policies(pool: Json, engines: Sequence[Json], names: set[tuple[str, str]]) -> list[Finding]:
    """Policies of master, stores and engines of a pool whose Mooncake the operator runs."""
    say, spec, metadata = Say("network", place(pool)), pool["spec"], pool["metadata"]
    if "mooncake" not in (spec.get("distributed") or {}):
        return []
    if (spec.get("networkPolicy") or {}).get("mode") == "Disabled":
        text = "networkPolicy.mode is Disabled: whoever reaches the master's admin port can empty the store"
        enable = """'{"spec":{"networkPolicy":{"mode":"Enabled"}}}'"""
        return [say.warning(text, f"kubectl -n {metadata['namespace']} patch kvp {metadata['name']} --type=merge -p {enable}")]
    wanted = [component_name(metadata["name"], component) for component in ("master", "store")]
    wanted += [one["metadata"]["name"] for one in engines if _uses(one, metadata)]
    missing = [name for name in wanted if (metadata["namespace"], name) not in names]
    if missing:
        fix = f"kubectl -n {metadata['namespace']} describe kvp {metadata['name']}   # why the operator does not make them"
        return [say.wrong(f"NetworkPolicies are missing, so these ports are open to everybody: {', '.join(missing)}", fix)]
    return [say.ok(f"its {len(wanted)} NetworkPolicies are there")]


def judge_hub_policies(operator: Operator, policies: Sequence[Json]) -> list[Finding]:
    """Policies of the operator's namespace that keep engines from the hub. They add up: one that lets in is enough."""
    say = Say("network", f"operator {operator.namespace}")
    closing = [
        policy
        for policy in policies
        if _selects(policy, operator.pod_labels) and "Ingress" in policy["spec"].get("policyTypes", ["Ingress"])
    ]
    if not closing:
        return [say.ok("no NetworkPolicy selects the operator's pods, so the hub is open to those with a pool's key")]
    letting = [rule for policy in closing for rule in policy["spec"].get("ingress") or () if _lets_in(rule)]
    names = ", ".join(policy["metadata"]["name"] for policy in closing)
    if not letting:
        return [say.wrong(f"NetworkPolicies keep everybody from the hub's port {HUB_PORT}: {names}", operator.restored)]
    some = "" if any(not rule.get("from") for rule in letting) else " from places that its `from` names"
    return [say.ok(f"port {HUB_PORT} is let in{some} ({names})")]


def _lets_in(rule: Json) -> bool:
    ports: list[Any] = rule.get("ports") or []
    return not ports or any(port.get("port") in (HUB_PORT, "hub", None) or _in_range(port) for port in ports)


def _in_range(port: Json) -> bool:
    first, last = port.get("port"), port.get("endPort")
    return isinstance(first, int) and isinstance(last, int) and first <= HUB_PORT <= last


def _selects(policy: Json, labels: dict[str, str]) -> bool:
    selector = policy["spec"].get("podSelector") or {}
    matches = (selector.get("matchLabels") or {}).items() <= labels.items()
    return matches and all(_expression(one, labels) for one in selector.get("matchExpressions") or ())


def _expression(one: Json, labels: dict[str, str]) -> bool:
    key, values = one["key"], one.get("values") or []
    met = {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    return met.get(one["operator"], True)


def _uses(engine: Json, pool: Json) -> bool:
    reference = engine["spec"].get("poolRef") or {}
    return (engine["metadata"]["namespace"], reference.get("name")) == (pool["namespace"], pool["name"])


async def _probe(cluster: Cluster, pools: Sequence[Json], operators: Sequence[Operator]) -> list[Finding]:
    """Dial the admin ports of masters, from which policies shut out everybody but operators and scrapers."""
    closed = {
        (pool["metadata"]["namespace"], pool["metadata"]["name"])
        for pool in pools
        if (pool["spec"].get("networkPolicy") or {}).get("mode") != "Disabled"
    }
    pods = await cluster.objects(PODS, cluster.scope.namespace, f"{PART_OF},{COMPONENT_LABEL}=master") if closed else []
    here = socket.gethostname()
    if any(here.startswith(f"{operator.deployment['metadata']['name']}-") for operator in operators if operator.deployment is not None):
        return []  # this is the operator's own pod, which is let in
    found = []
    for pod in pods[:MAX_PROBED]:
        address, labels = (pod.get("status") or {}).get("podIP"), pod["metadata"].get("labels") or {}
        where = pod["metadata"]["namespace"], labels.get("epochkv.io/pool", "")
        if address and where in closed:
            host = f"[{address}]" if ":" in address else address
            dialled, _ = await dial(host, MASTER_ADMIN_PORT, PROBE_SECONDS)
            found.append(judge_probe(f"pool {where[0]}/{where[1]}", pod["metadata"]["name"], dialled == "open"))
    return found


def judge_probe(about: str, pod: str, taken: bool) -> Finding:
    say = Say("network", about)
    if taken:
        text = f"the admin port of {pod} takes a connection from here, which no policy allows: does the cluster's network enforce policies?"
        return say.warning(text, "kubectl get pods -A | grep -Ei 'calico|cilium|antrea|kube-router'   # one that enforces them")
    return say.ok(f"the admin port of {pod} cannot be reached from here")
