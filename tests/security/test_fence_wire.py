"""Who may speak to the hub, and what garbage, tampering and replay can do: nothing but cost their sender an answer."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from epochkv_fence.messages import (
    Bump,
    BumpStatus,
    Error,
    Grant,
    Heartbeat,
    Message,
    Mode,
    Refusal,
    decode,
    encode,
)
from epochkv_fence.transport import ClientKeys, HubServer, KeyPair, generate_keypair
from tests.helpers_fence import POOL, FenceWorld, eventually


@pytest.fixture
def world() -> Iterator[FenceWorld]:
    made = FenceWorld(join_after_seconds=0.0)
    yield made
    made.close()


@pytest.fixture
def hub(world: FenceWorld) -> HubServer:
    made = world.hub()
    world.lead(made)
    return made


class RawClient:
    """A DEALER that says what it likes."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys is not None:
            self.socket.curve_serverkey = keys.hub_public.encode()
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
        self.socket.connect(endpoint)

    def ask(self, frames: list[bytes], timeout: float = 10.0) -> Message | None:
        self.socket.send_multipart(frames)
        return self.hear(timeout)

    def hear(self, timeout: float) -> Message | None:
        if not self.socket.poll(timeout * 1000):
            return None
        return decode(self.socket.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextlib.contextmanager
def raw(endpoint: str, keys: ClientKeys | None) -> Iterator[RawClient]:
    client = RawClient(endpoint, keys)
    try:
        yield client
    finally:
        client.close()


def heartbeat(boot: bytes, seq: int = 0) -> list[bytes]:
    return encode(Heartbeat(boot, seq, boot_age_seconds=100.0))


def pool_boots(world: FenceWorld, hub: HubServer, uid: str = POOL) -> set[bytes]:
    return {view.boot for view in world.thread.call(lambda: hub.snapshot(uid)).engines}


# ------------------------------------------------------------------------------------------------------------------ keys


def test_without_curve_nothing_is_heard(world: FenceWorld, hub: HubServer) -> None:
    with raw(hub.endpoint, None) as client:
        assert client.ask(heartbeat(b"x" * 16), timeout=1.0) is None
    assert hub.counters["received"] == 0
    assert pool_boots(world, hub) == set()


def test_an_unknown_key_is_refused_and_the_agent_says_so_once(world: FenceWorld, hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    agent, engine = world.agent(hub.endpoint, ClientKeys(world.hub_pair.public, *generate_keypair()))
    eventually(lambda: hub.counters["connections_refused"] >= 3, what="it keeps trying")
    assert agent.view.epoch is None
    assert agent.view.mode is Mode.BYPASS
    assert engine.adopted == []
    assert hub.counters["received"] == 0
    assert caplog.text.count("refuses our key") == 1


def test_an_agent_that_was_refused_joins_once_the_hub_knows_its_key(world: FenceWorld, hub: HubServer) -> None:
    late = generate_keypair()
    agent, _ = world.agent(hub.endpoint, ClientKeys(world.hub_pair.public, *late))
    eventually(lambda: hub.counters["connections_refused"] >= 1)
    pool = world.reconfigure(uid="pool-uid-2", name="default/second", client_public_keys=(late.public,))
    world.thread.call(lambda: hub.set_pool(pool))
    eventually(lambda: agent.view.epoch == 0)


def test_another_hubs_key_is_not_spoken_to(world: FenceWorld, hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    agent, engine = world.agent(hub.endpoint, ClientKeys(generate_keypair().public, *world.pool_pair))
    eventually(lambda: "no CURVE handshake" in caplog.text or "no connection to the hub" in caplog.text)
    time.sleep(0.5)
    assert engine.adopted == []
    assert agent.view.epoch is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1


def test_a_client_speaks_for_its_own_pool_only(world: FenceWorld, hub: HubServer) -> None:
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    other = generate_keypair()
    second = world.reconfigure(uid="pool-uid-2", name="default/second", client_public_keys=(other.public,))
    world.thread.call(lambda: hub.set_pool(second))
    victims = pool_boots(world, hub)
    with raw(hub.endpoint, ClientKeys(world.hub_pair.public, *other)) as client:
        (victim,) = victims
        assert isinstance(client.ask(heartbeat(victim, 10**6)), Grant)  # as a boot of its own pool
        status = client.ask(encode(Bump(1, 7)))
        assert isinstance(status, BumpStatus)
        eventually(lambda: world.authority.records["pool-uid-2"].target == 7)
    assert world.authority.records[POOL].target == 0
    assert pool_boots(world, hub) == victims
    before = agent.view.lease_until
    agent.poke()
    eventually(lambda: agent.view.lease_until > before)


# --------------------------------------------------------------------------------------------------------------- garbage


def test_garbage_costs_its_sender_an_answer_and_nothing_else(world: FenceWorld, hub: HubServer) -> None:
    boot = secrets.token_bytes(16)
    for frames, code in (
        ([b""], Refusal.FRAMES),
        ([b"\x01", b"\xff" * 100], Refusal.MALFORMED),
        ([b"\x09", b"x"], Refusal.VERSION),
        ([b"\x01", msgspec.msgpack.encode({"type": "Wipe"})], Refusal.TAG),
        ([b"\x01"] * 50, Refusal.FRAMES),
        ([b"\x01", b"x" * 70_000], Refusal.SIZE),
        (encode(Grant(boot, 0, 9, Mode.USE, 30.0)), Refusal.UNEXPECTED),
    ):
        with raw(hub.endpoint, world.client_keys) as client:
            answer = client.ask(frames)
            assert isinstance(answer, Error)
            assert answer.code is code
            assert isinstance(client.ask(heartbeat(boot)), Grant)  # on the same connection
    with raw(hub.endpoint, world.client_keys) as client:
        assert client.ask(encode(Error(Refusal.TAG, "hm")), timeout=0.3) is None  # errors are not answered


def test_a_peer_is_told_of_its_errors_at_most_once_a_second(world: FenceWorld, hub: HubServer) -> None:
    with raw(hub.endpoint, world.client_keys) as client:
        began = time.monotonic()
        answers = 0
        while time.monotonic() < began + 2.5:
            client.socket.send_multipart([b"\x01", b"\xc1"])
            answers += isinstance(client.hear(0.02), Error)
        took = time.monotonic() - began
    assert hub.counters["errors_unsaid"] > 10
    assert 2 <= answers <= took + 1


def test_a_giant_message_is_cut_off_and_hurts_nobody(world: FenceWorld, hub: HubServer) -> None:
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    with raw(hub.endpoint, world.client_keys) as client:
        assert client.ask([b"\x01", b"x" * 5_000_000], timeout=0.5) is None
        before = agent.view.lease_until
        agent.poke()
        eventually(lambda: agent.view.lease_until > before)


def test_a_reset_is_published_through_a_flood_of_garbage(world: FenceWorld, hub: HubServer) -> None:
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    stop = threading.Event()

    def flood() -> None:
        with raw(hub.endpoint, world.client_keys) as client:
            while not stop.is_set():
                with contextlib.suppress(zmq.Again):
                    client.socket.send_multipart([b"\x01", b"\xc1garbage"], zmq.NOBLOCK)
                while client.socket.poll(0):
                    client.socket.recv_multipart()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    try:
        eventually(lambda: hub.counters["refused_malformed"] > 500)
        world.request(hub, 1)
        eventually(lambda: world.published() == 1)
        flooded = hub.counters["refused_malformed"]
        eventually(lambda: hub.counters["refused_malformed"] > flooded)  # it was going on all the time
    finally:
        stop.set()
        thread.join(10)


def test_bytes_that_are_no_zeromq_at_all(world: FenceWorld, hub: HubServer) -> None:
    host, port = hub.endpoint.removeprefix("tcp://").split(":")
    noise = random.Random(1)
    for _ in range(50):
        with socket.create_connection((host, int(port))) as plain, contextlib.suppress(OSError):
            plain.sendall(noise.randbytes(noise.randrange(1, 500)))
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    assert world.thread.call(lambda: hub.counters["take_failed"]) == 0


# ------------------------------------------------------------------------------------------------- tampering and replay


class Tamperer:
    """A TCP relay that flips one bit of every chunk it passes on, once told to."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.tampering = False
        self.num_flips = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source, sink:
            while chunk := bytearray(source.recv(65536)):
                if self.tampering:
                    chunk[-1] ^= 1
                    self.num_flips += 1
                sink.sendall(chunk)

    def close(self) -> None:
        self._listener.close()


def test_tampered_frames_are_never_taken(world: FenceWorld, hub: HubServer) -> None:
    relay = Tamperer(hub.endpoint)
    try:
        agent, engine = world.agent(relay.endpoint)
        eventually(lambda: agent.view.epoch == 0 and hub.counters["received"] == agent.counters["sent"] >= 2)
        relay.tampering = True
        received, before = hub.counters["received"], agent.view
        world.request(hub, 1)
        eventually(lambda: relay.num_flips >= 5)
        assert hub.counters["received"] == received
        assert agent.view == before
        assert engine.adopted == [(0, Mode.USE)]
        relay.tampering = False
        eventually(lambda: agent.view.epoch == 1, what="it recovers by itself")
    finally:
        relay.close()


class FakeHub:
    """Has the hub's keys and says what it likes to one agent."""

    def __init__(self, keys: KeyPair) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.curve_server = 1
        self.socket.curve_publickey = keys.public.encode()
        self.socket.curve_secretkey = keys.secret.encode()
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peer = b""

    def next(self) -> Heartbeat:
        assert self.socket.poll(10_000)
        self.peer, *frames = self.socket.recv_multipart()
        message = decode(frames)
        assert isinstance(message, Heartbeat)
        return message

    def say(self, frames: list[bytes]) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def grant(self, beat: Heartbeat, epoch: int, **change: object) -> list[bytes]:
        fields = {"boot": beat.boot, "seq": beat.seq, "epoch": epoch, "mode": Mode.USE, "lease_seconds": 30.0, **change}
        return encode(Grant(**fields))  # type: ignore[arg-type]


def test_replayed_and_foreign_grants_and_garbage_change_nothing(world: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeHub(world.hub_pair)
    try:
        agent, engine = world.agent(fake.endpoint)
        first = fake.next()
        old = fake.grant(first, 3)
        fake.say(old)
        eventually(lambda: agent.view.epoch == 3)
        acknowledgement = fake.next()
        assert acknowledgement.epoch == 3
        fake.say(fake.grant(acknowledgement, 5))
        eventually(lambda: agent.view.epoch == 5)
        before = agent.view
        fake.say(old)  # replay
        fake.say(fake.grant(acknowledgement, 9, boot=b"z" * 16))
        fake.say(fake.grant(acknowledgement, 9, seq=10**9))
        for garbage in ([b"\x01", b"\xc1"], [b"\x07", b""], [b""], [b"\x01", b"\xc1"]):
            fake.say(garbage)
        eventually(lambda: agent.refused_grants.total() >= 3)
        eventually(lambda: agent.counters["wire_errors"] >= 4)
        assert agent.refused_grants == {"lower_epoch": 1, "other_boot": 1, "unknown_seq": 1}
        assert agent.view == before
        assert [epoch for epoch, _ in engine.adopted] == [3, 5]
        agent.poke()
        while fake.socket.poll(1000):  # it still heartbeats, and has answered the garbage
            fake.socket.recv_multipart()
    finally:
        fake.context.destroy(linger=0)
