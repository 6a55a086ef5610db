"""A standalone hub's metrics and health over HTTP, in Prometheus' text format, with the names that the operator uses."""

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Final

from epochkv_fence.protocol.pool import ENGINE_STATES, PoolSnapshot

POOL_GAUGES: Final[dict[str, tuple[str, Callable[[PoolSnapshot, float, float], float]]]] = {
    "epochkv_pool_target_epoch": ("Highest epoch recorded for the pool", lambda pool, lease, now: pool.target),
    "epochkv_pool_published_epoch": ("Highest epoch proved: no engine uses an older one", lambda pool, lease, now: pool.published),
    "epochkv_pool_reset_overdue_seconds": (
        "For how long a reset is unpublished beyond lease and margin; 0 while none is late",
        lambda pool, lease, now: pool.overdue_seconds(lease, now),
    ),
    "epochkv_pool_old_epoch_requests": ("Requests that run on under an older epoch", lambda pool, lease, now: pool.old_epoch_requests),
    "epochkv_pool_weights_diverged_engines": (
        "Engine processes that hold other weights than most engines of the same fingerprint",
        lambda pool, lease, now: len(pool.diverged),
    ),
    "epochkv_pool_tiers_off_engines": (
        "Engine processes that cannot use their tiers, or not all of them",
        lambda pool, lease, now: len(pool.limited),
    ),
    "epochkv_pool_reclaimed_keys": (
        "Keys of older epochs and weights removed from the store since this hub leads",
        lambda pool, lease, now: pool.reclaimed_keys,
    ),
    "epochkv_pool_reclaimed_bytes": (
        "Bytes of the store freed since this hub leads, as far as they are known",
        lambda pool, lease, now: pool.reclaimed_bytes,
    ),
}
"""What both hubs say of a pool: for each name its text and its value, of a snapshot, the lease in seconds and Unix seconds."""
MESSAGES: Final = "What the hub received, sent, rejected and failed at, by outcome"
ENGINES: Final = ("epochkv_pool_engines", f"Engine processes heard of, by state ({', '.join(ENGINE_STATES)})")


def exposition(pool: str, snapshot: PoolSnapshot, counters: dict[str, int], lease_seconds: float, now: float) -> str:
    """All metrics of one pool. `now`: Unix seconds."""
    labels = f'namespace="",pool="{pool}"'
    states = [view.state for view in snapshot.engines]
    by_state = {f',state="{state}"': states.count(state) for state in ENGINE_STATES}
    outcomes = {f',outcome="{name}"': value for name, value in sorted(counters.items())}
    families: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("epochkv_hub_leading", "gauge", "1 while this hub leads", {"": snapshot.leading}),
        *((name, "gauge", text, {"": value(snapshot, lease_seconds, now)}) for name, (text, value) in POOL_GAUGES.items()),
        (ENGINES[0], "gauge", ENGINES[1], by_state),
        ("epochkv_hub_messages_total", "counter", MESSAGES, outcomes),
    ]
    if snapshot.reset_seconds is not None:
        families.append(("epochkv_pool_last_reset_seconds", "gauge", "Time the latest reset took", {"": snapshot.reset_seconds}))
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}{extra}}} {int(value) if value == int(value) else value}" for extra, value in values.items()]
    return "\n".join(lines) + "\n"


class _Server(ThreadingTCPServer):  # no `HTTPServer`: that asks DNS for this host's name, and DNS may hang
    allow_reuse_address = daemon_threads = True


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Answers `/metrics` and `/healthz` on threads of its own.

    Args:
        render: the metrics, called on those threads; may raise, which is answered with 503.
        healthy: whether the hub leads.
    """

    def __init__(self, address: tuple[str, int], render: Callable[[], str], healthy: Callable[[], bool]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

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
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Scrapes are no news."""

        host, port = address
        ipv6 = host.startswith("[") or (host == "*" and socket.has_dualstack_ipv6())
        self._server = (_IPv6Server if ipv6 else _Server)((host.strip("[]*"), port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="epochkv-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
