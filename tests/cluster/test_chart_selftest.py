"""What `helm test` makes and runs, on a real API server: its objects, its rights, Pod Security, and when it says no."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.chart_releases import Release
from tests.cluster.operator_harness import POOLS, ROOT, Namespace, OperatorProcess

LOCAL = {"capacity": "64Mi"}
PODS = "/api/v1/namespaces/{}/pods"


@dataclass
class Installed:
    """A release with its operator, and the objects of its test."""

    release: Release
    operator: OperatorProcess
    hooks: list[dict[str, Any]]

    @property
    def pod(self) -> dict[str, Any]:
        (pod,) = [obj for obj in self.hooks if obj["kind"] == "Pod"]
        return pod

    def test(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run what the test's pod runs, with its rights. `arguments` come last and win."""
        env = {**os.environ, "KUBECONFIG": str(self.release.kubeconfig("epochkv-test"))}
        env["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("fence", "operator"))
        (container,) = self.pod["spec"]["containers"]
        command = [sys.executable, "-m", "epochkv_operator", *container["args"], *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def apply(release: Release, objects: list[dict[str, Any]], *options: str) -> None:
    command = [str(release.plane.kubectl), "--kubeconfig", str(release.plane.kubeconfig), "apply", *options, "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(objects), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "would violate" not in done.stderr, done.stderr


def values(namespace: Namespace) -> tuple[str, ...]:
    return "crds.install=false", f"watchNamespaces={{{namespace.name}}}", "test.timeoutSeconds=30"


def hooks(release: Release) -> list[dict[str, Any]]:
    """What `helm test` would make."""
    return [obj for obj in yaml.safe_load_all(release.helm("get", "hooks", release.name).stdout) if obj]


@pytest.fixture
def installed(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> Iterator[Installed]:
    """Serving one namespace, in a namespace of its own with Pod Security `restricted`."""
    home = f"{namespace.name}-home"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    namespace.request("POST", "/api/v1/namespaces", {"metadata": {"name": home, "labels": labels}})
    release = Release(plane, "demo", home, tmp_path)
    release.install(*values(namespace))
    made = hooks(release)
    apply(release, [obj for obj in made if obj["kind"] != "Pod"])
    with release.operator() as operator:
        yield Installed(release, operator.wait_ready(), made)
    release.uninstall()


def admitted(installed: Installed) -> None:
    """The pods of operator and test are, where Pod Security is restricted."""
    apply(installed.release, [installed.pod], "--dry-run=server")
    template = installed.release.deployment()["spec"]["template"]
    # The test's account: the operator's own would do as well, and this one is there in any case.
    spec = {**template["spec"], "serviceAccountName": "epochkv-test"}
    metadata = {"name": "operator", "namespace": installed.release.namespace}
    apply(installed.release, [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}], "--dry-run=server")


def test_helm_test(installed: Installed, namespace: Namespace) -> None:
    """One journey, because one operator is enough: its own pool, a pool of the user's, a namesake, no operator, no hub."""
    admitted(installed)
    passed = installed.test()
    assert passed.returncode == 0, passed.stderr + installed.operator.tail()
    assert f"KVCachePool {namespace.name}/epochkv-test: epoch 1 is published" in passed.stdout
    assert "answers with the pool's keys, at epoch 1" in passed.stdout
    eventually(lambda: namespace.pool("epochkv-test") is None, "the temporary pool is gone")
    assert installed.test().returncode == 0  # again, also beside what is still being deleted

    # A pool of the user's: only with rights that `test.pool` gives.
    namespace.create_pool("policy", local=LOCAL, resetEpoch=4)
    eventually(lambda: namespace.status("policy").get("epoch") == 4, "published")
    denied = installed.test("--pool=policy")
    assert denied.returncode == 1
    assert 'cannot get resource "kvcachepools"' in denied.stderr
    installed.release.upgrade(*values(namespace), "test.pool=policy")
    apply(installed.release, [obj for obj in hooks(installed.release) if obj["kind"] != "Pod"])
    passed = installed.test("--pool=policy")
    assert passed.returncode == 0, passed.stderr
    assert namespace.status("policy")["epoch"] == 5
    apply(installed.release, [obj for obj in installed.hooks if obj["kind"] != "Pod"])

    # Somebody's pool of the temporary name is left alone.
    mine = namespace.create_pool("epochkv-test", local=LOCAL)
    refused = installed.test()
    assert refused.returncode == 1
    assert "exists and is no temporary pool" in refused.stderr
    assert namespace.pool("epochkv-test")["metadata"]["uid"] == mine["metadata"]["uid"]
    namespace.delete(POOLS, "epochkv-test")

    installed.operator.terminate()
    failed = installed.test("--timeout-seconds=2")
    assert failed.returncode == 1
    assert "no operator has looked at it after 2 s" in failed.stderr
    eventually(lambda: namespace.pool("epochkv-test") is None, "deleted after a failure, too")

    # The status alone proves nothing: the test dials the hub as engines do.
    with installed.release.operator(hub_endpoint="tcp://127.0.0.1:9") as operator:
        failed = installed.test("--timeout-seconds=10")
        assert failed.returncode == 1, operator.tail()
        assert "the hub at tcp://127.0.0.1:9 does not answer" in failed.stderr
