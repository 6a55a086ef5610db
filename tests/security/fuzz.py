"""Fuzzes everything that takes bytes from outside: `make fuzz MINUTES=10`, or `python -m tests.security.fuzz --minutes 10`.

Decoder and state machines in this process; the receive paths of hub and agent over real sockets, with CURVE. A crash is any
exception but the one that is documented, a message that changes when encoded again, or a hub or agent that does not go on. It is
printed with the target, the seed and the number that make the same input again, and ends the run with status 1.
"""

import argparse
import contextlib
import logging
import os
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import msgspec
import zmq

from epochkv_fence.hub.machine import Hub
from epochkv_fence.net.gate import Peers
from epochkv_fence.protocol import messages as ms
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.agent import Agent, Received, Started
from epochkv_fence.protocol.agent import Send as AgentSend
from epochkv_fence.protocol.pool import PoolConfig, PoolRecord, ReclaimPolicy, Term
from tests.security.wire import FakeHub, RawClient, failures, heartbeat
from tests.support.fence import FenceWorld

# ------------------------------------------------------------------------------------------------------------ inputs
# Messages that are almost right, bytes that are not, and documents in between, drawn from a `random.Random`.
INSTANCES = [bytes([65 + n]) * 16 for n in range(4)]
WEIGHTS = [bytes([97 + n]) * 16 for n in range(4)]
CORPUS: list[ms.Message] = [
    ms.Heartbeat(
        INSTANCES[0], 7, 3, 12.5, {"hits": 0.5, "l1_bytes": 1e9}, engine="engine", pod="pod-0", fingerprint="f" * 64, weights=WEIGHTS[0]
    ),
    ms.Heartbeat(INSTANCES[1], 0),
    ms.Heartbeat(INSTANCES[0], 8, 3, weights=WEIGHTS[1]),
    ms.Heartbeat(INSTANCES[2], 9, 3, weights_note="rank 1: no answer"),
    ms.Heartbeat(INSTANCES[3], 9, 3, tiers_off="SavesOnly", tiers_note="loads are off: because"),
    ms.Heartbeat(INSTANCES[3], 10, 3, versions={"epochkv": "0.2.0", "vllm": "0.32.0"}, rank=1, old_epoch_requests=2, isolated=True),
    *(ms.Grant(INSTANCES[0], 7, 4, 30.0), ms.Nudge(INSTANCES[0]), ms.Propose(INSTANCES[1], 5)),
    *(ms.Bump(1, 4), ms.Bump(2, 5), ms.BumpStatus(1, 4, 4, 3, 2, 1, 0, 30.0), ms.Status(3), ms.Status(4, after=INSTANCES[0])),
    ms.Status(
        *(3, 4, 4, 1, [ms.EngineStatus(INSTANCES[0], 4, 12.5, 0.25, 7.5, engine="engine", pod="pod-0", weights=WEIGHTS[0])], 30.0),
        *(ms.Source.TRAINER, "uid-1", INSTANCES[0], {"61" * 16: "step-42"}),
    ),
    *(ms.Label(5, WEIGHTS[0], "step-42"), ms.Labelled(5, WEIGHTS[0], "step-42")),
    *(ms.Reclaim(INSTANCES[0], 4), ms.Reclaim(INSTANCES[0], 4, WEIGHTS[:2]), ms.Reclaim(INSTANCES[0], 4, WEIGHTS[:2], 7)),
    *(ms.Reclaimed(INSTANCES[0], 4, 12, 4096, 7), ms.Leave(INSTANCES[0]), ms.Error(ms.Refusal.TAG, "unknown tag")),
]
EDGES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 5, 2**31, 2**53, ms.MAX_EPOCH, ms.MAX_EPOCH + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 1e-300, 0.1, 30.0, 1e9, 1e15, 1.7e308, float("inf"), float("-inf"), float("nan"),
    "", "Spec", "size", "step-42", "61" * 16, "\0", "é" * 100, "x" * 253, "x" * 254, "x" * 2000, b"", *INSTANCES, *WEIGHTS,
    b"z" * 15, b"z" * 17, [], {}, [INSTANCES[0]], [WEIGHTS[0]] * ms.MAX_KEPT, [WEIGHTS[0]] * (ms.MAX_KEPT + 1), {"a": 1.0},
    {"x" * 65: 1.0}, {"61" * 16: "x"},
]  # fmt: skip


def value(rng: Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth < 3 and kind < 0.12:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and kind < 0.2:
        return {rng.choice(["instance", "epoch", "type", "", "x"]): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind < 0.3:
        return rng.randbytes(rng.choice([0, 1, 8, 16, 16, 40]))
    if kind < 0.4:
        return rng.randrange(-10, 20)
    return rng.choice(EDGES)


def body(rng: Random) -> dict[str, Any]:
    """A message's fields, some of them replaced, taken away or made up."""
    fields: dict[str, Any] = msgspec.msgpack.decode(ms.encode(rng.choice(CORPUS))[1])
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        name = rng.choice(list(fields) or ["type"])
        match rng.randrange(6):
            case 0:
                fields.pop(name, None)
            case 1:
                others = "extra", "weights", "weights_note", "tiers_off", "tiers_note", "keep", "labels", "first", ""
                fields[rng.choice(others)] = value(rng)
            case 2:
                fields["type"] = rng.choice([*ms.TAGS, "Wipe", "", 3, None])
            case _:
                fields[name] = value(rng)
    return fields


def payload(rng: Random) -> bytes:
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(120))
    try:
        data = bytearray(msgspec.msgpack.encode(body(rng)))
    except (OverflowError, RecursionError):
        return b""
    if rng.random() < 0.4 and data:
        for _ in range(rng.choice([1, 1, 2, 8])):
            where = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[where] ^= 1 << rng.randrange(8)
                case 1:
                    data[where] = rng.choice([0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xDB, 0xDD, 0xDF, 0xFF])
                case 2:
                    data[where:] = b""
                case _:
                    data[where:where] = rng.randbytes(rng.randrange(1, 9))
            if not data:
                break
    return bytes(data)


def frames(rng: Random) -> list[bytes]:
    """What arrives on a socket: mostly a version and a payload."""
    kind = rng.random()
    if kind < 0.85:
        return [ms.VERSION_FRAME, payload(rng)]
    if kind < 0.93:
        return [rng.choice([b"", b"\x00", b"\x01", b"\x02\x02", b"\xff" * 20]), payload(rng)]
    return [rng.randbytes(rng.randrange(20)) for _ in range(rng.choice([1, 1, 3, 4, 30]))]


# ----------------------------------------------------------------------------------------------------------- targets
Target = Callable[[Random], object]
BATCH = 200
MACHINE_MESSAGES = 30


class Crash(Exception):
    """Something did not go on as it must."""


# ----------------------------------------------------------------------------------------------------- in this process
def decoder(rng: Random) -> ms.Message | None:
    """`messages.decode`: a message or `WireError`, and a message stays what it is when encoded again."""
    given = frames(rng)
    try:
        message = ms.decode(given)
    except ms.WireError as error:
        if len(error.text) > 70_000:
            raise Crash(f"an error of {len(error.text)} characters") from None
        return None
    again = ms.decode(ms.encode(message))
    if again != message and "nan" not in repr(message):
        raise Crash(f"{message!r} became {again!r}")
    return message


def machines(rng: Random) -> None:
    """Both state machines take whatever can be decoded, and what they say can be encoded."""
    policy: ReclaimPolicy = rng.choice(["Delete", "RemoveAll", "Retain"])
    grace = rng.choice([0.0, 40.0, 600.0])
    hub = Hub(PoolConfig("u", "p", (), weights_grace_seconds=grace, reclaim=policy, store_admin=policy == "RemoveAll"))
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(3, rng.choice([2, 3]), True)), 100.0)
    agent = Agent(INSTANCES[0])
    agent.step(Started(), 100.0)
    now = 100.0
    for number in range(MACHINE_MESSAGES):
        now += rng.choice([0.0, 0.01, 0.3, 5.0, 40.0])
        message = decoder(rng)
        if message is None:
            continue
        actions = hub.step(ev.Heard(rng.choice([b"p", b"q"]), message, rng.randrange(2)), now)
        actions += hub.step(ev.RoundBegan(number), now)
        actions += hub.step(ev.RoundVerified(number) if rng.random() < 0.9 else ev.RoundDropped(number), now)
        actions += hub.step(ev.Tick(), now)
        for action in actions:
            _perform(hub, action, rng, now)
        if rng.random() < 0.2:
            hub.snapshot(now)
        hub.tick_at()
        hub.round_at(now)
        for step in agent.step(Received(message), now):
            if isinstance(step, AgentSend):
                ms.encode(step.message)
        agent.deadline()


def _perform(hub: Hub, action: ev.Action, rng: Random, now: float) -> None:
    worked = rng.random() < 0.8
    match action:
        case ev.Send(_, message):
            ms.encode(message)
        case ev.Changed():
            pass
        case call:
            hub.step(ev.Done(call, worked, (rng.randrange(2), None)), now)


# -------------------------------------------------------------------------------------------------- over real sockets
class HubPath:
    """The hub's receive path: a batch of frames on one connection, then a heartbeat must still be granted."""

    def __init__(self, world: FenceWorld) -> None:
        self._world = world
        self._hub = world.hub()
        self._hub._router.peers = Peers(1e9, 1e12)  # what is above a connection's limit is not decoded, and would test nothing
        self._client: RawClient | None = None
        self._number = 0

    def __call__(self, rng: Random) -> None:
        if self._client is None:
            self._client = RawClient(self._hub.endpoint, self._world.client_keys)
        with contextlib.suppress(zmq.Again):
            self._client.socket.send_multipart(frames(rng), zmq.NOBLOCK)
        while self._client.socket.poll(0):
            ms.decode(self._client.socket.recv_multipart())
        self._number += 1
        if self._number % BATCH == 0:
            self._client.close()
            self._client = None
            self.check()

    def check(self) -> None:
        """It still grants, and nothing of it failed."""
        client = RawClient(self._hub.endpoint, self._world.client_keys)
        instance = secrets.token_bytes(16)
        try:
            client.socket.send_multipart(heartbeat(instance))
            end = time.monotonic() + 30
            while time.monotonic() < end:
                answer = client.hear(0.5)
                if isinstance(answer, ms.Grant) and answer.instance == instance:
                    break
            else:
                raise Crash(f"the hub grants no more: {self._hub.counters}")
        finally:
            client.close()
        failed = failures(self._hub)
        if failed:
            raise Crash(f"the hub met exceptions: {failed}")


class AgentPath:
    """The agent's receive path: a hub that says anything; the agent goes on heartbeating on the same session."""

    def __init__(self, world: FenceWorld) -> None:
        self._fake = FakeHub(world.hub_pair)
        self._agent, _ = world.agent(self._fake.endpoint)
        self._fake.next()
        self._number = 0

    def __call__(self, rng: Random) -> None:
        self._fake.say(frames(rng))
        self._number += 1
        if self._number % BATCH == 0:
            self._drain()
            self._agent.poke()
            if not self._fake.socket.poll(30_000):
                raise Crash("the agent is silent")
            if self._agent.counters["sessions_failed"]:
                raise Crash("the agent's session met an exception")
            if not self._agent.counters["wire_errors"]:
                raise Crash("the agent counts no message that it dropped")
        elif self._number % 20 == 0:
            self._drain()

    def _drain(self) -> None:
        while self._fake.socket.poll(0):
            self._fake.peer = self._fake.socket.recv_multipart()[0]

    def close(self) -> None:
        self._fake.close()


# ------------------------------------------------------------------------------------------------------------ the run
@contextlib.contextmanager
def targets() -> Iterator[dict[str, tuple[Target, int]]]:
    """All targets, with how many inputs each gets in a turn."""
    with ExitStack() as stack:
        world = FenceWorld()
        stack.callback(world.close)
        hub_path, agent_path = HubPath(world), AgentPath(world)
        stack.callback(agent_path.close)
        yield {"decoder": (decoder, 4_000), "machines": (machines, 60), "hub": (hub_path, 2 * BATCH), "agent": (agent_path, 2 * BATCH)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No line per refused message."""
    logger = logging.getLogger("epochkv_fence")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run(seconds: float, seed: int, say: Callable[[str], None]) -> tuple[int, int]:
    """(inputs, crashes) after so many seconds of turns over all targets; the first crash ends the run."""
    counts: Counter[str] = Counter()
    began = told = time.monotonic()
    with quiet(), targets() as all_targets:
        while (now := time.monotonic()) < began + seconds:
            for name, (target, share) in all_targets.items():
                for _ in range(share):
                    number = counts[name]
                    counts[name] += 1
                    try:
                        target(Random(f"{seed}/{name}/{number}"))
                    except Exception:
                        say(f"CRASH in {name}, seed {seed}, input {number}:\n{traceback.format_exc()}")
                        return counts.total(), 1
                if time.monotonic() >= began + seconds:
                    break
            if now >= told + 10:
                told = now
                done = ", ".join(f"{name} {count}" for name, count in counts.items())
                say(f"{now - began:.0f} s, about {max(0.0, began + seconds - now):.0f} s left: {done}")
    return counts.total(), 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=None, help="of the run (default: a random one)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "big")
    print(f"fuzzing for {arguments.minutes:g} min, seed {seed}", flush=True)
    inputs, crashes = run(arguments.minutes * 60, seed, lambda text: print(text, flush=True))
    print(f"{inputs} inputs, {crashes} crashes (seed {seed})")
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
