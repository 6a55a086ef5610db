"""Who may connect: the ZAP handler of the hub's context (RFC 27), which libzmq asks about every CURVE client.

Answered at once, from a dictionary, and without a task per connection: thousands of agents come back together when a hub
restarts, and anybody may try keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from epochkv_fence.net.gate.reader import SocketReader

ADDRESS: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"
MAX_ADDRESS: Final = 64


class ZapHandler:
    """Lets a client in when `knows` its public key (z85), of the address it comes from; its messages then carry that key as
    `User-Id`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], domain: str, knows: Callable[[str, str], bool]) -> None:
        self._domain = domain.encode()
        self._knows = knows
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ADDRESS)
        self._reader = SocketReader(self._socket, self._take)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _take(self) -> None:
        request = self._socket.recv_multipart(zmq.NOBLOCK)
        number = request[1] if len(request) > 1 else b""
        key = self._key(request)
        known = bool(key) and self._knows(key, request[3].decode("ascii", "replace")[:MAX_ADDRESS])
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._socket.send_multipart([VERSION, number, status, text, key.encode() if known else b"", b""], zmq.NOBLOCK)
        self._reader.kick()

    def _key(self, request: list[bytes]) -> str:
        """The client's key; empty unless this is a request about a CURVE client of our domain."""
        if len(request) != 7:
            return ""
        version, _, domain, _, _, mechanism, key = request
        if version != VERSION or domain != self._domain or mechanism != b"CURVE" or len(key) != 32:
            return ""
        return z85.encode(key).decode("ascii")
