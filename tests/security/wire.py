"""Clients and hubs that say what they like, for tests of what the wire lets through."""

from contextlib import closing

import zmq

from epochkv_fence.net.keys import ClientKeys, KeyPair
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.messages import Heartbeat, Message, decode, encode
from tests.support.fence import POOL, FenceWorld

FAILURES = ("receive_failed", "loop_failed", "tasks_failed", "pool_step_failed", "unencodable")
"""Counters of what must never happen, whatever clients say."""


def failures(hub: HubServer) -> dict[str, int]:
    """Those that did."""
    return {name: hub.counters[name] for name in FAILURES if hub.counters[name]}


class RawClient:
    """A DEALER that says what it likes."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(endpoint)

    def ask(self, frames: list[bytes], timeout: float = 10.0) -> Message | None:
        """Send, and wait for one answer; None: there was none in time."""
        self.socket.send_multipart(frames)
        return self.hear(timeout)

    def hear(self, timeout: float) -> Message | None:
        if not self.socket.poll(int(timeout * 1000)):
            return None
        return decode(self.socket.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)


def raw(endpoint: str, keys: ClientKeys | None) -> closing[RawClient]:
    return closing(RawClient(endpoint, keys))


def heartbeat(instance: bytes, seq: int = 0) -> list[bytes]:
    return encode(Heartbeat(instance, seq, instance_age_seconds=100.0))


def pool_instances(world: FenceWorld, hub: HubServer, uid: str = POOL) -> set[bytes]:
    return {view.instance for view in world.thread.call(lambda: hub.snapshot(uid)).engines}


class FakeHub:
    """Has the hub's keys and says what it likes."""

    def __init__(self, keys: KeyPair) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.curve_server = 1
        self.socket.curve_publickey = keys.public.encode()
        self.socket.curve_secretkey = keys.secret.encode()
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peer = b""

    def hear(self) -> Message:
        """The next message; `say` answers its sender."""
        assert self.socket.poll(10_000)
        self.peer, *frames = self.socket.recv_multipart()
        return decode(frames)

    def next(self) -> Heartbeat:
        message = self.hear()
        assert isinstance(message, Heartbeat)
        return message

    def say(self, frames: list[bytes]) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def close(self) -> None:
        self.context.destroy(linger=0)
