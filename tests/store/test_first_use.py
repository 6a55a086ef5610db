"""First use of memory is over before anybody waits for it, and a store that stands still for a moment is not given up."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from epochkv_connector.store.connection import ENVIRONMENT, StoreOutcome
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.store.conftest import ConnectTo
from tests.support.store import Memory

SEGMENT_BYTES = 256 << 20


def filled_bytes(pid: int) -> int:
    """Of the segment, as long as its file is open in the process."""
    filled = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            filled += file.stat().st_blocks * 512 if "epochkv-segment" in os.readlink(file) else 0
    return filled


def test_a_segment_has_its_pages_before_it_is_mounted(stores: Mooncake, connect: ConnectTo) -> None:
    stores.start_master()
    store = stores.start_store(SEGMENT_BYTES)
    [mapped] = [file for file in Path(f"/proc/{store.popen.pid}/map_files").iterdir() if "epochkv-segment" in os.readlink(file)]
    assert mapped.stat().st_blocks * 512 >= SEGMENT_BYTES, "memory without pages was mounted"
    memory = Memory(8, 1 << 20)
    client = connect(stores.address, memory)
    wanted = [memory.fill(slot, slot) for slot in range(8)]
    transfers = [memory.transfer(f"pool/{slot}", slot) for slot in range(8)]
    assert set(client.put(transfers, 20).done.result(25)) == {StoreOutcome.OK}
    memory.clear()
    assert set(client.get(transfers, 20).done.result(25)) == {StoreOutcome.OK}
    assert [bytes(memory.payload(slot)) for slot in range(8)] == wanted


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
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", ENVIRONMENT["MC_TCP_STATUS_TIMEOUT_SEC"])
    stores.client_ttl_seconds = 30
    stores.start_master()
    store = stores.start_store(SEGMENT_BYTES)
    memory = Memory(4, 1 << 20)
    client = connect(stores.address, memory)
    for slot in range(4):
        memory.fill(slot, slot)
    transfers = [memory.transfer(f"pool/{slot}", slot) for slot in range(4)]
    assert set(client.put(transfers, 10).done.result(15)) == {StoreOutcome.OK}
    store.freeze()
    threading.Timer(3.0, store.thaw).start()
    began = time.monotonic()
    ticket = client.get(transfers, 10.0)
    assert set(ticket.done.result(15)) == {StoreOutcome.OK}, f"after {time.monotonic() - began:.1f} s"
