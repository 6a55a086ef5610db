"""The hub's one call that empties a store, against a real master."""

from __future__ import annotations

import asyncio

import pytest

from epochkv_fence.mooncake_admin import MooncakeAdmin
from epochkv_fence.store_admin import Removed, StoreAdminError
from tests.helpers_store import Cluster, RawClient, wait_until


def remove_all(stores: Cluster, *, force: bool, seconds: float = 10.0) -> Removed:
    admin = MooncakeAdmin(lambda uid: [f"http://127.0.0.1:{stores.admin_port}"], seconds)
    return asyncio.run(admin.remove_all("u-1", force=force))


@pytest.fixture
def filled(stores: Cluster) -> Cluster:
    """Ten keys of 1 MiB, none of which anybody reads."""
    stores.start_master("--default_kv_lease_ttl=2000")
    stores.start_store()
    client = RawClient(stores.address)
    for number in range(10):
        client.put(f"key-{number}", bytes([number]) * (1 << 20))
    client.close()
    wait_until(lambda: len(stores.keys()) == 10, 10, "ten keys")
    return stores


def test_everything_goes_and_is_counted_until_nothing_is_left(filled: Cluster) -> None:
    removed = remove_all(filled, force=True)
    assert removed.keys == 10
    assert removed.num_bytes is not None
    assert removed.num_bytes >= 10 << 20
    assert filled.keys() == []
    assert remove_all(filled, force=True) == Removed(0, 0)


def test_without_force_what_is_read_stays_until_its_lease_is_over(filled: Cluster) -> None:
    reader = RawClient(filled.address)
    try:
        assert reader.get("key-3", 1 << 20) == bytes([3]) * (1 << 20)
        assert remove_all(filled, force=False).keys == 9
        assert filled.keys() == ["key-3"]
        assert remove_all(filled, force=True).keys == 1
    finally:
        reader.close()


def test_a_frozen_and_a_dead_master_are_errors_in_time(filled: Cluster) -> None:
    assert filled.master is not None
    filled.master.freeze()
    with pytest.raises(StoreAdminError, match="no answer within"):
        remove_all(filled, force=True, seconds=0.5)
    filled.master.thaw()
    filled.master.kill()
    with pytest.raises(StoreAdminError, match="refused"):
        remove_all(filled, force=True)
    filled.start_master()
    assert remove_all(filled, force=True).keys == 0


def test_the_wrong_port_is_an_error_that_says_so(filled: Cluster) -> None:
    admin = MooncakeAdmin(lambda uid: [f"http://127.0.0.1:{filled.rpc_port}"], 3.0)
    with pytest.raises(StoreAdminError):
        asyncio.run(admin.remove_all("u-1", force=True))
    assert len(filled.keys()) == 10
