"""`python -m hack.images`: build the operator, store and engine images without Docker and without a registry."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer
from rich.console import Console

from hack.cluster.provider import run_command_line
from hack.images.builder import Builder
from hack.images.recipe import IMAGES, image

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
# Progress goes to stderr: stdout holds the archives, ready for `hack.cluster load-image`.
console = Console(highlight=False, stderr=True)


def _report(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


@app.command()
def build(names: Annotated[list[str] | None, typer.Argument(help="operator, store, engine; all by default")] = None) -> None:
    """Build what has changed and print the paths of the docker-archive files."""
    wanted = [image(name) for name in names] if names else list(IMAGES)
    for path in Builder(_report).ensure(wanted):
        print(path)


@app.command()
def prune() -> None:
    """Remove the image store and all archives from the cache."""
    folder = Builder(_report).folder
    shutil.rmtree(folder, ignore_errors=True)
    _report(f"removed {folder}")


if __name__ == "__main__":
    run_command_line(app)
