"""What a local cluster remembers about itself: name, folders, network index. Pure apart from reading and writing one JSON file.

Small things (certificates, sockets, pids, logs) lie in the run folder, whose path is short because socket paths are limited to
108 bytes; large ones (etcd, images, pod volumes) in the data folder, because /run may be a small tmpfs.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.components import Layout
from hack.cluster.provider import ClusterError

MAX_CLUSTERS = 50
_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")


def run_root() -> Path:
    """`$EPOCHKV_RUN`, else /run/epochkv."""
    return Path(os.environ.get("EPOCHKV_RUN") or "/run/epochkv")


def data_root() -> Path:
    """`$EPOCHKV_DATA`, else /var/lib/epochkv."""
    return Path(os.environ.get("EPOCHKV_DATA") or "/var/lib/epochkv")


def check_name(name: str) -> str:
    """The name itself, or an error that says what is allowed."""
    if not _NAME.fullmatch(name) or name.endswith("-"):
        raise ClusterError(f"cluster name {name!r}: use 1 to 15 lower-case letters, digits and dashes, beginning with a letter")
    return name


@dataclass(frozen=True)
class Network:
    """Addresses of the cluster with index i: everything in 10.(100+2i).0.0/16 (pods, node) and 10.(101+2i).0.0/16 (Services)."""

    index: int

    @property
    def _first(self) -> int:
        return 100 + 2 * self.index

    @property
    def device(self) -> str:
        """The host's end of the veth pair; its only trace on the host besides routes."""
        return f"epochkv{self.index}"

    @property
    def range(self) -> str:
        """Pods and node together: what the host routes to the node."""
        return f"10.{self._first}.0.0/16"

    @property
    def pods(self) -> str:
        """Pod CIDR."""
        return f"10.{self._first}.0.0/17"

    @property
    def services(self) -> str:
        """Service CIDR."""
        return f"10.{self._first + 1}.0.0/16"

    @property
    def kubernetes(self) -> str:
        """ClusterIP of the `kubernetes` Service."""
        return f"10.{self._first + 1}.0.1"

    @property
    def dns(self) -> str:
        """ClusterIP of the `kube-dns` Service."""
        return f"10.{self._first + 1}.0.10"

    @property
    def host(self) -> str:
        """The host as the node and the pods see it."""
        return f"10.{self._first}.255.1"

    @property
    def node(self) -> str:
        """The node: API server, kubelet, CoreDNS."""
        return f"10.{self._first}.255.2"


@dataclass(frozen=True)
class ClusterState:
    name: str
    run: Path
    data: Path
    network: Network

    @property
    def layout(self) -> Layout:
        """Control-plane addresses: fixed ports, since the network namespace is the cluster's own."""
        return Layout(
            folder=self.run,
            address=self.network.node,
            api_port=6443,
            etcd_port=2379,
            etcd_peer_port=2380,
            service_cidr=self.network.services,
            service_ip=self.network.kubernetes,
            with_nodes=True,
            data=self.data / "etcd",
        )

    @property
    def node_name(self) -> str:
        return f"{self.name}-node"

    @property
    def cgroup(self) -> str:
        """Parent of all container cgroups, relative to each hierarchy."""
        return f"/epochkv/{self.name}"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"


def known() -> dict[str, int]:
    """Network index by name of every cluster that has a record, running or not."""
    found = {}
    for file in sorted(run_root().glob("*/cluster.json")):
        try:
            found[file.parent.name] = int(json.loads(file.read_text())["index"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def free_index(taken: set[int], routes: str) -> int:
    """Smallest index that neither another cluster nor a route of this host (`ip -4 route` text) uses."""
    busy = {int(second) for second in re.findall(r"\b10\.(\d+)\.", routes)}
    for index in range(MAX_CLUSTERS):
        if index not in taken and not busy & {100 + 2 * index, 101 + 2 * index}:
            return index
    raise ClusterError(f"all {MAX_CLUSTERS} address ranges are taken: 'python -m hack.cluster down' what is not needed")


def load(name: str) -> ClusterState | None:
    """The recorded cluster, or None."""
    index = known().get(check_name(name))
    return None if index is None else make(name, index)


def make(name: str, index: int) -> ClusterState:
    """The cluster of this name with this network index; nothing is written."""
    return ClusterState(check_name(name), run_root() / name, data_root() / name, Network(index))


def save(state: ClusterState) -> None:
    state.run.mkdir(parents=True, exist_ok=True, mode=0o755)
    state.data.mkdir(parents=True, exist_ok=True, mode=0o711)
    staging = state.run / ".cluster.tmp"
    staging.write_text(json.dumps({"name": state.name, "index": state.network.index, "data": str(state.data)}))
    staging.rename(state.run / "cluster.json")
