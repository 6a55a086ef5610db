"""NetworkPolicies, enforced: what a pod without the pool's label is refused, while a pod with it gets through.

Each refusal stands beside the same connection that is let in, so a port on which nobody listens fails the test. The local provider does
not enforce policies, so these tests run on kind alone (`make test-kind`), where the journey passes under the same policies.
"""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from hack.cluster import binaries
from hack.demo.journey import ENGINE, NAMESPACE, POOL
from hack.demo.kube import Kube
from hack.demo.setup import ROOT, SYSTEM, Setup
from hack.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("CLUSTER") != "kind", reason="the local provider does not enforce NetworkPolicies: CLUSTER=kind"),
]
STRANGER, MEMBER, ENGINES = "stranger", "member", f"epochkv.io/engine={ENGINE}"
MASTER_RPC, MASTER_ADMIN, STORE_HEALTH, TRANSFERS, HUB, ENGINE_HTTP = 50051, 9003, 9300, range(15000, 15128), 7700, 8000

COMMAND = ["python3", "-m", "http.server", "--directory", "/tmp", str(TRANSFERS[5])]
DIAL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()
    print("let in")
except OSError:
    print("refused")
"""
# Ports on which a process of the pod listens, of either family.
LISTENING = """
lines = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name).readlines()[1:]]
print(*sorted({int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A"}))
"""


def pod(name: str, labels: dict[str, str]) -> dict[str, object]:
    """A pod that listens on a transfer port, with Python in it, as the namespace's Pod Security level wants it."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "main", "image": "epochkv/operator:dev", "command": COMMAND, "securityContext": security}
    spec = {
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels}, "spec": spec}


@pytest.fixture(scope="module")
def pods(kube: Kube) -> Iterator[None]:
    names = [f"pod/{STRANGER}", f"pod/{MEMBER}"]
    for made in (pod(STRANGER, {"app": STRANGER}), pod(MEMBER, {"app": MEMBER, "epochkv.io/pool": POOL})):
        kube.kubectl("apply", "-f", "-", stdin=json.dumps(made))
    kube.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", *names, "--timeout=120s", seconds=130.0)
    yield
    kube.kubectl("-n", NAMESPACE, "delete", *names, "--ignore-not-found")


def address(kube: Kube, selector: str, namespace: str = NAMESPACE) -> str:
    return str(kube.pods(namespace, selector)[0]["status"]["podIP"])


def transfer_port(kube: Kube, selector: str) -> int:
    """One of the ports of the range on which the first pod of these listens."""
    name = kube.pods(NAMESPACE, selector)[0]["metadata"]["name"]
    ports = kube.kubectl("-n", NAMESPACE, "exec", name, "--", "python3", "-c", LISTENING).split()
    return next(int(port) for port in ports if int(port) in TRANSFERS)


def expect(kube: Kube, name: str, host: str, port: int, outcome: str) -> None:
    """A new policy, or a new pod's address, takes a moment to reach the node's rules."""
    said: list[str] = []

    def same() -> bool:
        said[:] = [kube.kubectl("-n", NAMESPACE, "exec", name, "--", "python3", "-c", DIAL, host, str(port)).strip()]
        return said == [outcome]

    eventually(same, lambda: f"{name} to {host}:{port}: {said}, not {outcome}", 60, 0.5)


def test_a_master_answers_its_pool_and_the_operator(kube: Kube, pods: None) -> None:
    host = address(kube, f"epochkv.io/pool={POOL},app.kubernetes.io/component=master")
    expect(kube, MEMBER, host, MASTER_RPC, "let in")
    expect(kube, STRANGER, host, MASTER_RPC, "refused")
    # What the operator asks the admin port shows in `MasterAvailable`. Members have no business there.
    kube.kubectl("-n", NAMESPACE, "wait", f"kvp/{POOL}", "--for=condition=MasterAvailable", "--timeout=60s")
    for name in (STRANGER, MEMBER):
        expect(kube, name, host, MASTER_ADMIN, "refused")


def test_a_store_answers_its_pool(kube: Kube, pods: None) -> None:
    selector = f"epochkv.io/pool={POOL},app.kubernetes.io/component=store"
    host, port = address(kube, selector), transfer_port(kube, selector)
    expect(kube, MEMBER, host, port, "let in")
    expect(kube, STRANGER, host, port, "refused")


def test_an_engine_answers_everybody_but_on_its_transfer_ports(kube: Kube, pods: None) -> None:
    host, port = address(kube, ENGINES), transfer_port(kube, ENGINES)
    expect(kube, STRANGER, host, ENGINE_HTTP, "let in")
    expect(kube, MEMBER, host, port, "let in")
    expect(kube, STRANGER, host, port, "refused")


def test_a_pod_that_joined_answers_its_pool_on_its_transfer_ports(kube: Kube, pods: None) -> None:
    host, engine = address(kube, f"app={MEMBER}"), kube.pods(NAMESPACE, ENGINES)[0]
    expect(kube, engine["metadata"]["name"], host, TRANSFERS[5], "let in")
    expect(kube, STRANGER, host, TRANSFERS[5], "refused")


def test_scrapers_are_let_in_by_the_label_of_their_namespace(kube: Kube, pods: None) -> None:
    hosts = [address(kube, f"epochkv.io/pool={POOL},app.kubernetes.io/component={name}") for name in ("master", "store")]
    for label, outcome in (("epochkv.io/scrape=true", "let in"), ("epochkv.io/scrape-", "refused")):
        kube.kubectl("label", "namespace", NAMESPACE, label)
        for host, port in zip(hosts, (MASTER_ADMIN, STORE_HEALTH), strict=True):
            expect(kube, STRANGER, host, port, outcome)


def test_the_hub_answers_whom_the_chart_names(setup: Setup, kube: Kube, pods: None) -> None:
    host = address(kube, "app.kubernetes.io/component=operator", SYSTEM)
    expect(kube, STRANGER, host, HUB, "let in")  # by default, everybody: the hub knows its clients by keys
    members = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"epochkv.io/pool": POOL}}}]
    for peers, outcome in ((members, "refused"), ([], "let in")):
        upgrade = [
            *(str(binaries.find("helm")), "upgrade", "epochkv", str(ROOT / "charts/epochkv"), "--namespace", SYSTEM, "--reuse-values"),
            *("--kubeconfig", str(setup.provider.kubeconfig()), "--set-json", f"networkPolicy.hubFrom={json.dumps(peers)}", "--wait"),
        ]
        subprocess.run(upgrade, timeout=240, check=True)
        expect(kube, STRANGER, host, HUB, outcome)
        expect(kube, MEMBER, host, HUB, "let in")
