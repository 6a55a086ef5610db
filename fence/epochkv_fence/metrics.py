"""A standalone hub's metrics and health over HTTP, in Prometheus' text format, with the names that the operator uses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from epochkv_fence.protocol.pool import ENGINE_STATES, PoolSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_SECONDS: Final = 5.0


def exposition(pool: str, snapshot: PoolSnapshot, counters: dict[str, int], lease_seconds: float, now: float) -> str:
    """All metrics of one pool. `now`: Unix seconds."""
    labels = f'namespace="",pool="{_escaped(pool)}"'
    states = [view.state for view in snapshot.engines]
    engines = f"Engine processes heard of, by state ({', '.join(ENGINE_STATES)})"
    by_state = {f',state="{state}"': states.count(state) for state in ENGINE_STATES}
    outcomes = {f',outcome="{_escaped(name)}"': value for name, value in sorted(counters.items())}
    took = {} if snapshot.reset_seconds is None else {"": snapshot.reset_seconds}
    diverged, limited, keys = {"": len(snapshot.diverged)}, {"": len(snapshot.limited)}, {"": snapshot.reclaimed_keys}
    overdue = snapshot.overdue_seconds(lease_seconds, now)
    families: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("epochkv_hub_leading", "gauge", "1 while this hub leads", {"": snapshot.leading}),
        ("epochkv_pool_target_epoch", "gauge", "Highest epoch recorded for the pool", {"": snapshot.target}),
        ("epochkv_pool_published_epoch", "gauge", "Highest epoch proved: no engine uses an older one", {"": snapshot.published}),
        *([("epochkv_pool_last_reset_seconds", "gauge", "Time the latest reset took", took)] if took else []),
        ("epochkv_pool_reset_overdue_seconds", "gauge", "For how long a reset is unpublished beyond lease and margin", {"": overdue}),
        ("epochkv_pool_engines", "gauge", engines, by_state),
        ("epochkv_pool_weights_diverged_engines", "gauge", "Live engines that hold other weights than most of their fingerprint", diverged),
        ("epochkv_pool_tiers_off_engines", "gauge", "Live engines that cannot use their tiers, or not all of them", limited),
        ("epochkv_pool_old_epoch_requests", "gauge", "Requests that run under older epochs", {"": snapshot.old_epoch_requests}),
        ("epochkv_pool_reclaimed_keys", "gauge", "Keys of older epochs and weights removed from the store since this hub started", keys),
        ("epochkv_pool_reclaimed_bytes", "gauge", "Bytes of them, as far as they are known", {"": snapshot.reclaimed_bytes}),
        ("epochkv_hub_messages_total", "counter", "Messages and connections by outcome", outcomes),
    ]
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}{extra}}} {int(value) if value == int(value) else value}" for extra, value in values.items()]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _IPv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class MetricsServer:
    """Answers `/metrics` and `/healthz` on threads of its own.

    Args:
        render: the metrics, called on those threads; may raise, which is answered with 503.
        healthy: whether the hub leads.
    """

    def __init__(self, address: tuple[str, int], render: Callable[[], str], healthy: Callable[[], bool]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                status, body = 404, "see /metrics and /healthz\n"
                try:
                    if self.path == "/metrics":
                        status, body = 200, render()
                    elif self.path == "/healthz":
                        status, body = (200, "ok\n") if healthy() else (503, "not leading\n")
                except Exception as error:
                    status, body = 503, f"{error}\n"
                content = body.encode()
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Scrapes are no news."""

        host, port = address
        self._server = (_IPv6Server if host.startswith("[") else ThreadingHTTPServer)((host.strip("[]").replace("*", ""), port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="epochkv-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
