"""Processes of tests at a fraction of their price: forked from a server that has imported what they need.

An operator takes 2 s of CPU until it leads, an engine 23 until it answers, most of it to import the same modules (measured). What
is forked runs the same command line in a session of its own, so that it is ended, frozen and killed like any other.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import IO, Any
from unittest import mock

from hack.waiting import poll


class Forked:
    """Of `subprocess.Popen` what `hack.standalone.process.Process` uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._reading = threading.Lock()  # how it ended can be read once
        self.pid = int(process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with self._reading:
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit status, as of `subprocess.Popen`."""
        if not poll(lambda: self.poll() is not None, timeout, 0.01):
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the process alone, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """The one that this process has: it has imported `modules`, in this `environ`."""

    def __init__(self, *modules: str, environ: Mapping[str, str] | None = None) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        with mock.patch.dict(os.environ, environ or {}):
            forkserver.ensure_running()

    def popen(self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> Forked:
        """As `subprocess.Popen`, for a `command` that starts with `PYTHON -m MODULE`; standard error goes to `stdout`."""
        assert command[1] == "-m", command
        process = self._context.Process(target=_be, args=(list(command[2:]), os.fspath(stdout.name), dict(env)))
        process.start()
        forked = Forked(process)
        poll(lambda: forked.poll() is not None or os.getpgid(forked.pid) == forked.pid, 60.0, 0.001)  # its group is what it is ended by
        return forked


def _be(arguments: list[str], log: str, environ: dict[str, str]) -> None:
    """Be what `python -m *arguments` is."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # that of the tests would outlive it, with its shared memory
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
