"""A store with a disk, as the operator renders it: blocks that memory has no room for any more are read back from the disk."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochkv_connector.store.connection import StoreOutcome
from hack.loopback import free_port, port_open
from hack.waiting import eventually
from tests.store.conftest import ConnectTo
from tests.support.pods import ADMIN_PORT, rendered, start
from tests.support.proxy import RecordingProxy
from tests.support.store import Memory, block_keys, get, put

SPEC = {"distributed": {"mooncake": {"store": {"segmentSize": "64Mi", "ssd": {"capacity": "4Gi"}}}}}
MASTER, STORE = "127.12.0.1", "127.12.0.2"
RPC_PORT, PAYLOAD, KEYS = 50051, 1_000_000, 100


class Pods:
    """A master and a store of one pool. `keys` answers what the master knows."""

    def __init__(self, directory: Path) -> None:
        self.disk = directory / "ssd"
        self.disk.mkdir()
        self.master = start(rendered(SPEC, "master"), "master", MASTER, directory)
        try:
            self.master.wait_until(lambda: port_open(RPC_PORT, MASTER), 30, "accepting connections")
            self.container = rendered(SPEC, "store")
            own = {"MOONCAKE_MASTER": f"{MASTER}:{RPC_PORT}", "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.disk)}
            self.rest_port = free_port()
            self.store = start(self.container, "store", STORE, directory, self.rest_port, **own)
            self.store.wait_until(lambda: bool(self.ask("get_all_segments").split()), 60, "mounted")
        except BaseException:
            self.end()
            raise

    def ask(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{MASTER}:{ADMIN_PORT}/{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def known(self) -> set[str]:
        return set(self.ask("get_all_keys").split())

    def places(self, keys: list[str]) -> dict[str, set[str]]:
        """Keys by where the master says they are: `values` is memory, `local_disk_values` the store's disk."""
        found = json.loads(self.ask(f"batch_query_keys?keys={','.join(keys)}"))["data"]
        return {place: {key for key, item in found.items() if item[place]} for place in ("values", "local_disk_values")}

    def only_on_disk(self, keys: list[str]) -> set[str]:
        found = self.places(keys)
        return found["local_disk_values"] - found["values"]

    def end(self) -> None:
        for process in (getattr(self, "store", None), self.master):
            if process is not None:
                process.end(5.0)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    made.end()


def test_blocks_that_left_memory_are_read_from_disk(pods: Pods, connect: ConnectTo) -> None:
    memory = Memory(1, PAYLOAD)
    client = connect(f"{MASTER}:{RPC_PORT}", memory)
    keys = block_keys(KEYS)
    values = {}
    for seed, key in enumerate(keys):
        values[key] = memory.fill(0, seed)
        # A block that is being written to disk cannot leave memory, which is small here.
        eventually(lambda key=key: put(client, memory, [key]) == [StoreOutcome.OK], "room for a block", 30, pause=0.2)
    places = eventually(lambda: pods.only_on_disk(keys), lambda: f"blocks only on disk; {pods.places(keys)}", 30)
    assert len(places) > KEYS // 4
    for key in sorted(places):
        memory.clear()
        assert get(client, memory, [key]) == [StoreOutcome.OK]
        assert bytes(memory.payload(0)) == values[key]

    # What a pod runs before it ends.
    command = pods.container["lifecycle"]["preStop"]["exec"]["command"]
    hook = [sys.executable, *command[1:-1], command[-1].replace(":8088/", f":{pods.rest_port}/")]
    with RecordingProxy() as proxy:
        ended = subprocess.run(hook, env={**os.environ, **proxy.environ}, check=False, timeout=60)
        assert (ended.returncode, proxy.asked) == (0, [])
    left = sorted(places)[:10]
    assert client.exists(left).result(10) == [False] * len(left), "readers are not sent to a store that is about to go"
    assert get(client, memory, left[:1]) == [StoreOutcome.ABSENT]
