"""What stands before the hub: pools take turns by the time that their messages cost; sockets are read without a loss, and no flood
starves the loop."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from epochkv_fence.net import gate as turns_module
from epochkv_fence.net.gate import BURST_MESSAGES, MAX_WAITING, MAX_WAITING_BYTES, SLICE_SECONDS, PoolQueue, SocketReader, Turns, Waiting


def message(key: str, number: int = 0, size: int = 10) -> Waiting:
    return Waiting(b"peer", key, [b"x" * size, number.to_bytes(4, "big")])


class Clock:
    """Stands still but where a message is taken."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_messages_of_one_queue_keep_their_order_and_none_is_lost() -> None:
    turns, lines = Turns(), {key: PoolQueue() for key in "abc"}
    for number in range(300):
        for key, line in lines.items():
            assert turns.put(line, message(key, number))
    taken: list[Waiting] = []
    end = time.monotonic() + 20
    while turns:
        assert time.monotonic() < end
        turns.serve(taken.append, 0.001)
    for key, line in lines.items():
        assert [waiting for waiting in taken if waiting.key == key] == [message(key, number) for number in range(300)]
        assert line.num_bytes == 0


def test_turns_are_of_equal_time_not_of_equal_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A's messages cost 10 ms each, B's 0.1 ms: of what B says, each waits for one of A's at most."""
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    turns, costly, cheap = Turns(), PoolQueue(), PoolQueue()
    for number in range(200):
        turns.put(costly, message("costly", number))
    spent = {"costly": 0.0, "cheap": 0.0}
    waited: list[float] = []
    put_at: dict[int, float] = {}

    def take(waiting: Waiting) -> None:
        cost = 0.01 if waiting.key == "costly" else 0.0001
        if waiting.key == "cheap":
            waited.append(clock.now - put_at[int.from_bytes(waiting.frames[1], "big")])
        spent[waiting.key] += cost
        clock.now += cost

    for number in range(50):
        put_at[number] = clock.now
        turns.put(cheap, message("cheap", number))
        turns.serve(take, 0.002)
    assert len(waited) >= 49
    assert max(waited) <= 0.01 + SLICE_SECONDS
    for number in range(50, 250):  # now both have more than enough
        put_at[number] = clock.now
        turns.put(cheap, message("cheap", number))
    before = dict(spent)
    turns.serve(take, 0.03)
    assert spent["cheap"] - before["cheap"] >= 0.0099  # as long as one of the costly ones


def test_who_was_silent_has_saved_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    turns, busy, late = Turns(), PoolQueue(), PoolQueue()

    def take(waiting: Waiting) -> None:
        order.append(waiting.key)
        clock.now += SLICE_SECONDS

    order: list[str] = []
    for _ in range(1000):
        turns.put(busy, message("busy"))
    turns.serve(take, 500 * SLICE_SECONDS)
    order.clear()
    for _ in range(1000):
        turns.put(late, message("late"))
    turns.serve(take, 100 * SLICE_SECONDS)
    assert abs(order.count("late") - order.count("busy")) <= 2


def test_a_line_has_an_end_in_messages_and_in_bytes() -> None:
    turns, line, other = Turns(), PoolQueue(), PoolQueue()
    for _ in range(MAX_WAITING):
        assert turns.put(line, message("a"))
    assert not turns.put(line, message("a"))
    assert turns.put(other, message("b"))
    taken: list[Waiting] = []
    while turns:
        turns.serve(taken.append, 1.0)
    assert len(taken) == MAX_WAITING + 1
    large = Waiting(b"peer", "a", [b"x" * (MAX_WAITING_BYTES // 4)])
    assert sum(turns.put(line, large) for _ in range(6)) == 4


# ----------------------------------------------------------------------------------------------- a reader of sockets
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
