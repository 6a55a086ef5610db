"""`epochkv update --version V -- COMMAND`: push weights, and prove that they arrived, whatever language pushes them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Annotated, Final

import typer

from epochkv_fence.cli.asking import NOTHING_ASKED, Config, Out, connect, gone
from epochkv_fence.cli.exits import Exit
from epochkv_fence.cli.render import Output, StatusLine, push_waits_for, say_error, show_weights, shown_weights
from epochkv_fence.client import PoolError, Update, WeightsDiverged, WeightsReport
from epochkv_fence.client.pool import WEIGHTS_SECONDS
from epochkv_fence.connection import CONFIG_ENV

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
VERSION_ENV: Final = "EPOCHKV_WEIGHTS_VERSION"
NOT_STARTED: Final = "COMMAND was not started, so nothing was pushed"
ENDED_WELL: Final = "COMMAND ended well; `epochkv weights` shows which engines hold what"


class CommandFailed(Exception):
    """The command ended with a status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the command ended with status {status}")
        self.status = status


def update(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What pushes the weights, after `--`.")],
    version: Annotated[str, typer.Option("--version", metavar="V", help="What you call the new weights; of two names the newest counts.")],
    config: Config = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For what comes before COMMAND, and again for what comes after it.")
    ] = WEIGHTS_SECONDS,
    output: Out = Output.TABLE,
    order: Annotated[
        str | None, gone("--order", "weights name themselves, so no order is wrong, and engines may serve during the push. Leave it out")
    ] = None,
) -> None:
    """Run COMMAND, which pushes new weights, and wait until every engine of the pool holds them, bit by bit.

    Engines name KV by the weights that they hold, so COMMAND may push in any order, paused or serving. Afterwards the new weights are
    called V, and an engine that missed the push is named.

    With -o json its standard output goes to standard error. COMMAND gets EPOCHKV_WEIGHTS_VERSION and EPOCHKV_CONFIG. Signals are passed
    on to its process group.

    Exit status: that of COMMAND when it failed (128 + n for signal n; nothing is waited for then); 0 all engines hold the
    same, new weights; 3 they do not in time, also when nothing has changed; 4 no hub answered: before COMMAND, which is not
    started then, or after it.

    \b
      epochkv update --version step-42 -- python push_weights.py --step 42
    """
    _check_command(command[0])
    found = _push(command, version, config, timeout, output)
    if output is Output.JSON:
        show_weights(found, output)
    else:
        print(shown_weights(found))


def _push(command: Sequence[str], version: str, config: str | None, timeout: float, output: Output) -> WeightsReport:
    """Run the command, and wait until every engine holds the weights that it pushed."""
    progress = StatusLine(push_waits_for)
    made: Update | None = None
    has_ended = False
    try:
        with (
            closing(connect(config, timeout, NOTHING_ASKED)) as pool,
            pool.weight_update(version, timeout_s=timeout, progress=progress) as made,
        ):
            status = run(command, environment(os.environ, config, version), to_stderr=output is Output.JSON)
            if status != 0:
                raise CommandFailed(status)
            has_ended = True
    except CommandFailed as error:
        say_error(f"{error}; `epochkv weights` shows which engines hold what")
        raise typer.Exit(error.status) from None
    except PoolError as error:
        if isinstance(error, WeightsDiverged) and output is Output.JSON:
            show_weights(error.report, output)
        elif not isinstance(error, WeightsDiverged):
            error.add_note(ENDED_WELL if has_ended else NOT_STARTED)
        raise
    except KeyboardInterrupt:
        say_error(f"interrupted; {ENDED_WELL if has_ended else NOT_STARTED}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    finally:
        progress.stop()
    assert made.report is not None
    return made.report


def _check_command(name: str) -> None:
    """End with what a shell would say, before anything is asked of the pool."""
    if shutil.which(name) is not None:
        return
    if shutil.which(name, os.F_OK) is None and not (os.path.dirname(name) and os.path.exists(name)):
        say_error(f"{name} is not a command; nothing was asked of the pool")
        raise typer.Exit(Exit.NO_COMMAND)
    why = "is a directory" if os.path.isdir(name) else "may not be executed by this user"
    say_error(f"{name} {why}; nothing was asked of the pool")
    raise typer.Exit(Exit.NOT_EXECUTABLE)


def environment(environ: Mapping[str, str], config: str | None, version: str) -> dict[str, str]:
    """What the command sees."""
    found = {**environ, VERSION_ENV: version}
    given = config if config is not None else found.get(CONFIG_ENV)
    if given:
        found[CONFIG_ENV] = given if given.lstrip().startswith("{") else os.path.abspath(given)
    return found


def run(command: Sequence[str], environ: Mapping[str, str], *, to_stderr: bool = False) -> int:
    """Run the command in a process group of its own, which gets our signals and, if we have one, the terminal.

    Args:
        to_stderr: where its standard output goes, as ours is for one JSON document.

    Returns:
        Its exit status, 128 + n when signal n ended it.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: object) -> None:
        if child is None:
            early.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        with _terminal() as terminal:
            try:
                child = subprocess.Popen(list(command), env=dict(environ), process_group=0, stdout=2 if to_stderr else None)
            except OSError as error:
                say_error(f"{command[0]} cannot be started: {error.strerror or error}")
                return Exit.NOT_EXECUTABLE
            for number in early:
                forward(number, None)
            return _wait(child, terminal)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes], terminal: bool) -> int:
    """Until the child has ended; one that is stopped from the terminal (Ctrl-Z) stops us with it."""
    while True:
        if terminal:
            _own_terminal(child.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGCONT)
        _, status = os.waitpid(child.pid, os.WUNTRACED if terminal else 0)
        if os.WIFSTOPPED(status):
            _own_terminal(os.getpgrp())
            os.killpg(os.getpgrp(), signal.SIGSTOP)
            continue
        code = os.waitstatus_to_exitcode(status)
        child.returncode = code
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _terminal() -> Iterator[bool]:
    """Whether our standard input is a terminal that we are in front of; it is ours again when the block ends."""
    try:
        ours = sys.stdin is not None and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        ours = False
    if not ours:
        yield False
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield True
    finally:
        _own_terminal(os.getpgrp())
        signal.signal(signal.SIGTTOU, before)


def _own_terminal(group: int) -> None:
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)
