"""The workflows: right by actionlint, with everything pinned that somebody else could move, and with nobody's name in them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster import binaries

ROOT = Path(__file__).resolve().parents[3]
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
def test_every_action_is_pinned_by_commit(path: Path) -> None:
    lines = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if re.match(r"\s*(- )?uses:", line)]
    assert lines
    assert [line for line in lines if not STEP.fullmatch(line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_may_write_unless_its_job_says_so(path: Path) -> None:
    assert workflow(path.stem)["permissions"] == {"contents": "read"}


def test_only_what_publishes_may_write() -> None:
    granted = {
        name: {right for right, level in job.get("permissions", {}).items() if level == "write"}
        for name, job in workflow("release")["jobs"].items()
    }
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


def test_no_script_is_written_by_a_tag() -> None:
    """`${{ }}` inside a script would run what a tag or a branch is called."""
    for path in WORKFLOWS:
        for job in workflow(path.stem)["jobs"].values():
            assert [step["run"] for step in job["steps"] if "${{" in step.get("run", "")] == []
