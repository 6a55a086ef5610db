"""What is released: one version everywhere, images by digest in the chart, images from pinned bases, and lists of what they hold."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack import release
from hack.cluster import binaries

ROOT = Path(__file__).resolve().parents[3]
DIGESTS = {name: f"sha256:{digit * 64}" for name, digit in zip(("operator", "store", "engine", "connector"), "abcd", strict=True)}
DOCKERFILES = {"operator": "Dockerfile", "store": "docker/store.Dockerfile", "engine": "docker/engine.Dockerfile"}


def test_every_place_has_one_version() -> None:
    assert len(set(release.versions().values())) == 1
    (version,) = set(release.versions().values())
    assert release.check(f"v{version}") == version


def test_the_released_chart_names_every_image_by_digest(tmp_path: Path) -> None:
    helm = str(binaries.build().path("helm"))
    chart = release.package("registry.example/team", DIGESTS, tmp_path, helm)
    command = [helm, "template", "demo", str(chart), "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    objects = [obj for obj in yaml.safe_load_all(rendered) if obj]
    (deployment,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    version = next(iter(release.versions().values()))
    assert container["image"] == f"registry.example/team/epochkv-operator@{DIGESTS['operator']}"
    assert f"--store-image=registry.example/team/epochkv-store:{version}@{DIGESTS['store']}" in container["args"]
    assert f"--engine-image=registry.example/team/epochkv-engine:{version}@{DIGESTS['engine']}" in container["args"]
    assert rendered.count(f"image: 'registry.example/team/epochkv-connector:{version}@{DIGESTS['connector']}'") == 2
    images = {spec["image"] for obj in objects for spec in obj.get("spec", {}).get("containers", [])}
    assert images == {container["image"]}


@pytest.mark.parametrize("digests", [{}, {**DIGESTS, "store": "sha256:1"}, {**DIGESTS, "engine": "latest"}, {**DIGESTS, "connector": ""}])
def test_a_chart_without_all_digests_is_refused(digests: dict[str, str]) -> None:
    values = (release.CHART / "values.yaml").read_text()
    with pytest.raises(release.ReleaseError, match=r"--digest (operator|store|engine|connector)=sha256"):
        release.released_values(values, "registry.example", "1.0.0", digests)


def test_released_images_are_for_both_processors() -> None:
    """All but the engine's, which is for what vLLM's image is for."""
    images = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]["images"]
    (build,) = [step["with"] for step in images["steps"] if step.get("id") == "build"]
    assert build["platforms"] == "${{ steps.vllm.outputs.platforms || 'linux/amd64,linux/arm64' }}"
    assert [step["if"] for step in images["steps"] if step.get("id") == "vllm"] == ["matrix.image == 'engine'"]
    assert {one["image"] for one in images["strategy"]["matrix"]["include"]} == DIGESTS.keys()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_bases_are_pinned_by_digest_and_images_run_as_nobody_in_particular(name: str) -> None:
    """vLLM's image is the user's choice; the release workflow finds its digest and builds on that.

    Each stage that is an image ends with the same numeric user, which `runAsNonRoot` can check.
    """
    text = (ROOT / DOCKERFILES[name]).read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert set(arguments) <= {"BASE_IMAGE", "VLLM_IMAGE"}
    assert re.fullmatch(r"debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", arguments["BASE_IMAGE"])
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    for source in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert source in {"${BASE_IMAGE}", "${VLLM_IMAGE}", *stages}
    bodies = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]
    images = [stage for stage in bodies if re.search(r"^(CMD|ENTRYPOINT|EXPOSE)", stage, re.MULTILINE)]
    assert images
    assert [re.findall(r"^USER (\S+)$", stage, re.MULTILINE)[-1] for stage in images] == ["65532:65532"] * len(images)


def pins(name: str) -> set[tuple[str, str]]:
    """Name and version of each requirement that is locked for an image."""
    text = (ROOT / f"hack/requirements/{name}.txt").read_text()
    return {(package.lower().replace("_", "-"), version) for package, version in re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)}


@pytest.mark.timeout(600)
@pytest.mark.slow  # the release makes one, too
def test_the_sbom_lists_exactly_what_is_pinned() -> None:
    done = subprocess.run(["make", "sbom"], cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("operator", "store", "connector"):
        text = (ROOT / f".build/sbom/{name}.cdx.json").read_text()
        bom = json.loads(text)
        assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
        listed = {(item["name"].lower().replace("_", "-"), item["version"]) for item in bom["components"]}
        assert listed == pins(name)
        assert all(item["purl"].startswith("pkg:pypi/") for item in bom["components"])
        assert any(item.get("licenses") for item in bom["components"])
        assert str(ROOT) not in text


# --------------------------------------------------------------------------------------------------------- workflows
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
STEP = re.compile(r"uses: (\S+?)@([0-9a-f]{40}) # v[0-9]+\.[0-9]+\.[0-9]+$")


def workflow(name: str) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows" / f"{name}.yaml").read_text())
    return {("on" if key is True else key): value for key, value in loaded.items()}


def test_actionlint_has_no_complaint() -> None:
    actionlint = binaries.build(also=["actionlint"]).path("actionlint")
    done = subprocess.run([str(actionlint), "-no-color", *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_every_action_may_write_where_a_job_says_so_and_runs_no_tag(path: Path) -> None:
    """`${{ }}` inside a script would run what a tag or a branch is called."""
    lines = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if re.match(r"\s*(- )?uses:", line)]
    assert lines
    assert [line for line in lines if not STEP.fullmatch(line)] == []
    found = workflow(path.stem)
    assert found["permissions"] == {"contents": "read"}
    assert [step["run"] for job in found["jobs"].values() for step in job["steps"] if "${{" in step.get("run", "")] == []


def test_only_what_publishes_may_write() -> None:
    permissions = {name: job.get("permissions", {}) for name, job in workflow("release")["jobs"].items()}
    granted = {name: {right for right, level in of_it.items() if level == "write"} for name, of_it in permissions.items()}
    assert granted == {
        "check": set(),
        "wheel": {"id-token", "attestations"},
        "images": {"packages", "id-token", "attestations"},
        "publish": {"contents", "packages", "id-token"},
    }


def test_started_by_hand_it_publishes_nothing() -> None:
    jobs = workflow("release")["jobs"]
    publishing = "needs.check.outputs.publish == 'true'"
    assert jobs["publish"]["if"] == publishing
    for name in ("wheel", "images"):
        for step in jobs[name]["steps"]:
            said = f"{step.get('uses', '')} {step.get('run', '')}"
            if any(word in said for word in ("cosign", "attest", "login-action")):
                assert step["if"] == publishing, step
    (build,) = [step for step in jobs["images"]["steps"] if "build-push-action" in step.get("uses", "")]
    assert publishing in build["with"]["push"]
    assert (build["with"]["sbom"], build["with"]["provenance"]) == (True, "mode=max")
