"""`epochkv plan --live` as people run it, against a real API server, with an operator that then does what was foretold."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.waiting import eventually
from tests.cluster.operator_harness import ENGINES, Namespace, OperatorProcess
from tests.cluster.test_api_validation import manifest
from tests.support.cli import inside

Json = dict[str, Any]
POOL: Json = {"local": {"capacity": "1Gi"}}
ENGINE: Json = {"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, "replicas": 2, "resources": {"limits": {"memory": "4Gi"}}}
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(namespace: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Write manifests to a file, and run `epochkv plan --live` on it: exit status, stdout, stderr."""

    def run(*objects: Json, arguments: tuple[str, ...] = (), kubeconfig: Path | None = None) -> tuple[int, str, str]:
        file = tmp_path / "manifests.yaml"
        file.write_text(yaml.safe_dump_all(objects))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig or namespace.plane.kubeconfig))
        monkeypatch.setenv("PATH", f"{namespace.plane.kubectl.parent}:{os.environ['PATH']}")
        return inside(capsys, "plan", "-f", str(file), "--live", "-n", namespace.name, *arguments)

    return run


def pool(**changes: Any) -> Json:
    return manifest("KVCachePool", "policy", {**POOL, **changes})


def engine(**changes: Any) -> Json:
    return manifest("InferenceEngine", "rollout", {**ENGINE, **changes})


def apply(namespace: Namespace, *objects: Json, flags: tuple[str, ...] = ()) -> None:
    namespace.kubectl("apply", *flags, "-f", "-", stdin=yaml.safe_dump_all(objects))


def generation(namespace: Namespace) -> int | None:
    """Of the engine's Deployment: it rises with each change of it."""
    found = namespace.get("/apis/apps/v1/namespaces/{}/deployments", "rollout")
    return found["metadata"]["generation"] if found else None


def template(namespace: Namespace) -> Json:
    found = namespace.get("/apis/apps/v1/namespaces/{}/deployments", "rollout")
    assert found is not None
    return found["spec"]["template"]


def steps(output: str) -> dict[str, str]:
    """Steps of `-o json`, by kind and name."""
    return {" ".join(step.split()[1:3]).split(":")[0]: step for one in json.loads(output)["objects"] for step in one["steps"]}


def settled(namespace: Namespace) -> None:
    def done() -> bool:
        found = namespace.get(ENGINES, "rollout")
        assert found is not None
        seen = (found.get("status") or {}).get("observedGeneration")
        return generation(namespace) is not None and bool(seen == found["metadata"]["generation"])

    eventually(done, "the engine is reconciled")


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["kubectl-apply", "server-side"])
def test_what_is_foretold_is_what_the_operator_does(
    namespace: Namespace, operator: OperatorProcess, plan: Plan, flags: tuple[str, ...]
) -> None:
    eventually(lambda: len(namespace.versions()) == 2, "the namespace has its ServiceAccount and its CA")
    before = namespace.versions()
    status, output, _ = plan(pool(), engine(), arguments=("-o", "json"))
    assert status == 0, "new pods replace none"
    wanted = set(steps(output))
    assert {f"Deployment {namespace.name}/rollout", f"ConfigMap {namespace.name}/policy-connection"} <= wanted
    assert namespace.versions() == before, "a plan writes nothing"

    apply(namespace, pool(), engine(), flags=flags)
    settled(namespace)
    for kind in ("deployments", "configmaps", "services", "serviceaccounts", "poddisruptionbudgets"):
        assert namespace.names(kind) == {step.split("/")[1] for step in wanted if step.split()[0].lower() + "s" == kind}

    status, output, _ = plan(pool(), engine())
    assert status == 0, output
    assert output.count("nothing to do") == 2, "defaults are no difference"

    seen = generation(namespace)
    status, output, _ = plan(pool(), engine(replicas=3))
    assert (status, "has changed: spec.replicas\n" in output) == (0, True), output
    apply(namespace, pool(), engine(replicas=3), flags=flags)
    eventually(lambda: generation(namespace) != seen, "scaled")

    old = template(namespace)
    status, output, _ = plan(engine(replicas=3, args=["--enforce-eager"]))
    assert status == 2, output
    assert "replaces 3 pods, at most 1 at a time" in output
    assert template(namespace) == old
    apply(namespace, engine(replicas=3, args=["--enforce-eager"]), flags=flags)
    eventually(lambda: template(namespace) != old, "rolled")

    # A field that the file does not have any more goes, as with kubectl.
    status, output, _ = plan(engine(replicas=3))
    assert status == 2, output
    assert "containers[engine].args" in output


def test_engines_that_are_in_no_file_are_shown_when_their_pool_restarts_them(
    namespace: Namespace, operator: OperatorProcess, plan: Plan
) -> None:
    apply(namespace, pool(), engine())
    settled(namespace)
    status, output, _ = plan(pool(local={"capacity": "2Gi"}), arguments=("-o", "json"))
    assert status == 2, output
    assert "replaces 2 pods" in steps(output)[f"Deployment {namespace.name}/rollout"]
    status, output, _ = plan(pool(resetEpoch=4))
    assert status == 0, output
    assert "all KV of the pool becomes unreachable" in output
    old = template(namespace)
    apply(namespace, pool(local={"capacity": "2Gi"}))
    eventually(lambda: template(namespace) != old, "the engine is rolled by its pool")


def test_what_kubectl_apply_drops_is_said_and_not_foretold(namespace: Namespace, operator: OperatorProcess, plan: Plan) -> None:
    def without(gone: Any) -> Json:
        return engine(
            template={"spec": {"securityContext": {"runAsUser": gone}, "containers": [{"name": "engine", "livenessProbe": gone}]}}
        )

    def both(spec: Json) -> tuple[bool, bool]:
        return "runAsUser" in spec["spec"]["securityContext"], "livenessProbe" in spec["spec"]["containers"][0]

    apply(namespace, pool())
    # Whoever makes an object with another command may apply it next.
    namespace.kubectl("create", "-f", "-", stdin=yaml.safe_dump(engine()))
    settled(namespace)
    null, note = without(None), "spec.template.spec.securityContext.runAsUser: null, which `kubectl apply` drops"
    status, output, _ = plan(null)
    assert note in output
    apply(namespace, null)
    settled(namespace)
    assert both(template(namespace))[0], "it removed nothing"

    wanted = without({"$patch": "delete"})
    status, output, _ = plan(wanted)
    assert (status, note in output) == (2, False), output
    apply(namespace, wanted)
    eventually(lambda: both(template(namespace)) == (False, False), "removed")
    status, output, _ = plan(wanted)
    assert (status, "nothing to do" in output) == (0, True), output

    apply(namespace, null, flags=("--server-side", "--force-conflicts"))
    settled(namespace)
    assert both(template(namespace)) == (False, False)


def test_what_the_api_server_would_refuse_is_an_error_with_file_field_and_fix(
    namespace: Namespace, operator: OperatorProcess, plan: Plan
) -> None:
    apply(namespace, pool(resetEpoch=7), engine())
    settled(namespace)
    status, output, errors = plan(pool(resetEpoch=3))
    assert (status, output) == (1, "")
    assert "manifests.yaml: " in errors
    assert "spec.resetEpoch never goes down: it is 7; to reset, set it above status.targetEpoch" in errors


def test_no_cluster_no_right_and_no_namespace_are_said(namespace: Namespace, plan: Plan, tmp_path: Path) -> None:
    status, _, errors = plan(pool(), kubeconfig=tmp_path / "none")
    assert (status, "current-context must exist" in errors) == (1, True), errors
    config = yaml.safe_load(namespace.plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "away").write_text(yaml.safe_dump(config))
    status, _, errors = plan(pool(), kubeconfig=tmp_path / "away")
    assert (status, "127.0.0.1:1" in errors) == (1, True), errors
    status, _, errors = plan(pool(), kubeconfig=namespace.plane.kubeconfig_for("somebody"))
    assert (status, "Forbidden" in errors, "or leave out --live" in errors) == (1, True, True), errors
    status, _, errors = plan(pool(), arguments=("--context", "nobody"))
    assert (status, "nobody" in errors) == (1, True), errors
    status, _, errors = plan({**pool(), "metadata": {"name": "policy", "namespace": "nowhere"}}, arguments=("-n", "nowhere"))
    assert (status, "manifests.yaml: Error from server (NotFound)" in errors) == (1, True), errors
