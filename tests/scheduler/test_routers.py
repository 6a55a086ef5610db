"""What routers make of an engine's KV events over changes of names: no block of before, no child before its parent, nothing that one
request has alone; and an engine that idles tells as soon as one that works."""

import queue
from collections.abc import Callable
from typing import Any

import pytest

from hack.waiting import eventually
from tests.scheduler.rigs import LENGTH, TOKENS, MakeRig, push_out
from tests.scheduler.router import findable
from tests.support.routers.aibrix import AibrixIndex
from tests.support.routers.llmd import LlmdIndex
from tests.support.scheduler import BLOCK, OwnRoot, SharedStore, prompt

Listened = Callable[..., Any]
SHORT = prompt(3, BLOCK - 1)
"""Too short for a block: a step, so that events go out."""


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


# ---------------------------------------------------------------------- an engine that idles
def test_an_idle_engine_tells_of_an_epoch(listened: Listened) -> None:
    rig, router = listened(epoch=0)
    rig.serve(TOKENS)
    router.listen()
    assert not rig.scheduler.has_requests()
    rig.adopt(1)
    assert rig.scheduler.has_requests(), "vLLM publishes from inside a step"
    assert rig.run() == 1
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


def test_an_idle_engine_tells_of_new_weights_and_of_a_reset(listened: Listened) -> None:
    rig, router = listened(epoch=0)
    for change in (lambda: setattr(rig, "weights", "w1"), lambda: rig.scheduler.reset_prefix_cache(reset_connector=True)):
        rig.serve(TOKENS)
        router.listen()
        assert router.where
        change()
        look(rig)
        assert 1 <= rig.run() <= 2
        assert kinds(router.listen()) == ["AllBlocksCleared"]
        assert router.where == set()


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
    rig, router = listened(epoch=0, l1_bytes=20 * 2304)
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
    from epochkv_connector.engine.events import EventStream

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
        self.engines = {name: listened(store=store) for name in ("a", "b")}
        for rig, _ in self.engines.values():
            rig.pins.root._global = OwnRoot(rig.pins.root.snapshot.root)
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
