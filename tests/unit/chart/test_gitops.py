"""What tools that wait for an object make of it: kstatus, Flux with the page's expressions, Argo CD with the page's check."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.api.generate import ENGINE, manifest
from hack.cluster import binaries

ROOT = Path(__file__).resolve().parents[3]
Json = dict[str, Any]


@pytest.fixture(scope="session")
def page() -> list[Json]:
    """The manifests of the page."""
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/gitops.md").read_text(), re.DOTALL)]


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
def test_what_tools_that_wait_make_of_it(
    kind: str, status: Json, plain: str, flux: str, argo: str, page: list[Json], tmp_path: Path
) -> None:
    kustomization, settings = page[0], page[1]
    (expressions,) = (one for one in kustomization["spec"]["healthCheckExprs"] if one["kind"] == kind)
    (tmp_path / "expressions").write_text(json.dumps(expressions))
    (tmp_path / "check").write_text(settings["data"][f"resource.customizations.health.epochkv.io_{kind}"])
    obj = {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": {"name": "it", "generation": 3}, "spec": {}, "status": status}
    command = [binaries.build(also=["gitops"]).path("gitops"), tmp_path / "expressions", tmp_path / "check"]
    done = subprocess.run(command, input=json.dumps(obj), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [plain, flux, argo], done.stderr
