"""A real Mooncake beside the API server, and a Pod object that says where its master is: there is no kubelet in this layer."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

from hack.standalone.mooncake import Mooncake
from tests.cluster.operator_harness import ROOT, Namespace

ENGINE = Path(os.environ.get("EPOCHKV_PYTHON_ENGINE") or ROOT / ".build/venv-engine/bin/python")
ADMIN_PORT = 9003
"""Where the operator looks for it: a master has its pod's address for itself."""
CLIENT_TTL_SECONDS = 600
"""A master forgets a store, with every key in it, that it has not heard from for so long. Longer than any test stops one: a
master that is continued looks at its clock before it reads the pings that wait in its sockets."""


def pool_store(directory: Path, address: str) -> Mooncake:
    """A master on a loopback address of its own and one node."""
    return Mooncake(
        directory,
        segment_bytes=64 << 20,
        lease_seconds=0.5,
        client_ttl_seconds=CLIENT_TTL_SECONDS,
        host=address,
        admin_port=ADMIN_PORT,
        python=ENGINE,
    )


def put(store: Mooncake, count: int, size: int = 4096) -> None:
    """Put `count` keys of `size` bytes, as an engine of an older epoch would have."""
    for number in range(count):
        body = json.dumps({"key": f"kv/0/{number}", "value": "x" * size}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{store.store_ports[0]}/api/put", body, {"Content-Type": "application/json"})
        request.method = "PUT"
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200


def announce(space: Namespace, pool: str, store: Mooncake) -> None:
    """The master's pod, as a kubelet would report it."""
    labels = {
        "app.kubernetes.io/managed-by": "epochkv-operator",
        "app.kubernetes.io/component": "master",
        "epochkv.io/pool": pool,
    }
    name = f"{pool}-master-0"
    pods = f"/api/v1/namespaces/{space.name}/pods"
    pod = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [{"name": "master", "image": "none"}]}}
    space.request("POST", pods, pod)
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": store.host, "podIPs": [{"ip": store.host}], "conditions": ready}
    space.request("PATCH", f"{pods}/{name}/status", {"status": status}, "application/merge-patch+json")
