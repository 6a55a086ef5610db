"""A pool in a cluster of IPv6: master and store as the operator renders them, on `::1`, and the connector's client."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from epochkv_operator.planning.connection import connection
from hack.cluster.binaries import build
from hack.loopback import free_port, has_ipv6, port_open
from hack.waiting import eventually
from tests.support.planning import CONTEXT, pool
from tests.support.pods import ADMIN_PORT, Etcd, rendered, start

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
ENGINE = """
import sys
from epochkv_connector.store.client import NO_LAYOUT, StoreClient
from tests.support.store import Memory, block_keys, get, put, settings
memory = Memory(4, 10_000)
client = StoreClient(settings(sys.argv[1], local_hostname=None), [memory.region], layout=NO_LAYOUT)
client.start()
assert client.wait_ready(20), client.stats()
keys, values = block_keys(4), [memory.fill(slot, slot) for slot in range(4)]
print(put(client, memory, keys))
memory.clear()
print(get(client, memory, keys), [bytes(memory.payload(slot)) for slot in range(4)] == values)
client.close(10)
"""
"""A process of its own: Mooncake decides once for all of its clients how it writes addresses."""


@pytest.fixture
def health_port() -> int:
    return free_port()


@pytest.fixture(params=["one master", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path, health_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """The port of the store's own HTTP server, and the address of its master."""
    rest_port = free_port()
    with ExitStack() as stack:
        mooncake: dict[str, Any] = {"store": {"segmentSize": "64Mi"}}
        environ = {"MOONCAKE_MASTER": "[::1]:50051", "MOONCAKE_CLIENT_HTTP_PORT": str(health_port)}
        if request.param == "etcd":
            etcd = stack.enter_context(Etcd(build().path("etcd"), tmp_path, "::1"))
            mooncake["master"] = {"highAvailability": {"backend": "Etcd", "etcd": {"endpoints": [etcd.endpoint]}}}
            tier = connection(pool({"distributed": {"mooncake": mooncake}}), CONTEXT)["distributed"]
            environ["MOONCAKE_MASTER"] = tier["master_address"]
            monkeypatch.setenv("MC_STORE_CLUSTER_ID", tier["cluster_id"])
        spec = {"distributed": {"mooncake": mooncake}}
        master = start(rendered(spec, "master"), "master", "::1", tmp_path)
        stack.callback(master.end, 5.0)
        master.wait_until(lambda: port_open(50051, "::1") and port_open(ADMIN_PORT, "::1"), 40, "listening on ::1")
        made = start(rendered(spec, "store"), "store", "::1", tmp_path, rest_port, **environ)
        stack.callback(made.end, 5.0)
        made.wait_until(lambda: port_open(rest_port), 60, "listening")
        yield rest_port, environ["MOONCAKE_MASTER"]


def test_blocks_travel_by_ipv6_and_probes_are_answered(store: tuple[int, str], health_port: int) -> None:
    rest_port, master = store
    engine = subprocess.run([sys.executable, "-c", ENGINE, master], capture_output=True, text=True, timeout=90, check=False)
    four = "[<StoreOutcome.OK: 'ok'>, <StoreOutcome.OK: 'ok'>, <StoreOutcome.OK: 'ok'>, <StoreOutcome.OK: 'ok'>]"
    assert engine.stdout.splitlines() == [four, f"{four} True"], engine.stderr
    for host in ("127.0.0.1", "[::1]"):
        eventually(lambda host=host: status(f"http://{host}:{health_port}/health") == "200", f"the kubelet's probe at {host}", 20)
        assert status(f"http://{host}:{rest_port}/api/exist/nothing") == "200"


def status(url: str) -> str:
    return subprocess.run(["curl", "-sgo", "/dev/null", "-w", "%{http_code}", url], capture_output=True, text=True, check=False).stdout
