"""Command line of the operator: `epochkv-operator run`."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from epochkv_operator.api.base import PodSecurity
from epochkv_operator.settings import LogFormat, Settings

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a plain traceback: no local variables, which may be keys
    add_completion=False,
)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


@app.callback()
def _main() -> None:
    """EpochKV operator: runs KV-cache pools, and proves when a reset is complete."""


def _labels(given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    labels = [text.partition("=") for text in given]
    if any(not key or not equals for key, equals, _ in labels):
        raise typer.BadParameter("must be key=value", param_hint="--monitor-label")
    return tuple((key, value) for key, _, value in labels)


_HUB_ENDPOINT = "What engines dial. Default: tcp://epochkv-hub.<namespace>.svc:<port of --hub-bind>."


@app.command(context_settings={"auto_envvar_prefix": "EPOCHKV"})
def run(
    namespace: Annotated[
        str, Option(default_factory=_own_namespace, help="Where the Lease and the hub's Secret live. Default: the pod's own.")
    ],
    watch_namespace: Annotated[list[str] | None, Option(help="Serve only this namespace; repeatable. Default: the whole cluster.")] = None,
    hub_bind: Annotated[str, Option(help="ZeroMQ endpoint the fence hub listens on while leading.")] = Settings.hub_bind,
    hub_endpoint: Annotated[str, Option(help=_HUB_ENDPOINT)] = Settings.hub_endpoint,
    lease_duration_seconds: Annotated[
        int, Option(min=2, help="How long a standby waits after the leader's last renewal.")
    ] = Settings.lease_duration_seconds,
    probe_bind: Annotated[str, Option(help="host:port of /livez and /readyz.")] = Settings.probe_bind,
    metrics_bind: Annotated[str, Option(help="host:port of /metrics.")] = Settings.metrics_bind,
    store_image: Annotated[str, Option(help="Image of masters and stores where the pool names none.")] = Settings.store_image,
    engine_image: Annotated[str, Option(help="Image of engines where the engine names none.")] = Settings.engine_image,
    pod_security: Annotated[PodSecurity, Option(help="podSecurity of pools and engines that say nothing.")] = Settings.pod_security,
    monitor_label: Annotated[
        list[str] | None, Option(help="key=value: a label of each PodMonitor, by which your Prometheus finds it; repeatable.")
    ] = None,
    gates: Annotated[bool, Option(help="Pods get the readiness gate of spec.serve; needs patch pods/status.")] = Settings.gates,
    workers: Annotated[int, Option(min=1, max=64, help="Objects reconciled at the same time.")] = Settings.workers,
    resync_seconds: Annotated[float, Option(min=1, help="Period of the LISTs that find what the watches lost.")] = Settings.resync_seconds,
    log_format: Annotated[LogFormat, Option(help="json for clusters, console for people.")] = "json",
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option(help="What is too quiet is left out.")] = "info",
) -> None:
    """Run until SIGTERM. Exits 0 on SIGTERM or SIGINT, 1 when leadership is lost or a part fails: let Kubernetes restart it."""
    from epochkv_operator import logs
    from epochkv_operator.control.runtime import Operator

    logs.configure(log_format, log_level)
    settings = Settings(
        namespace=namespace,
        watch_namespaces=tuple(watch_namespace or ()),
        hub_bind=hub_bind,
        hub_endpoint=hub_endpoint,
        lease_duration_seconds=lease_duration_seconds,
        probe_bind=probe_bind,
        metrics_bind=metrics_bind,
        store_image=store_image,
        engine_image=engine_image,
        pod_security=pod_security,
        monitor_labels=_labels(monitor_label or ()),
        gates=gates,
        workers=workers,
        resync_seconds=resync_seconds,
    )
    sys.exit(asyncio.run(Operator(settings).main()))


@app.command()
def crds() -> None:
    """Print the CustomResourceDefinitions of this version, for `kubectl apply --server-side -f -`."""
    import json

    from epochkv_operator.api.generate import CRDS, manifest

    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": [manifest(crd) for crd in CRDS]}, indent=2))


if __name__ == "__main__":
    app(prog_name="epochkv-operator")
