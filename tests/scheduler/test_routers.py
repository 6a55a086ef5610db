"""What routers make of an engine's KV events, over vLLM's own ZeroMQ publisher and in order with its events of GPU blocks: what L1 holds,
and over changes of names no block of before, no child before its parent, nothing that one request has alone. An engine that idles tells
as soon as one that works."""

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from epochkv_connector.engine.events import EventStream, Private, Renamed
from hack.loopback import free_port, has_ipv6, port_open
from hack.waiting import eventually
from tests.scheduler.rigs import LENGTH, SLOT_BYTES, TOKENS, MakeRig, push_out
from tests.support.routers.aibrix import AibrixIndex
from tests.support.routers.llmd import LlmdIndex
from tests.support.scheduler import BLOCK, OwnRoot, SharedStore, prompt

Listened = Callable[..., Any]
SHORT = prompt(3, BLOCK - 1)
"""Too short for a block: a step, so that events go out."""


class Router:
    """A subscriber that believes what it hears: which blocks are where. It takes offence at what a router could not follow.

    Attributes:
        where: (medium, group, hash) of every block announced and not taken back.
        heard: all events, in order.
        payloads: the messages they came in.
    """

    def __init__(self, publisher: Any) -> None:
        self.payloads: list[bytes] = []
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
        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _receive(self) -> tuple[int, list[Any]]:
        _, sequence, payload = self._socket.recv_multipart()
        self.payloads.append(payload)
        return int.from_bytes(sequence, "big"), msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events

    def listen(self) -> list[Any]:
        """Everything published up to now, exactly once and in order."""
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
        if kind == "BlockStored" and event.kv_cache_spec_kind == "full_attention" and event.parent_block_hash is not None:
            assert self.knows(event.group_idx, event.parent_block_hash), f"a child before its parent: {event}"
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

    def knows(self, group: int, name: int) -> bool:
        """Whether it was told of a block since the last clearing."""
        return any((medium, group, name) in self.where for medium in ("GPU", "CPU"))

    def blocks(self, medium: str, group: int = 0) -> set[int]:
        return {name for where, of_group, name in self.where if (where, of_group) == (medium, group)}

    def close(self) -> None:
        self._socket.close(0)


def findable(rig: Any, group: int = 0) -> set[int]:
    """Names that L1 holds and can be asked for under the present root, as its index says."""
    index = rig.tiers.state.index
    names = [name for name in index._names if name is not None]
    current = {name for of_group, name in names if of_group == group and index._roots[index._maps[group][name]] == index._root}
    return {int.from_bytes(name, "big") % (1 << 64) for name in current}  # vLLM publishes the last 64 bits


@pytest.fixture
def listened(make_rig: MakeRig, tmp_path: Path) -> Iterator[Listened]:
    """An engine that publishes for real, and a router that hears all of it."""
    made: list[Any] = []

    def build(**options: Any) -> tuple[Any, Any]:
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


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("endpoint", ["tcp://*:{}", "tcp://[::]:{}"])
def test_routers_of_either_family_reach_an_engine(endpoint: str, make_rig: MakeRig) -> None:
    make_rig(epoch=0)
    publisher = ZmqEventPublisher(data_parallel_rank=0, endpoint=endpoint.format(port := free_port()))
    try:
        assert port_open(port, "127.0.0.1")
        assert port_open(port, "::1")
    finally:
        publisher.shutdown()


def kinds(news: list[Any]) -> list[str]:
    return [type(event).__name__ for event in news]


def look(rig: Any) -> None:
    """At the weights, as an idle engine does once they were quiet for a moment."""

    def quiet() -> bool:
        rig.watch.when_idle()
        return not rig.watch.pending

    eventually(quiet, "a look at the weights", 10.0)


def of_device(news: list[Any]) -> list[Any]:
    return [event for event in news if getattr(event, "medium", None) == "GPU"]


# ---------------------------------------------------------------------- what L1 holds
def test_a_router_learns_what_is_in_l1(listened: Listened) -> None:
    rig, router = listened(epoch=0)
    rig.serve(TOKENS)
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
    assert chain == TOKENS[: 8 * BLOCK]
    stored = next(event for event in news if getattr(event, "medium", None) == "CPU")
    assert (stored.block_size, stored.lora_name, stored.locality, stored.kv_cache_spec_kind) == (BLOCK, None, "LOCAL", "full_attention")


def test_an_eviction_is_told(listened: Listened) -> None:
    rig, router = listened(l1_bytes=10 * SLOT_BYTES, epoch=0)  # ten blocks
    assert rig.tiers.state.index.num_slots == 10
    rig.serve(prompt(1, LENGTH))
    rig.serve(prompt(2, LENGTH))
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    removed = [event for event in router.heard if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
    assert len(removed) == 6
    rig.adopt(1)
    rig.serve(prompt(3, LENGTH))  # takes the slots of the old root, whose names nobody believes in any more
    news = router.listen()
    assert rig.tiers.stats()["slots_other_roots"] == 2
    assert [type(event).__name__ for event in news].index("AllBlocksCleared") == 0
    assert [type(event).__name__ for event in news].count("AllBlocksCleared") == 1
    assert not [event for event in news if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
    assert router.blocks("CPU") == findable(rig)


def test_what_l2_brings_into_l1_is_told(listened: Listened, make_rig: MakeRig, store: SharedStore) -> None:
    make_rig(store=store, epoch=0).serve(TOKENS)
    rig, router = listened(store=store, epoch=0)
    rig.serve(TOKENS)
    router.listen()
    assert len(store.fetched) == 8
    assert router.blocks("CPU") == findable(rig)
    assert len(router.blocks("CPU")) == 8


def test_groups_are_told_apart(listened: Listened) -> None:
    groups = ("full", "48", "32")
    rig, router = listened(groups=groups, epoch=0)
    rig.serve(prompt(1, LENGTH))
    router.listen()
    for group in range(len(groups)):
        assert router.blocks("CPU", group) == findable(rig, group)
        assert router.blocks("CPU", group)


def stored(*names: int, parent: int | None = None, medium: str = "GPU", group: int = 0) -> BlockStored:
    return BlockStored(list(names), parent, [0] * len(names), 1, None, medium, None, group_idx=group)


def removed(*names: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(names), medium, group_idx=0)


def host(name: int, parent: int | None = None, group: int = 0) -> BlockStored:
    return stored(name, parent=parent, medium="CPU", group=group)


STREAM: dict[str, tuple[list[Any], list[Any]]] = {
    "a child in L1 waits for its parent": ([host(3, 2), host(2, 1), host(1)], [host(1), host(2, 1), host(3, 2)]),
    "wherever that appears": ([host(3, 2), stored(1, 2)], [stored(1, 2), host(3, 2)]),
    "a child that left L1 while it waited": ([host(2, 1), host(3, 1), removed(2, medium="CPU"), host(1)], [host(1), host(3, 1)]),
    "a group that needs no parents": ([host(2, 1, group=1)], [host(2, 1, group=1)]),
    "a clearing forgets what waits": ([host(2, 1), Renamed(), host(1)], [AllBlocksCleared(), host(1)]),
    "what is private comes and goes in silence": ([Private(stored(1, 2)), removed(1), stored(3), removed(2, 3)], [stored(3), removed(3)]),
    "after other names, blocks of before leave in silence": (
        [stored(1), Renamed(), removed(1), stored(2), removed(2)],
        [stored(1), AllBlocksCleared(), stored(2), removed(2)],
    ),
    "a child of a block that was cleared": ([stored(1), Renamed(), stored(2, parent=1), removed(2)], [stored(1), AllBlocksCleared()]),
    "unless L1 tells of the parent": (
        [stored(1), Renamed(), host(1), stored(2, parent=1)],
        [stored(1), AllBlocksCleared(), host(1), stored(2, parent=1)],
    ),
}


@pytest.mark.parametrize("case", STREAM)
def test_what_is_passed_on(case: str) -> None:
    events, told = STREAM[case]
    assert EventStream([0], tuple).pass_on(events) == told


def test_what_came_to_l1_behind_a_reset_is_told_once() -> None:
    events = [AllBlocksCleared(), host(1), removed(1, medium="CPU")]
    assert EventStream([0], lambda: (host(1),)).pass_on(events) == events


def test_nothing_is_kept_of_what_is_gone() -> None:
    told = EventStream([0], tuple)
    told.pass_on([host(2, 1), host(3, 1), removed(2, medium="CPU"), removed(3, medium="CPU"), Private(stored(4)), removed(4)])
    told.pass_on([stored(5), removed(5), host(6), removed(6, medium="CPU")])
    assert not any((told._orphans, told._parents, told._private, told._on_device, told._of_host))


# ---------------------------------------------------------------------- an engine that idles
CHANGES: dict[str, Callable[[Any], object]] = {
    "an epoch": lambda rig: rig.adopt(1),
    "new weights": lambda rig: setattr(rig, "weights", "w1"),
    "a reset": lambda rig: rig.scheduler.reset_prefix_cache(reset_connector=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_idle_engine_tells_of_other_names(listened: Listened, change: str) -> None:
    rig, router = listened(epoch=0)
    rig.serve(TOKENS)
    router.listen()
    assert router.where
    assert not rig.scheduler.has_requests()
    CHANGES[change](rig)
    look(rig)
    assert rig.scheduler.has_requests(), "vLLM publishes from inside a step"
    assert 1 <= rig.run() <= 2
    assert kinds(router.listen()) == ["AllBlocksCleared"]
    assert router.where == set()


def test_an_idle_engine_tells_of_a_lost_lease_and_of_its_return(listened: Listened) -> None:
    rig, router = listened(epoch=0)
    rig.serve(TOKENS)
    router.listen()
    before = router.blocks("CPU")
    rig.lease_until = 0.0
    assert rig.run() == 1
    assert kinds(router.listen()) == ["AllBlocksCleared"]
    rig.lease_until = float("inf")
    rig.pins.root._settled = False  # as the agent does with a grant
    assert rig.run() == 1
    router.listen()
    assert router.blocks("CPU") == before == findable(rig)


@pytest.mark.parametrize("kv_events", [True, False])
def test_an_engine_that_waits_is_woken_when_there_is_something_to_tell(make_rig: MakeRig, kv_events: bool) -> None:
    rig = make_rig(epoch=0, kv_events=kv_events)
    rig.serve(TOKENS)
    inputs = rig.core.input_queue = queue.Queue()
    hooks = rig.side.hooks
    hooks.stats()
    assert inputs.empty()
    hooks.adopt(1)
    rig.run()
    rig.lease_until = 0.0
    hooks.stats()
    assert [inputs.get_nowait()[0].name for _ in range(inputs.qsize())] == ["WAKEUP", "WAKEUP"] * kv_events
    rig.run()
    hooks.stats()
    assert inputs.empty()


# ---------------------------------------------------------------------- parents first
def test_blocks_that_are_found_again_are_told_parents_first(listened: Listened) -> None:
    rig, router = listened(epoch=0, l1_bytes=20 * SLOT_BYTES)
    for seed in (1, 2, 3):  # the third takes the slots of the first, as they were given up: children first
        rig.serve(prompt(seed, LENGTH))
    router.listen()
    held = {rig.tiers.state.index._names[slot]: slot for slot in range(rig.tiers.state.index.num_slots)}
    chain = [held[0, name] for name in rig.request(prompt(3, LENGTH)).block_hashes if (0, name) in held]
    assert chain != sorted(chain), "slots lie in the order of the chain, so this shows nothing"
    rig.lease_until = 0.0
    rig.serve(SHORT)
    router.listen()
    rig.lease_until = float("inf")
    rig.serve(SHORT)
    router.listen()  # it takes offence at a child before its parent
    assert len(router.blocks("CPU")) >= 16
    assert router.blocks("CPU") == findable(rig)


def test_after_a_reset_of_the_device_alone_l1_is_told_again(listened: Listened) -> None:
    rig, router = listened(epoch=0)
    rig.serve(TOKENS)
    router.listen()
    before = router.blocks("CPU")
    assert rig.scheduler.reset_prefix_cache()
    rig.run()
    news = router.listen()
    assert kinds(news) == ["AllBlocksCleared", *["BlockStored"] * 8]
    assert router.blocks("CPU") == before == findable(rig)
    assert router.blocks("GPU") == set()
    rig.serve(TOKENS)
    router.listen()
    assert router.blocks("GPU") == before, "vLLM tells of what was loaded"


# ---------------------------------------------------------------------- names that nobody else has
def test_in_bypass_nothing_is_told(listened: Listened) -> None:
    rig, router = listened(num_blocks=12)
    rig.serve(TOKENS)
    push_out(rig)
    assert router.listen() == []
    rig.adopt(0)
    rig.serve(TOKENS)
    router.listen()
    assert router.blocks("GPU") == router.blocks("CPU") == findable(rig)
    rig.lease_until = 0.0
    push_out(rig)  # and evicts what was told before
    assert kinds(router.listen()) == ["AllBlocksCleared"]


@pytest.mark.parametrize("change", ["epoch", "weights"])
def test_what_a_request_names_for_itself_is_not_told(listened: Listened, change: str) -> None:
    rig, router = listened(epoch=0)
    request = rig.add(prompt(1, LENGTH), max_tokens=3 * BLOCK)
    rig.steps(2)
    router.listen()
    assert len(router.blocks("GPU")) == 8
    if change == "epoch":
        rig.adopt(1)
    else:
        rig.weights = "w1"
    rig.run()
    assert request.num_output_tokens == 3 * BLOCK
    news = router.listen()
    assert of_device(news) == []
    assert router.where == set()
    rig.serve(prompt(2, LENGTH))
    router.listen()
    assert len(router.blocks("GPU")) == 8


@pytest.mark.unclean
def test_an_error_in_the_stream_leaves_vllm_its_events(listened: Listened, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, router = listened(epoch=0)

    def fails(*_: Any) -> None:
        raise KeyError("an event of another version")

    monkeypatch.setattr(EventStream, "_pass", fails)
    first = rig.serve(TOKENS)
    news = router.listen()
    assert len(router.blocks("GPU")) == 8
    assert [event.medium for event in of_device(news)] == ["GPU"]
    rig.adopt(1)
    assert rig.run() == 1
    assert kinds(router.listen()) == ["AllBlocksCleared"]
    assert rig.connector._guard.errors == {"events": 1}
    assert rig.outputs[rig.serve(TOKENS)] == rig.outputs[first]
    assert not rig.side.state.broken


# ---------------------------------------------------------------------- the rules of routers
class Fleet:
    """Two engines of a pool, and indexes that follow both."""

    def __init__(self, listened: Listened, store: SharedStore) -> None:
        self.engines = {}
        for name in ("a", "b"):
            rig, _ = self.engines[name] = listened(store=store)
            rig.pins.root._global = OwnRoot(rig.pins.root.snapshot.root)  # before another one binds vLLM's: threads of this one look, too
        self.llmd, self.aibrix = LlmdIndex(BLOCK), AibrixIndex(BLOCK)
        self._read = dict.fromkeys(self.engines, 0)

    def listen(self) -> None:
        for name, (rig, router) in self.engines.items():
            rig.run()
            router.listen()
            for payload in router.payloads[self._read[name] :]:
                self.llmd.read(name, payload)
                self.aibrix.read(name, payload)
            self._read[name] = len(router.payloads)
        assert self.llmd.dropped == self.aibrix.dropped == []

    def adopt(self, epoch: int, weights: str | None = None) -> None:
        for rig, _ in self.engines.values():
            rig.adopt(epoch, weights)
            look(rig)


@pytest.mark.parametrize("weights", [None, "w1"])
def test_the_rules_of_routers_over_a_change_of_names(listened: Listened, weights: str | None) -> None:
    fleet = Fleet(listened, SharedStore())
    (a, _), (b, _) = fleet.engines.values()
    fleet.adopt(0)
    a.serve(TOKENS)
    fleet.listen()
    assert fleet.llmd.find(TOKENS) == {"a": 8}
    assert set(fleet.aibrix.find(TOKENS)) == {"a"}
    b.serve(TOKENS)  # loads what a has put into L2
    fleet.listen()
    assert fleet.llmd.find(TOKENS) == {"a": 8, "b": 8}
    assert set(fleet.aibrix.find(TOKENS)) == {"a", "b"}
    fleet.adopt(1, weights)
    fleet.listen()
    for index in (fleet.llmd, fleet.aibrix):
        assert (index.blocks("a"), index.blocks("b"), index.find(TOKENS)) == (0, 0, {})
    b.serve(TOKENS)
    fleet.listen()
    assert fleet.llmd.find(TOKENS) == {"b": 8}
    assert set(fleet.aibrix.find(TOKENS)) == {"b"}
    b.scheduler.reset_prefix_cache()
    fleet.listen()
    assert fleet.llmd.find(TOKENS) == {"b": 8}, "L1 has them still"
