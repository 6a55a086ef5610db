"""The cache key of the Go binaries covers everything that they are built from, and a demo builds nothing that only tests need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hack.cluster import binaries
from hack.cluster.provider import ClusterError

CLUSTER = binaries.MODULES[0]


@pytest.mark.parametrize("file", ["go.mod", "go.sum", "main.go", "pause/main.go"])
def test_key_changes_with_each_file(tmp_path: Path, file: str) -> None:
    shutil.copytree(binaries.TOOLS, tmp_path / "tools")
    before = binaries.module_hash(CLUSTER, "go1.26.0", tmp_path / "tools")
    assert binaries.module_hash(CLUSTER, "go1.26.0", tmp_path / "tools") == before
    with (tmp_path / "tools/cluster" / file).open("a") as handle:
        handle.write("\n")
    assert binaries.module_hash(CLUSTER, "go1.26.0", tmp_path / "tools") != before


def test_the_program_knows_every_name_that_it_is_called_by() -> None:
    source = (binaries.TOOLS / "cluster/main.go").read_text()
    assert [name for name in CLUSTER.names if f'case "{name}":' not in source] == []
    assert f"k8s.io/kubernetes {binaries.KUBERNETES_VERSION}\n" in (binaries.TOOLS / "cluster/go.mod").read_text()


def test_a_demo_does_not_wait_for_what_only_tests_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(module: binaries.Module, folder: Path, report: object) -> None:
        folder.mkdir(parents=True)
        for name in module.programs:
            (folder / name).touch()

    monkeypatch.setattr(binaries, "_build_module", build)
    found = binaries.build(lambda line: None, tmp_path)
    assert found.path("kubectl").name == "kubectl"
    with pytest.raises(ClusterError, match=r"promtool is not built: run 'python -m hack\.cluster build"):
        found.path("promtool")
    assert binaries.build(lambda line: None, tmp_path, checks=True).path("promtool").name == "promtool"


def test_what_is_left_is_told_by_the_packages_that_are_left() -> None:
    assert binaries._left(100, 3000, 10.0) == "100 of 3000 packages"
    assert binaries._left(1000, 3000, 60.0) == "1000 of 3000 packages, about 2:00 left"
    assert binaries._left(3000, 3000, 200.0) == "linking"
