"""`reset`, `wait`, `status`, `engines`, `weights`: thin over the client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from epochkv_fence.cli.exits import Exit
from epochkv_fence.cli.render import (
    Output,
    StatusLine,
    reset_waits_for,
    say_error,
    show_engines,
    show_reset,
    show_status,
    show_wait,
    show_weights,
    wait_waits_for,
)
from epochkv_fence.client import ConfigurationError, Connection, HubUnreachable, Pool, ResetTimeout, WrongPool
from epochkv_fence.client.pool import LOOK_SECONDS, RESET_SECONDS
from epochkv_fence.protocol.messages import MAX_EPOCH

Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="PATH",
        help="The pool's connection.json, or its directory. Default: what the variable EPOCHKV_CONFIG names.",
    ),
]
Out = Annotated[Output, typer.Option("--output", "-o", help="A table for people, or JSON.")]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="Give up after this time. The command gives up after 30 s if no hub has answered."),
]
OnFailure = Annotated[
    str,
    typer.Option(
        "--on-failure",
        metavar="bypass|crash",
        help="When the epoch is recorded and not published in time: bypass says so and exits with 3, crash also prints an error.",
    ),
]


def gone(option: str, instead: str) -> Any:
    """A removed option: hidden from help, and rejected with what replaced it.

    Args:
        instead: what to do now, after "is no longer supported: ".
    """

    def refuse(ctx: typer.Context, value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"it is no longer supported: {instead}", ctx, param_hint=option)

    return typer.Option(option, hidden=True, callback=refuse, metavar="GONE")


CONNECT_SECONDS: Final = 30.0
"""Longer than a standby operator takes to become the hub."""
NO_EPOCH: Final = f"{{!r}} is no epoch; give an integer from 0 to {MAX_EPOCH}."
NOTHING_ASKED: Final = "Nothing was asked of the pool: engines go on with the KV they have"
MAY_BE_RECORDED: Final = ". The epoch may be recorded already, and is published then without this command: `epochkv status` shows it"


def connect(config: str | None, timeout: float, consequence: str | None = None) -> Pool:
    """The pool, within the command's own time.

    Args:
        consequence: what it means for the caller that no hub answers.

    Raises:
        ConfigurationError: also when the key is another pool's.
    """
    try:
        connection = Connection.load(config, what="--config")
        return Pool.connect(connection, min(timeout, CONNECT_SECONDS))
    except WrongPool as error:
        raise ConfigurationError(str(error)) from None
    except HubUnreachable as error:
        if consequence is None:
            raise
        raise HubUnreachable(f"{error}. {consequence}") from None


@contextmanager
def _asking(progress: StatusLine, output: Output) -> Iterator[None]:
    """The error of an epoch that is late goes to stderr; with JSON what is known of it is a document on stdout as well."""
    try:
        try:
            yield
        finally:
            progress.stop()
    except ResetTimeout as error:
        if output is Output.JSON:
            show_reset(error.reset, output)
        raise


@contextmanager
def interruptible(consequence: str) -> Iterator[None]:
    """Ctrl-C ends the command with what it means for the pool."""
    try:
        yield
    except KeyboardInterrupt:
        say_error(f"interrupted{consequence}")
        raise typer.Exit(Exit.INTERRUPTED) from None


def reset(
    config: Config = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="Ask for this epoch. Default: one above the pool's target.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it is published.")] = True,
    timeout: Timeout = RESET_SECONDS,
    on_failure: OnFailure = "bypass",
    force: Annotated[
        bool, typer.Option("--force", help="Accept an epoch that is more than a million above the target. It never goes down again.")
    ] = False,
    output: Out = Output.TABLE,
    weights_version: Annotated[
        str | None, gone("--weights-version", "weights name themselves. Leave it out; `epochkv update` says what they are called")
    ] = None,
) -> None:
    """Make all KV of the pool unreachable, and wait until that is proved.

    New weights need no reset: engines name KV by the weights that they hold.

    \b
      epochkv reset                                 # the next epoch
      epochkv reset --epoch 7 -o json               # at least epoch 7; repeating it changes nothing

    Exit status: 0 published (with --no-wait: recorded); 3 recorded, not published in time; 4 no hub recorded it. With -o json, the
    command also prints JSON when it ends with 3.
    """
    progress = StatusLine(reset_waits_for)
    with interruptible(f". {NOTHING_ASKED}"):
        pool = connect(config, timeout, NOTHING_ASKED)
    with interruptible(MAY_BE_RECORDED), closing(pool), _asking(progress, output):
        done = pool.reset(
            epoch,
            wait=wait,
            timeout_s=timeout,
            on_failure=on_failure,  # type: ignore[arg-type]
            progress=progress,
            force=force,
        )
    show_reset(done, output, wait)
    if wait and not done.published:
        raise typer.Exit(Exit.NOT_IN_TIME)


def _epoch(text: str) -> int:
    if re.fullmatch("[0-9]{1,16}", text) is None or int(text) > MAX_EPOCH:
        raise typer.BadParameter(NO_EPOCH.format(text))
    return int(text)


class WaitCommand(TyperCommand):
    """A negative number is an EPOCH out of its range, not an option that is not known."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption, which is click's or typer's own, as typer's version has it
            if not re.fullmatch(r"-\d", option := getattr(error, "option_name", "")):
                raise
            number = next(text for text in given if text.startswith(option))
            raise typer.BadParameter(NO_EPOCH.format(number), ctx, param_hint="'EPOCH'") from None


def wait(
    epoch: Annotated[int, typer.Argument(parser=_epoch, metavar="EPOCH", help="The epoch to wait for.")],
    config: Config = None,
    timeout: Timeout = RESET_SECONDS,
    output: Out = Output.TABLE,
) -> None:
    """Wait until EPOCH is published, that is, until it is proved that no engine uses an older one.

    The command asks for no reset. Somebody else does, such as `epochkv reset --no-wait`, a trainer, or resetEpoch of the pool. It ends
    at once when the epoch is published already.

    \b
      epochkv wait 7 --timeout 60

    Exit status: 0 published; 3 not in time, and the message says whether anybody has asked for it; 4 no hub answers. With -o json, the
    command also prints JSON when it ends with 3.
    """
    progress = StatusLine(wait_waits_for)
    with closing(connect(config, timeout)) as pool, _asking(progress, output):
        done = pool.wait(epoch, timeout, progress)
    show_wait(done, output)


def status(config: Config = None, timeout: Timeout = LOOK_SECONDS, output: Out = Output.TABLE) -> None:
    """Show the pool: epochs, weights, engines.

    \b
      epochkv status --config policy/client
      EPOCHKV_CONFIG=policy/client epochkv status -o json
    """
    with closing(connect(config, timeout)) as pool:
        show_status(pool.status(timeout), output)


def engines(config: Config = None, timeout: Timeout = LOOK_SECONDS, output: Out = Output.TABLE) -> None:
    """List the pool's live engine processes.

    \b
      epochkv engines
      epochkv engines -o json | jq -r '.[] | select(.state != "use") | .name'
    """
    with closing(connect(config, timeout)) as pool:
        show_engines(pool.status(timeout), output)


def weights(
    config: Config = None,
    timeout: Timeout = LOOK_SECONDS,
    output: Out = Output.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """List the weights by digest, with the engines that hold them. The largest group comes first, then the one that changed last.

    `epochkv update` waits until a push has reached every engine.

    \b
      epochkv weights
      epochkv weights --json | jq .equal
    """
    with closing(connect(config, timeout)) as pool:
        show_weights(pool.weights(timeout), Output.JSON if as_json else output)
