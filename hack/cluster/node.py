"""The node's own world: network, mount, PID, UTS and IPC namespaces around one init process, and the veth pair to the host.

When that init is killed, the kernel kills everything that the cluster ever started, containers too, and drops its mounts,
interfaces, iptables rules and sysctls. So `down` cannot forget any, and two clusters cannot collide. Only the veth, the routes, the
cgroups and the folders live outside; they are removed by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hack.cluster import config
from hack.cluster.config import ClusterState
from hack.cluster.process import Component, ProcessTable
from hack.cluster.provider import ClusterError
from hack.waiting import poll

CGROUPS = Path("/sys/fs/cgroup")
MARK = "EPOCHKV_CLUSTER_RUN"  # in the environment of everything we start: how `down` finds what has no record
_SHARES = 8 * 1024  # of the CPUs on v1, where all pods together would get what one process outside of any cgroup gets
_NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc")

# Runs as PID 1 of the node. /run and /var/log become the node's own; the cluster's run folder stays visible at its path.
# SIGCHLD is ignored across exec, so the kernel reaps orphans and `sleep` is a sufficient init.
_INIT = """
set -eu
run=$1 data=$2 hostname=$3 link=$4
mount -t proc proc /proc
exec 3<"$run"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$run" /run/lock /run/netns
mount -c --bind /proc/self/fd/3 "$run"
exec 3<&-
mkdir -p "$data/log" "$data/cni-cache" /var/lib/cni  # libcni's cache folder cannot be configured: a mount point only
mount --bind "$data/log" /var/log
mount --bind "$data/cni-cache" /var/lib/cni
mount --make-rshared /
hostname "$hostname"
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward
if [ -e /proc/sys/net/ipv6 ]; then echo 1 >/proc/sys/net/ipv6/conf/all/forwarding; fi
touch "$link"
trap '' CHLD
exec sleep infinity
"""


def host(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command on the host; an error carries its words."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise ClusterError(f"'{' '.join(command)}' failed: {(done.stderr or done.stdout).strip()}")
    return done


class Node:
    """The namespaces of one cluster."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.table = ProcessTable(state.run)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of everything on the node."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            MARK: str(self.state.run),
        }

    def alive(self) -> bool:
        return self.table.alive("init")

    def ensure(self) -> bool:
        """Create the namespaces and the network unless they are there; True when they are new."""
        new = not self.alive()
        if new:
            self._start_init()
            self.make_cgroups()
        self._connect()
        return new

    def _start_init(self) -> None:
        ready = self.state.run / ".init-ready"
        ready.unlink(missing_ok=True)
        arguments = [str(self.state.run), str(self.state.data), self.state.node_name, str(ready)]
        init = self.table.start(
            "init",
            ["sh", "-c", _INIT, "init", *arguments],
            env=self.environment,
            prefix=["unshare", *_NAMESPACES, "--propagation", "private", "--fork"],
        )
        if not poll(lambda: ready.exists() or not init.alive(), 20) or not ready.exists():
            raise ClusterError(f"cannot set up the node's namespaces (root is needed):\n{init.tail()}")
        ready.unlink()

    def _connect(self) -> None:
        net, pid = self.state.network, str(self._init().pid)
        if not Path(f"/sys/class/net/{net.device}").exists():
            host("ip", "link", "add", net.device, "type", "veth", "peer", "name", "eth0", "netns", pid)
        at_once = ["nodad"] if net.ipv6 else []  # no other machine is on this link, whose addresses would be taken
        self.run(["ip", "address", "replace", f"{net.node}/{net.link}", "dev", "eth0", *at_once])
        self.run(["ip", "link", "set", "eth0", "up"])
        host("ip", "address", "replace", f"{net.host}/{net.link}", "dev", net.device, *at_once)
        host("ip", "link", "set", net.device, "up")
        for cidr in (net.range, net.services):
            # The second route keeps packets for a dead cluster on this machine.
            host("ip", "route", "replace", cidr, "via", net.node, "dev", net.device)
            host("ip", "route", "replace", "unreachable", cidr, "metric", "4000")
        # The API server asks webhooks by their Service's address: without a route to it, nothing comes to where kube-proxy replaces it.
        self.run(["ip", "route", "replace", net.services, "dev", "eth0"])

    def _init(self) -> Component:
        init = self.table.get("init")
        if init is None or not init.alive():
            raise ClusterError(f"cluster {self.state.name} is not running: 'python -m hack.cluster up' starts it")
        return init

    def prefix(self) -> list[str]:
        """Launcher that runs a command on the node: append the command."""
        return ["nsenter", "-t", str(self._init().pid), "--mount", "--net", "--pid", "--uts", "--ipc", "--"]

    def start(self, name: str, argv: Sequence[str]) -> Component:
        return self.table.start(name, argv, env=self.environment, prefix=self.prefix())

    def run(self, argv: Sequence[str], *, stdin: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the node to its end; an error carries its words."""
        done = subprocess.run(
            [*self.prefix(), *argv],
            check=False,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            capture_output=True,
            text=True,
            env=self.environment,
        )
        if done.returncode != 0:
            raise ClusterError(f"'{' '.join(argv)}' on the node failed: {(done.stderr or done.stdout).strip()}")
        return done

    # -- removal -----------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Kill the init and remove what lies outside it. The record goes last: what is interrupted can be repeated."""
        self.end_processes()
        self.disconnect()
        self.remove_cgroups()
        _remove(self.state.data)
        _remove(self.state.run, last="cluster.json")
        if not config.known():
            self.remove_mount_point()

    def end_processes(self) -> None:
        """Kill the init (and with it everything inside), then whatever else is recorded or carries our mark."""
        init = self.table.get("init")
        if init:
            init.end(grace=0)
        for component in self.table.all():
            component.end(grace=0)
            self.table.forget(component.name)
        if not poll(lambda: not _end_marked(self.state.run), 30, 0.1):
            raise ClusterError(f"processes of cluster {self.state.name} do not die: {marked(self.state.run)}")

    def disconnect(self) -> None:
        """Remove the veth and the routes; what is not there is fine."""
        net = self.state.network
        host("ip", "link", "delete", net.device, check=False)
        for cidr in (net.range, net.services):
            host("ip", "route", "delete", "unreachable", cidr, "metric", "4000", check=False)

    def make_cgroups(self) -> None:
        """Make the parent of the pods' cgroups in every hierarchy (v1) or the one (v2), with the parent's CPUs and memory nodes."""
        v2 = (CGROUPS / "cgroup.controllers").exists()
        for root in _hierarchies():
            folder = root
            for part in self.state.cgroup.strip("/").split("/"):
                parent, folder = folder, folder / part
                if v2:
                    available = (parent / "cgroup.controllers").read_text().split()
                    _write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in available))
                folder.mkdir(exist_ok=True)
                if v2:
                    continue
                for file in ("cpuset.cpus", "cpuset.mems"):
                    if (parent / file).exists():
                        _write(folder / file, (parent / file).read_text())
                if (folder / "cpu.shares").exists():
                    _write(folder / "cpu.shares", str(_SHARES))

    def remove_cgroups(self) -> None:
        """Remove the cluster's cgroups in every hierarchy (v1) or the one (v2)."""
        for root in _hierarchies():
            folder = root / self.state.cgroup.lstrip("/")
            if folder.is_dir() and not poll(lambda folder=folder: _remove_tree(folder), 20, 0.1):  # type: ignore[misc]
                raise ClusterError(f"cgroup {folder} cannot be removed: processes in it: {_processes(folder)}")
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    @staticmethod
    def remove_mount_point() -> None:
        """Remove what `ensure` made outside the namespaces, if nobody else uses it."""
        with contextlib.suppress(OSError):
            Path("/var/lib/cni").rmdir()


@contextmanager
def locked(name: str, last: bool = False) -> Iterator[None]:
    """One `up` or `down` of a name at a time. `last`: nothing of it is left afterwards."""
    path = config.run_root() / f".{name}.lock"
    handle = _lock(path)
    try:
        yield
        if last:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    for root in (config.run_root(), config.data_root()) if last else ():
        with contextlib.suppress(OSError):  # other clusters are in it, or it is gone
            root.rmdir()


def _lock(path: Path) -> int:
    """Lock a file and return its descriptor. A `down` removes the file and, when empty, the folder: what is locked must still be there."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
            os.close(handle)


def claim(name: str, ipv6: bool = False) -> ClusterState:
    """The recorded cluster, else a new record with a network index that nobody has."""
    lock = os.open(config.run_root(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := config.load(name):
            if found.network.ipv6 != ipv6:
                raise ClusterError(f"cluster {name} is of IPv{6 if found.network.ipv6 else 4}: 'make down' removes it")
            return found
        taken = {network.index for network in config.known().values()}
        made = config.make(name, config.Network(config.free_index(taken, host("ip", "-4", "route").stdout), ipv6))
        config.save(made)
        return made
    finally:
        os.close(lock)


def _hierarchies() -> list[Path]:
    """Mount points of cgroup hierarchies: the one of v2, or those of v1 (and, mixed, the controllerless v2 one)."""
    if (CGROUPS / "cgroup.procs").exists():
        return [CGROUPS]
    found = [path for path in sorted(CGROUPS.glob("*")) if (path / "cgroup.procs").exists()]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _write(file: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # What a hierarchy does not let us set, the kubelet reports with its name.
        file.write_text(text)


def marked(run: Path) -> list[int]:
    """Pids of processes whose environment says that they belong to this cluster."""
    needle = f"{MARK}={run}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _end_marked(run: Path) -> bool:
    """Kill what carries the mark; True while there was any."""
    pids = marked(run)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if pids:
        time.sleep(0.05)
    return bool(pids)


def _remove_tree(folder: Path) -> bool:
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return not folder.exists()


def _processes(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "cgroup.procs").read_text().split().__repr__()
    return "unknown"


def _remove(folder: Path, last: str | None = None) -> None:
    """Remove a tree, refusing to touch anything that is mounted below it; the entry `last` goes last."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if below := [mount for mount in mounts if mount.startswith(f"{folder}/") or mount == str(folder)]:
        raise ClusterError(f"{folder} has mounts below it ({', '.join(below[:3])}): unmount them, then run 'down' again")
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name == last:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(folder)
