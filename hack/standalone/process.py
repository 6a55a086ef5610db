"""Child processes with a log file and an end that is certain: own session, ended by its group id, never by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from hack.waiting import eventually, poll

_LEFT_BEHIND_SECONDS = 5.0
"""For what the first process of a group has left behind: it is told to end, too, and killed then."""


class ProcessError(RuntimeError):
    """A child ended or never became ready; the message carries the last lines of its log."""


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
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def wait_until(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll `ready` until it is true.

        Raises:
            ProcessError: the process ended, or `seconds` passed.
        """
        found = poll(lambda: "ready" if ready() else "" if self.alive() else "ended", seconds, 0.1)
        if found != "ready":
            why = f"ended with status {self.popen.returncode} before {what}" if found else f"was not {what} after {seconds:.0f} s"
            raise ProcessError(f"{self.name} {why}; its log {self.log} ends with\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send to the whole group (SIGSTOP, SIGCONT, ...)."""
        os.killpg(self.popen.pid, number)

    def freeze(self) -> None:
        """SIGSTOP; returns when every thread of the first process stands still."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: self._run_states() == {"T"}, f"{self.name} stands still", 10.0, 0.01)

    def thaw(self) -> None:
        """SIGCONT; returns when it runs."""
        self.signal(signal.SIGCONT)
        eventually(lambda: "T" not in self._run_states(), f"{self.name} runs", 10.0, 0.01)

    def _run_states(self) -> set[str]:
        """The kernel's letters of its threads: R, S, T (stopped), Z."""
        states = set()
        for path in Path(f"/proc/{self.popen.pid}/task").glob("*/stat"):
            with suppress(OSError):  # it ends
                states.add(path.read_text().rpartition(")")[2].split()[0])
        return states

    def kill(self) -> None:
        """SIGKILL to the whole group, and wait for the end. Safe to call twice."""
        self._group_signal(signal.SIGKILL)
        self.popen.wait(30.0)
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

    def __exit__(self, *_: object) -> None:
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
