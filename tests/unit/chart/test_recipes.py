"""The pages on serving platforms: their YAML puts the pool's label on the pods that run vLLM, and asks for no other connector.

Kustomize is in kubectl. No package registry serves the platforms' charts. `$EPOCHKV_PLATFORMS` is a folder that has them, as
`helm pull --untar` leaves them: llm-d-modelservice, vllm-stack, kserve-llmisvc-crd. Without it, what needs them is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster import binaries

ROOT = Path(__file__).resolve().parents[3]
LABEL, POOL = "epochkv.io/pool", "policy"
PLATFORMS = os.environ.get("EPOCHKV_PLATFORMS", "")
Json = dict[str, Any]


def page(name: str) -> list[Json]:
    """The YAML of a page."""
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", (ROOT / f"docs/recipes/{name}.md").read_text(), re.DOTALL)]


def supplied(name: str) -> Path:
    """A chart or a file of a platform."""
    if not (PLATFORMS and (Path(PLATFORMS) / name).exists()):
        pytest.skip(f"no package registry serves {name}: put it into a folder, and the folder into EPOCHKV_PLATFORMS")
    return Path(PLATFORMS) / name


def rendered(*command: str | Path) -> list[Json]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def test_kustomize_labels_pods_and_no_selector(tmp_path: Path) -> None:
    """On objects such as llm-d's guides have: the guides themselves are not here."""
    (overlay,) = (one for one in page("llm-d") if "resources" in one)
    container = {"name": "modelserver", "image": "docker.io/vllm/vllm-openai:v0.27.1"}
    pods = {"metadata": {"labels": {"llm-d.ai/role": "decode"}}, "spec": {"containers": [container]}}
    selector = {"matchLabels": {"llm-d.ai/role": "decode"}}
    base = [
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"selector": selector, "template": pods}},
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "spec": {"leaderWorkerTemplate": {"workerTemplate": pods}},
        },
    ]
    folder = tmp_path / overlay["resources"][0]
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(yaml.safe_dump_all([{**one, "metadata": {"name": "decode"}} for one in base]))
    (folder / "kustomization.yaml").write_text("resources: [base.yaml]")
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    one, several = rendered(binaries.build().path("kubectl"), "kustomize", tmp_path)
    assert one["spec"]["selector"] == selector
    for made in (one["spec"]["template"], several["spec"]["leaderWorkerTemplate"]["workerTemplate"]):
        assert made["metadata"]["labels"] == {"llm-d.ai/role": "decode", LABEL: POOL}
        assert made["spec"]["containers"][0]["image"] == "docker.io/vllm/vllm-openai:v0.33.0"


@pytest.mark.parametrize(
    ("name", "chart", "version", "in_selector"),
    [("llm-d", "llm-d-modelservice", "v0.4.12", True), ("production-stack", "vllm-stack", "0.1.12", False)],
)
def test_a_chart_labels_the_pods_of_vllm(name: str, chart: str, version: str, in_selector: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(supplied(chart), tmp_path / chart)
    about = yaml.safe_load((folder / "Chart.yaml").read_text())
    assert about["version"] == version
    # A chart from its repository lacks what it can do without, such as a whole Prometheus.
    about["dependencies"] = [one for one in about["dependencies"] if "condition" not in one]
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about))
    (folder / "Chart.lock").unlink(missing_ok=True)
    (values,) = (one for one in page(name) if "resources" not in one)
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    objects = rendered(binaries.build().path("helm"), "template", "demo", folder, "--values", tmp_path / "values.yaml")
    made = {obj["metadata"]["name"]: obj["spec"] for obj in objects if obj["kind"] == "Deployment"}
    vllm = [spec for spec in made.values() if spec["template"]["spec"]["containers"][0]["name"] == "vllm"]
    assert vllm
    for spec in made.values():
        assert (LABEL in spec["template"]["metadata"]["labels"]) is (spec in vllm)
    for spec in vllm:
        assert spec["template"]["metadata"]["labels"][LABEL] == POOL
        assert (LABEL in spec["selector"]["matchLabels"]) is in_selector
        engine = spec["template"]["spec"]["containers"][0]
        assert not re.search("kv.transfer|kv.offload|no-enable-prefix-caching", str([engine["command"], engine.get("args")]))
        assert "PYTHONPATH" not in {one["name"] for one in engine["env"]}
        assert engine["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "1"}


def unknown(value: Any, schema: Json, path: str = "") -> Iterator[str]:
    """Fields that a schema of a CRD does not have: the API server would drop them."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, list):
        for item in value:
            yield from unknown(item, schema["items"], path)
    elif isinstance(value, dict):
        for key, inner in value.items():
            found = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if found is None:
                yield f"{path}.{key}"
            else:
                yield from unknown(inner, found, f"{path}.{key}")


def test_the_crd_of_kserve_has_the_fields() -> None:
    text = supplied("kserve-llmisvc-crd/templates/serving.kserve.io_llminferenceservices.yaml").read_text()
    crd = yaml.load(re.sub(r"\{\{.*?\}\}", "x", text), Loader=yaml.CSafeLoader)
    (manifest,) = page("kserve")
    group, version = manifest["apiVersion"].split("/")
    assert (group, manifest["kind"]) == (crd["spec"]["group"], crd["spec"]["names"]["kind"])
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == version)
    assert list(unknown(manifest["spec"], schema["properties"]["spec"])) == []
    assert list(unknown({"nothing": 1}, schema["properties"]["spec"])) == [".nothing"]


def test_labels_of_pods_stand_where_the_platforms_take_them() -> None:
    (kserve,), (dynamo,) = page("kserve"), page("dynamo")
    assert kserve["spec"]["labels"] == {LABEL: POOL}
    (worker,) = dynamo["spec"]["components"]
    assert (dynamo["apiVersion"], worker["type"]) == ("nvidia.com/v1beta1", "worker")
    assert worker["podTemplate"]["metadata"]["labels"] == {LABEL: POOL}
