"""YAML of pages of the documentation: what tools that wait for an object make of it (kstatus, Flux, Argo CD), and recipes of serving
platforms, which put the pool's label on the pods that run vLLM."""

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator import doctor
from epochkv_operator.api.generate import ENGINE, manifest
from hack.cluster import binaries
from hack.other_crds import read_crd

ROOT = Path(__file__).resolve().parents[3]
LABEL, POOL, KSERVE, SAMPLES = "epochkv.io/pool", "policy", "llminferenceservices.serving.kserve.io", "config/samples"
Json = dict[str, Any]


@functools.cache
def page(name: str) -> list[Json]:
    """The manifests of a page."""
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", (ROOT / f"docs/{name}.md").read_text(), re.DOTALL)]


def conditions(generation: int = 3, **given: str) -> Json:
    """A status in which each condition is what `status reason` says."""
    found = [{"type": kind, **dict(zip(("status", "reason"), said.split(), strict=True)), "message": said} for kind, said in given.items()]
    return {"observedGeneration": generation, "conditions": found}


NEW = manifest(ENGINE)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["default"]


@pytest.mark.parametrize(
    ("status", "plain", "flux", "argo"),
    [
        (NEW, "InProgress", "InProgress", "Progressing"),
        (conditions(Ready="True Ready", Progressing="True RolledOut"), "Current", "Current", "Healthy"),
        (conditions(Ready="True Ready"), "Current", "Current", "Healthy"),
        (conditions(Ready="True ScaledToZero", Available="False ScaledToZero"), "Current", "Current", "Healthy"),
        # The operator has not seen the newest spec.
        (conditions(2, Ready="True Ready"), "InProgress", "InProgress", "Progressing"),
        (conditions(2, Ready="False InvalidTemplate"), "InProgress", "InProgress", "Progressing"),
        (conditions(Ready="False Starting", Progressing="True RollingOut"), "InProgress", "InProgress", "Progressing"),
        (conditions(Ready="Unknown HubUnavailable"), "InProgress", "InProgress", "Progressing"),
        (conditions(Ready="True Ready", Progressing="True RollingOut"), "Current", "InProgress", "Progressing"),
        # Only an edit mends these.
        (conditions(Ready="True Ready", Progressing="False ImagePullFailed"), "Current", "Failed", "Degraded"),
        (conditions(Ready="False InvalidTemplate", Progressing="True RolledOut"), "InProgress", "Failed", "Degraded"),
        (conditions(Ready="False CrashLooping"), "InProgress", "Failed", "Degraded"),
    ],
)
@pytest.mark.parametrize("kind", ["InferenceEngine", "KVCachePool"])
def test_what_tools_that_wait_make_of_it(kind: str, status: Json, plain: str, flux: str, argo: str, tmp_path: Path) -> None:
    kustomization, settings, *_ = page("gitops")
    (expressions,) = (one for one in kustomization["spec"]["healthCheckExprs"] if one["kind"] == kind)
    (tmp_path / "expressions").write_text(json.dumps(expressions))
    (tmp_path / "check").write_text(settings["data"][f"resource.customizations.health.epochkv.io_{kind}"])
    obj = {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": {"name": "it", "generation": 3}, "spec": {}, "status": status}
    command = [binaries.build(also=["gitops"]).path("gitops"), tmp_path / "expressions", tmp_path / "check"]
    done = subprocess.run(command, input=json.dumps(obj), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [plain, flux, argo], done.stderr


def test_kubectl_takes_what_we_say() -> None:
    """Until it dials, as there is no server."""
    said = [fix.format(ns="rl", name="policy", word="pool") for fix in (*doctor.FIXES.values(), doctor.LOGS)]
    env = {"PATH": f"{binaries.build().path('kubectl').parent}:/bin", "KUBECONFIG": "/dev/null"}
    for command in said + re.findall("^kubectl .*", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE):
        shell = ["bash", "-c", re.split(r"   #| \| ", command)[0]]
        done = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert "was refused" in done.stderr, done


def test_kustomize_labels_pods_and_no_selector(tmp_path: Path) -> None:
    """On objects such as llm-d's guides have: the guides themselves are not here."""
    (overlay,) = (one for one in page("recipes/llm-d") if "resources" in one)
    container = {"name": "modelserver", "image": "docker.io/vllm/vllm-openai:v0.27.1"}
    pods = {"metadata": {"labels": {"llm-d.ai/role": "decode"}}, "spec": {"containers": [container]}}
    selector, group = {"matchLabels": {"llm-d.ai/role": "decode"}}, {"workerTemplate": pods}
    base = [
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"selector": selector, "template": pods}},
        {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "spec": {"leaderWorkerTemplate": group}},
    ]
    folder = tmp_path / overlay["resources"][0]
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(yaml.safe_dump_all([{**one, "metadata": {"name": "decode"}} for one in base]))
    (folder / "kustomization.yaml").write_text("resources: [base.yaml]")
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    command = [str(binaries.build().path("kubectl")), "kustomize", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    one, several = yaml.safe_load_all(done.stdout)
    assert one["spec"]["selector"] == selector
    for made in (one["spec"]["template"], several["spec"]["leaderWorkerTemplate"]["workerTemplate"]):
        assert made["metadata"]["labels"] == {"llm-d.ai/role": "decode", LABEL: POOL}
        assert made["spec"]["containers"][0]["image"] == "docker.io/vllm/vllm-openai:v0.32.0"


def unknown(given: Any, schema: Json, path: str) -> Iterator[str]:
    """Fields that a CRD does not have. Of what it takes as it is, none."""
    if isinstance(given, list):
        for item in given:
            yield from unknown(item, schema["items"], path)
    elif isinstance(given, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        for name, value in given.items():
            field = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            yield from [f"{path}.{name}"] if field is None else unknown(value, field, f"{path}.{name}")


@pytest.mark.parametrize(
    ("crd", "file"), [(KSERVE, "docs/recipes/kserve.md"), ("rayclusters.ray.io", f"{SAMPLES}/kuberay/raycluster.yaml")]
)
def test_other_kinds_have_the_fields_that_we_write(crd: str, file: str) -> None:
    text = (ROOT / file).read_text()
    (given,) = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) or [text])
    versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in read_crd(crd)["spec"]["versions"]}
    schema = versions[given["apiVersion"].rpartition("/")[2]]
    assert not list(unknown(given["spec"], schema["properties"]["spec"], "spec"))
    assert LABEL not in given["metadata"].get("labels", {}), "it would not reach the pods"
    assert crd != KSERVE or given["spec"]["labels"] == {LABEL: POOL}
    (worker,) = page("recipes/dynamo")[0]["spec"]["components"]  # whose CRD no registry has
    assert (page("recipes/dynamo")[0]["apiVersion"], worker["type"]) == ("nvidia.com/v1beta1", "worker")
    assert worker["podTemplate"]["metadata"]["labels"] == {LABEL: POOL}
