"""`reset`, `wait`, `status`, `engines`, `weights`, `update`: thin over the client."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Final

import typer

from epochkv_fence.cli import render
from epochkv_fence.cli.render import Exit, Output, StatusLine, say_error
from epochkv_fence.client import (
    ConfigurationError,
    Connection,
    HubUnreachable,
    Pool,
    PoolError,
    ResetTimeout,
    Update,
    WeightsDiverged,
    WeightsReport,
    WrongPool,
)
from epochkv_fence.client.pushes import WEIGHTS_SECONDS
from epochkv_fence.client.resets import RESET_SECONDS
from epochkv_fence.client.session import STATUS_SECONDS
from epochkv_fence.connection import CONFIG_ENV
from epochkv_fence.protocol.messages import MAX_EPOCH
from epochkv_fence.protocol.pool import is_called

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


CONNECT_SECONDS: Final = 30.0
"""Longer than a standby operator takes to become the hub."""
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
def interruptible(consequence: str) -> Iterator[None]:
    """Ctrl-C ends the command with what it means for the pool."""
    try:
        yield
    except KeyboardInterrupt:
        say_error(f"interrupted{consequence}")
        raise typer.Exit(Exit.INTERRUPTED) from None


def reset(
    config: Config = None,
    epoch: Annotated[
        int | None, typer.Option(min=0, max=MAX_EPOCH, help="Ask for this epoch. Default: one above the pool's target.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it is published.")] = True,
    timeout: Timeout = RESET_SECONDS,
    force: Annotated[
        bool, typer.Option("--force", help="Accept an epoch from a million to 10^13 above the target, which never goes down again.")
    ] = False,
    output: Out = Output.TABLE,
) -> None:
    """Make all KV of the pool unreachable, and wait until that is proved.

    New weights need no reset: engines name KV by the weights that they hold.

    \b
      epochkv reset                                 # the next epoch
      epochkv reset --epoch 7 -o json               # at least epoch 7; repeating it changes nothing

    Exit status: 0 published (with --no-wait: recorded); 3 recorded, not published in time; 4 no hub recorded it. With -o json, the
    command also prints JSON when it ends with 3.
    """
    with interruptible(f". {NOTHING_ASKED}"):
        pool = connect(config, timeout, NOTHING_ASKED)
    with interruptible(MAY_BE_RECORDED), closing(pool):
        done = pool.reset(epoch, wait=wait, timeout_s=timeout, progress=StatusLine(render.reset_waits_for), force=force)
    render.show_reset(done, output, wait)
    if wait and not done.published:
        raise typer.Exit(Exit.NOT_IN_TIME)


def wait(
    epoch: Annotated[int, typer.Argument(min=0, max=MAX_EPOCH, metavar="EPOCH", help="The epoch to wait for.")],
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
    with closing(connect(config, timeout)) as pool:
        try:
            done = pool.wait(epoch, timeout, StatusLine(partial(render.reset_waits_for, recorder="somebody to ask for it")))
        except ResetTimeout as error:
            if output is Output.JSON:  # the error itself goes to stderr
                render.show_reset(error.reset, output)
            raise
    render.show_wait(done, output)


def status(config: Config = None, timeout: Timeout = STATUS_SECONDS, output: Out = Output.TABLE) -> None:
    """Show the pool: epochs, weights, engines.

    \b
      epochkv status --config policy/client
      EPOCHKV_CONFIG=policy/client epochkv status -o json
    """
    with closing(connect(config, timeout)) as pool:
        render.show_status(pool.status(timeout), output)


def engines(
    config: Config = None,
    weights: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only those that hold these weights: a label, or 8 or more first digits of a digest.")
    ] = None,
    timeout: Timeout = STATUS_SECONDS,
    output: Out = Output.TABLE,
) -> None:
    """List the pool's live engine processes.

    \b
      epochkv engines
      epochkv engines --weights step-42 -o json | jq -r '.[].pod'     # whom a router may ask
      epochkv engines -o json | jq -r '.[] | select(.state != "sharing") | .name'

    Exit status: 1 if no engine holds the weights that --weights names. With -o json, the command also prints an empty list then.
    """
    with closing(connect(config, timeout)) as pool:
        found = pool.status(timeout)
    if weights is not None:
        held = (one for one in found.engines if one.weights and is_called(one.weights, found.labels.get(one.weights, ""), weights))
        found = replace(found, engines=tuple(held))
    nobody = weights is not None and not found.engines
    if output is Output.JSON or not nobody:
        render.show_engines(found, output)
    if nobody:
        say_error(f"no live engine holds {weights}; `epochkv weights` shows what they hold")
        raise typer.Exit(Exit.FAILED)


def weights(config: Config = None, timeout: Timeout = STATUS_SECONDS, output: Out = Output.TABLE) -> None:
    """List the weights by digest, with the engines that hold them. The largest group comes first, then the one that changed last.

    `epochkv update` waits until a push has reached every engine.

    \b
      epochkv weights
      epochkv weights -o json | jq .equal
    """
    with closing(connect(config, timeout)) as pool:
        render.show_weights(pool.weights(timeout), output)


# ----------------------------------------------------------------------------------------------------------------------
# `epochkv update --version V -- COMMAND`: push weights, and prove that they arrived, whatever language pushes them.


FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
VERSION_ENV: Final = "EPOCHKV_WEIGHTS_VERSION"
NOT_STARTED: Final = "COMMAND was not started, so nothing was pushed"
ENDED_WELL: Final = "COMMAND ended well; `epochkv weights` shows which engines hold what"


def update(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What pushes the weights, after `--`.")],
    version: Annotated[str, typer.Option("--version", metavar="V", help="Label of the new weights; the newest label counts.")],
    config: Config = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For the steps before COMMAND, and again for those after it.")
    ] = WEIGHTS_SECONDS,
    only_new: Annotated[
        bool, typer.Option("--only-new", help="Fail where engines held these weights before under a label, or V was that of others.")
    ] = False,
    output: Out = Output.TABLE,
) -> None:
    """Run COMMAND, which pushes new weights, and wait until every engine of the pool holds them, bit by bit.

    Engines name KV by the weights that they hold, so COMMAND may push in any order, paused or serving. The label of the new weights is
    V. If an engine missed the push, the message names it. If engines held these weights before under another label, or V was the label of
    other weights, a line on standard error says so.

    COMMAND gets EPOCHKV_WEIGHTS_VERSION, EPOCHKV_CONFIG and our signals. With -o json, its standard output
    goes to standard error.

    Exit status: 0 all engines hold the same, new weights; 3 they do not in time, nothing has changed, or --only-new fails; 4 no hub
    answered, and the message says whether COMMAND was started. If COMMAND failed, its status (128 + n for signal n); then nothing is
    waited for.

    \b
      epochkv update --version step-42 -- python push_weights.py --step 42
    """
    if shutil.which(command[0]) is None:  # as a shell would say it
        say_error(f"{command[0]} is no command that this user may execute; nothing was asked of the pool")
        raise typer.Exit(Exit.NO_COMMAND)
    found = _push(command, version, config, timeout, output, only_new=only_new)
    for note in found.notes:
        say_error(note)
    if output is Output.JSON:
        render.show_weights(found, output)
    else:
        print(render.shown_weights(found))


def _push(command: Sequence[str], version: str, config: str | None, timeout: float, output: Output, *, only_new: bool) -> WeightsReport:
    """Run the command, and wait until every engine holds the weights that it pushed."""
    made: Update | None = None
    has_ended = False
    try:
        with (
            closing(connect(config, timeout, NOTHING_ASKED)) as pool,
            pool.weight_update(version, timeout_s=timeout, progress=StatusLine(render.push_waits_for), only_new=only_new) as made,
        ):
            status = run(command, environment(os.environ, config, version), to_stderr=output is Output.JSON)
            if status != 0:
                say_error(f"the command ended with status {status}; `epochkv weights` shows which engines hold what")
                raise typer.Exit(status)
            has_ended = True
    except PoolError as error:
        if isinstance(error, WeightsDiverged) and output is Output.JSON:
            render.show_weights(error.report, output)
        elif not isinstance(error, WeightsDiverged):
            error.add_note(ENDED_WELL if has_ended else NOT_STARTED)
        raise
    except KeyboardInterrupt:
        say_error(f"interrupted; {ENDED_WELL if has_ended else NOT_STARTED}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    assert made.report is not None
    return made.report


def environment(environ: Mapping[str, str], config: str | None, version: str) -> dict[str, str]:
    """What the command sees."""
    found = {**environ, VERSION_ENV: version}
    given = config if config is not None else found.get(CONFIG_ENV)
    if given:
        found[CONFIG_ENV] = given if given.lstrip().startswith("{") else os.path.abspath(os.path.expanduser(given))
    return found


def run(command: Sequence[str], environ: Mapping[str, str], *, to_stderr: bool = False) -> int:
    """Run the command; it gets our signals. Those that a terminal sends it gets from there, as everything in front of it does.

    Args:
        to_stderr: where its standard output goes, as ours is for one JSON document.

    Returns:
        Its exit status, 128 + n when signal n ended it.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []
    interactive = sys.stdin is not None and os.isatty(0)

    def forward(number: int, frame: object) -> None:
        if child is None:
            early.append(number)
        elif interactive:
            if number not in (signal.SIGINT, signal.SIGQUIT):
                child.send_signal(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    # Those that are ignored, as under nohup, stay so: here, and in the command.
    before = {number: signal.signal(number, forward) for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        try:
            child = subprocess.Popen(
                list(command), env=dict(environ), process_group=None if interactive else 0, stdout=2 if to_stderr else None
            )
        except OSError as error:
            say_error(f"{command[0]} cannot be started: {error.strerror or error}")
            raise typer.Exit(Exit.NOT_EXECUTABLE) from None
        for number in early:
            forward(number, None)
        code = child.wait()
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
