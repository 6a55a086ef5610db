"""Child processes with a log file and an end that is certain: own session, ended by its group id, never by name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_LEFT_BEHIND_SECONDS = 5.0
"""For what the first process of a group has left behind: it is told to end, too, and killed then."""


class ProcessError(RuntimeError):
    """A child ended or never became ready; the message carries the last lines of its log."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_open(port: int, host: str = "127.0.0.1") -> bool:
    """Does something accept connections there?"""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


Popen = Callable[..., Any]
"""`subprocess.Popen`, or what makes a child that has its `pid`, `returncode`, `poll`, `wait`, `send_signal` and `terminate`."""


class Process:
    """A running child. Use as a context manager, or call `end()`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        popen: Popen = subprocess.Popen,
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink, _starting:
            if _closed.is_set():
                raise ProcessError(f"{name} is not started: everything ends")
            self.popen = popen(
                list(command),
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environ or {})},
                cwd=cwd,
                start_new_session=True,
            )
            _living.add(self)

    def alive(self) -> bool:
        return self.popen.poll() is None

    def tail(self, num_lines: int = 25) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def wait_until(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll `ready` until it is true.

        Raises:
            ProcessError: the process ended, or `seconds` passed.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.alive():
                raise ProcessError(
                    f"{self.name} ended with status {self.popen.returncode} before {what}; its log {self.log} ends with\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name}: not {what} after {seconds:.0f} s; its log {self.log} ends with\n{self.tail()}")
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        """Send to the whole group (SIGSTOP, SIGCONT, SIGKILL, ...)."""
        os.killpg(self.popen.pid, number)
        if number == signal.SIGKILL:
            _living.discard(self)

    def end(self, grace_seconds: float = 10.0, *, whole_group: bool = True) -> None:
        """SIGTERM, then SIGKILL for whatever is left of the group after the grace. Safe to call twice.

        Args:
            grace_seconds: for the group to end by itself.
            whole_group: SIGTERM everybody; otherwise only the first process, as a kubelet does, which ends its children itself:
                what it leaves behind is told when it is gone, and not waited for as long.
        """
        if self._group_signal(signal.SIGCONT):
            self._end_group(grace_seconds, whole_group)
        self.popen.wait(10.0)
        _living.discard(self)

    def _end_group(self, grace_seconds: float, whole_group: bool) -> None:
        if whole_group:
            self._group_signal(signal.SIGTERM)
        else:
            self.popen.terminate()
        deadline = time.monotonic() + grace_seconds
        orphaned = False
        while self._group_signal(0) and time.monotonic() < deadline:
            if self.popen.poll() is not None and not whole_group and not orphaned:  # reaped: it is no member any more
                orphaned, deadline = True, min(deadline, time.monotonic() + _LEFT_BEHIND_SECONDS)
                self._group_signal(signal.SIGTERM)
            time.sleep(0.02)
        self._group_signal(signal.SIGKILL)

    def _group_signal(self, number: int) -> bool:
        """False: nobody is left in the group."""
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


_living: set[Process] = set()
_starting = threading.Lock()
_closed = threading.Event()


@contextmanager
def nothing_left(say: Callable[[str], None]) -> Iterator[None]:
    """For a whole program: whatever ends the block, SIGTERM and Ctrl-C included, every `Process` ends, and no other starts.

    A thread that mends what a fault has broken may be about to start something again. Of several signals the first one
    counts: another would leave half of it running.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, frame: None)  # a handler, as children would inherit SIG_IGN
        say(f"{signal.Signals(number).name}: ending what was started")
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        yield
    finally:
        with _starting:
            _closed.set()
        with ThreadPoolExecutor() as threads:
            list(threads.map(Process.end, tuple(_living)))
