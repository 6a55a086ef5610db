"""Command line of the operator: `epochkv-operator run`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from epochkv_operator.settings import LogFormat, Settings

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a plain traceback: no local variables, which may be keys
    add_completion=False,
    help="EpochKV operator: KV-cache pools that can be invalidated as a whole, provably.",
)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


@app.callback()
def _main() -> None:
    """EpochKV operator: KV-cache pools that can be invalidated as a whole, provably."""


@app.command()
def run(
    namespace: Annotated[
        str,
        typer.Option(
            envvar="EPOCHKV_NAMESPACE",
            default_factory=_own_namespace,
            help="Where the Lease and the hub's Secret live. Default: the pod's own.",
        ),
    ],
    watch_namespace: Annotated[
        list[str] | None,
        typer.Option(envvar="EPOCHKV_WATCH_NAMESPACE", help="Serve only this namespace; repeatable. Default: the whole cluster."),
    ] = None,
    hub_bind: Annotated[
        str, typer.Option(envvar="EPOCHKV_HUB_BIND", help="ZeroMQ endpoint the fence hub listens on while leading.")
    ] = "tcp://0.0.0.0:7700",
    hub_endpoint: Annotated[
        str,
        typer.Option(
            envvar="EPOCHKV_HUB_ENDPOINT",
            help="What engines dial. Default: tcp://epochkv-hub.<namespace>.svc:<port of --hub-bind>.",
        ),
    ] = "",
    lease_name: Annotated[str, typer.Option(envvar="EPOCHKV_LEASE_NAME", help="Name of the leader Lease.")] = "epochkv-operator",
    lease_duration_seconds: Annotated[
        int,
        typer.Option(
            envvar="EPOCHKV_LEASE_DURATION_SECONDS",
            min=2,
            help="How long a standby waits after the leader's last renewal.",
        ),
    ] = 15,
    probe_bind: Annotated[str, typer.Option(envvar="EPOCHKV_PROBE_BIND", help="host:port of /livez and /readyz.")] = "0.0.0.0:8080",
    metrics_bind: Annotated[str, typer.Option(envvar="EPOCHKV_METRICS_BIND", help="host:port of /metrics.")] = "0.0.0.0:9090",
    store_image: Annotated[
        str, typer.Option(envvar="EPOCHKV_STORE_IMAGE", help="Image of masters and stores where the pool names none.")
    ] = "epochkv/store:dev",
    engine_image: Annotated[
        str, typer.Option(envvar="EPOCHKV_ENGINE_IMAGE", help="Image of engines where the engine names none.")
    ] = "epochkv/engine:dev",
    workers: Annotated[int, typer.Option(envvar="EPOCHKV_WORKERS", min=1, max=64, help="Objects reconciled at the same time.")] = 4,
    resync_seconds: Annotated[
        float,
        typer.Option(envvar="EPOCHKV_RESYNC_SECONDS", min=1, help="Period of the whole LISTs that heal lost events."),
    ] = 300.0,
    log_format: Annotated[
        LogFormat, typer.Option(envvar="EPOCHKV_LOG_FORMAT", help="json for clusters, console for people.")
    ] = LogFormat.JSON,
    log_level: Annotated[str, typer.Option(envvar="EPOCHKV_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
) -> None:
    """Run until SIGTERM. Exits 0 on SIGTERM or SIGINT, 1 when leadership is lost or a part fails: let Kubernetes
    restart it.
    """
    from epochkv_operator import logs
    from epochkv_operator.control.runtime import Operator

    logs.configure(log_format, log_level)
    settings = Settings(
        namespace=namespace,
        watch_namespaces=tuple(watch_namespace or ()),
        hub_bind=hub_bind,
        hub_endpoint=hub_endpoint,
        lease_name=lease_name,
        lease_duration_seconds=lease_duration_seconds,
        probe_bind=probe_bind,
        metrics_bind=metrics_bind,
        store_image=store_image,
        engine_image=engine_image,
        workers=workers,
        resync_seconds=resync_seconds,
    )
    sys.exit(asyncio.run(Operator(settings).main()))


if __name__ == "__main__":
    app(prog_name="epochkv-operator")
