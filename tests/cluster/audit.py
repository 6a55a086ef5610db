"""What a local cluster could leave on the machine, asked from the kernel and not from the code that removes it."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def host_iptables() -> str:
    """All rules and chains of the host's own network namespace, without counters."""
    return re.sub(r"\[\d+:\d+\]|^#.*$", "", _run("iptables-save"), flags=re.MULTILINE)


def interfaces() -> set[str]:
    """Network interfaces of the host."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def mounts_with(*parts: str) -> list[str]:
    """Mounts of the host that mention one of the texts."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if any(part in line for part in parts)]


def cgroups(name: str) -> list[str]:
    """Cgroup folders of a cluster, in every hierarchy."""
    return [str(path) for depth in ("", "*/") for path in Path("/sys/fs/cgroup").glob(f"{depth}epochkv/{name}")]


def namespaces(pid: int) -> dict[str, str]:
    """Kind -> identity of the namespaces of a process."""
    return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "mnt", "pid")}


def processes_in(wanted: dict[str, str]) -> set[int]:
    """Pids in any of these namespaces."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if any(str((folder / "ns" / kind).readlink()) == identity for kind, identity in wanted.items()):
                    found.add(int(folder.name))
    return found
