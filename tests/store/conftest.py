"""Fixtures of the store layer: real processes over TCP on loopback."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from epochkv_connector.store.client import NO_LAYOUT, StoreClient, StoreUnavailable
from epochkv_connector.store.connection import StoreOutcome
from hack.standalone.mooncake import Mooncake
from tests.support.store import Memory, block_keys, put, settings

ConnectTo = Callable[..., StoreClient]


def mooncake(directory: Path) -> Mooncake:
    """One node at most, whose read leases last 5 s."""
    return Mooncake(directory, segment_bytes=64 << 20, lease_seconds=5.0)


def why_not(client: StoreClient, keys: Sequence[str]) -> StoreOutcome:
    """Why a client cannot say which of these there are."""
    with pytest.raises(StoreUnavailable) as caught:
        client.exists(keys).result(10)
    return caught.value.outcome


def holding(stores: Mooncake, connect: ConnectTo, count: int, size: int = 1000) -> tuple[StoreClient, Memory, list[str]]:
    """A client whose memory has as many blocks, and their keys, under which a new master with a store has them."""
    memory, keys = Memory(count, size), block_keys(count)
    stores.start_master()
    stores.start_store()
    client = connect(stores.address, memory)
    assert put(client, memory, keys) == [StoreOutcome.OK] * count
    return client, memory, keys


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Mooncake]:
    """A Mooncake of which nothing runs yet; everything started in it ends with the test."""
    made = mooncake(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """A master and one store for the tests of a module that break nothing."""
    with mooncake(tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture
def connect() -> Iterator[ConnectTo]:
    """`connect(address, memory, layout=..., **settings)`: started clients, closed after the test."""
    clients: list[StoreClient] = []

    def make(address: str, memory: Memory | None = None, *, wait: bool = True, layout: bytes = NO_LAYOUT, **changes: object) -> StoreClient:
        client = StoreClient(settings(address, **changes), [memory.region] if memory else [], layout=layout)
        clients.append(client)
        client.start()
        if wait:
            assert client.wait_ready(15), f"not connected to {address}: {client.state!r}, {client.stats()}"
        return client

    yield make
    for client in clients:
        client.close(10)
