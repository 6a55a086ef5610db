"""A Docker daemon of one cluster, for machines where none runs: Debian's docker.io, unpacked and not installed.

It lives in namespaces of its own (`node.py`), as a local cluster does. So its bridges, iptables rules, mounts, sysctls and containers end
with the namespaces' init, and a daemon of somebody else, or of another cluster, is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hack.cluster import less_runc
from hack.cluster.binaries import cache_root
from hack.cluster.config import ClusterState
from hack.cluster.node import Node, host
from hack.cluster.process import log_tail
from hack.cluster.provider import ClusterError, Report, check_installed
from hack.waiting import poll

MODULES = Path("/lib/modules")
"""kind mounts it into every node; Docker makes it where it is not."""
_SECONDS = 60.0
_TOOLS = {"containerd": "containerd", "runc": "runc", "iptables": "iptables", "ip": "iproute2", "nsenter": "util-linux"}


def environment(state: ClusterState) -> dict[str, str]:
    """For commands that talk to the daemon; the package's `docker` where the machine has none."""
    return {**os.environ, "DOCKER_HOST": f"unix://{state.run}/docker.sock", "PATH": f"{os.environ['PATH']}:{_package() / 'usr/bin'}"}


def start(node: Node, report: Report) -> None:
    """Start the daemon in the node's namespaces, unless it runs; returns when it answers."""
    node.ensure()
    if node.table.alive("dockerd"):
        return
    _unpack(report)
    run = node.state.run
    if not MODULES.exists():
        (run / "made-modules").touch()
    settings = {
        "hosts": [f"unix://{run}/docker.sock"],
        "data-root": str(node.state.data / "docker"),
        "exec-root": str(run / "docker"),
        "pidfile": str(run / "dockerd.pid"),
        "storage-driver": "overlay2",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "cgroup-parent": node.state.cgroup,
        "runtimes": {"less": {"path": less_runc.__file__}},
        "default-runtime": "less",
    }
    (run / "dockerd.json").write_text(json.dumps(settings, indent=1))
    (run / "dockerd.pid").unlink(missing_ok=True)
    path = f"PATH={_package() / 'usr/sbin'}:{_package() / 'usr/bin'}:{node.environment['PATH']}"
    daemon = node.start("dockerd", ["env", path, "dockerd", "--config-file", str(run / "dockerd.json")])

    def answers() -> bool:
        command = ["docker", "version"]
        return subprocess.run(command, env=environment(node.state), capture_output=True, check=False).returncode == 0

    if not poll(lambda: answers() or not daemon.alive(), _SECONDS, 0.2) or not daemon.alive():
        raise ClusterError(f"dockerd did not start; its last log lines:\n{log_tail(Path(daemon.log))}")


def remove(node: Node) -> None:
    """End the daemon with all that it runs, and remove what lies outside its namespaces."""
    made = (node.state.run / "made-modules").exists()
    node.remove()
    if made and MODULES.is_dir() and not any(MODULES.iterdir()):
        MODULES.rmdir()


def _package() -> Path:
    return cache_root() / "docker.io"


def _unpack(report: Report) -> None:
    check_installed(_TOOLS)
    if (_package() / "usr/sbin/dockerd").exists():
        return
    report("Docker: downloading and unpacking Debian's docker.io (36 MB, once)")
    _package().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_package().parent, prefix=".docker-") as name:
        folder = Path(name)
        host("apt-get", "update", "-qq")
        host("sh", "-c", 'cd "$1" && apt-get download -qq docker.io', "sh", name)
        host("dpkg", "-x", str(next(folder.glob("*.deb"))), str(folder / "root"))
        shutil.rmtree(_package(), ignore_errors=True)
        (folder / "root").rename(_package())
