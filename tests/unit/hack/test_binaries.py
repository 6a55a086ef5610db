"""The cache key of the Go binaries covers everything that they are built from, and a demo builds nothing that only tests need."""

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
    assert binaries.build(lambda line: None, tmp_path, also=["prometheus"]).path("promtool").name == "promtool"
