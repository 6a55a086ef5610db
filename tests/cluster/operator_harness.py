"""The operator as a real process against a real API server, and the few things that tests do around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from epochkv_operator.api.generate import CRDS, manifest
from hack.cluster.controlplane import ControlPlane
from hack.loopback import free_ports
from hack.standalone.process import Popen, Process
from hack.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
POOLS = "/apis/epochkv.io/v1alpha1/namespaces/{}/kvcachepools"
ENGINES = "/apis/epochkv.io/v1alpha1/namespaces/{}/inferenceengines"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
#: Where everything the operator makes is listed, by a short name.
CHILDREN = {
    "deployments": "/apis/apps/v1/namespaces/{}/deployments",
    "statefulsets": "/apis/apps/v1/namespaces/{}/statefulsets",
    "services": "/api/v1/namespaces/{}/services",
    "configmaps": "/api/v1/namespaces/{}/configmaps",
    "serviceaccounts": "/api/v1/namespaces/{}/serviceaccounts",
    "poddisruptionbudgets": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "networkpolicies": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "secrets": "/api/v1/namespaces/{}/secrets",
}
LEASE_SECONDS = 30
"""For operators that nobody takes over from: on a busy machine a request may take seconds, and who cannot renew in time ends."""
TAKEOVER_SECONDS = 3
"""For those that die, or freeze, and are followed by another one, which has to wait for so long."""
T = TypeVar("T")


class Namespace:
    """One namespace of the control plane, as admin."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.plane = plane
        self.name = name

    @classmethod
    def create_in(cls, plane: ControlPlane, name: str) -> Namespace:
        space = cls(plane, name)
        space.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return space

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """JSON answer; raises AssertionError with the server's message for anything but success."""
        status, answer = self.plane.api.request(method, path, body, content_type, 15)
        assert 200 <= status < 300, f"{method} {path}: {status} {answer.decode(errors='replace')[:800]}"
        return json.loads(answer) if answer else None

    def get(self, collection: str, name: str) -> Any | None:
        status, answer = self.plane.api.request("GET", f"{collection.format(self.name)}/{name}", timeout=15)
        assert status in (200, 404), f"GET {name}: {status} {answer.decode(errors='replace')[:800]}"
        return json.loads(answer) if status == 200 else None

    def create(self, collection: str, body: Any) -> Any:
        return self.request("POST", collection.format(self.name), body)

    def patch(self, collection: str, name: str, body: Any, subresource: str = "") -> Any:
        path = f"{collection.format(self.name)}/{name}{subresource}"
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def delete(self, collection: str, name: str) -> None:
        self.request("DELETE", f"{collection.format(self.name)}/{name}", {"propagationPolicy": "Background"})

    def names(self, kind: str) -> set[str]:
        """Names of the objects of a kind that carry the operator's label."""
        path = CHILDREN[kind].format(self.name) + "?labelSelector=app.kubernetes.io/managed-by%3Depochkv-operator"
        return {item["metadata"]["name"] for item in self.request("GET", path)["items"]}

    def versions(self) -> dict[str, str]:
        """resourceVersion of every object of the operator and its user here, by kind and name. Leases are left out."""
        found: dict[str, str] = {}
        for path in (*CHILDREN.values(), POOLS, ENGINES, "/apis/events.k8s.io/v1/namespaces/{}/events"):
            for item in self.request("GET", path.format(self.name))["items"]:
                metadata = item["metadata"]
                found[f"{path.rsplit('/', 1)[1]}/{metadata['name']}"] = f"{metadata['uid']}@{metadata['resourceVersion']}"
        return found

    def kubectl(self, *arguments: str, stdin: str | None = None, ok: bool = True) -> str:
        """What kubectl writes; on standard error, where it has to fail."""
        command = [str(self.plane.kubectl), f"--kubeconfig={self.plane.kubeconfig}", "-n", self.name, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout if ok else done.stderr

    def pool(self, name: str) -> Any:
        return self.get(POOLS, name)

    def status(self, name: str) -> dict[str, Any]:
        return (self.get(POOLS, name) or {}).get("status") or {}

    def engine_status(self, name: str) -> dict[str, Any]:
        return (self.get(ENGINES, name) or {}).get("status") or {}

    def create_pool(self, name: str, **spec: Any) -> Any:
        body = {"apiVersion": "epochkv.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": name}, "spec": spec}
        return self.create(POOLS, body)

    def create_engine(self, name: str, **spec: Any) -> Any:
        body = {"apiVersion": "epochkv.io/v1alpha1", "kind": "InferenceEngine", "metadata": {"name": name}, "spec": spec}
        return self.create(ENGINES, body)

    def patch_spec(self, pool: str, **fields: Any) -> None:
        self.patch(POOLS, pool, {"spec": fields})

    def events(self, reason: str) -> list[dict[str, Any]]:
        items = self.request("GET", f"/apis/events.k8s.io/v1/namespaces/{self.name}/events")["items"]
        return [event for event in items if event["reason"] == reason]

    def bump(self, pool: str, epoch: int) -> None:
        self.patch(POOLS, pool, {"spec": {"resetEpoch": epoch}})


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((item for item in status.get("conditions") or [] if item["type"] == kind), {})


def becomes(read: Callable[[str], dict[str, Any]], name: str, kind: str, **wanted: str) -> dict[str, Any]:
    """The condition of this kind, once it has this status or reason; `read`: `status` or `engine_status` of a namespace."""
    return eventually(
        lambda: found if (found := condition(read(name), kind)).items() >= wanted.items() else None,
        lambda: f"{kind} {wanted}: {read(name)}",
    )


@contextmanager
def leading_operator(space: Namespace, directory: Path, **options: Any) -> Iterator[OperatorProcess]:
    """One for this namespace, which leads."""
    with OperatorProcess(space.plane, space.name, directory, **options) as operator:
        yield operator.wait_ready()


def install_crds(plane: ControlPlane) -> None:
    """Apply the CRDs and wait until both are served."""
    for crd in CRDS:
        plane.api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd.name}", manifest(crd))
    for plural in ("kvcachepools", "inferenceengines"):
        eventually(lambda p=plural: plane.api.ok(f"/apis/epochkv.io/v1alpha1/{p}"), f"{plural} served")


class OperatorProcess:
    """`python -m epochkv_operator run` with ports of its own. A flag that is None is left out, one that is a tuple is
    repeated. Ended by pid."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        directory: Path,
        *,
        hub_port: int | None = None,
        kubeconfig: Path | None = None,
        popen: Popen = subprocess.Popen,
        **flags: Any,
    ) -> None:
        self.home = Namespace(plane, namespace)
        """Where its Lease and the hub's Secret are."""
        self._popen = popen
        ports = free_ports(3)
        self.hub_port = hub_port or ports[0]
        self.probe_port, self.metrics_port = ports[1:]
        self.log_file = directory / f"operator-{self.probe_port}.log"
        options = {
            "namespace": namespace,
            "watch-namespace": namespace,
            "hub-bind": f"tcp://127.0.0.1:{self.hub_port}",
            "hub-endpoint": f"tcp://127.0.0.1:{self.hub_port}",
            "probe-bind": f"127.0.0.1:{self.probe_port}",
            "metrics-bind": f"127.0.0.1:{self.metrics_port}",
            "lease-duration-seconds": LEASE_SECONDS,
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        lists = {name: value if isinstance(value, tuple) else (value,) for name, value in options.items()}
        given = [f"--{name}={value}" for name, values in lists.items() for value in values if value is not None]
        self.command = [sys.executable, "-m", "epochkv_operator", "run", *given]
        python_path = os.pathsep.join(str(ROOT / part) for part in ("fence", "operator"))
        self.env = {"KUBECONFIG": str(kubeconfig or plane.kubeconfig), "PYTHONPATH": python_path}
        self.process: Process

    def __enter__(self) -> OperatorProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.process.kill()

    def start(self) -> OperatorProcess:
        self.process = Process("operator", self.command, self.log_file, self.env, cwd=ROOT, popen=self._popen)
        return self

    def terminate(self, seconds: float = 15.0) -> int:
        self.process.popen.terminate()
        status: int = self.process.popen.wait(seconds)
        return status

    def wait_ready(self, seconds: float = 60.0) -> OperatorProcess:
        """Until /readyz answers 200: this process leads and its hub is bound."""
        self.process.wait_until(lambda: self.http("/readyz")[0] == 200, seconds, "ready")
        return self

    def http(self, path: str, seconds: float = 5.0) -> tuple[int, str]:
        """Status and text of a probe; status 0 when nobody answers."""
        port = self.metrics_port if path == "/metrics" else self.probe_port
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over all labels; 0 when there are none."""
        samples = (line for line in self.http("/metrics")[1].splitlines() if line.startswith((name + "{", name + " ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The log so far, one dict per line."""
        for line in self.log_file.read_text(errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                yield {"event": line, "level": "raw"}

    def logged(self, text: str) -> list[dict[str, Any]]:
        """Lines whose event contains `text`."""
        return [line for line in self.lines() if text in str(line.get("event"))]

    def tail(self, count: int = 25) -> str:
        return self.process.tail(count)
