"""Settings of one operator process: command-line flags, each with an environment variable, and nothing read later from
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from epochkv_operator.api.base import PodSecurity


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


@dataclass(frozen=True)
class Settings:
    """Seconds are wall seconds; binds are `host:port` except `hub_bind`, a ZeroMQ endpoint. Host `*` is every address of IPv4 and IPv6."""

    namespace: str
    """Where the operator runs: its Lease and the Secret with the hub's key pair live here."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces served; empty: the whole cluster."""
    hub_bind: str = "tcp://*:7700"
    """Where the fence hub listens while this process leads."""
    hub_endpoint: str = ""
    """What engines dial; empty: `tcp://epochkv-hub.<namespace>.svc:7700`."""
    hub_secret: str = "epochkv-hub"
    lease_name: str = "epochkv-operator"
    lease_duration_seconds: int = 15
    probe_bind: str = "*:8080"
    metrics_bind: str = "*:9090"
    workers: int = 4
    resync_seconds: float = 300.0
    store_image: str = "epochkv/store:dev"
    """Image of Mooncake masters and stores where the pool names none."""
    engine_image: str = "epochkv/engine:dev"
    """Image of engines where the engine names none."""
    pod_security: PodSecurity = "restricted"
    """`podSecurity` of pools and engines that say nothing."""
    monitor_labels: tuple[tuple[str, str], ...] = ()
    """Labels of the PodMonitors, by which a Prometheus finds them."""
    gates: bool = True
    """Pods get the readiness gates of `spec.serve`, which this operator may write."""

    @property
    def endpoint(self) -> str:
        return self.hub_endpoint or f"tcp://epochkv-hub.{self.namespace}.svc:{self.hub_bind.rsplit(':', 1)[-1]}"

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces to list; `(None,)` stands for the whole cluster."""
        return self.watch_namespaces or (None,)
