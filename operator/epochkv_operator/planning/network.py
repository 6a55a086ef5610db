"""Network policies. Mooncake has no authentication on any port, and its admin port accepts a flush from anybody who reaches it."""

from __future__ import annotations

from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.names import (
    COMPONENT_LABEL,
    MASTER_ADMIN_PORT,
    MASTER_RPC_PORT,
    POOL_LABEL,
    SCRAPE_LABEL,
    STORE_HEALTH_PORT,
    TRANSFER_PORTS,
    component_selector,
    engine_labels,
    engine_selector,
    master_name,
    owned_object,
    pool_labels,
    store_name,
)


def pool_policies(pool: KVCachePool, context: Context) -> list[Json]:
    """Policies of the master and the stores, for a pool whose Mooncake the operator runs."""
    if pool.spec.network_policy.mode == "Disabled":
        return []
    name = pool.metadata.name
    members = [_pods({POOL_LABEL: name})]
    scrapers = [{"namespaceSelector": {"matchLabels": {SCRAPE_LABEL: "true"}}}]
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": context.operator_namespace}},
        **_pods({"app.kubernetes.io/part-of": "epochkv", COMPONENT_LABEL: "operator"}),
    }
    master = [
        {"from": members, "ports": [_tcp(MASTER_RPC_PORT)]},
        {"from": [operator, *scrapers], "ports": [_tcp(MASTER_ADMIN_PORT)]},
    ]
    store = [
        {"from": members, "ports": [_tcp(*TRANSFER_PORTS)]},
        {"from": scrapers, "ports": [_tcp(STORE_HEALTH_PORT)]},
    ]
    return [
        _policy(master_name(name), pool, pool_labels(name, "master"), component_selector(name, "master"), master, context),
        _policy(store_name(name), pool, pool_labels(name, "store"), component_selector(name, "store"), store, context),
    ]


def engine_policy(engine: InferenceEngine, pool: KVCachePool, context: Context) -> list[Json]:
    """Closes an engine's transfer ports, whose buffers hold KV, to everybody outside the pool. Its other ports stay open:
    clients, and trainers
    that push weights over ports of their own choice."""
    distributed = pool.spec.distributed
    if pool.spec.network_policy.mode == "Disabled" or distributed is None or distributed.mooncake is None:
        return []
    first, last = TRANSFER_PORTS
    ingress = [
        {"ports": [_tcp(1, first - 1), _tcp(last + 1, 65535), {"protocol": "UDP", "port": 1, "endPort": 65535}]},
        {"from": [_pods({POOL_LABEL: pool.metadata.name})], "ports": [_tcp(first, last)]},
    ]
    name = engine.metadata.name
    return [_policy(name, engine, engine_labels(engine), engine_selector(name), ingress, context)]


def _policy(
    name: str,
    owner: KVCachePool | InferenceEngine,
    labels: dict[str, str],
    selector: dict[str, str],
    ingress: list[Json],
    context: Context,
) -> Json:
    body = {"spec": {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": ingress}}
    return owned_object("networking.k8s.io/v1", "NetworkPolicy", name, owner, labels, context, body)


def _pods(labels: dict[str, str]) -> Json:
    return {"podSelector": {"matchLabels": labels}}


def _tcp(port: int, end: int | None = None) -> Json:
    return {"protocol": "TCP", "port": port} | ({"endPort": end} if end is not None else {})
