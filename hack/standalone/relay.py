"""A TCP relay in front of a server, for what a network does to it: silence, replayed and tampered bytes."""

from __future__ import annotations

import contextlib
import socket
import threading


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
