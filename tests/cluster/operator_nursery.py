"""The operator as a process at half its price: forked from a server that has imported it.

An operator takes 2 s of CPU until it leads, more than half of it to import the same modules. What is forked runs the same command
line in a session of its own, so that it is killed and frozen like any other.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import IO, Any

PRELOADED = ["epochkv_operator.__main__", "epochkv_operator.control.runtime", "epochkv_operator.logs"]
MODULE = "epochkv_operator"


class ForkedOperator:
    """Of `subprocess.Popen` what `hack.standalone.process.Process` uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = int(process.pid or 0)

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked operator", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def popen(command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> ForkedOperator:
    """As `subprocess.Popen`, for the command line of an operator; standard error goes to `stdout`."""
    assert command[1:3] == ["-m", MODULE], command
    process = _context().Process(target=_run, args=(list(command[3:]), os.fspath(stdout.name), dict(env)))
    process.start()
    started = ForkedOperator(process)
    while started.poll() is None and os.getpgid(started.pid) != started.pid:  # its group is what it is ended by
        pass
    return started


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(arguments: list[str], log: str, environ: dict[str, str]) -> None:
    """Be the operator."""
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.clear()
    os.environ.update(environ)
    from epochkv_operator.__main__ import app

    sys.argv = [MODULE, *arguments]
    app(prog_name="epochkv-operator")
