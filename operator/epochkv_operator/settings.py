"""Settings of one operator process: command-line flags, each with an environment variable, and nothing read later from elsewhere."""

from dataclasses import dataclass
from typing import Final, Literal

from epochkv_operator.api.base import PodSecurity

LogFormat = Literal["json", "console"]
LEASE: Final = "epochkv-operator"
HUB_SECRET: Final = "epochkv-hub"


@dataclass(frozen=True)
class Settings:
    """`epochkv-operator run --help` says what each means. Seconds are wall seconds; binds are `host:port` except `hub_bind`, a ZeroMQ
    endpoint. Host `*` is every address of IPv4 and IPv6."""

    namespace: str
    watch_namespaces: tuple[str, ...] = ()
    hub_bind: str = "tcp://*:7700"
    hub_endpoint: str = ""
    lease_duration_seconds: int = 15
    probe_bind: str = "*:8080"
    metrics_bind: str = "*:9090"
    workers: int = 4
    resync_seconds: float = 300.0
    store_image: str = "epochkv/store:dev"
    engine_image: str = "epochkv/engine:dev"
    pod_security: PodSecurity = "restricted"
    monitor_labels: tuple[tuple[str, str], ...] = ()
    gates: bool = True

    @property
    def endpoint(self) -> str:
        return self.hub_endpoint or f"tcp://epochkv-hub.{self.namespace}.svc:{self.hub_bind.rsplit(':', 1)[-1]}"

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces to list; `(None,)` stands for the whole cluster."""
        return self.watch_namespaces or (None,)
