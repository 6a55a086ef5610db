"""`python -m hack.demo run|prepare|stock|cold|diagnose|down`: see `make help`."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from hack.cluster.provider import ClusterError
from hack.demo.kube import DemoError
from hack.engine_api import EngineError
from hack.standalone.process import ProcessError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
# A log file is no terminal and has no width: tables get a readable one there.
console = Console() if Console().is_terminal else Console(width=120)
Seed = Annotated[int | None, typer.Option(help="Seed of the prompts; another one each time by default.")]


@app.command()
def run(
    seed: Seed = None,
    bumps: Annotated[int, typer.Option(min=0, help="Resets to measure at the end.")] = 20,
) -> None:
    """The main job on a real cluster; leaves it up."""
    from hack.demo.run import demo

    try:
        sys.exit(demo(console, seed, bumps))
    except KeyboardInterrupt:
        console.print("interrupted: `make down` removes what is up")
        sys.exit(130)


@app.command()
def prepare() -> None:
    """What a cluster needs, side by side: Kubernetes compiled, images built, vLLM installed."""
    from hack.demo.setup import Setup

    Setup().prepare(lambda text, part="": console.print(f"==> {part}: {text}", markup=False, highlight=False))


@app.command()
def stock(seed: Seed = None) -> None:
    """No cluster: vLLM's own Mooncake connector with one engine late, then ours."""
    from hack.demo.stock import demo

    sys.exit(demo(console, seed))


@app.command()
def cold(
    seed: Seed = None,
    runs: Annotated[int, typer.Option(min=1, help="Fresh engines, one after the other.")] = 10,
    load: Annotated[int, typer.Option(min=0, help="Processes that use a core each meanwhile.")] = 4,
) -> None:
    """No cluster: the first load of fresh engines from the store, on a busy machine."""
    from hack.demo.cold import demo

    sys.exit(demo(console, seed, runs, load))


@app.command()
def down() -> None:
    """Remove the cluster and everything that the demo made."""
    from hack.demo.setup import Setup

    Setup().remove(lambda line: console.print(line, markup=False, highlight=False))


@app.command()
def diagnose() -> None:
    """Print what one would look at first when something fails: pods, warnings, the operator's last lines."""
    from hack.demo.setup import Setup

    console.print(Setup().diagnosis(), markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: known failures are one clear message and exit status 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs side by side is ended, too
    try:
        app()
    except (ClusterError, DemoError, EngineError, ProcessError, OSError) as error:
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
