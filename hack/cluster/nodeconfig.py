"""Configuration files and command lines of what runs on the node: pure functions of the cluster's state.

Kubernetes and CNI read JSON where they read YAML, so no YAML library is needed.
"""

from __future__ import annotations

from hack.cluster.state import ClusterState

PAUSE_IMAGE = "epochkv/pause:dev"
CLUSTER_DOMAIN = "cluster.local"
_DISABLED = (
    "snapshotter.v1.aufs",
    "snapshotter.v1.btrfs",
    "snapshotter.v1.devmapper",
    "snapshotter.v1.zfs",
    "tracing.processor.v1.otlp",
)


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
                    "routes": [{"dst": "0.0.0.0/0"}],
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
    return f"""{CLUSTER_DOMAIN}:53 in-addr.arpa:53 {{
    bind {state.network.node}
    errors
    ready 127.0.0.1:8181
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
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
            "addressType": "IPv4",
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
