"""A proxy that serves nobody and keeps what it was asked for."""

from __future__ import annotations

import socketserver
import threading


class RecordingProxy:
    """An HTTP proxy on loopback. Use as a context manager.

    Attributes:
        url: for the proxy variables.
        asked: first lines of requests, such as `CONNECT etcd:2379 HTTP/1.1`.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Refusal(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                asked.append(self.rfile.readline().decode(errors="replace").strip())
                self.wfile.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusal)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environ(self) -> dict[str, str]:
        """As platforms set it, in both spellings."""
        return {spelled: self.url for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for spelled in (name, name.lower())}

    def __enter__(self) -> RecordingProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
