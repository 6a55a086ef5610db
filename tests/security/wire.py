"""Clients, relays and hubs that say what they like, for tests of what the wire lets through."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import zmq

from epochkv_fence.messages import Grant, Heartbeat, Message, Mode, decode, encode
from epochkv_fence.transport import ClientKeys, HubServer, KeyPair
from tests.helpers_fence import POOL, FenceWorld

FAILURES = ("take_failed", "turns_failed", "tasks_failed", "steps_failed", "unencodable")
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
            self.socket.curve_serverkey = keys.hub_public.encode()
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
        self.socket.connect(endpoint)

    def ask(self, frames: list[bytes], timeout: float = 10.0) -> Message | None:
        """Send, and wait for one answer; None: there was none in time."""
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
    """A client that is closed at the end."""
    client = RawClient(endpoint, keys)
    try:
        yield client
    finally:
        client.close()


def heartbeat(boot: bytes, seq: int = 0) -> list[bytes]:
    """The frames of a heartbeat."""
    return encode(Heartbeat(boot, seq, boot_age_seconds=100.0))


def pool_boots(world: FenceWorld, hub: HubServer, uid: str = POOL) -> set[bytes]:
    """The boots that the hub knows."""
    return {view.boot for view in world.thread.call(lambda: hub.snapshot(uid)).engines}


class Relay:
    """A TCP relay that can flip one bit of every chunk, send every chunk twice, or swallow what it is given.

    `num_changed` counts the chunks that were not passed on as they came.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.tampering = False
        self.replaying = False
        self.silent = False
        self.num_changed = 0
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
                if self.tampering or self.replaying or self.silent:
                    self.num_changed += 1
                if self.tampering:
                    chunk[-1] ^= 1
                if self.silent:
                    continue
                sink.sendall(chunk)
                if self.replaying:
                    sink.sendall(chunk)

    def close(self) -> None:
        self._listener.close()


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
        """The next heartbeat; `say` answers its sender."""
        assert self.socket.poll(10_000)
        self.peer, *frames = self.socket.recv_multipart()
        message = decode(frames)
        assert isinstance(message, Heartbeat)
        return message

    def say(self, frames: list[bytes]) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def grant(self, beat: Heartbeat, epoch: int, **change: object) -> list[bytes]:
        """The frames of a grant that answers `beat`, with some fields replaced."""
        fields = {"boot": beat.boot, "seq": beat.seq, "epoch": epoch, "mode": Mode.USE, "lease_seconds": 30.0, **change}
        return encode(Grant(**fields))  # type: ignore[arg-type]

    def close(self) -> None:
        self.context.destroy(linger=0)
