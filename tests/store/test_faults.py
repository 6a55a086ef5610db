"""Masters and stores that die, freeze, forget, fill up: every fault is a miss in bounded time, and the client comes back by itself."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import pytest

from epochkv_connector.store.client import StoreUnavailable
from epochkv_connector.store.connection import StoreOutcome, StoreState
from hack.loopback import free_port
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.store.conftest import ConnectTo, holding, why_not
from tests.support.store import Memory, block_keys, get, pattern, put


# -- the master ---------------------------------------------------------------------------------------------------------------
def test_a_master_that_is_absent_at_start_is_joined_when_it_appears(
    stores: Mooncake, connect: ConnectTo, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(1, 1000)
    assert not stores.answers()
    client = connect(stores.address, memory, wait=False)
    time.sleep(1.0)  # several probes
    assert client.state is StoreState.PROBING
    keys = block_keys(1)
    assert put(client, memory, keys) == [StoreOutcome.DOWN]
    assert get(client, memory, keys) == [StoreOutcome.DOWN]
    assert why_not(client, keys) is StoreOutcome.DOWN
    assert len([r for r in caplog.records if "no Mooncake master answers" in r.message]) == 1

    stores.start_master()
    stores.start_store()
    assert client.wait_ready(15)
    assert put(client, memory, keys) == [StoreOutcome.OK]
    assert get(client, memory, keys) == [StoreOutcome.OK]


def test_a_killed_master_costs_one_call_and_its_successor_is_used(stores: Mooncake, connect: ConnectTo) -> None:
    client, memory, keys = holding(stores, connect, 2)
    assert stores.master
    stores.master.kill()
    assert why_not(client, keys) is StoreOutcome.UNREACHABLE
    assert client.state is StoreState.PROBING
    assert client.stats()["breaker_opened"] == 1
    calls = client.stats()["exists_calls"]
    for _ in range(100):  # answered without a call
        assert why_not(client, keys) is StoreOutcome.DOWN
        assert get(client, memory, keys) == [StoreOutcome.DOWN] * 2
    assert client.stats()["exists_calls"] == calls

    stores.start_master()  # empty
    assert client.wait_ready(15)
    assert stores.keys() == []
    assert client.exists(keys).result(10) == [False, False]
    assert get(client, memory, keys)[0] is StoreOutcome.ABSENT
    eventually(lambda: put(client, memory, keys) == [StoreOutcome.OK] * 2, "store remounted and puts accepted", 30)
    assert get(client, memory, keys) == [StoreOutcome.OK] * 2


def test_a_frozen_master_is_a_timeout_for_the_caller_and_then_an_open_breaker(stores: Mooncake, connect: ConnectTo) -> None:
    client, memory, keys = holding(stores, connect, 2)
    assert stores.master
    stores.master.freeze()
    lookup = client.exists(keys, timeout=0.05)
    with pytest.raises(StoreUnavailable) as caught:
        lookup.result(10)
    assert caught.value.outcome is StoreOutcome.TIMEOUT
    eventually(lambda: client.state is StoreState.PROBING, "breaker open", 10)
    assert client.stats()["setups"] == 1
    time.sleep(1.0)
    assert client.state is StoreState.PROBING, "a frozen process accepts TCP connections; that alone must not close the breaker"
    assert client.stats()["setups"] == 1, "setup holds the GIL and must not be tried on a frozen master"

    stores.master.thaw()
    assert client.wait_ready(15)
    assert get(client, memory, keys) == [StoreOutcome.OK] * 2


class Mute:
    """Accepts connections and ends them when told to, as a live master does, but answers no call: too slow, or another protocol."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while connection.recv(4096):
                pass

    def close(self) -> None:
        self._listener.close()


def test_setup_is_not_repeated_soon_after_it_failed(connect: ConnectTo, caplog: pytest.LogCaptureFixture) -> None:
    """It holds the GIL for as long as the master does not answer, and the engine stands still."""
    with closing(Mute()) as mute:
        client = connect(mute.address, wait=False, setup_backoff_seconds=(60.0, 60.0))
        eventually(lambda: client.stats().get("setup_failed") == 1, "setup fails", 20)
        eventually(lambda: "returned -1; it takes connections: is it a Mooncake master, of version " in caplog.text, "a sentence", 5)
        hasty = connect(mute.address, wait=False, setup_backoff_seconds=(0.5, 0.5))
        eventually(lambda: hasty.stats().get("setup_failed", 0) >= 3, "the pause decides", 20)
        assert client.stats()["setup_failed"] == 1


CROWDED = """
import logging, sys
from epochkv_connector.store.client import NO_LAYOUT, StoreClient
from tests.support.store import settings
logging.basicConfig(level=logging.WARNING)
client = StoreClient(settings(sys.argv[1]), [], layout=NO_LAYOUT)
client.start()
client.wait_ready(5)
client.close(10)
"""


def test_a_client_without_ports_says_so(shared: Mooncake) -> None:
    """In a process of its own: Mooncake reads the range once."""
    first = free_port()
    with socket.create_server(("", first)):
        environ = {**os.environ, "MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(first)}
        command = [sys.executable, "-c", CROWDED, shared.address]
        said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False).stderr
    [line] = [line for line in said.splitlines() if "Mooncake setup as 127.0.0.1" in line]
    assert f"returned -1; of the ports {first} to {first} 0 are free, and a client needs 2: " in line


# -- segment owners -------------------------------------------------------------------------------------------------------------
def test_a_killed_store_is_a_miss_and_another_one_takes_over(stores: Mooncake, connect: ConnectTo) -> None:
    stores.client_ttl_seconds = 3
    client, memory, keys = holding(stores, connect, 2)
    stores.stores[0].kill()
    assert client.exists(keys).result(10) == [True, True]  # the master does not know yet
    outcomes = get(client, memory, keys)
    assert outcomes[0] is StoreOutcome.TRANSFER
    assert StoreOutcome.OK not in outcomes
    assert client.state is StoreState.READY

    stores.start_store()
    eventually(lambda: client.exists(keys).result(10) == [False, False], "master dropped the dead segment", 30)
    assert get(client, memory, keys)[0] is StoreOutcome.ABSENT
    assert put(client, memory, keys) == [StoreOutcome.OK] * 2
    assert get(client, memory, keys) == [StoreOutcome.OK] * 2


def test_a_frozen_store_keeps_the_buffers_after_the_deadline(stores: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(4, 1 << 18)
    stores.client_ttl_seconds = 60
    stores.start_master()
    store = stores.start_store()
    client = connect(stores.address, memory)
    keys = block_keys(4)
    values = [memory.fill(slot, slot) for slot in range(4)]
    assert put(client, memory, keys) == [StoreOutcome.OK] * 4

    store.freeze()
    ticket = client.get([memory.transfer(key, slot) for slot, key in enumerate(keys)], 0.2)
    assert ticket.done.result(5) == [StoreOutcome.TIMEOUT] * 4
    assert not ticket.released.done(), "the call is still in flight, so the buffers are not free"
    assert client.stats()["in_flight"] == 1
    ticket.released.result(30)
    assert client.stats()["in_flight"] == 0
    assert client.state is StoreState.READY, "the master is fine, so lookups go on"

    store.thaw()
    eventually(lambda: get(client, memory, keys) == [StoreOutcome.OK] * 4, "reads work again", 30)
    assert [bytes(memory.payload(slot)) for slot in range(4)] == values


def test_calls_that_hang_hold_up_nobody_else(stores: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(64, 1 << 18)
    stores.client_ttl_seconds = 60
    stores.start_master()
    stores.start_store(segment_bytes=16 << 20)
    client = connect(stores.address, memory)
    others, *lost = (block_keys(48) for _ in range(3))
    assert put(client, memory, others) == [StoreOutcome.OK] * 48
    node = stores.start_store()  # only there is room for what follows
    for keys in lost:
        assert put(client, memory, keys) == [StoreOutcome.OK] * 48

    node.freeze()
    tickets = [client.get([memory.transfer(key, slot) for slot, key in enumerate(keys)], 0.2) for keys in lost]
    third = client.get([memory.transfer(others[0], 63)], 20.0)
    assert third.done.result(20) == [StoreOutcome.OK]
    assert not any(ticket.released.done() for ticket in tickets), "as many calls as there are threads hang"


def test_a_full_store_drops_puts_and_recovers(stores: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(16, 1 << 20)
    # Leases of an hour from `exists` on: what has one cannot be evicted, so full means full.
    stores.lease_seconds = 3600.0
    stores.start_master()
    stores.start_store(segment_bytes=16 << 20)
    client = connect(stores.address, memory)
    kept: list[str] = []

    def is_full() -> bool:
        key = block_keys(1)[0]
        memory.fill(0, len(kept))
        outcomes = put(client, memory, [key])
        kept.extend([key] if client.exists([key]).result(5) == [True] else [])
        return StoreOutcome.FULL in outcomes

    eventually(is_full, "the store fills up", 60)
    calls = client.stats()["put_calls"]
    assert put(client, memory, block_keys(1)) == [StoreOutcome.FULL]
    assert client.stats()["put_calls"] == calls, "backing off: not even tried"
    memory.clear()
    assert get(client, memory, [kept[-1]]) == [StoreOutcome.OK]
    assert bytes(memory.payload(0)) == pattern(len(kept) - 1, 1 << 20)

    stores.flush()
    eventually(lambda: put(client, memory, block_keys(1)) == [StoreOutcome.OK], "puts accepted again", 20)
