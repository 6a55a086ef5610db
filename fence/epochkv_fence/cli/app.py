"""The command line `epochkv`. Commands that other packages add are found by entry points: the fence imports none of those packages.

An entry point of the group `epochkv.commands` has the command's name and names a `typer.Typer` app with that one command. Its module
imports what the command line has anyway (typer, rich); the command imports the rest when it runs, so `epochkv reset` stays quick.
The extra in brackets is what to install when that is missing: `plan = "epochkv_operator.cli:app [operator]"`.
"""

import contextlib
import functools
import importlib.metadata
import io
import logging
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from epochkv_fence.cli import asking, doctor, hub, warm
from epochkv_fence.cli.render import Exit, say_error
from epochkv_fence.client import ArgumentError, HubUnreachable, PoolError, ResetTimeout, WeightsDiverged
from epochkv_fence.protocol.pool import AuthorityError
from epochkv_fence.standalone.authority import StateError
from epochkv_fence.version import VERSION

GROUP: Final = "epochkv.commands"


@functools.cache
def _found() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in sorted(importlib.metadata.entry_points(group=GROUP))}


@functools.cache
def load_plugin(name: str) -> Any:
    """The command `name`; None when no package that is here adds it."""
    entry = _found().get(name)
    if entry is not None:
        with contextlib.suppress(ModuleNotFoundError):  # an image may leave packages out
            return typer.main.get_command(entry.load())
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The commands and their exit statuses. Known failures are one clear message on stderr, never a traceback.


HELP: Final = """Reset KV-cache pools, and show what their engines hold.

Exit status: 0 done; 1 failed; 2 wrong usage or configuration, such as a key that the hub accepts for another pool; 3 not in time: an
epoch is recorded and not published (leases fence the engines that did not acknowledge), or engines do not hold the same, new weights;
4 no hub answered, or it rejected the key, and nothing is known to be recorded; 5 the hub's state cannot be used; 6 the hub lost its
state; 130 interrupted. `update` also ends with the status of COMMAND when it failed (128 + n for signal n), 126 if COMMAND cannot be
executed, 127 if there is no such command. `doctor` ends with 1 when something is wrong, and with 2 when some checks could not run.
"""
OPTIONS: Final = {"label": "--version", "timeout_s": "--timeout"}
"""What the command line calls the client's parameters, where that is another name."""
STATUSES: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], Exit], ...]] = (
    ((ResetTimeout, WeightsDiverged), Exit.NOT_IN_TIME),
    (HubUnreachable, Exit.UNREACHABLE),
    (StateError, Exit.STATE),
    ((PoolError, AuthorityError, OSError), Exit.FAILED),
    (ValueError, Exit.USAGE),
)
"""The first that fits counts."""


class _Commands(TyperGroup):
    """Our commands, then those that other packages add.

    Typer itself ends what is interrupted without a word.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in _found() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or load_plugin(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            with asking.interruptible(""):
                return super().invoke(ctx)
        except ModuleNotFoundError as error:
            extras = ",".join(_found()[ctx.invoked_subcommand].extras if ctx.invoked_subcommand in _found() else ())
            say_error(f"{error.name} is not installed, and `epochkv {ctx.invoked_subcommand}` needs it; install epochkv[{extras}]")
            sys.exit(Exit.FAILED)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback: no local variables, which may be keys
    rich_markup_mode=None,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"epochkv {VERSION or 'from source'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """What stands before the command."""


app.command("hub")(hub.hub)
app.command("reset")(asking.reset)
app.command("wait")(asking.wait)
app.command("status")(asking.status)
app.command("engines")(asking.engines)
app.command("weights")(asking.weights)
app.command("update", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})(asking.update)
app.command("warm")(warm.warm)
app.command("doctor")(doctor.doctor)
app.add_typer(hub.keys, name="keys", help=hub.KEYS_HELP)


def run() -> None:
    logging.getLogger("epochkv_fence").addHandler(logging.NullHandler())  # errors are told once, by the commands
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a label may have letters that the terminal has not
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="epochkv")
    except ArgumentError as error:
        option = OPTIONS.get(error.parameter, f"--{error.parameter.replace('_', '-')}")
        _end(ValueError(f"{option} {error.problem}"), Exit.USAGE)
    except (PoolError, AuthorityError, OSError, ValueError) as error:
        _end(error, next(status for kinds, status in STATUSES if isinstance(error, kinds)))


def _end(error: Exception, status: Exit) -> None:
    for text in (str(error), *getattr(error, "__notes__", ())):
        say_error(text)
    sys.exit(status)
