"""Routers that follow two real engines over an epoch and new weights: Dynamo's own indexer, and the rules of llm-d and AIBrix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from hack.standalone.engine import Engine
from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, Pair, Prompts, Reference, Weights, check
from tests.support.routers.aibrix import AibrixIndex
from tests.support.routers.dynamo import DynamoIndexer
from tests.support.routers.llmd import LlmdIndex
from tests.support.routers.wire import events_of

BLOCK_TOKENS = CACHED // BLOCKS


class Fleet:
    """Engines by number, and three indexes that follow them.

    Attributes:
        cleared: by engine: how often it told that all its blocks are gone.
    """

    def __init__(self, engines: dict[int, Engine], dynamo: DynamoIndexer) -> None:
        self.engines, self.dynamo = engines, dynamo
        self.llmd, self.aibrix = LlmdIndex(BLOCK_TOKENS), AibrixIndex(BLOCK_TOKENS)
        self.cleared = dict.fromkeys(engines, 0)
        self.missed = 0  # before they listened

    def hear(self, number: int, payload: bytes) -> None:
        for index in (self.llmd, self.aibrix):
            index.read(str(number), payload)
        self.cleared[number] += sum(event["type"] == "AllBlocksCleared" for event in events_of(payload))

    def believes(self, *numbers: int, what: str, prompt: list[int]) -> None:
        """Every router finds the whole prompt with these engines and no other; AIBrix finds its first block at least."""
        want = dict.fromkeys(numbers, BLOCKS)
        named = {str(number): count for number, count in want.items()}
        found: list[Any] = []

        def same() -> bool:
            found[:] = self.llmd.find(prompt), self.dynamo.find(prompt), set(self.aibrix.find(prompt))
            return found == [named, want, set(named)]

        eventually(same, lambda: f"{what}: llm-d, Dynamo and AIBrix believe {found}", 30.0)

    def knows_nothing(self, what: str) -> None:
        """No router has a block of any engine."""
        held: list[int] = []

        def none() -> bool:
            held[:] = (
                sum(self.llmd.blocks(str(number)) for number in self.engines),
                sum(self.aibrix.blocks(str(number)) for number in self.engines),
                sum(self.dynamo.blocks(number) for number in self.engines),
            )
            return not any(held)

        eventually(none, lambda: f"{what}: llm-d, AIBrix and Dynamo hold {held} blocks", 30.0)

    @property
    def dropped(self) -> list[str]:
        """Events that a router could not place."""
        return [*self.llmd.dropped, *self.aibrix.dropped, *self.dynamo.dropped]

    def could_follow(self) -> None:
        """No event came before what it builds on, since all routers listen."""
        assert len(self.dropped) == self.missed, self.dropped


@contextmanager
def listening(endpoints: dict[int, str], hear: Callable[[int, bytes], None]) -> Iterator[None]:
    """Take the events of these engines as they come."""
    context, stop, poller = zmq.Context(), threading.Event(), zmq.Poller()
    sockets = {}
    for number, endpoint in endpoints.items():
        sockets[number] = context.socket(zmq.SUB)
        sockets[number].setsockopt(zmq.SUBSCRIBE, b"")
        sockets[number].connect(endpoint)
        poller.register(sockets[number], zmq.POLLIN)

    def listen() -> None:
        while not stop.is_set():
            ready = dict(poller.poll(50))
            for number, socket in sockets.items():
                if socket in ready:
                    hear(number, socket.recv_multipart()[-1])

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10.0)
        context.destroy(0)


@pytest.fixture
def fleet(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Follows A (1) and B (2), and believes nothing of what was before."""
    engines = {1: pair.a, 2: pair.b}
    endpoints = {number: pair.events_of(engine.name) for number, engine in engines.items()}
    with DynamoIndexer(tmp_path_factory.mktemp("dynamo"), BLOCK_TOKENS) as dynamo:
        fleet = Fleet(engines, dynamo)
        with listening(endpoints, fleet.hear):
            for number, endpoint in endpoints.items():
                dynamo.follow(number, endpoint)

            def heard() -> bool:  # a subscription takes effect late
                pair.pool.bump()
                return all(fleet.cleared.values())

            eventually(heard, "events of both engines", 30.0)
            fleet.knows_nothing("an epoch begins")
            settle(pair, fleet)
            yield fleet


def settle(pair: Pair, fleet: Fleet) -> None:
    """Dynamo subscribes on its own: until it hears of a block, it may miss one."""
    prompts = Prompts(7)

    def heard() -> bool:
        prompt = prompts(BLOCK_TOKENS + 1)
        for engine in fleet.engines.values():
            engine.complete(prompt, 2)
        return set(fleet.dynamo.find(prompt)) == set(fleet.engines)

    eventually(heard, "Dynamo hears both engines", 30.0)
    pair.pool.bump()
    fleet.knows_nothing("the epoch of the test begins")
    fleet.missed = len(fleet.dropped)


@pytest.mark.parametrize("change", ["epoch", pytest.param("weights", marks=pytest.mark.slow)])
def test_routers_follow_engines_over_a_change_of_names(
    pair: Pair, prompts: Prompts, reference: Reference, weights: Weights, fleet: Fleet, change: str
) -> None:
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))
    fleet.believes(1, 2, what="A has computed a prompt, and B has loaded it", prompt=prompt)
    fleet.could_follow()
    if change == "epoch":
        pair.pool.bump()
    else:
        pair.push(weights.after(pair.model))
    fleet.knows_nothing(f"{change} changed, and both engines idle")
    check(pair.b.complete(prompt), 0, reference(prompt, pair.model))
    fleet.believes(2, what="B has computed it again", prompt=prompt)
    assert pair.b.reset_prefix_cache(external=False)
    fleet.believes(2, what="B has it in L1 alone", prompt=prompt)
    check(pair.b.complete(prompt), CACHED, reference(prompt, pair.model))
    fleet.could_follow()


@pytest.mark.slow
def test_routers_hear_of_a_lost_lease_from_an_engine_that_idles(pair: Pair, prompts: Prompts, reference: Reference, fleet: Fleet) -> None:
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))
    fleet.believes(1, 2, what="a prompt is shared", prompt=prompt)
    pair.pool.stop_hub()
    try:
        fleet.knows_nothing("no engine has a lease")
        check(pair.a.complete(prompt), 0, reference(prompt, pair.model))
        fleet.knows_nothing("what A computes in bypass nobody finds")
    finally:
        pair.pool.start_hub()
    pair.pool.wait_engines(2)
    fleet.believes(1, 2, what="the leases are back, and L1 is found again", prompt=prompt)
    check(pair.a.complete(prompt), CACHED, reference(prompt, pair.model))
    fleet.could_follow()
