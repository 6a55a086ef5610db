"""Clusters through kind: with the machine's Docker daemon, or with one of their own where none runs and `$EPOCHKV_DOCKER` is `start`.

Where kind's node image can be pulled, it is used. Elsewhere it is built here, of the same Kubernetes (`hack/images/kind_node.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hack.cluster import binaries, config, docker
from hack.cluster.config import ClusterState, check_name, run_root
from hack.cluster.node import Node, claim, locked
from hack.cluster.provider import ClusterError, ComponentStatus, Report
from hack.waiting import poll

NODE_IMAGE = "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5"
AGREE = "EPOCHKV_DOCKER"
_LABEL = "io.x-k8s.kind.cluster"
_COMPLETE = "/kind/complete"  # in the first node: kind has done all that `up` asked of it
_READY_SECONDS = 240.0
# The kubelet refuses cgroup v1 by default. A lease that one process alone asks for ends it on a busy machine.
_ALONE = {"extraArgs": [{"name": "leader-elect", "value": "false"}]}
_PATCHES = (
    {"kind": "KubeletConfiguration", "failCgroupV1": False},
    {"kind": "ClusterConfiguration", "controllerManager": _ALONE, "scheduler": _ALONE},
)


def kind_config(mounts: Sequence[Path], image: str, workers: int = 0, address: str | None = None) -> dict[str, object]:
    """Cluster configuration (JSON is valid YAML): a control plane and workers, host folders mounted read-only at the same path.

    `address`: where the API server is reached, at port 6443; None: kind chooses a port of this machine's loopback.
    """
    extra = [{"hostPath": str(path), "containerPath": str(path), "readOnly": True} for path in mounts]
    node = {"image": image, **({"extraMounts": extra} if extra else {})}
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, **node} for role in ("control-plane", *("worker",) * workers)],
        "kubeadmConfigPatches": [json.dumps(patch) for patch in _PATCHES],
        **({"networking": {"apiServerAddress": address, "apiServerPort": 6443}} if address else {}),
    }


class KindCluster:
    """One cluster of kind; `workers`: nodes beside the one of the control plane."""

    def __init__(self, name: str, workers: int = 0) -> None:
        self.name, self.workers = check_name(name), workers
        self._record = check_name(f"kind-{name}")  # of a Docker daemon of its own, and the folder of the files

    # -- Provider ----------------------------------------------------------------------------------------------------

    def up(self, report: Report, mounts: Sequence[Path] = ()) -> None:
        """Create, or start what is stopped; anew when an earlier `up` was interrupted."""
        for path in mounts:
            if not path.exists():
                raise ClusterError(f"--mount {path}: no such file or folder on this machine")
        with locked(self._record):
            self._start_daemon(report)
            since = time.time() if self._start_nodes(report) else 0.0
            if self._nodes() and not self._complete():
                report(f"cluster {self.name} is incomplete: making it anew")
                self._kind("delete", "cluster", "--name", self.name)
            if nodes := self._nodes():
                self._check_mounts(list(nodes), mounts)
            else:
                self._create(report, mounts)
            self._wait_ready(since)
        report(f"cluster {self.name} is ready: export KUBECONFIG={self.kubeconfig()}")

    def down(self, report: Report) -> None:
        """Remove the nodes, and a Docker daemon of the cluster's own with all that it made."""
        with locked(self._record, last=True):
            if own := self._own():
                docker.remove(Node(own))
            elif _answers(os.environ) and self._nodes():
                self._kind("delete", "cluster", "--name", self.name)
            else:
                report(f"cluster {self.name}: nothing to remove")
                return
            shutil.rmtree(self.folder, ignore_errors=True)
        report(f"cluster {self.name} is removed")

    def status(self) -> list[ComponentStatus]:
        """The Docker daemon, if it is the cluster's own, the nodes, and what the API says of these."""
        own = self._own()
        lines = []
        if own:
            daemon = Node(own).table.get("dockerd")
            alive = daemon is not None and daemon.alive()
            lines.append(ComponentStatus("dockerd", alive, daemon.pid if daemon else None, daemon.tail(5) if daemon else "not started"))
        if not _answers(self._environment()):
            return lines
        nodes = self._nodes()
        lines += [ComponentStatus(node, state == "running", None, f"{state}: 'up' starts it") for node, state in nodes.items()]
        if nodes:
            waiting = self._not_ready()
            lines.append(ComponentStatus("nodes are Ready", not waiting, None, waiting))
        return lines

    def kubeconfig(self) -> Path:
        """Written anew from kind, which knows the current port."""
        if not _answers(self._environment()) or not self._nodes():
            raise ClusterError(
                f"there is no cluster {self.name!r}: 'python -m hack.cluster up --provider kind --name {self.name}' makes it"
            )
        path = self.folder / "admin.kubeconfig"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(self._kind("get", "kubeconfig", "--name", self.name))
        return path

    def load_images(self, archives: Sequence[Path], report: Report) -> None:
        for path in archives:
            self._kind("load", "image-archive", str(path), "--name", self.name)
            report(f"loaded {path.name}")

    # -- beyond Provider -----------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Its files on this machine; there as long as the cluster is."""
        return run_root() / self._record

    def pulls(self) -> bool:
        """True where the machine's Docker daemon answers and has, or can pull, kind's node image: then it builds images, too."""
        if self._own() or not _answers(os.environ):
            return False
        return any(_succeeds(["docker", *words, NODE_IMAGE], os.environ) for words in (("image", "inspect"), ("pull", "--quiet")))

    def docker(self, *words: str) -> str:
        """Output of a docker command for the daemon that runs the nodes."""
        return _output(["docker", *words], self._environment())

    # -- internal ------------------------------------------------------------------------------------------------------

    def _own(self) -> ClusterState | None:
        """The record of a Docker daemon of the cluster's own."""
        return config.load(self._record)

    def _environment(self) -> Mapping[str, str]:
        own = self._own()
        return docker.environment(own) if own else os.environ

    def _start_daemon(self, report: Report) -> None:
        if self._own() is None:
            if _answers(os.environ):
                return
            if os.environ.get(AGREE) != "start":
                raise ClusterError(
                    f"no Docker daemon answers: start one; or set {AGREE}=start, which runs Debian's docker.io for this cluster alone,"
                    " until 'make down'; or use CLUSTER=local"
                )
            report("no Docker daemon answers: starting one for this cluster")
        docker.start(Node(claim(self._record)), report)

    def _nodes(self) -> dict[str, str]:
        """State of each node's container by name, the control plane's first."""
        lines = self.docker("ps", "--all", "--filter", f"label={_LABEL}={self.name}", "--format", "{{.Names}} {{.State}}").splitlines()
        return dict(sorted(line.split() for line in lines))

    def _first(self) -> str:
        return next(iter(self._nodes()))

    def _start_nodes(self, report: Report) -> bool:
        """Start what does not run; True when there was any."""
        stopped = {node: state for node, state in self._nodes().items() if state != "running"}
        for node, state in stopped.items():
            report(f"{node} is {state}: starting it")
            self.docker("unpause" if state == "paused" else "start", node)
        return bool(stopped)

    def _complete(self) -> bool:
        return _succeeds(["docker", "exec", self._first(), "test", "-e", _COMPLETE], self._environment())

    def _create(self, report: Report, mounts: Sequence[Path]) -> None:
        own, image = self._own(), NODE_IMAGE
        if not self.pulls():
            from hack.images import kind_node  # late: images depend on this package

            archive, image = kind_node.ensure(report)
            self.docker("load", "--quiet", "--input", str(archive))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "kind.yaml"
        path.write_text(json.dumps(kind_config(mounts, image, self.workers, own.network.node if own else None)))
        report(f"kind create cluster --name {self.name} (nodes of {image})")
        self._kind("create", "cluster", "--name", self.name, "--config", str(path), "--kubeconfig", str(self.folder / "admin.kubeconfig"))
        self.docker("exec", self._first(), "touch", _COMPLETE)

    def _check_mounts(self, nodes: Sequence[str], mounts: Sequence[Path]) -> None:
        inspected = json.loads(self.docker("inspect", *nodes))
        shown = set.intersection(*({mount["Destination"] for mount in node["Mounts"]} for node in inspected))
        if missing := [str(path) for path in mounts if str(path) not in shown]:
            raise ClusterError(
                f"the nodes of cluster {self.name} do not show {', '.join(missing)}, and Docker cannot add a folder to a container: remove"
                f" the cluster ('python -m hack.cluster down --provider kind --name {self.name}'), or use another name (EPOCHKV_CLUSTER)"
            )

    def _wait_ready(self, since: float) -> None:
        """Until every node is Ready, with a lease that its kubelet renewed at `since` (Unix seconds) or later."""
        if not poll(lambda: not self._not_ready(since), _READY_SECONDS, 0.5):
            first = self._first()
            raise ClusterError(
                f"cluster {self.name} is not Ready after {_READY_SECONDS:.0f} s: {self._not_ready(since)}"
                f" ('docker exec {first} journalctl -u kubelet' says more)"
            )

    def _not_ready(self, since: float = 0.0) -> str:
        """What is not Ready, or empty."""
        nodes = self._nodes()
        kubectl = ["kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", "get", "nodes,leases", "-n", "kube-node-lease", "-o", "json"]
        command = ["docker", "exec", next(iter(nodes)), *kubectl]
        done = subprocess.run(command, env=dict(self._environment()), capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()
        items = json.loads(done.stdout)["items"]
        ready = {item["metadata"]["name"] for item in items if item["kind"] == "Node" and _is_ready(item)}
        alive = {item["metadata"]["name"] for item in items if item["kind"] == "Lease" and _renewed(item) >= since}
        return ", ".join(sorted(nodes.keys() - (ready & alive)))

    def _kind(self, *words: str) -> str:
        return _output([str(binaries.find("kind")), *words], self._environment())


def _is_ready(node: Mapping[str, Any]) -> bool:
    return any(found["type"] == "Ready" and found["status"] == "True" for found in node["status"].get("conditions", []))


def _renewed(lease: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp()


def _answers(environment: Mapping[str, str]) -> bool:
    """True when there is a `docker` and a daemon that it reaches."""
    return shutil.which("docker", path=environment["PATH"]) is not None and _succeeds(["docker", "version"], environment)


def _succeeds(command: list[str], environment: Mapping[str, str]) -> bool:
    try:
        return subprocess.run(command, env=dict(environment), capture_output=True, check=False, timeout=600).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=dict(environment), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"'{' '.join(command)}' failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout
