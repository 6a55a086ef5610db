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


def host_sysctls() -> dict[str, str]:
    """Settings that a cluster needs differently inside."""
    names = ("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/ipv4/conf/all/forwarding")
    return {name: Path("/proc/sys", name).read_text().strip() for name in names}


def interfaces() -> set[str]:
    """Network interfaces of the host."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def routes_within(second_octets: tuple[int, ...]) -> list[str]:
    """Routes of the host to 10.N.0.0/16 for these N."""
    wanted = tuple(f"10.{octet}." for octet in second_octets)
    return [line for line in _run("ip", "-4", "route").splitlines() if any(part in line for part in wanted)]


def mounts_with(*parts: str) -> list[str]:
    """Mounts of the host that mention one of the texts."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if any(part in line for part in parts)]


def cgroups(name: str) -> list[str]:
    """Cgroup folders of a cluster, in every hierarchy."""
    return [str(path) for depth in ("", "*/") for path in Path("/sys/fs/cgroup").glob(f"{depth}epochkv/{name}")]


def cgroup_pids(name: str) -> set[int]:
    """Pids (of the host) of all containers of a cluster."""
    return {int(pid) for top in cgroups(name) for file in Path(top).rglob("cgroup.procs") for pid in file.read_text().split()}


def started(pids: set[int]) -> dict[int, str]:
    """Pid -> start time in ticks, of those that live."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return found


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


def processes_naming(text: str) -> list[str]:
    """Command lines (zombies have none) that contain a text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found.append(f"{folder.name} {line}")
    return found
