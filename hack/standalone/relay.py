"""A TCP relay in front of a server, for what a network does to it: silence, delay, broken lines, replayed and tampered bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class Relay:
    """A TCP relay that can flip one bit of every chunk, send every chunk twice, swallow or delay what it is given, or hang up.

    Attributes:
        endpoint, address: where it listens, as `tcp://host:port` and `host:port`.
        num_changed: chunks that were not passed on as they came.
        delay_seconds: how long every chunk waits, in either direction; they queue up behind each other.
        num_delayed: chunks that waited.
        watch: sees every chunk that a client has sent before it is passed on, on the connection's own thread.
    """

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("tcp://")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.endpoint = f"tcp://{self.address}"
        self.tampering = False
        self.replaying = False
        self.silent = False
        self.num_changed = 0
        self.delay_seconds = 0.0
        self.num_delayed = 0
        self.watch: Callable[[bytes], None] | None = None
        self._is_cut = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Hang up on everybody, and on whoever comes, until `mend`. Returns how many connections broke."""
        with self._lock:
            self._is_cut = True
            broken = list(self._open)
        for end in broken:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(broken) // 2

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        """Accept nobody any more; connections stay."""
        with contextlib.suppress(OSError):  # else the listener is there until the next one has come
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def target(self) -> str:
        """`host:port` that a new connection is for."""
        return self._target

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        host, port = self.target().split(":")
        try:
            far = socket.create_connection((host, int(port)), 5.0)
        except OSError:  # as if nobody listened
            near.close()
            return
        far.settimeout(None)
        with self._lock:
            refused = self._is_cut
            if not refused:
                self._open |= {near, far}
        if refused:
            near.close()
            far.close()
            return
        self._serve(near, far)

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._relay, args=(far, near, None), daemon=True)
        back.start()
        self._relay(near, far, lambda chunk: self.watch(chunk) if self.watch else None)
        back.join()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()

    def _relay(self, source: socket.socket, sink: socket.socket, watch: Callable[[bytes], None] | None) -> None:
        """One direction. Its end is passed on as an end of this direction alone: a peer that hangs stays silent."""
        try:
            while chunk := bytearray(source.recv(65536)):
                if watch is not None:
                    watch(bytes(chunk))
                self._pass_on(chunk, sink)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, chunk: bytearray, sink: socket.socket) -> None:
        if self.tampering or self.replaying or self.silent:
            self.num_changed += 1
        if self.delay_seconds > 0:
            self.num_delayed += 1
            time.sleep(self.delay_seconds)
        if self.tampering:
            chunk[-1] ^= 1
        if self.silent:
            return
        sink.sendall(chunk)
        if self.replaying:
            sink.sendall(chunk)
