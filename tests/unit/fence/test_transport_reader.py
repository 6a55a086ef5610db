"""A plain ZeroMQ socket in an event loop: nothing is lost to its edge-triggered descriptor, and no flood starves the loop."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from epochkv_fence.net.gate import BURST_MESSAGES, SocketReader

SECONDS = 20


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.0005)


def pair(context: zmq.Context) -> tuple[zmq.Socket, zmq.Socket]:
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for end in (left, right):
        end.rcvhwm = end.sndhwm = 0
    port = left.bind_to_random_port("tcp://127.0.0.1")
    right.connect(f"tcp://127.0.0.1:{port}")
    right.send(b"hello")
    assert left.poll(1000 * SECONDS), "no connection"
    assert left.recv() == b"hello"
    return left, right


async def test_every_message_is_taken_once_and_in_order_while_answers_are_sent(context: zmq.Context) -> None:
    """Each answer may swallow the sign that the next message has come."""
    left, right = pair(context)
    taken: list[int] = []

    done = asyncio.Event()

    def take() -> None:
        taken.append(int(left.recv(zmq.NOBLOCK)))
        left.send(b"answer", zmq.NOBLOCK)
        reader.kick()
        if len(taken) == 5000:
            done.set()

    reader = SocketReader(left, take)
    for number in range(5000):
        right.send(str(number).encode())
        if number % 100 == 0:
            await asyncio.sleep(0.001)  # the reader goes to sleep and has to be woken again
    async with asyncio.timeout(SECONDS):
        await done.wait()
    reader.close()
    assert taken == list(range(5000))


async def test_a_flood_does_not_keep_timers_from_running(context: zmq.Context) -> None:
    left, right = pair(context)
    for _ in range(50 * BURST_MESSAGES):
        right.send(b"x")
    taken = 0
    order: list[int] = []

    def take() -> None:
        nonlocal taken
        left.recv(zmq.NOBLOCK)
        taken += 1

    reader = SocketReader(left, take)
    end = time.monotonic() + SECONDS
    while taken < 50 * BURST_MESSAGES and time.monotonic() < end:
        await asyncio.sleep(0)
        order.append(taken)
    reader.close()
    assert taken == 50 * BURST_MESSAGES
    steps = [after - before for before, after in itertools.pairwise(order)]
    assert max(steps) <= BURST_MESSAGES


async def test_a_message_that_cannot_be_handled_is_counted_and_the_next_one_is_taken(context: zmq.Context) -> None:
    left, right = pair(context)
    taken: list[bytes] = []
    failures: list[int] = []

    def take() -> None:
        message = left.recv(zmq.NOBLOCK)
        if message == b"bad":
            raise ValueError(message)
        taken.append(message)

    reader = SocketReader(left, take, failed=lambda: failures.append(1))
    for message in (b"a", b"bad", b"b"):
        right.send(message)
    await until(lambda: taken == [b"a", b"b"])
    reader.close()
    assert len(failures) == 1
