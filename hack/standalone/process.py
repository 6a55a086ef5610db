"""One child process with a log file and an end that is certain: own session, ended by its group id, never by name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


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


class Process:
    """A running child. Use as a context manager, or call `end()`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self.popen = subprocess.Popen(
                list(command),
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environ or {})},
                cwd=cwd,
                start_new_session=True,
            )

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

    def end(self, grace_seconds: float = 10.0, *, whole_group: bool = True) -> None:
        """SIGTERM, then SIGKILL for whatever is left of the group after the grace. Safe to call twice.

        Args:
            grace_seconds: for the group to end by itself.
            whole_group: SIGTERM everybody; otherwise only the first process, as a kubelet does, which ends its children itself.
        """
        if not self._group_signal(signal.SIGCONT):
            self.popen.wait(10.0)
            return
        if whole_group:
            self._group_signal(signal.SIGTERM)
        else:
            self.popen.terminate()
        deadline = time.monotonic() + grace_seconds
        while self._group_signal(0) and time.monotonic() < deadline:
            self.popen.poll()  # reaps it, as one that is waited for is still a member
            time.sleep(0.02)
        self._group_signal(signal.SIGKILL)
        self.popen.wait(10.0)

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
