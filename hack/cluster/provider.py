"""What a cluster provider must offer, and how one fails."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Report = Callable[[str], None]


def check_installed(tools: Mapping[str, str]) -> None:
    """Raise ClusterError with the fix unless each tool is on PATH. `tools`: program -> Debian's package."""
    if missing := sorted({package for tool, package in tools.items() if shutil.which(tool) is None}):
        raise ClusterError(f"not installed: {', '.join(missing)}: 'apt-get install {' '.join(missing)}'")


class ClusterError(RuntimeError):
    """Something about a cluster failed. The text says what, to which object, and what to do."""


def run_command_line(app: Callable[[], object]) -> None:
    """A command line: known failures are one clear message and exit status 1."""
    try:
        app()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True)
class ComponentStatus:
    """One line of `status`. `detail` holds the last log lines of what is dead."""

    name: str
    alive: bool
    pid: int | None = None
    detail: str = ""


class Provider(Protocol):
    """One cluster, known by its name. Every operation may be repeated."""

    name: str

    def up(self, report: Report, mounts: Sequence[Path] = ()) -> None:
        """Create or repair the cluster and wait until its node is Ready. `mounts`: host folders that hostPath volumes will name."""
        ...

    def down(self, report: Report) -> None:
        """Remove everything, also after a crash; success when there is nothing."""
        ...

    def status(self) -> list[ComponentStatus]:
        """State of every component; empty when there is no such cluster."""
        ...

    def kubeconfig(self) -> Path:
        """File that reaches the cluster as admin from this machine."""
        ...

    def load_images(self, archives: Sequence[Path], report: Report) -> None:
        """Make docker-archive files available to pods with imagePullPolicy IfNotPresent or Never."""
        ...
