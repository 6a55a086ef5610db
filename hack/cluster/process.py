"""Long-running component processes, known by pid *and* start time, so that nothing else is ever signalled.

Each one gets a session of its own, a log file of its own and a small JSON record beside it. The records are all that a later
`down` or `status` needs, also after a crash of the process that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.cluster.provider import ClusterError
from hack.waiting import poll

# Launchers (`nsenter`) that are children of this Python process: they end with their component and must be reaped.
_launchers: list[subprocess.Popen[bytes]] = []


def start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot (field 22 of /proc/PID/stat); None when dead or a zombie.

    A zombie with threads that are still on their way out lives: they hold its sockets, so its ports are not free yet.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        num_threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" and num_threads <= 1 else int(fields[19])


@dataclass(frozen=True)
class Component:
    """A started process. `start` is its start time in ticks: a reused pid does not match."""

    name: str
    pid: int
    start: int
    log: str
    argv: list[str]

    def alive(self) -> bool:
        """True while this very process runs. Reaps it when it is our child."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        _launchers[:] = [launcher for launcher in _launchers if launcher.poll() is None]
        return start_time(self.pid) == self.start

    def signal(self, number: int) -> bool:
        """Send a signal to this very process; False when it is gone."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def end(self, grace: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds (0: SIGKILL at once). Returns when the process is gone."""
        if grace > 0:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            if poll(lambda: not self.alive(), grace):
                return
        self.signal(signal.SIGKILL)
        if not poll(lambda: not self.alive(), 20):
            raise ClusterError(f"{self.name} (pid {self.pid}) does not die: look at /proc/{self.pid}/stack")

    def tail(self, lines: int = 15) -> str:
        return log_tail(Path(self.log), lines)


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a file, or a note that there is none."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - 64 * 1024))
            text = handle.read().decode(errors="replace")
    except OSError:
        return f"(no log at {path})"
    return "\n".join(text.splitlines()[-lines:]) or "(empty log)"


class ProcessTable:
    """The processes of one cluster: records in `folder/pids`, logs in `folder/logs`."""

    def __init__(self, folder: Path) -> None:
        self.pids = folder / "pids"
        self.logs = folder / "logs"

    def get(self, name: str) -> Component | None:
        """The recorded process, alive or not."""
        try:
            return Component(**json.loads((self.pids / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def all(self) -> list[Component]:
        """Every record, in order of start."""
        files = sorted(self.pids.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [found for path in files if (found := self.get(path.stem))]

    def alive(self, name: str) -> bool:
        found = self.get(name)
        return found is not None and found.alive()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> Component:
        """Start a component in a session of its own.

        `prefix` is a launcher that forks exactly once (`nsenter --fork`): then its child is what gets recorded.
        """
        self.pids.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*prefix, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(env) if env is not None else _plain_environment(),
                cwd=cwd or "/",
            )
        if prefix:
            _launchers.append(process)
            pid = _only_child(process.pid, name, log)
        else:
            process.returncode = 0  # Not waited for through this object: `Component.alive` reaps.
            pid = process.pid
        started = start_time(pid)
        if started is None:
            raise ClusterError(f"{name} ended at once; last lines of {log}:\n{log_tail(log)}")
        component = Component(name, pid, started, str(log), list(argv))
        staging = self.pids / f".{name}.tmp"
        staging.write_text(json.dumps(asdict(component)))
        staging.rename(self.pids / f"{name}.json")
        return component

    def forget(self, name: str) -> None:
        """Drop the record of a process that has ended."""
        (self.pids / f"{name}.json").unlink(missing_ok=True)


def _plain_environment() -> dict[str, str]:
    """What components see: a PATH with sbin and nothing of the caller's proxies, tokens or Python settings."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


def _only_child(launcher: int, name: str, log: Path) -> int:
    children: list[int] = []

    def seen() -> bool:
        with contextlib.suppress(OSError):
            children[:] = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
        return bool(children) or start_time(launcher) is None

    if not poll(seen, 10, 0.01) or not children:
        raise ClusterError(f"{name} ended at once; last lines of {log}:\n{log_tail(log)}")
    return children[0]
