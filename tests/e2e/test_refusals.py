"""Bad input on the installed chart: refused at admission, with a sentence that names field and remedy, and nothing is lost."""

from __future__ import annotations

import json

import pytest
import yaml

from hack.demo.journey import NAMESPACE, POOL
from hack.demo.kube import Kube
from tests.e2e.conftest import engine_manifest, pool_manifest, refused

pytestmark = pytest.mark.timeout(900)


def spec(kube: Kube) -> object:
    return json.loads(kube.kubectl("-n", NAMESPACE, "get", "kvp", POOL, "-o", "json"))["spec"]


@pytest.mark.parametrize("patch", ['{"spec":{"resetEpoch":0}}', '{"spec":{"resetEpoch":null}}'])
def test_the_epoch_never_goes_down(kube: Kube, patch: str) -> None:
    raised = {"spec": {"resetEpoch": int(spec(kube).get("resetEpoch", 0)) + 1}}  # type: ignore[attr-defined]
    kube.kubectl("-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", json.dumps(raised))
    before = spec(kube)
    assert "spec.resetEpoch never goes down" in refused(kube, "-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", patch)
    assert spec(kube) == before


def test_arguments_of_the_operator_are_refused(kube: Kube) -> None:
    manifest = engine_manifest("bad", POOL)
    manifest["spec"]["args"].append("--kv-transfer-config={}")
    message = refused(kube, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    assert "spec.args" in message
    assert "remove it from spec.args" in message


def test_protected_environment_is_refused(kube: Kube) -> None:
    manifest = engine_manifest("bad", POOL)
    manifest["spec"]["env"].append({"name": "PYTHONHASHSEED", "value": "0"})
    message = refused(kube, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    assert "spec.env" in message


def test_unknown_fields_are_refused(kube: Kube) -> None:
    manifest = pool_manifest("bad", "epochkv/store:dev")
    manifest["spec"]["resetEpohc"] = 1
    assert "resetEpohc" in refused(kube, "apply", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(manifest))


def test_pods_of_the_demo_satisfy_restricted_pod_security(kube: Kube) -> None:
    labels = json.loads(kube.kubectl("get", "namespace", NAMESPACE, "-o", "json"))["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    running = [pod for pod in kube.pods(NAMESPACE, "app.kubernetes.io/part-of=epochkv") if pod["status"]["phase"] == "Running"]
    assert len(running) >= 5
    for pod in running:
        assert pod["spec"]["securityContext"]["runAsUser"] == 65532
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in pod["spec"]["containers"])
