"""What a local cluster is made of, as data: names, folders and addresses; command lines and files of every component.

Pure apart from reading and writing one JSON file. Kubernetes and CNI read JSON where they read YAML, so no YAML library is needed.
A control plane alone (loopback, free ports, for tests) has a `Layout`; a whole local cluster has a `ClusterState`, whose layout has
fixed ports in a network namespace of its own.

Small things (certificates, sockets, pids, logs) lie in the run folder, whose path is short because socket paths are limited to
108 bytes; large ones (etcd, images, pod volumes) in the data folder, because /run may be a small tmpfs.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from epochkv_fence.common import bracketed
from hack.cluster.pki import Pki
from hack.cluster.provider import ClusterError

MAX_CLUSTERS = 50
PAUSE_IMAGE = "epochkv/pause:dev"
CLUSTER_DOMAIN = "cluster.local"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")
_DISABLED = (
    "snapshotter.v1.aufs",
    "snapshotter.v1.btrfs",
    "snapshotter.v1.devmapper",
    "snapshotter.v1.zfs",
    "tracing.processor.v1.otlp",
)


# -- names, folders, addresses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Addresses and folders of one control plane."""

    folder: Path
    address: str  # where the API server listens and what it advertises
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    service_cidr: str
    service_ip: str  # first address of service_cidr: the `kubernetes` Service
    with_nodes: bool = False
    data: Path | None = None  # etcd's data; inside `folder` when None

    @property
    def pki(self) -> Pki:
        return Pki(self.folder / "pki")

    @property
    def server(self) -> str:
        return f"https://{bracketed(self.address)}:{self.api_port}"

    def kubeconfig(self, name: str) -> Path:
        """Kubeconfig of a component, or of `admin`."""
        return self.folder / f"{name}.kubeconfig"


def run_root() -> Path:
    """`$EPOCHKV_RUN`, else /run/epochkv."""
    return Path(os.environ.get("EPOCHKV_RUN") or "/run/epochkv")


def data_root() -> Path:
    """`$EPOCHKV_DATA`, else /var/lib/epochkv."""
    return Path(os.environ.get("EPOCHKV_DATA") or "/var/lib/epochkv")


def check_name(name: str) -> str:
    """The name itself, or an error that says what is allowed."""
    if not _NAME.fullmatch(name) or name.endswith("-"):
        raise ClusterError(f"cluster name {name!r}: use 1 to 20 lower-case letters, digits and dashes, beginning with a letter")
    return name


@dataclass(frozen=True)
class Network:
    """Addresses of the cluster with index i: all of IPv4, or all of IPv6.

    IPv4: pods and node in 10.(100+2i).0.0/16, Services in 10.(101+2i).0.0/16.
    IPv6: pods and node in fd65:706f:6368:i::/80, Services in fd65:706f:6368:i:1::/112.
    """

    index: int
    ipv6: bool = False

    def _address(self, of_ipv4: str, of_ipv6: str, *, service: bool = False) -> str:
        if not self.ipv6:
            return f"10.{100 + 2 * self.index + service}.{of_ipv4}"
        return str(ipaddress.ip_interface(f"fd65:706f:6368:{self.index:x}:{int(service)}::{of_ipv6}")).removesuffix("/128")

    @property
    def device(self) -> str:
        """The host's end of the veth pair; its only trace on the host besides routes."""
        return f"epochkv{self.index}"

    @property
    def range(self) -> str:
        """Pods and node together: what the host routes to the node."""
        return self._address("0.0/16", "/80")

    @property
    def pods(self) -> str:
        """Pod CIDR."""
        return self._address("0.0/17", "/112")

    @property
    def services(self) -> str:
        """Service CIDR."""
        return self._address("0.0/16", "/112", service=True)

    @property
    def kubernetes(self) -> str:
        """ClusterIP of the `kubernetes` Service."""
        return self._address("0.1", "1", service=True)

    @property
    def dns(self) -> str:
        """ClusterIP of the `kube-dns` Service."""
        return self._address("0.10", "a", service=True)

    @property
    def host(self) -> str:
        """The host as the node and the pods see it."""
        return self._address("255.1", "ffff:1")

    @property
    def node(self) -> str:
        """The node: API server, kubelet, CoreDNS."""
        return self._address("255.2", "ffff:2")

    @property
    def link(self) -> str:
        """Length of the prefix that host and node share."""
        return "126" if self.ipv6 else "30"

    @property
    def reverse_zone(self) -> str:
        return "ip6.arpa" if self.ipv6 else "in-addr.arpa"


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


def known() -> dict[str, Network]:
    """Network by name of every cluster that has a record, running or not."""
    found = {}
    for file in sorted(run_root().glob("*/cluster.json")):
        try:
            record = json.loads(file.read_text())
            found[file.parent.name] = Network(int(record["index"]), bool(record.get("ipv6")))
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
    network = known().get(check_name(name))
    return None if network is None else make(name, network)


def make(name: str, network: Network) -> ClusterState:
    """The cluster of this name with this network; nothing is written."""
    return ClusterState(check_name(name), run_root() / name, data_root() / name, network)


def save(state: ClusterState) -> None:
    state.run.mkdir(parents=True, exist_ok=True, mode=0o755)
    state.data.mkdir(parents=True, exist_ok=True, mode=0o711)
    staging = state.run / ".cluster.tmp"
    staging.write_text(json.dumps({"name": state.name, "index": state.network.index, "ipv6": state.network.ipv6, "data": str(state.data)}))
    staging.rename(state.run / "cluster.json")


# -- control plane -------------------------------------------------------------------------------------------------------


def write_credentials(layout: Layout) -> None:
    """Make the certificates and kubeconfigs of the control plane; what exists is kept."""
    pki = layout.pki
    pki.ensure_ca()
    pki.ensure(
        "apiserver",
        "kube-apiserver",
        hosts=[
            "IP:127.0.0.1",
            *([f"IP:{layout.address}"] if layout.address != "127.0.0.1" else []),
            f"IP:{layout.service_ip}",
            "DNS:localhost",
            "DNS:kubernetes",
            "DNS:kubernetes.default",
            "DNS:kubernetes.default.svc",
            "DNS:kubernetes.default.svc.cluster.local",
        ],
    )
    pki.ensure("etcd", "etcd", hosts=["IP:127.0.0.1", "DNS:localhost"])
    pki.ensure("apiserver-client", "kube-apiserver-client", groups=["system:masters"])
    pki.ensure("admin", "admin", groups=["system:masters"])
    pki.ensure("controller-manager", "system:kube-controller-manager")
    for name in ("admin", "controller-manager"):
        if not layout.kubeconfig(name).exists():
            pki.kubeconfig(layout.kubeconfig(name), name, layout.server)


def etcd_args(layout: Layout) -> list[str]:
    """Single member, client and peer TLS, no fsync: the data is thrown away with the cluster."""
    pki, client = layout.pki, f"https://127.0.0.1:{layout.etcd_port}"
    peer = f"https://127.0.0.1:{layout.etcd_peer_port}"
    return [
        "--name=default",
        f"--data-dir={layout.data or layout.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--client-cert-auth",
        "--peer-client-cert-auth",
        f"--trusted-ca-file={pki.ca}",
        f"--peer-trusted-ca-file={pki.ca}",
        f"--cert-file={pki.crt('etcd')}",
        f"--key-file={pki.key('etcd')}",
        f"--peer-cert-file={pki.crt('etcd')}",
        f"--peer-key-file={pki.key('etcd')}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_args(layout: Layout) -> list[str]:
    """Node and RBAC authorization; default admission (Pod Security among it), NodeRestriction when there are nodes."""
    pki = layout.pki
    args = [
        f"--etcd-servers=https://127.0.0.1:{layout.etcd_port}",
        f"--etcd-cafile={pki.ca}",
        f"--etcd-certfile={pki.crt('etcd')}",
        f"--etcd-keyfile={pki.key('etcd')}",
        f"--bind-address={('::' if ':' in layout.address else '0.0.0.0') if layout.with_nodes else layout.address}",
        f"--advertise-address={layout.address}",
        f"--secure-port={layout.api_port}",
        f"--tls-cert-file={pki.crt('apiserver')}",
        f"--tls-private-key-file={pki.key('apiserver')}",
        f"--client-ca-file={pki.ca}",
        f"--service-cluster-ip-range={layout.service_cidr}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki.folder / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki.key('service-account')}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--endpoint-reconciler-type=lease" if layout.with_nodes else "--endpoint-reconciler-type=none",
        "--profiling=false",
    ]
    if layout.with_nodes:
        args += [
            f"--kubelet-certificate-authority={pki.ca}",
            f"--kubelet-client-certificate={pki.crt('apiserver-client')}",
            f"--kubelet-client-key={pki.key('apiserver-client')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--enable-admission-plugins=NodeRestriction",
        ]
    return args


def audit_args(folder: Path, log: Path, user: str) -> list[str]:
    """One user's requests, without their bodies, as they are answered."""
    rules = [{"level": "Metadata", "users": [user], "omitStages": ["RequestReceived", "ResponseStarted"]}, {"level": "None"}]
    policy = folder / "audit-policy.json"
    policy.write_text(json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log}"]


def controller_manager_args(layout: Layout) -> list[str]:
    """All default controllers, one instance, no serving port."""
    pki, config = layout.pki, layout.kubeconfig("controller-manager")
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki.key('service-account')}",
        f"--root-ca-file={pki.ca}",
        f"--cluster-signing-cert-file={pki.ca}",
        f"--cluster-signing-key-file={pki.key('ca')}",
        f"--service-cluster-ip-range={layout.service_cidr}",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
        # The default of 20 requests a second makes a thousand engines wait for their pods for minutes.
        "--kube-api-qps=300",
        "--kube-api-burst=600",
    ]


# -- node ----------------------------------------------------------------------------------------------------------------


def containerd_toml(state: ClusterState) -> str:
    """containerd with everything of its own: root, state, socket, CNI.

    `restrict_oom_score_adj`: without CAP_SYS_RESOURCE every sandbox otherwise dies with "can't get final child's PID from pipe".
    """
    return f"""version = 2
root = "{state.data}/containerd"
state = "{state.run}/containerd"
oom_score = 0
disabled_plugins = [{", ".join(f'"io.containerd.{name}"' for name in _DISABLED)}]

[grpc]
  address = "{state.containerd_socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state.run}/cni"
    max_conf_num = 1
"""


def cni_conflist(state: ClusterState) -> dict[str, object]:
    """Routed pods (`ptp`): one veth each, no bridge, so Service traffic needs no br_netfilter."""
    return {
        "cniVersion": "1.0.0",
        "name": "epochkv",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{state.run}/cni-leases",
                    "ranges": [[{"subnet": state.network.pods}]],
                    "routes": [{"dst": "::/0" if state.network.ipv6 else "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet_config(state: ClusterState) -> dict[str, object]:
    """KubeletConfiguration that works on cgroup v1 and v2, with swap, and without the right to set limits on itself."""
    pki = state.layout.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": state.network.node,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki.crt("kubelet")),
        "tlsPrivateKeyFile": str(pki.key("kubelet")),
        "containerRuntimeEndpoint": f"unix://{state.containerd_socket}",
        "clusterDNS": [state.network.dns],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(state.run / "resolv.conf"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": state.cgroup,
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "failCgroupV1": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "healthzBindAddress": "127.0.0.1",
        "readOnlyPort": 0,
        "registerWithTaints": [],
        "nodeStatusUpdateFrequency": "10s",
        "shutdownGracePeriod": "0s",
        "volumePluginDir": str(state.data / "volume-plugins"),
        "serializeImagePulls": False,
        "syncFrequency": "10s",
    }


def kubelet_args(state: ClusterState) -> list[str]:
    return [
        f"--config={state.run}/kubelet.json",
        f"--kubeconfig={state.layout.kubeconfig('kubelet')}",
        f"--hostname-override={state.node_name}",
        f"--node-ip={state.network.node}",
        f"--root-dir={state.data}/kubelet",
        f"--cert-dir={state.run}/pki",
    ]


def proxy_config(state: ClusterState) -> dict[str, object]:
    """kube-proxy in iptables mode; it must not touch conntrack limits, which only the first network namespace may set."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(state.layout.kubeconfig("kube-proxy"))},
        "mode": "iptables",
        "clusterCIDR": state.network.pods,
        "hostnameOverride": state.node_name,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
    }


def scheduler_args(state: ClusterState) -> list[str]:
    config = state.layout.kubeconfig("scheduler")
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
    ]


def corefile(state: ClusterState) -> str:
    """Cluster names from the API server; everything else does not exist. No cache: a moved endpoint is seen at once."""
    return f"""{CLUSTER_DOMAIN}:53 {state.network.reverse_zone}:53 {{
    bind {state.network.node}
    errors
    ready 127.0.0.1:8181
    kubernetes {CLUSTER_DOMAIN} {state.network.reverse_zone} {{
        kubeconfig {state.layout.kubeconfig("coredns")}
        pods insecure
    }}
}}
.:53 {{
    bind {state.network.node}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def dns_objects(state: ClusterState) -> dict[str, dict[str, object]]:
    """API path -> object: Service `kube-dns`, its EndpointSlice, and the read rights of CoreDNS and kube-proxy's user."""
    labels = {"k8s-app": "kube-dns", "kubernetes.io/name": "CoreDNS"}
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    rbac = "rbac.authorization.k8s.io"
    return {
        "/api/v1/namespaces/kube-system/services/kube-dns": {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {"clusterIP": state.network.dns, "ports": [{**port, "targetPort": 53} for port in ports]},
        },
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns": {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns",
                "namespace": "kube-system",
                "labels": {
                    "kubernetes.io/service-name": "kube-dns",
                    "endpointslice.kubernetes.io/managed-by": "epochkv-cluster",
                },
            },
            "addressType": "IPv6" if state.network.ipv6 else "IPv4",
            "endpoints": [{"addresses": [state.network.node], "conditions": {"ready": True}}],
            "ports": ports,
        },
        f"/apis/{rbac}/v1/clusterroles/system:coredns": {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["endpoints", "services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        },
        f"/apis/{rbac}/v1/clusterrolebindings/system:coredns": {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "system:coredns"}],
        },
    }
