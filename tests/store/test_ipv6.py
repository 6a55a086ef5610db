"""A pool in a cluster of IPv6: master and store as the operator renders them, on `::1`, and the connector's client."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.loopback import free_port, has_ipv6, port_open
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.support.pods import ADMIN_PORT, rendered, start

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
SPEC = {"distributed": {"mooncake": {"store": {"segmentSize": "64Mi"}}}}
MASTER = "[::1]:50051"
ENGINE = """
from epochkv_connector.store.client import NO_LAYOUT, StoreClient
from tests.support.store import Memory, block_keys, get, put, settings
memory = Memory(4, 10_000)
client = StoreClient(settings("[::1]:50051", local_hostname=None), [memory.region], layout=NO_LAYOUT)
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


@pytest.fixture
def store(tmp_path: Path, health_port: int) -> Iterator[int]:
    """The port of the store's own HTTP server."""
    rest_port = free_port()
    master = start(rendered(SPEC, "master"), "master", "::1", tmp_path)
    try:
        master.wait_until(lambda: port_open(50051, "::1") and port_open(ADMIN_PORT, "::1"), 20, "listening on ::1")
        environ = {"MOONCAKE_MASTER": MASTER, "MOONCAKE_CLIENT_HTTP_PORT": str(health_port)}
        made: Process = start(rendered(SPEC, "store"), "store", "::1", tmp_path, rest_port, **environ)
        try:
            made.wait_until(lambda: port_open(rest_port), 60, "listening")
            yield rest_port
        finally:
            made.end(5.0)
    finally:
        master.end(5.0)


def test_blocks_travel_by_ipv6_and_probes_are_answered(store: int, health_port: int) -> None:
    engine = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=90, check=False)
    four = "[<StoreOutcome.OK: 'ok'>, <StoreOutcome.OK: 'ok'>, <StoreOutcome.OK: 'ok'>, <StoreOutcome.OK: 'ok'>]"
    assert engine.stdout.splitlines() == [four, f"{four} True"], engine.stderr
    for host in ("127.0.0.1", "[::1]"):
        eventually(lambda host=host: status(f"http://{host}:{health_port}/health") == "200", f"the kubelet's probe at {host}", 20)
        assert status(f"http://{host}:{store}/api/exist/nothing") == "200"


def status(url: str) -> str:
    return subprocess.run(["curl", "-sgo", "/dev/null", "-w", "%{http_code}", url], capture_output=True, text=True, check=False).stdout
