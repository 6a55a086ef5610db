"""`python -m hack.cluster`: bring local Kubernetes clusters up and down."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hack.cluster import binaries, choose_provider
from hack.cluster.provider import run_command_line

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)
Name = Annotated[str, typer.Option(help="Name of the cluster; several can live side by side.", envvar="EPOCHKV_CLUSTER")]
Kind = Annotated[str | None, typer.Option("--provider", help="local, local-ipv6 or kind; default $CLUSTER, else local.")]
DEFAULT_NAME = "epochkv"
OTHER_MODULES = [module.name for module in binaries.MODULES if module.checks]


def _report(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


@app.command()
def build(
    also: Annotated[list[str] | None, typer.Argument(help=f"What tests or kind need: {', '.join(OTHER_MODULES)}.")] = None,
) -> None:
    """Build the Kubernetes binaries (cached; minutes the first time)."""
    progress = Console(highlight=False, stderr=True)
    binaries.build(lambda text: progress.print(text, markup=False, soft_wrap=True), also=also or ())


@app.command()
def up(
    name: Name = DEFAULT_NAME,
    kind: Kind = None,
    mount: Annotated[list[Path] | None, typer.Option(help="Host folder for hostPath volumes (repeatable).")] = None,
) -> None:
    """Create the cluster, or repair it; returns when the node is Ready."""
    choose_provider(name, kind).up(_report, mount or [])


@app.command()
def down(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Remove the cluster and everything it made; success when there is none."""
    choose_provider(name, kind).down(_report)


@app.command()
def status(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Show every component; exit status 1 when one is dead, 3 when there is no such cluster."""
    lines = choose_provider(name, kind).status()
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
def env(name: Name = DEFAULT_NAME, kind: Kind = None) -> None:
    """Print exports: eval "$(python -m hack.cluster env)"."""
    found = binaries.locate()
    print(f"export KUBECONFIG={shlex.quote(str(choose_provider(name, kind).kubeconfig()))}")
    print(f"export KUBECTL={shlex.quote(str(found.path('kubectl')))}")
    print(f"export HELM={shlex.quote(str(found.path('helm')))}")
    print(f"export PATH={':'.join(shlex.quote(str(folder)) for folder in found.folders)}:$PATH")


if __name__ == "__main__":
    run_command_line(app)
