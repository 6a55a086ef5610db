"""A full local cluster: repaired by the next `up`, and nothing left of one, not even of an `up` that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hack.cluster.binaries import build
from hack.cluster.config import run_root
from hack.cluster.local import COMPONENTS, LocalCluster
from hack.images.builder import Builder
from hack.images.recipe import image
from hack.waiting import poll
from tests.cluster import audit

pytestmark = [
    pytest.mark.slow,  # `make demo` and the e2e layer start one
    pytest.mark.timeout(900),  # the first image build fetches packages
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of a local cluster need root"),
]

# Answers with the name of the pod.
SERVER = (
    "import http.server, os\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers(); self.wfile.write(os.environ['HOSTNAME'].encode())\n"
    "    def log_message(self, *a): pass\n"
    "http.server.ThreadingHTTPServer(('', 8000), H).serve_forever()\n"
)
CLIENT = (
    "import socket, sys, urllib.request\n"
    "print(socket.gethostbyname(sys.argv[1]))\n"
    "for _ in range(40): print(urllib.request.urlopen(f'http://{sys.argv[1]}', timeout=5).read().decode())\n"
)


def _workload() -> list[dict[str, object]]:
    container = {
        "name": "web",
        "image": image("store").reference,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", SERVER],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
        "resources": {"limits": {"memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "probe", "labels": enforce}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web", "namespace": "probe"},
            "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": "probe"},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
        },
    ]


class Cluster(LocalCluster):
    """A local cluster with what these tests ask of it."""

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(build().path("kubectl")), f"--kubeconfig={self.kubeconfig()}", *args]
        return subprocess.run(command, input=stdin, check=check, capture_output=True, text=True, timeout=120)

    def apply(self, *objects: object) -> None:
        for obj in objects:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(obj))

    def pids(self) -> dict[str, int]:
        table = self.node.table
        return {name: found.pid for name in ("init", *COMPONENTS) if (found := table.get(name))}

    def run_workload(self) -> None:
        self.load_images(Builder(print).ensure([image("store")]), print)
        self.apply(*_workload())
        self.kubectl("-n", "probe", "rollout", "status", "deployment/web", "--timeout=120s")

    def pods(self) -> list[str]:
        items = json.loads(self.kubectl("-n", "probe", "get", "pods", "-l", "app=web", "-o", "json").stdout)["items"]
        return [item["metadata"]["name"] for item in items]

    def answers(self, pod: str) -> list[str]:
        """From inside a pod: the address of the Service's name, then who answered 40 requests to that name."""
        name = "web.probe.svc.cluster.local"
        done = self.kubectl("-n", "probe", "exec", pod, "--", "python3", "-c", CLIENT, name)
        return done.stdout.split()


def _name(suffix: str) -> str:
    return f"t{os.getpid() % 10**7}{suffix}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(_name("a"))
    try:
        found.up(print)
        found.run_workload()
        yield found
    finally:
        found.down(print)


@pytest.fixture
def other() -> Iterator[Cluster]:
    found = Cluster(_name("b"))
    try:
        yield found
    finally:
        found.down(print)


def test_up_again_changes_nothing_and_repairs_what_died(cluster: Cluster) -> None:
    before = cluster.pids()
    cluster.up(print)
    assert cluster.pids() == before
    cluster.signal("kube-proxy", signal.SIGKILL)
    dead = [line for line in cluster.status() if not line.alive]
    assert [line.name for line in dead] == ["kube-proxy"]
    assert dead[0].detail  # the last lines of its log
    command = [sys.executable, "-m", "hack.cluster", "status", "--name", cluster.name]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    cluster.up(print)
    after = cluster.pids()
    assert {name for name in after if after[name] != before[name]} == {"kube-proxy"}
    assert all(line.alive for line in cluster.status())
    assert set(cluster.answers(cluster.pods()[0])[1:]) == set(cluster.pods())


def test_down_works_after_an_up_that_was_killed_and_on_nothing(other: Cluster) -> None:
    log = subprocess.DEVNULL
    command = [sys.executable, "-m", "hack.cluster", "up", "--name", other.name]
    starting = subprocess.Popen(command, stdout=log, stderr=log)
    records = run_root() / other.name / "pids"
    assert poll((records / "etcd.json").exists, 60, 0.01)
    starting.kill()
    starting.wait()
    # The worst case: the records of processes that run are lost as well.
    init = other.pids()["init"]
    inside = audit.namespaces(init)
    for file in records.iterdir():
        file.unlink()
    assert audit.processes_in(inside)
    rules, links = audit.host_iptables(), audit.interfaces()
    other.down(print)
    assert audit.processes_in(inside) == set()
    assert audit.cgroups(other.name) == []
    assert audit.mounts_with(str(records.parent)) == []
    assert (audit.host_iptables(), links - audit.interfaces() - {other.network.device}) == (rules, set())
    assert not records.parent.exists()
    other.down(print)  # nothing there: success
    done = subprocess.run([sys.executable, "-m", "hack.cluster", "down", "--name", other.name], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
