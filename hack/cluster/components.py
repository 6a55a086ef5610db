"""Command lines of etcd, the API server and the controller manager: pure functions of one `Layout`.

Shared by the control plane alone (loopback, free ports, for tests) and the full local cluster (own network namespace).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.pki import Pki


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
        return f"https://{self.address}:{self.api_port}"

    def kubeconfig(self, name: str) -> Path:
        """Kubeconfig of a component, or of `admin`."""
        return self.folder / f"{name}.kubeconfig"


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
        f"--bind-address={'0.0.0.0' if layout.with_nodes else layout.address}",
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
