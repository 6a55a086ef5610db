"""A real master: the hub's one call that empties a store, and the series that boards ask for."""

import asyncio
import re
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from epochkv_fence.client import Pool
from epochkv_fence.mooncake_admin import MooncakeAdmin
from hack.observe.catalog import MOONCAKE
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.support.hub import Agents, HubProcess
from tests.support.store import RawClient


def remove_all(stores: Mooncake, seconds: float = 10.0) -> tuple[int, int | None]:
    admin = MooncakeAdmin(lambda uid: [f"http://127.0.0.1:{stores.admin_port}"], seconds)
    return asyncio.run(admin.remove_all("u-1"))


@pytest.fixture
def filled(stores: Mooncake) -> Mooncake:
    """Ten keys of 1 MiB, none of which anybody reads."""
    stores.lease_seconds = 2.0
    stores.start_master()
    stores.start_store()
    client = RawClient(stores.address)
    for number in range(10):
        client.put(f"key-{number}", bytes([number]) * (1 << 20))
    client.close()
    eventually(lambda: len(stores.keys()) == 10, "ten keys", 10)
    return stores


def test_everything_goes_and_is_counted_until_nothing_is_left(filled: Mooncake) -> None:
    keys, num_bytes = remove_all(filled)
    assert keys == 10
    assert num_bytes is not None
    assert num_bytes >= 10 << 20
    assert filled.keys() == []
    assert remove_all(filled) == (0, 0)


def test_what_is_read_stays_until_its_lease_is_over(filled: Mooncake) -> None:
    with closing(RawClient(filled.address)) as reader:
        assert reader.get("key-3", 1 << 20) == bytes([3]) * (1 << 20)
        assert remove_all(filled)[0] == 9
        assert filled.keys() == ["key-3"]
        eventually(lambda: remove_all(filled)[0] == 1, "the lease of the reader is over", 30)


def test_a_file_hub_empties_the_store_after_it_has_published(filled: Mooncake, tmp_path: Path) -> None:
    options = ("--reclaim", "RemoveAll", "--store-admin", f"http://127.0.0.1:{filled.admin_port}")
    with HubProcess(tmp_path / "state", *options) as hub, Pool.connect(hub.folder) as pool:
        with Agents(hub.folder) as agents:
            agent, engine = agents.start()
            eventually(lambda: agent.view.epoch == 0, "the agent joins")
            assert pool.reset().published
            eventually(lambda: filled.keys() == [], "the store is emptied", 60)
            eventually(lambda: (1, ()) in engine.reclaims, "an engine looks for what was being read", 60)


def test_what_boards_ask_of_the_master_is_served(shared: Mooncake) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{shared.admin_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    values = dict(re.findall(r"^(\w+) ([\d.e+]+)$", text, re.MULTILINE))
    assert {metric.name: metric.kind for metric in MOONCAKE} == {metric.name: types.get(metric.name) for metric in MOONCAKE}
    assert {metric.name for metric in MOONCAKE} <= values.keys()
    assert float(values["master_total_capacity_bytes"]) == 64 << 20
