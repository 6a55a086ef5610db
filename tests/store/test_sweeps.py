"""A pool whose engines are all gone: the hub empties its store through the store's own admin port. Real hub, real store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochkv_connector.naming.identity import object_key
from epochkv_fence.mooncake_admin import MooncakeAdmin
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.store.conftest import ConnectTo
from tests.support.store import Memory, put

LEASE_SECONDS = 3.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Mooncake]:
    """A store whose read leases last 3 s."""
    with Mooncake(tmp_path, segment_bytes=64 << 20, lease_seconds=LEASE_SECONDS) as made:
        yield made


@pytest.fixture
def pool(tmp_path: Path, store: Mooncake) -> Iterator[Pool]:
    """Leases of half a second, so that a pool without engines counts as one soon."""
    admin = MooncakeAdmin(lambda uid: [f"http://127.0.0.1:{store.admin_port}"], deadline_seconds=1.0)
    with Pool(tmp_path, lease_seconds=0.5, stores=admin) as pool:
        pool.configure(store_admin=True, reclaim_seconds=LEASE_SECONDS + 1.0)
        yield pool


def names(epoch: int, count: int) -> list[str]:
    namespace = f"{secrets.token_hex(4)}/{secrets.token_hex(8)}/e{epoch}/w{secrets.token_hex(8)}"
    return [object_key(namespace, 0, 0, bytes([number])) for number in range(count)]


def test_without_engines_the_store_is_emptied_through_its_admin(store: Mooncake, pool: Pool, connect: ConnectTo) -> None:
    memory = Memory(8, 1000)
    client = connect(store.address, memory)
    old = names(0, 5)
    put(client, memory, old)
    assert list(client.exists(old[:1]).result(5)) == [True]  # leased: somebody may read it
    assert set(old) <= set(store.keys())
    epoch = pool.bump()
    eventually(lambda: not set(old[1:]) & set(store.keys()), "what nobody reads is gone", 20)
    eventually(lambda: not set(old) & set(store.keys()), "the rest is gone after its lease", 30)
    eventually(lambda: pool.snapshot().reclaimed >= epoch, "the hub knows that nothing is left", 30)
    snapshot = pool.snapshot()
    assert snapshot.reclaimed_keys >= len(old)
    assert snapshot.reclaimed_bytes >= len(old) * memory.object_bytes


def test_a_master_that_hangs_is_asked_again(store: Mooncake, pool: Pool, connect: ConnectTo, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(8, 1000)
    old = names(0, 3)
    put(connect(store.address, memory), memory, old)
    assert store.master is not None
    store.master.freeze()
    epoch = pool.bump()
    assert pool.snapshot().published == epoch, "publication never waits for memory"
    eventually(lambda: "sweep failed" in caplog.text, "a sweep has failed", 30)
    store.master.thaw()
    eventually(lambda: not set(old) & set(store.keys()), "the old keys are gone", 60)
