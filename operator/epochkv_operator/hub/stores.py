"""Where the masters of a pool's own Mooncake listen for administration: on their pods, because the Service has no such
port. It accepts a flush from anybody who reaches it, so only the operator may (NetworkPolicy), and nobody by a stable name.
"""

from __future__ import annotations

import ipaddress

from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import PODS, POOLS
from epochkv_operator.kube.store import Store
from epochkv_operator.planning.names import MASTER_ADMIN_PORT, component_selector


def master_urls(store: Store, pool_uid: str) -> list[str]:
    """Admin ports of the live masters, from what the watches show. Those that are ready come first: with several masters, the
    one that serves is among them. None for a pool that is gone, and for one whose Mooncake somebody else runs.
    """
    pool = store.by_uid(POOLS.kind, pool_uid)
    if pool is None or not ((pool["spec"].get("distributed") or {}).get("mooncake")):
        return []
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    wanted = component_selector(name, "master")
    pods = [
        pod
        for pod in store.found(PODS.kind, namespace, POOL_LABEL, name)
        if wanted.items() <= pod["metadata"]["labels"].items() and pod["metadata"].get("deletionTimestamp") is None
    ]
    addresses = [address for pod in sorted(pods, key=_rank) if (address := _address(pod))]
    return [f"http://{address}:{MASTER_ADMIN_PORT}" for address in addresses]


def _rank(pod: Json) -> tuple[bool, str]:
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
    return not ready, str(pod["metadata"]["name"])


def _address(pod: Json) -> str:
    """The pod's address as a URL wants it; empty while it has none, and when it has ended."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return ""
    try:
        address = ipaddress.ip_address(status.get("podIP") or "")
    except ValueError:
        return ""
    return f"[{address}]" if address.version == 6 else str(address)
