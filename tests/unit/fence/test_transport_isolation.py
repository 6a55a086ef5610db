"""What goes wrong with one pool, or with one message, harms nothing else, and is over when its cause is."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from epochkv_fence.hub import machine
from epochkv_fence.hub.machine import Hub, HubState
from epochkv_fence.net.gate import Bucket, Client, PoolQueue, Receiver, Router
from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.protocol.messages import BumpStatus, Grant, Heartbeat, Message
from hack.waiting import eventually
from tests.security.wire import heartbeat, raw
from tests.support.fence import POOL, SECOND_POOL, FakeEngine, FenceWorld, LoopThread

LEASE = 3.0


@pytest.fixture
def world() -> Iterator[FenceWorld]:
    made = FenceWorld(lease_seconds=LEASE)
    yield made
    made.close()


STEPS = [
    (Hub, "_finish_round"),
    (Hub, "_tick"),
    (Hub, "round_at"),
    (machine, "_heartbeat"),
    (machine, "acquire"),
]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_pool_whose_steps_fail_harms_no_other_and_goes_on_afterwards(
    world: FenceWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: Any, step: str
) -> None:
    real = getattr(owner, step)
    broken = threading.Event()
    broken.set()

    def fails(hub: Hub | HubState, *args: Any, **kwargs: Any) -> Any:
        state = hub.state if isinstance(hub, Hub) else hub
        if state.config.uid == SECOND_POOL and broken.is_set():
            raise ArithmeticError("the test breaks this pool")
        return real(hub, *args, **kwargs)

    monkeypatch.setattr(owner, step, fails)
    hub = world.hub()
    keys = world.second_pool(hub)
    world.lead(hub)
    good, _ = world.agent(hub.endpoint)
    bad, _ = world.agent(hub.endpoint, keys)
    eventually(lambda: good.view.epoch == 0, "the other pool's engine is granted")
    world.thread.call(lambda: hub.request(SECOND_POOL, 1))
    bad.poke()
    eventually(lambda: hub.counters["steps_failed"] >= 1, "the fault is there")
    world.request(hub, 1)
    eventually(lambda: world.published() == 1, "the other pool's reset")
    lease = good.view.lease_until
    eventually(lambda: good.view.lease_until > lease + LEASE / 2, "its leases are renewed, again and again")
    broken.clear()
    bad.poke()
    eventually(lambda: bad.view.epoch == 1, "the pool is served again")
    eventually(lambda: world.thread.call(lambda: hub.snapshot(SECOND_POOL)).published == 1)
    assert hub.counters["tasks_failed"] == hub.counters["turns_failed"] == hub.counters["take_failed"] == 0
    said = caplog.text.count("the hub failed to take a step")
    assert 1 <= said <= 4  # not once per failure: at most one each 10 s
    assert said < hub.counters["steps_failed"] or hub.counters["steps_failed"] == 1


class Answers:
    """A receiver that answers each heartbeat with a status that no message can hold, and then with a grant."""

    def __init__(self) -> None:
        self.router: Router | None = None
        self.bucket, self.costs = Bucket.full(100.0, 100.0, 0.0), Bucket.full(100.0, 100.0, 0.0)
        self.queue = PoolQueue()

    def client(self, key: str) -> Client | None:
        return Client(self, 0)

    def cost(self, message: Message) -> float:
        return 0.0

    def take(self, client: Client, peer: bytes, message: Message) -> None:
        assert self.router is not None
        assert isinstance(message, Heartbeat)
        broken: list[Any] = [2**64, -(2**64), object(), "\ud800"]
        for value in broken:
            self.router.send(peer, BumpStatus(1, 1, value, 1))
        self.router.send(peer, Grant(message.instance, message.seq, 7, 30.0))


def test_what_cannot_be_encoded_is_counted_told_once_and_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    thread, pair, counters, answers = LoopThread(), generate_keypair(), Counter[str](), Answers()
    router = answers.router = Router(pair, Receiver(answers.client, answers.take, lambda: None), counters)
    endpoint = thread.call(lambda: router.open("tcp://127.0.0.1:0"))
    try:
        with caplog.at_level(logging.ERROR), raw(endpoint, ClientKeys(pair.public, *generate_keypair())) as client:
            for seq in range(3):
                answer = client.ask(heartbeat(b"b" * 16, seq))
                assert isinstance(answer, Grant)
                assert (answer.seq, answer.epoch) == (seq, 7)
    finally:
        thread.call(router.close)
        thread.close()
    assert counters["unencodable"] == 12
    assert counters["take_failed"] == counters["unsent"] == 0
    assert caplog.text.count("cannot be encoded") == 1


def test_an_engine_whose_numbers_cannot_be_encoded_is_silent_until_they_can(world: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    hub = world.hub()
    world.lead(hub)
    engine = FakeEngine()
    engine.num_old_epoch = 2**64
    agent, _ = world.agent(hub.endpoint, engine=engine)
    eventually(lambda: agent.counters["unencodable"] >= 2)
    assert agent.view.epoch is None
    engine.num_old_epoch = 5
    eventually(lambda: agent.view.epoch == 0)
    eventually(lambda: world.thread.call(lambda: hub.snapshot(POOL)).old_epoch_requests == 5)
    assert agent.counters["sessions_failed"] == 0
    assert caplog.text.count("cannot be encoded") == 1
