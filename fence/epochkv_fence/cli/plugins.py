"""Commands that other packages add to `epochkv`, found by entry points: the fence imports none of those packages.

An entry point of the group `epochkv.commands` has the command's name and names a `typer.Typer` app with that one command. Its module
imports what the command line has anyway (typer, rich); the command imports the rest when it runs, so `epochkv reset` stays quick.
The extra in brackets is what to install when that is missing: `plan = "epochkv_operator.cli.plan:app [operator]"`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import Any, Final

import typer

from epochkv_fence.cli.exits import Exit
from epochkv_fence.cli.render import say_error

GROUP: Final = "epochkv.commands"


@functools.cache
def _found() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in sorted(importlib.metadata.entry_points(group=GROUP))}


def names() -> list[str]:
    """Names of the added commands."""
    return list(_found())


@functools.cache
def load(name: str) -> Any:
    """The command `name`; None when no package that is here adds it."""
    entry = _found().get(name)
    if entry is None:
        return None
    try:
        command = typer.main.get_command(entry.load())
    except ModuleNotFoundError:  # an image may leave packages out
        return None
    run = command.callback

    def with_libraries(*arguments: Any, **options: Any) -> Any:
        try:
            return run(*arguments, **options) if run is not None else None
        except ModuleNotFoundError as error:
            extras = ",".join(entry.extras)
            remedy = f"; install epochkv[{extras}]" if extras else ""
            say_error(f"{error.name} is not installed, and `epochkv {name}` needs it{remedy}")
            sys.exit(Exit.FAILED)

    command.callback = with_libraries
    return command
