"""A TCP relay between an engine and the hub that can go silent: connections stay, and nothing gets through any more."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes on what it gets until `silent` is set. `swallowed` counts the chunks that were not passed on."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.silent = threading.Event()
        self.swallowed = 0
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
            while chunk := source.recv(65536):
                if self.silent.is_set():
                    self.swallowed += 1
                else:
                    sink.sendall(chunk)

    def close(self) -> None:
        self._listener.close()
