"""KV events of L1 as a router hears them: over vLLM's own ZeroMQ publisher, in order with vLLM's events of GPU blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.scheduler.rigs import LENGTH, MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt


class Router:
    """A subscriber that believes what it hears: which blocks are where.

    Attributes:
        where: (medium, group, hash) of every block announced and not taken back.
        heard: all events, in order.
    """

    def __init__(self, publisher: Any) -> None:
        self.where: set[tuple[str, int, int]] = set()
        self.tokens: dict[int, tuple[tuple[int, ...], int | None]] = {}
        self.heard: list[Any] = []
        self._publisher = publisher
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._sequence = -1

    def connect(self, endpoint: str) -> None:
        """Return once a published batch arrives: a subscription takes effect late."""
        self._socket.connect(endpoint)
        deadline = time.monotonic() + 20.0
        while self._socket.poll(50) == 0:
            assert time.monotonic() < deadline, "the subscription does not take effect"
            self._publish([])
        self._sequence = self._receive()[0]

    def _publish(self, events: list[Any]) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _receive(self) -> tuple[int, list[Any]]:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        _, sequence, payload = self._socket.recv_multipart()
        return int.from_bytes(sequence, "big"), msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events

    def listen(self) -> list[Any]:
        """Everything published up to now, exactly once and in order."""
        from vllm.distributed.kv_events import BlockRemoved

        mark = BlockRemoved(block_hashes=[7], medium="MARK")
        self._publish([mark])
        news: list[Any] = []
        while True:
            assert self._socket.poll(10_000), "the publisher is silent"
            sequence, events = self._receive()
            assert sequence == self._sequence + 1, "an event was lost"
            self._sequence = sequence
            if events == [mark]:
                break
            news += events
        for event in news:
            self._believe(event)
        self.heard += news
        return news

    def _believe(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.where.clear()
            return
        for name in event.block_hashes:
            place = (event.medium, event.group_idx, name)
            if kind == "BlockRemoved":
                assert place in self.where, f"removed, and never stored: {place}"
                self.where.discard(place)
            else:
                self.where.add(place)
        if kind == "BlockStored" and event.medium == "CPU":
            assert len(event.block_hashes) == 1
            self.tokens[event.block_hashes[0]] = (tuple(event.token_ids), event.parent_block_hash)

    def blocks(self, medium: str, group: int = 0) -> set[int]:
        """What it believes to be there."""
        return {name for where, of_group, name in self.where if (where, of_group) == (medium, group)}

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture
def listened(make_rig: MakeRig, tmp_path: Any) -> Iterator[Callable[..., tuple[Any, Router]]]:
    """An engine that publishes for real, and a router that hears all of it."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    made: list[Any] = []

    def build(**options: Any) -> tuple[Any, Router]:
        rig = make_rig(kv_events=True, **options)
        endpoint = f"ipc://{tmp_path}/events{len(made)}"
        publisher = ZmqEventPublisher(data_parallel_rank=0, endpoint=endpoint)
        made.append(publisher)
        rig.scheduler.kv_event_publisher = publisher
        router = Router(publisher)
        made.append(router)
        router.connect(endpoint)
        return rig, router

    yield build
    for thing in reversed(made):
        (thing.close if isinstance(thing, Router) else thing.shutdown)()


def findable(rig: Any, group: int = 0) -> set[int]:
    """Names that L1 holds and can be asked for under the present root, as its index says."""
    index = rig.books.state.index
    names = [name for name in index._names if name is not None]
    current = {name for of_group, name in names if of_group == group and index._roots[index._maps[group][name]] == index._root}
    return {int.from_bytes(name, "big") % (1 << 64) for name in current}  # vLLM publishes the last 64 bits


def test_a_router_learns_what_is_in_l1(listened: Callable[..., Any]) -> None:
    rig, router = listened()
    rig.adopt(0)
    tokens = prompt(1, LENGTH)
    rig.serve(tokens)
    news = router.listen()
    assert [event.medium for event in news if type(event).__name__ == "BlockStored"].count("CPU") == 8
    assert router.blocks("CPU") == findable(rig)
    assert len(router.blocks("CPU")) == 8
    assert router.blocks("CPU") == router.blocks("GPU")  # the same names, so that a router needs no second table
    chain, parent = [], None
    by_parent = {parent: (name, held) for name, (held, parent) in router.tokens.items()}
    for _ in range(8):
        parent, held = by_parent[parent]
        chain += held
    assert chain == tokens[: 8 * BLOCK]
    stored = next(event for event in news if getattr(event, "medium", None) == "CPU")
    assert (stored.block_size, stored.lora_name, stored.locality, stored.kv_cache_spec_kind) == (BLOCK, None, "LOCAL", "full_attention")


def test_an_eviction_is_told(listened: Callable[..., Any]) -> None:
    rig, router = listened(l1_bytes=10 * 2304)  # ten blocks
    rig.adopt(0)
    assert rig.books.state.index.num_slots == 10
    rig.serve(prompt(1, LENGTH))
    rig.serve(prompt(2, LENGTH))
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    removed = [event for event in router.heard if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
    assert len(removed) == 6
    rig.adopt(1)
    rig.serve(prompt(3, LENGTH))  # takes the slots of the old root, whose names nobody believes in any more
    news = router.listen()
    assert [type(event).__name__ for event in news].count("AllBlocksCleared") == 1
    assert not [event for event in news if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
    assert router.blocks("CPU") == findable(rig)


def test_after_a_clearing_nothing_of_before_is_believed(listened: Callable[..., Any]) -> None:
    rig, router = listened()
    rig.adopt(0)
    tokens = prompt(1, LENGTH)
    rig.serve(tokens)
    router.listen()
    old = router.blocks("CPU")
    rig.adopt(1, weights="w1")
    rig.serve(prompt(2, LENGTH))
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    assert len(router.blocks("CPU")) == 8
    assert not router.blocks("CPU") & old
    rig.serve(tokens)
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.serve(prompt(3, BLOCK - 1))  # a step, so that events go out; too short for a block
    router.listen()
    assert router.where == set()
    assert findable(rig) == set()


def test_a_save_that_an_epoch_overtakes_is_not_announced(listened: Callable[..., Any]) -> None:
    rig, router = listened()
    rig.adopt(0)
    worker = rig.workers[0]
    worker.hold_saves = True
    request = rig.add(prompt(1, LENGTH))
    rig.steps(3)
    assert worker.saves
    rig.adopt(1, weights="w1")
    worker.hold_saves = False
    worker.work()
    rig.run()
    assert request.request_id in rig.finished
    router.listen()
    assert router.blocks("CPU") == findable(rig)


def test_blocks_of_a_root_that_returns_are_told_again(listened: Callable[..., Any]) -> None:
    rig, router = listened()
    rig.adopt(0)
    tokens = prompt(1, LENGTH)
    rig.serve(tokens)
    router.listen()
    before = router.blocks("CPU")
    assert len(before) == 8
    rig.lease_until = 0.0  # the lease is lost: a private root, and blocks of the shared one cannot be hit
    rig.serve(prompt(2, BLOCK - 1))
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    assert not router.blocks("CPU") & before
    rig.lease_until = float("inf")
    rig.serve(prompt(3, BLOCK - 1))
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    assert router.blocks("CPU") >= before
    assert {router.tokens[name][0] for name in before} == {tuple(tokens[start : start + BLOCK]) for start in range(0, 8 * BLOCK, BLOCK)}


def test_what_l2_brings_into_l1_is_told(listened: Callable[..., Any], make_rig: MakeRig) -> None:
    store = SharedStore()
    writer = make_rig(store=store)
    writer.adopt(0)
    tokens = prompt(1, LENGTH)
    writer.serve(tokens)
    rig, router = listened(store=store)
    rig.adopt(0)
    rig.serve(tokens)
    router.listen()
    assert len(store.fetched) == 8
    assert router.blocks("CPU") == findable(rig)
    assert len(router.blocks("CPU")) == 8


@pytest.mark.parametrize("groups", [("48", "full"), ("full", "48", "32")])
def test_groups_are_told_apart(listened: Callable[..., Any], groups: tuple[str, ...]) -> None:
    rig, router = listened(groups=groups)
    rig.adopt(0)
    rig.serve(prompt(1, LENGTH))
    router.listen()
    for group in range(len(groups)):
        assert router.blocks("CPU", group) == findable(rig, group)
        assert router.blocks("CPU", group)


def test_without_l1_only_clearings_are_told(listened: Callable[..., Any]) -> None:
    rig, router = listened(l1_bytes=None, store=SharedStore())
    rig.adopt(0)
    rig.serve(prompt(1, LENGTH))
    rig.adopt(1, weights="w1")
    rig.serve(prompt(1, LENGTH))
    router.listen()
    assert router.blocks("CPU") == set()
    assert any(type(event).__name__ == "AllBlocksCleared" for event in router.heard)


def test_an_error_in_the_events_ends_them_and_nothing_else(listened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from epochkv_connector.engine.events import host as events

    rig, router = listened()
    rig.adopt(0)

    def fails(*_: Any) -> None:
        raise KeyError("an event of another version")

    monkeypatch.setattr(events, "host_block_stored", fails)
    first = rig.serve(prompt(1, LENGTH))
    rig.block_pool.reset_prefix_cache()
    again = rig.serve(prompt(1, LENGTH))
    assert rig.cached[again] == 8 * BLOCK
    assert rig.outputs[first] == rig.outputs[again]
    assert rig.connector._guard.errors == {"events": 1}
    assert not rig.side.state.broken
    router.listen()
    assert router.blocks("CPU") == set()
    assert rig.leaks() == {}
