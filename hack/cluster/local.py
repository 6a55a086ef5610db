"""The local provider: every Kubernetes component as a process of its own inside the node's namespaces (`node.py`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from hack.cluster import config
from hack.cluster.binaries import Binaries, build
from hack.cluster.config import ClusterState
from hack.cluster.controlplane import Api
from hack.cluster.node import Node, claim, locked
from hack.cluster.process import log_tail
from hack.cluster.provider import ClusterError, ComponentStatus, Report, check_installed
from hack.waiting import poll

COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "containerd",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
)
_SECONDS = 120.0  # for each step, on a busy machine; usually a few
# Whose configuration a file is; CNI and resolv.conf are read anew for every pod.
_READER = {
    "containerd.toml": "containerd",
    "kubelet.json": "kubelet",
    "kube-proxy.json": "kube-proxy",
    "Corefile": "coredns",
}
_KEY = re.compile(r"[0-9a-f]{12}")
_TOOLS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}


class LocalCluster:
    """One local cluster, of IPv4 or IPv6. Needs root, Debian's containerd, runc, iptables and containernetworking-plugins."""

    def __init__(self, name: str, ipv6: bool = False) -> None:
        self.name, self.ipv6 = config.check_name(name), ipv6

    # -- Provider ----------------------------------------------------------------------------------------------------

    def up(self, report: Report, mounts: Sequence[Path] = ()) -> None:
        """Create or repair; about 25 s on two cores once the binaries are built."""
        _check_machine(mounts)
        binaries = build(report)
        from hack.images import static  # late: images depend on this package

        pause_archive = static.ensure(binaries.path("pause"), "pause", config.PAUSE_IMAGE)
        started = time.monotonic()

        def step(text: str) -> None:
            report(f"[{time.monotonic() - started:5.1f} s] {text}")

        with locked(self.name):
            cluster = claim(self.name, self.ipv6)
            node = Node(cluster)
            if not node.alive():
                self._forget_processes(node)
            elif (server := node.table.get("kube-apiserver")) and server.argv[0] != str(binaries.path("kube-apiserver")):
                raise ClusterError(f"cluster {self.name} runs another Kubernetes ({server.argv[0]}): 'make down' removes it")
            if node.ensure():
                step(f"node {cluster.node_name}: own namespaces, {cluster.network.node} on {cluster.network.device}")
            self._write_configuration(node)
            self._start_components(node, binaries, pause_archive, step)
        step(f"cluster {self.name} is ready: export KUBECONFIG={self.kubeconfig()}")

    def down(self, report: Report) -> None:
        """Kill the node's init and remove what lies outside it."""
        with locked(self.name, last=True):
            cluster = config.load(self.name)
            if cluster is None:
                # No record: at most folders of an `up` that died before it wrote one.
                shutil.rmtree(config.run_root() / self.name, ignore_errors=True)
                shutil.rmtree(config.data_root() / self.name, ignore_errors=True)
                report(f"cluster {self.name}: nothing to remove")
            else:
                Node(cluster).remove()
                report(f"cluster {self.name} is removed")

    def status(self) -> list[ComponentStatus]:
        """Processes, then what the API says of itself and the node."""
        cluster = config.load(self.name)
        if cluster is None:
            return []
        node, lines = Node(cluster), []
        for name in ("init", *COMPONENTS):
            component = node.table.get(name)
            alive = component is not None and component.alive()
            detail = "" if alive else (component.tail(5) if component else "not started")
            lines.append(ComponentStatus(name, alive, component.pid if component else None, detail))
        api = Api(cluster.layout)
        for name, ok in (("api /readyz", api.ok("/readyz")), (f"node {cluster.node_name}", _node_ready(api, cluster))):
            lines.append(ComponentStatus(name, ok, None, "" if ok else "not ready"))
        return lines

    def kubeconfig(self) -> Path:
        return self._state().layout.kubeconfig("admin")

    def load_images(self, archives: Sequence[Path], report: Report) -> None:
        """Import into containerd's `k8s.io` namespace."""
        node = Node(self._state())
        record = node.state.data / "loaded.json"
        loaded: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
        for path in archives:
            started = time.monotonic()
            # Archives of hack.images carry a hash of their content in the name: what is there is not imported again.
            name, _, key = path.stem.rpartition("-")
            if _KEY.fullmatch(key) and loaded.get(name) == key:
                report(f"{path.name} is loaded")
                continue
            self._import(node, path)
            loaded[name] = key
            record.write_text(json.dumps(loaded))
            report(f"loaded {path.name} in {time.monotonic() - started:.1f} s")

    # -- beyond Provider: what fault tests use --------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The node's namespaces: `run` commands there, take `network.device` down."""
        return Node(self._state())

    @property
    def network(self) -> config.Network:
        return self._state().network

    def signal(self, component: str, number: int) -> None:
        """Send a signal to a component (SIGSTOP, SIGCONT, SIGKILL); `up` starts dead ones again."""
        found = self.node.table.get(component)
        if found is None or not found.signal(number):
            raise ClusterError(f"{component} of cluster {self.name} is not running")
        if number == signal.SIGKILL:
            poll(lambda: not found.alive(), 20)

    # -- internal ------------------------------------------------------------------------------------------------------

    def _state(self) -> ClusterState:
        found = config.load(self.name)
        if found is None:
            raise ClusterError(f"there is no cluster {self.name!r}: 'python -m hack.cluster up --name {self.name}' makes it")
        return found

    @staticmethod
    def _forget_processes(node: Node) -> None:
        """After a crash of the node: end what is left and drop containerd's view of containers that are gone."""
        node.end_processes()
        for name in ("containerd", "cni-leases"):
            shutil.rmtree(node.state.run / name, ignore_errors=True)

    @staticmethod
    def _write_configuration(node: Node) -> None:
        """Credentials and files; a component whose file changed is ended, so that it starts with the new one."""
        cluster = node.state
        layout, run = cluster.layout, cluster.run
        (run / "cni").mkdir(exist_ok=True)
        config.write_credentials(layout)
        clients = {
            "scheduler": ("system:kube-scheduler", []),
            "kube-proxy": ("system:kube-proxy", []),
            "coredns": ("system:coredns", []),
            "kubelet": (f"system:node:{cluster.node_name}", ["system:nodes"]),
        }
        for name, (user, groups) in clients.items():
            hosts = [f"IP:{cluster.network.node}", f"DNS:{cluster.node_name}"] if name == "kubelet" else []
            layout.pki.ensure(name, user, groups=groups, hosts=hosts)
            if not layout.kubeconfig(name).exists():
                layout.pki.kubeconfig(layout.kubeconfig(name), name, layout.server)
        files = {
            "containerd.toml": config.containerd_toml(cluster),
            "cni/10-epochkv.conflist": json.dumps(config.cni_conflist(cluster), indent=1),
            "kubelet.json": json.dumps(config.kubelet_config(cluster), indent=1),
            "kube-proxy.json": json.dumps(config.proxy_config(cluster), indent=1),
            "Corefile": config.corefile(cluster),
            "resolv.conf": f"nameserver {cluster.network.node}\n",
        }
        for name, text in files.items():
            path = run / name
            if path.exists() and path.read_text() == text:
                continue  # kube-proxy exits when its file is as much as touched
            component = node.table.get(_READER[name]) if name in _READER else None
            if component is not None:
                component.end()
            path.write_text(text)

    def _start_components(self, node: Node, binaries: Binaries, pause_archive: Path, step: Report) -> None:
        cluster, api = node.state, Api(node.state.layout)
        dead = [name for name in COMPONENTS if not node.table.alive(name)]
        for name in dead:
            node.table.forget(name)

        def start(*names: str) -> None:
            for name in names:
                if name in dead:
                    node.start(name, self._command(cluster, binaries, name))

        start("etcd", "kube-apiserver", "containerd")
        self._wait(node, cluster.containerd_socket.exists, "containerd")
        if "containerd" in dead:
            self._wait(node, lambda: self._import(node, pause_archive, quiet=True), "containerd")
        self._wait(node, lambda: api.ok("/readyz"), "kube-apiserver")
        step("API server is ready")
        since = time.time() if "kubelet" in dead else 0.0  # after a crash, the node's old status still says Ready
        start("kube-controller-manager", "kube-scheduler", "kubelet")
        for path, obj in config.dns_objects(cluster).items():
            self._wait(node, lambda path=path, obj=obj: _applied(api, path, obj), f"applying {path}")  # type: ignore[misc]
        start("coredns")
        self._wait(node, lambda: _node_ready(api, cluster, since), f"node {cluster.node_name}")
        step("node is Ready")
        start("kube-proxy")  # after the node: it exits when the node's address changes
        self._wait(node, lambda: api.ok("/api/v1/namespaces/default/serviceaccounts/default"), "kube-controller-manager")
        self._wait(node, lambda: _answers(node, "http://127.0.0.1:8181/ready"), "coredns")
        self._wait(node, lambda: _answers(node, "http://127.0.0.1:10256/healthz"), "kube-proxy")

    @staticmethod
    def _command(cluster: ClusterState, binaries: Binaries, name: str) -> list[str]:
        layout, run = cluster.layout, cluster.run
        args: dict[str, Callable[[], list[str]]] = {
            "etcd": lambda: config.etcd_args(layout),
            "kube-apiserver": lambda: config.apiserver_args(layout),
            "kube-controller-manager": lambda: config.controller_manager_args(layout),
            "kube-scheduler": lambda: config.scheduler_args(cluster),
            "kubelet": lambda: config.kubelet_args(cluster),
            "kube-proxy": lambda: [f"--config={run}/kube-proxy.json"],
            "coredns": lambda: ["-conf", f"{run}/Corefile"],
            "containerd": lambda: ["--config", f"{run}/containerd.toml"],
        }
        binary = "containerd" if name == "containerd" else str(binaries.path(name))
        return [binary, *args[name]()]

    def _wait(self, node: Node, condition: Callable[[], bool], what: str) -> None:
        dead: list[str] = []

        def done() -> bool:
            dead[:] = [name for name in ("init", *COMPONENTS) if node.table.get(name) and not node.table.alive(name)]
            return bool(dead) or condition()

        in_time = poll(done, _SECONDS, 0.1)
        if dead:
            tail = log_tail(node.table.logs / f"{dead[0]}.log")
            raise ClusterError(f"{dead[0]} of cluster {self.name} ended; its last log lines:\n{tail}")
        if not in_time:
            tail = log_tail(node.table.logs / f"{what}.log") if what in COMPONENTS else log_tail(node.table.logs / "kubelet.log")
            raise ClusterError(f"{what} of cluster {self.name} was not ready after {_SECONDS:.0f} s; log:\n{tail}")

    @staticmethod
    def _import(node: Node, path: Path, quiet: bool = False) -> bool:
        socket = str(node.state.containerd_socket)
        with path.open("rb") as handle:
            try:
                node.run(["ctr", "--address", socket, "-n", "k8s.io", "images", "import", "-"], stdin=handle.fileno())
            except ClusterError:
                if quiet:
                    return False
                raise
        return True


def _check_machine(mounts: Sequence[Path]) -> None:
    if os.geteuid() != 0:
        raise ClusterError("the local provider needs root: it creates namespaces; use 'sudo', or CLUSTER=kind with Docker")
    check_installed(_TOOLS)
    for path in mounts:
        if not path.exists():
            raise ClusterError(f"--mount {path}: no such file or folder on this machine")


def _node_ready(api: Api, cluster: ClusterState, since: float = 0.0) -> bool:
    """True when the node is Ready by a heartbeat not older than `since` (Unix seconds)."""
    try:
        status, body = api.request("GET", f"/api/v1/nodes/{cluster.node_name}")
    except OSError:
        return False
    if status != 200:
        return False
    conditions = json.loads(body)["status"].get("conditions", [])
    return any(
        condition["type"] == "Ready"
        and condition["status"] == "True"
        and datetime.fromisoformat(condition["lastHeartbeatTime"]).timestamp() >= int(since)
        for condition in conditions
    )


def _applied(api: Api, path: str, obj: object) -> bool:
    try:
        api.apply(path, obj)
    except OSError:
        return False  # 403 and 429 are normal for about two seconds after the API server's start
    return True


def _answers(node: Node, url: str) -> bool:
    """True when a URL answers 2xx on the node's loopback."""
    code = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=2)"
    done = subprocess.run(
        [*node.prefix(), "python3", "-c", code], check=False, capture_output=True, env=node.environment, stdin=subprocess.DEVNULL
    )
    return done.returncode == 0
