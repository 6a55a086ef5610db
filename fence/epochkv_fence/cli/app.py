"""The commands and their exit statuses. Known failures are one clear message on stderr, never a traceback."""

from __future__ import annotations

import logging
import sys
from typing import Final

import typer

from epochkv_fence.cli import asking, hub, keys, update
from epochkv_fence.cli.exits import Exit
from epochkv_fence.cli.file_hub import HubError
from epochkv_fence.cli.render import say_error
from epochkv_fence.client import ConfigurationError, HubUnreachable, PoolError, ResetTimeout
from epochkv_fence.file_authority import StateError

HELP: Final = """KV-cache pools that can be invalidated as a whole, provably.

Exit status: 0 done; 1 failed; 2 wrong usage or configuration; 3 recorded, but not published in time (engines that did not
acknowledge are fenced by their leases); 4 no hub answered, nothing is known to be recorded: keep engines paused; 5 the hub's
state cannot be used; 6 the hub lost its state; 130 interrupted.
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback: no local variables, which may be keys
    rich_markup_mode=None,
    help=HELP,
)
app.command("hub", help=hub.HELP)(hub.hub)
app.command("reset", help=asking.RESET_HELP)(asking.reset)
app.command("wait", help=asking.WAIT_HELP)(asking.wait)
app.command("status", help=asking.STATUS_HELP)(asking.status)
app.command("engines", help=asking.ENGINES_HELP)(asking.engines)
app.command("update", help=update.HELP, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})(update.update)
app.add_typer(keys.app, name="keys", help=keys.HELP)


def run() -> None:
    """Entry point."""
    logging.getLogger("epochkv_fence").addHandler(logging.NullHandler())  # errors are told once, by the commands
    try:
        app()
    except ConfigurationError as error:
        _end(error, Exit.USAGE)
    except ResetTimeout as error:
        _end(error, Exit.NOT_PUBLISHED)
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
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


def _end(error: Exception, status: Exit) -> None:
    for text in (str(error), *getattr(error, "__notes__", ())):
        say_error(text)
    sys.exit(status)
