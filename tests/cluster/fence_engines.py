"""Engines as the hub sees them: the production agent on real sockets, with hooks that do what a connector would, and a
Service in front of the hub.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys

FIRST_WEIGHTS = bytes.fromhex("3f2a9c1e" + "0" * 24)


def client_keys(secret: dict[str, Any]) -> ClientKeys:
    """The keys in a pool's Secret."""
    data = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    return ClientKeys(data["hub.pub"], data["client.pub"], data["client.key"])


class FenceEngine:
    """One engine instance. `hold` keeps the acknowledgement back, as a scheduler inside `schedule()` does.

    `pod` None: the engine's name is its pod's, too. `credentials` reads the keys again, as from a mounted Secret.
    `gives_back`: keys and bytes that it finds below each epoch.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        name: str,
        *,
        pod: str | None = None,
        rank: int = 0,
        credentials: Callable[[], ClientKeys] | None = None,
        versions: dict[str, str] | None = None,
        pool: str = "",
        gives_back: tuple[int, int] = (3, 3000),
    ) -> None:
        self._gives_back = gives_back
        self.adopted: list[int] = []
        self.hold = threading.Event()
        self.running = 0
        self.held: tuple[bytes | None, str] = (FIRST_WEIGHTS, "")
        self.lacks = ("", "")
        self.removed: list[int] = []
        who = ("external", name) if pod is None else (name, pod)
        identity = EngineIdentity(*who, rank, versions=versions or {}, pool=pool)
        self.agent = AgentThread(endpoint, keys, secrets.token_bytes(16), identity, self, credentials=credentials)

    def __enter__(self) -> FenceEngine:
        self.agent.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.agent.stop(5.0)

    @property
    def epoch(self) -> int | None:
        return self.agent.view.epoch

    @property
    def leased(self) -> bool:
        """Whether it may use its epoch right now."""
        return time.monotonic() < self.agent.view.lease_until

    def push(self, weights: bytes | None, note: str = "") -> None:
        """Other weights, or none that anybody knows; the hub is told at once."""
        self.held = (weights, note)
        self.agent.poke()

    # What the agent calls.

    def ready(self) -> bool:
        return True

    def adopt(self, epoch: int) -> None:
        self.adopted.append(epoch)

    def busy(self) -> bool:
        return self.hold.is_set()

    def old_epoch_requests(self) -> int:
        return self.running

    def stats(self) -> dict[str, float]:
        return {}

    def isolated(self) -> bool:
        return False

    def weights(self) -> tuple[bytes | None, str]:
        return self.held

    def labelled(self, weights: bytes, label: str) -> None:
        """Answers would say it."""

    def tiers(self) -> tuple[str, str]:
        return self.lacks

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> tuple[int, int]:
        """Says how many keys and bytes it removed, once for each epoch."""
        first = below not in self.removed
        self.removed.append(below)
        return self._gives_back if first else (0, 0)


class Service:
    """A TCP forwarder that, like a Kubernetes Service, sends each *new* connection to the endpoint that is ready now
    and never cuts an old one.
    """

    def __init__(self, choose: Callable[[], int | None]) -> None:
        self._choose = choose
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Service:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        port = self._choose()
        try:
            server = socket.create_connection(("127.0.0.1", port or 1), timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        self._sockets += [client, server]
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
