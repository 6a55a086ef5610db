"""`epochkv update --version V -- COMMAND`: push weights inside a weight update, whatever language pushes them."""

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

from epochkv_fence.cli.asking import NOTHING_ASKED, RESET_SECONDS, Config, Out, connect
from epochkv_fence.cli.exits import Exit
from epochkv_fence.cli.render import Output, Progress, say_error, show_reset
from epochkv_fence.client import PoolError, Update
from epochkv_fence.connection import CONFIG_ENV

HELP: Final = """Run COMMAND, which pushes new weights to every engine of the pool, inside a weight update.

Exactly the engines that are there when COMMAND starts share the new epoch; one that starts or restarts meanwhile serves
without reuse until the next update. When COMMAND fails, the epoch is raised with nobody named: weights
are unknown, and `epochkv status` shows them as `failed: VERSION ...`.

--order push_under_pause (default): COMMAND pauses the engines, pushes, and resumes nothing; resume after `epochkv update`.
--order fence_first: the old epoch is fenced before COMMAND starts, so engines may serve (without reuse) while it pushes.

With -o json its standard output goes to standard error. If epochkv itself is killed in the middle (kill -9, out of memory), COMMAND
goes on: end it before the next update. A lease and its margin later the hub raises the epoch, and no engine shares until then.

COMMAND gets EPOCHKV_WEIGHTS_VERSION, EPOCHKV_CONFIG and, with fence_first, EPOCHKV_EPOCH. Signals are passed on to its process
group. Exit status: that of COMMAND when it failed (128 + n for signal n), otherwise as for `epochkv reset`.

\b
  epochkv update --version step-42 -- python push_weights.py --step 42
  epochkv update --version step-42 --order fence_first -- ./push.sh && ./resume.sh
"""
FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
VERSION_ENV: Final = "EPOCHKV_WEIGHTS_VERSION"
EPOCH_ENV: Final = "EPOCHKV_EPOCH"
NOT_STARTED: Final = "COMMAND was not started, so nothing was pushed"


class CommandFailed(Exception):
    """The command ended with a status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the command ended with status {status}")
        self.status = status


def update(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What pushes the weights, after `--`.")],
    version: Annotated[str, typer.Option("--version", metavar="V", help="What you call the new weights; different for every update.")],
    order: Annotated[str, typer.Option(metavar="push_under_pause|fence_first", help="When the old epoch is fenced.")] = "push_under_pause",
    config: Config = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For what comes before COMMAND, and again for what comes after it.")
    ] = RESET_SECONDS,
    output: Out = Output.TABLE,
) -> None:
    """See HELP."""
    _check_command(command[0])
    progress = Progress(quiet=False)
    made: Update | None = None
    try:
        with (
            closing(connect(config, timeout, NOTHING_ASKED)) as pool,
            pool.weight_update(version, order, timeout, progress=progress) as made,  # type: ignore[arg-type]
        ):
            status = run(command, environment(os.environ, config, made), to_stderr=output is Output.JSON)
            if status != 0:
                raise CommandFailed(status)
    except CommandFailed as error:
        for note in getattr(error, "__notes__", [str(error)]):
            say_error(f"{error}. {note}")
        raise typer.Exit(error.status) from None
    except PoolError as error:
        if made is None:
            error.add_note(NOT_STARTED)
        raise
    except KeyboardInterrupt as error:
        for note in getattr(error, "__notes__", ("interrupted",)) if made is not None else (f"interrupted; {NOT_STARTED}",):
            say_error(note)
        raise typer.Exit(Exit.INTERRUPTED) from None
    finally:
        progress.stop()
    assert made is not None
    assert made.reset is not None
    show_reset(made.reset, output)
    if not made.reset.published:
        raise typer.Exit(Exit.NOT_PUBLISHED)


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


def environment(environ: Mapping[str, str], config: str | None, made: Update) -> dict[str, str]:
    """What the command sees."""
    found = {**environ, VERSION_ENV: made.version}
    found.pop(EPOCH_ENV, None)
    if made.epoch is not None:
        found[EPOCH_ENV] = str(made.epoch)
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
