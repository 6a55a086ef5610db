"""The cache key of the Go binaries covers everything that they are built from."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from hack.cluster import binaries
from hack.cluster.provider import ClusterError

REST = ["kubernetes", "helm", "coredns", "prometheus", "actionlint"]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    shutil.copytree(binaries.TOOLS, tmp_path / "tools")
    return tmp_path / "tools"


@pytest.mark.parametrize("file", ["go.mod", "go.sum", "tools.go"])
def test_key_changes_with_each_file(tools: Path, file: str) -> None:
    before = binaries.module_hash("etcd", "go1.24.0", tools)
    assert binaries.module_hash("etcd", "go1.24.0", tools) == before
    with (tools / "etcd" / file).open("a") as handle:
        handle.write("\n")
    assert binaries.module_hash("etcd", "go1.24.0", tools) != before


def test_every_module_pins_its_packages() -> None:
    for module in binaries.MODULES:
        imports = (binaries.TOOLS / module.name / "tools.go").read_text()
        for package in module.packages.values():
            assert f'_ "{package}"' in imports
    assert f"k8s.io/kubernetes {binaries.KUBERNETES_VERSION}" in (binaries.TOOLS / "kubernetes/go.mod").read_text()


def test_missing_binary_says_how_to_build_it(tmp_path: Path) -> None:
    found = binaries.Binaries((tmp_path,))
    assert [module.name for module in found.missing()] == ["etcd", *REST]
    with pytest.raises(ClusterError, match=r"python -m hack\.cluster build"):
        found.path("etcd")
    (tmp_path / "etcd").touch(mode=stat.S_IRWXU)
    assert found.path("etcd") == tmp_path / "etcd"
    assert [module.name for module in found.missing()] == REST


def test_a_demo_does_not_wait_for_what_only_tests_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(binaries, "_build_module", lambda module, *rest: built.append(module.name))
    binaries.build(lambda line: None, tmp_path)
    assert built == ["etcd", "kubernetes", "helm", "coredns"]
    built.clear()
    binaries.build(lambda line: None, tmp_path, checks=True)
    assert built[-2:] == ["prometheus", "actionlint"]
