"""The commands and their exit statuses. Known failures are one clear message on stderr, never a traceback."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from epochkv_fence.cli import asking, doctor, hub, keys, plugins, update
from epochkv_fence.cli.exits import Exit
from epochkv_fence.cli.render import say_error
from epochkv_fence.client import ArgumentError, ConfigurationError, HubUnreachable, PoolError, ResetTimeout, WeightsDiverged
from epochkv_fence.standalone.database import StateError
from epochkv_fence.standalone.options import HubError

HELP: Final = """Reset KV-cache pools, and show what their engines hold.

Exit status: 0 done; 1 failed; 2 wrong usage or configuration, such as a key that the hub accepts for another pool; 3 not in time: an
epoch is recorded and not published (leases fence the engines that did not acknowledge), or engines do not hold the same, new weights;
4 no hub answered, or it rejected the key, and nothing is known to be recorded; 5 the hub's state cannot be used; 6 the hub lost its
state; 130 interrupted. `update` also ends with the status of COMMAND when it failed (128 + n for signal n), 126 if COMMAND cannot be
executed, 127 if there is no such command. `doctor` ends with 1 when something is wrong, and with 2 when it could not look.
"""
SENTENCE: Final = 300
"""No first sentence of a command's help is longer."""
OPTIONS: Final = {
    "epoch": "--epoch",
    "label": "--version",
    "timeout_s": "--timeout",
    "on_failure": "--on-failure",
}
"""What the command line calls the client's parameters."""


class _Commands(TyperGroup):
    """Our commands, then those that other packages add.

    Typer itself ends what is interrupted without a word, also while it parses, for which it imports a lot.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in plugins.names() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or plugins.load(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """With whole sentences: click cuts them off at the width of the terminal."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=SENTENCE)) for name, command in found if command is not None])

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with asking.interruptible(""):
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        with asking.interruptible(""):
            return super().invoke(ctx)


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
        try:
            print(f"epochkv {importlib.metadata.version('epochkv')}")
        except importlib.metadata.PackageNotFoundError:
            print("epochkv, run from its source without being installed")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """What stands before the command."""


app.command("hub")(hub.hub)
app.command("reset")(asking.reset)
app.command("wait", cls=asking.WaitCommand)(asking.wait)
app.command("status")(asking.status)
app.command("engines")(asking.engines)
app.command("weights")(asking.weights)
app.command("update", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})(update.update)
app.command("doctor")(doctor.doctor)
app.add_typer(keys.app, name="keys", help=keys.HELP)


def run() -> None:
    logging.getLogger("epochkv_fence").addHandler(logging.NullHandler())  # errors are told once, by the commands
    logging.getLogger("epochkv_fence.connection").addHandler(_Warnings(logging.WARNING))
    try:
        app(prog_name="epochkv")
    except ArgumentError as error:
        _end(ValueError(f"{OPTIONS.get(error.parameter, error.parameter)} {error.problem}"), Exit.USAGE)
    except ConfigurationError as error:
        _end(error, Exit.USAGE)
    except (ResetTimeout, WeightsDiverged) as error:
        _end(error, Exit.NOT_IN_TIME)
    except HubUnreachable as error:
        _end(error, Exit.UNREACHABLE)
    except StateError as error:
        _end(error, Exit.STATE)
    except HubError as error:
        _end(error, Exit.USAGE)
    except (PoolError, OSError) as error:
        _end(error, Exit.FAILED)
    except ValueError as error:
        _end(error, Exit.USAGE)


class _Warnings(logging.Handler):
    """What the client warns of, as the commands say things."""

    def emit(self, record: logging.LogRecord) -> None:
        say_error(record.getMessage())


def _end(error: Exception, status: Exit) -> None:
    for text in (str(error), *getattr(error, "__notes__", ())):
        say_error(text)
    sys.exit(status)
