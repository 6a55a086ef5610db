"""Old KV leaves the store: wiped or swept after publication, or left; with a real Mooncake and with engines that answer.

There is no kubelet in this layer: a Pod object says where the master is.
"""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.loopback import port_open
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.cluster.operator_harness import POOLS, ROOT, Namespace, OperatorProcess, condition
from tests.cluster.test_operator_reset import engines

ENGINE = Path(os.environ.get("EPOCHKV_PYTHON_ENGINE") or ROOT / ".build/venv-engine/bin/python")
ADMIN_PORT = 9003
"""Where the operator looks for it: a master has its pod's address for itself."""
CLIENT_TTL_SECONDS = 600
"""A master forgets a store, with every key in it, that it has not heard from for so long. Longer than any test stops one: a
master that is continued looks at its clock before it reads the pings that wait in its sockets."""


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with Mooncake(
        tmp_path_factory.mktemp("mooncake"),
        segment_bytes=64 << 20,
        lease_seconds=0.5,
        client_ttl_seconds=CLIENT_TTL_SECONDS,
        host=f"127.9.{os.getpid() % 250 + 1}.1",
        admin_port=ADMIN_PORT,
        python=ENGINE,
    ) as store:
        store.stores[0].wait_until(lambda: port_open(store.store_ports[0]), 60, "accepting connections")
        yield store


def put(store: Mooncake, count: int) -> None:
    """Put `count` keys of 4096 bytes, as an engine of an older epoch would have."""
    for number in range(count):
        body = json.dumps({"key": f"kv/0/{number}", "value": "x" * 4096}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{store.store_ports[0]}/api/put", body, {"Content-Type": "application/json"})
        request.method = "PUT"
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200


def announce(space: Namespace, store: Mooncake) -> None:
    """The master's pod, as a kubelet would report it."""
    app = "app.kubernetes.io"
    labels = {f"{app}/managed-by": "epochkv-operator", f"{app}/component": "master", "epochkv.io/pool": "policy"}
    pods = "/api/v1/namespaces/{}/pods"
    space.create(pods, {"metadata": {"name": "master", "labels": labels}, "spec": {"containers": [{"name": "master", "image": "none"}]}})
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": store.host, "podIPs": [{"ip": store.host}], "conditions": ready}
    space.patch(pods, "master", {"status": status}, "/status")


@pytest.fixture(autouse=True)
def _alone(namespace: Namespace) -> Iterator[None]:
    """The pool of a test leaves nothing that empties the store of the next one."""
    yield
    namespace.delete(POOLS, "policy")
    eventually(lambda: namespace.pool("policy") is None, "the pool is gone")


def served(operator: OperatorProcess, space: Namespace, store: Mooncake, policy: str, keys: int = 5) -> None:
    """A pool whose store holds `keys` keys, with the operator leading it."""
    operator.wait_ready()
    reset = {"leaseSeconds": 2, "reclaimPolicy": policy}
    space.create_pool("policy", distributed={"mooncake": {"store": {"segmentSize": "64Mi"}}}, reset=reset)
    announce(space, store)
    put(store, keys)
    assert len(store.keys()) == keys
    eventually(lambda: "targetEpoch" in space.status("policy"), "served")


def reclaimed(space: Namespace) -> tuple[str | None, str | None, int | None]:
    """Status and reason of the condition, and the epoch below which `status.reclaim` counts: 0 before the first."""
    status = space.status("policy")
    found = condition(status, "Reclaimed")
    return found.get("status"), found.get("reason"), status.get("reclaim", {}).get("epoch", 0)


def test_remove_all_wipes_the_store_after_it_has_published(namespace: Namespace, operator: OperatorProcess, mooncake: Mooncake) -> None:
    served(operator, namespace, mooncake, "RemoveAll")
    with engines(f"tcp://127.0.0.1:{operator.hub_port}", namespace, 1):
        namespace.bump("policy", 1)
        eventually(lambda: mooncake.keys() == [], "wiped")
        assert namespace.status("policy")["epoch"] == 1, "published before"
        eventually(lambda: reclaimed(namespace) == ("True", "Reclaimed", 1), "reported", 60)
        found = namespace.status("policy")["reclaim"]
        assert (found["policy"], found["epoch"]) == ("RemoveAll", 1)
        assert found["keys"] >= 5
        assert found["bytes"] >= 5 * 4096
        assert found["completionTime"]
        own = f'{{namespace="{namespace.name}",pool="policy"}}'
        assert operator.metric(f"epochkv_pool_reclaimed_keys{own}") == found["keys"]
        assert operator.metric(f"epochkv_pool_reclaimed_bytes{own}") == found["bytes"]


def test_delete_without_any_engine_is_done_through_the_master(namespace: Namespace, operator: OperatorProcess, mooncake: Mooncake) -> None:
    served(operator, namespace, mooncake, "Delete")
    namespace.bump("policy", 1)
    eventually(lambda: namespace.status("policy").get("epoch") == 1, "published")
    eventually(lambda: mooncake.keys() == [], "swept", 90)
    eventually(lambda: reclaimed(namespace) == ("True", "Reclaimed", 1), "reported", 60)
    found = namespace.status("policy")["reclaim"]
    assert (found["policy"], found["epoch"], found["keys"]) == ("Delete", 1, 5)
