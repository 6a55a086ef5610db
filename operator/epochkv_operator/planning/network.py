"""Network policies. Mooncake has no authentication on any port, and its admin port accepts a flush from anybody who reaches it."""

from __future__ import annotations

from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.names import (
    COMPONENT_LABEL,
    MASTER_ADMIN_PORT,
    MASTER_RPC_PORT,
    SCRAPE_LABEL,
    STORE_HEALTH_PORT,
    TRANSFER_PORTS,
    component_selector,
    engine_object,
    engine_selector,
    pool_object,
)

SSD_PORTS = (10000, 65535)
"""What is on disk is asked for on a port that the kernel chooses, and Mooncake has no option for it. None of a store's other ports."""


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
    ingress = {
        "master": [
            {"from": members, "ports": [_tcp(MASTER_RPC_PORT)]},
            {"from": [operator, *scrapers], "ports": [_tcp(MASTER_ADMIN_PORT)]},
        ],
        "store": [
            {"from": members, "ports": [_tcp(*(SSD_PORTS if pool.mooncake is not None and pool.mooncake.store.ssd else TRANSFER_PORTS))]},
            {"from": scrapers, "ports": [_tcp(STORE_HEALTH_PORT)]},
        ],
    }
    return [
        pool_object("NetworkPolicy", pool, component, context, _policy(component_selector(name, component), allowed))
        for component, allowed in ingress.items()
    ]


def engine_policy(engine: InferenceEngine, pool: KVCachePool, context: Context) -> list[Json]:
    """Closes an engine's transfer ports, whose buffers hold KV, to everybody outside the pool.

    Its other ports stay open: to clients, and to trainers that push weights over ports of their own choice.
    """
    if pool.spec.network_policy.mode == "Disabled" or pool.mooncake is None:
        return []
    first, last = TRANSFER_PORTS
    ingress = [
        {"ports": [_tcp(1, first - 1), _tcp(last + 1, 65535), {"protocol": "UDP", "port": 1, "endPort": 65535}]},
        {"from": [_pods({POOL_LABEL: pool.metadata.name})], "ports": [_tcp(first, last)]},
    ]
    return [engine_object("NetworkPolicy", engine, context, _policy(engine_selector(engine.metadata.name), ingress))]


def _policy(selector: dict[str, str], ingress: list[Json]) -> Json:
    return {"spec": {**_pods(selector), "policyTypes": ["Ingress"], "ingress": ingress}}


def _pods(labels: dict[str, str]) -> Json:
    return {"podSelector": {"matchLabels": labels}}


def _tcp(port: int, end: int | None = None) -> Json:
    return {"protocol": "TCP", "port": port} | ({"endPort": end} if end is not None else {})
