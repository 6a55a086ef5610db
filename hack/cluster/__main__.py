"""`python -m hack.cluster`: bring local Kubernetes clusters up and down."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hack.cluster import binaries, choose_provider
from hack.cluster.provider import ClusterError, Provider, run_command_line

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)
Name = Annotated[str, typer.Option(help="Name of the cluster; several can live side by side.", envvar="EPOCHKV_CLUSTER")]
Kind = Annotated[str | None, typer.Option("--provider", help="local or kind; default $CLUSTER, else local.")]
DEFAULT_NAME = "epochkv"


def _report(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _cluster(name: str, kind: str | None) -> Provider:
    return choose_provider(name, kind)


@app.command()
def build(checks: Annotated[bool, typer.Option("--checks", help="Also what tests check alerts and workflows with.")] = False) -> None:
    """Build the Kubernetes binaries (cached; about ten minutes the first time)."""
    found = binaries.build(_report, checks=checks)
    for folder in found.folders:
        print(folder)


@app.command()
def up(
    name: Name = DEFAULT_NAME,
    kind: Kind = None,
    mount: Annotated[list[Path] | None, typer.Option(help="Host folder for hostPath volumes (repeatable).")] = None,
    control_plane_only: Annotated[
        bool, typer.Option("--control-plane-only", help="etcd, API server and controllers on loopback; no node, no root.")
    ] = False,
) -> None:
    """Create the cluster, or repair it; returns when the node is Ready."""
    if control_plane_only:
        from hack.cluster.controlplane import ControlPlane
        from hack.cluster.state import check_name, run_root

        started = time.monotonic()
        plane = ControlPlane(run_root() / f"cp-{check_name(name)}", binaries=binaries.build(_report))
        plane.start()
        _report(f"control plane {name} is ready after {time.monotonic() - started:.1f} s: export KUBECONFIG={plane.kubeconfig}")
        return
    _cluster(name, kind).up(_report, mount or [])


@app.command()
def down(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Remove the cluster and everything it made; success when there is none."""
    from hack.cluster.controlplane import ControlPlane
    from hack.cluster.state import check_name, run_root

    alone = run_root() / f"cp-{check_name(name)}"
    if alone.exists():
        ControlPlane(alone, binaries=binaries.Binaries(())).close()
        _report(f"control plane {name} is removed")
    _cluster(name, kind).down(_report)


@app.command()
def status(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Show every component; exit status 1 when one is dead, 3 when there is no such cluster."""
    lines = _cluster(name, kind).status()
    if not lines:
        _report(f"there is no cluster {name!r}")
        raise typer.Exit(3)
    table = Table("component", "state", "pid")
    for line in lines:
        table.add_row(line.name, "[green]up[/]" if line.alive else "[red]down[/]", str(line.pid or ""))
    console.print(table)
    for line in lines:
        if not line.alive:
            _report(f"{line.name}:\n{line.detail}")
    if not all(line.alive for line in lines):
        raise typer.Exit(1)


@app.command()
def kubeconfig(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Print the path of the admin kubeconfig."""
    print(_cluster(name, kind).kubeconfig())


@app.command("load-image")
def load_image(archives: list[Path], name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Import docker-archive files into the cluster's node."""
    if missing := [str(path) for path in archives if not path.is_file()]:
        raise ClusterError(f"no such image archive: {', '.join(missing)}; 'python -m hack.images build' makes them")
    _cluster(name, kind).load_images(archives, _report)


@app.command()
def logs(component: str, name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Print the log of a component."""
    print(_cluster(name, kind).logs(component))


@app.command()
def env(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Print exports: eval "$(python -m hack.cluster env)"."""
    found = binaries.locate()
    print(f"export KUBECONFIG={shlex.quote(str(_cluster(name, kind).kubeconfig()))}")
    print(f"export KUBECTL={shlex.quote(str(found.path('kubectl')))}")
    print(f"export HELM={shlex.quote(str(found.path('helm')))}")
    print(f"export PATH={':'.join(shlex.quote(str(folder)) for folder in found.folders)}:$PATH")


@app.command("node-exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node_exec(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run a command in the node's namespaces (local provider): node-exec -- iptables-save."""
    import os

    from hack.cluster.local import LocalCluster

    command = [*LocalCluster(name).node.prefix(), *(context.args or ["bash"])]
    os.execvp(command[0], command)


if __name__ == "__main__":
    run_command_line(app)
