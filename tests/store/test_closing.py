"""First use of memory is over before anybody waits for it; a store that stands still for a moment is not given up; and ends of the store
client: with calls in flight, before its start, with its master away; and what it says of its environment.
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from epochkv_connector.store.client import StoreClient, StoreUnavailable
from epochkv_connector.store.connection import StoreOutcome, StoreState
from epochkv_fence.launch import CLIENT_ENVIRONMENT
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.store.conftest import ConnectTo, holding, why_not
from tests.support.store import Memory, block_keys, get, put, settings

SEGMENT_BYTES = 256 << 20


def filled_bytes(pid: int) -> int:
    """Of the segment, as long as its file is open in the process."""
    filled = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            filled += file.stat().st_blocks * 512 if "epochkv-segment" in os.readlink(file) else 0
    return filled


def test_a_segment_has_its_pages_before_it_is_mounted(stores: Mooncake) -> None:
    stores.start_master()
    store = stores.start_store(SEGMENT_BYTES)
    [mapped] = [file for file in Path(f"/proc/{store.popen.pid}/map_files").iterdir() if "epochkv-segment" in os.readlink(file)]
    assert mapped.stat().st_blocks * 512 >= SEGMENT_BYTES, "memory without pages was mounted"


def test_a_store_that_waits_for_its_master_ends_when_it_is_told(stores: Mooncake) -> None:
    stores.start_master()
    store = stores.start_store(SEGMENT_BYTES)
    assert stores.master is not None
    stores.master.kill()
    store.kill()
    store = stores.start_store(SEGMENT_BYTES, wait=False)
    eventually(lambda: filled_bytes(store.popen.pid) >= SEGMENT_BYTES, "filled without a master", 30)
    store.popen.terminate()
    assert store.popen.wait(30) == 0


def test_a_stall_of_a_store_of_3_seconds_fails_nothing(stores: Mooncake, connect: ConnectTo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", CLIENT_ENVIRONMENT["MC_TCP_STATUS_TIMEOUT_SEC"])
    stores.client_ttl_seconds = 30
    client, memory, keys = holding(stores, connect, 4, 1 << 20)
    stores.stores[0].freeze()
    threading.Timer(3.0, stores.stores[0].thaw).start()
    assert get(client, memory, keys) == [StoreOutcome.OK] * 4


_CLOSE_IN_FLIGHT = """
import sys, threading
sys.path[:0] = [{root!r}]
from tests.support.store import Memory, settings
from epochkv_connector.store.client import StoreClient
memory = Memory(8, 1 << 18)
client = StoreClient(settings({address!r}), [memory.region])
client.start()
assert client.wait_ready(15)
keys = [f"k{{i}}" for i in range(8)]
put = client.put([memory.transfer(key, slot) for slot, key in enumerate(keys)], 20)
assert put.done.result(20) == ["ok"] * 8
print("stored", flush=True)
sys.stdin.readline()  # the store is frozen now
tickets = [client.get([memory.transfer(key, slot) for slot, key in enumerate(keys)], 30) for _ in range(3)]
lookups = [client.exists(keys) for _ in range(3)]
while client.stats()["in_flight"] < 2:
    pass
print("idle" if client.close({timeout}) else "busy", flush=True)
print([ticket.done.done() for ticket in tickets[2:]], client.exists(keys).exception(1).outcome, flush=True)
"""


@pytest.mark.parametrize(("timeout", "expected"), [(0.3, "busy"), (30.0, "idle")])
def test_closing_with_calls_in_flight_is_clean(stores: Mooncake, request: pytest.FixtureRequest, timeout: float, expected: str) -> None:
    stores.client_ttl_seconds = 60
    stores.start_master()
    store = stores.start_store()
    script = _CLOSE_IN_FLIGHT.format(root=str(request.config.rootpath), address=stores.address, timeout=timeout)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdin
    assert child.stdout
    try:
        assert child.stdout.readline() == "stored\n"
        store.freeze()
        out, _ = child.communicate("\n", timeout=60)
    finally:
        child.kill()
    assert out.splitlines() == [expected, "[True] closed"]
    assert child.returncode == 0


def test_a_closed_client_answers_and_stays_closed(stores: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(1, 100)
    stores.start_master()
    stores.start_store()
    client = connect(stores.address, memory)
    assert client.close(5)
    assert client.state is StoreState.CLOSED
    keys = block_keys(1)
    assert put(client, memory, keys) == [StoreOutcome.CLOSED]
    assert get(client, memory, keys) == [StoreOutcome.CLOSED]
    assert why_not(client, keys) is StoreOutcome.CLOSED
    with pytest.raises(StoreUnavailable):
        client.remove_matching("^a/")
    assert client.close(5)


def test_closing_before_start_and_while_the_master_is_away_ends_at_once(stores: Mooncake) -> None:
    for start in (False, True):
        client = StoreClient(settings(stores.address))
        if start:
            client.start()
        assert client.close(5)
        assert client.state is StoreState.CLOSED


def test_what_the_operator_sets_counts(stores: Mooncake, connect: ConnectTo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS", raising=False)
    monkeypatch.setenv("MC_RPC_CONNECT_TIMEOUT_MS", "700")
    connect(stores.address, wait=False)
    assert (os.environ["MC_RPC_TIMEOUT_MS"], os.environ["MC_RPC_CONNECT_TIMEOUT_MS"]) == ("1000", "700")
