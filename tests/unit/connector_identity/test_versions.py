"""What an engine tells its hub of the packages that it runs, and what it says of a framework that nobody has tried with us."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import vllm

from epochkv_connector.engine import plugin
from epochkv_connector.engine.interface import FRAMEWORKS, running, warn_of_frameworks

ROOT = Path(__file__).resolve().parents[3]


def test_the_versions_are_those_of_the_installed_packages() -> None:
    names = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    mooncake = {version for name, version in names.items() if name.startswith("mooncake-transfer-engine")}
    assert running() == {"epochkv": names["epochkv"], "vllm": vllm.__version__, "mooncake": mooncake.pop()}


class Framework:
    """A framework of which the environment has `version`, once it is loaded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.version = ""
        self._patch = patch
        installed = importlib.metadata.version
        patch.setattr(importlib.metadata, "version", lambda name: self.version if name == "skyrl" else installed(name))

    def load(self, version: str) -> None:
        self.version = version
        self._patch.setitem(sys.modules, "skyrl", ModuleType("skyrl"))


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    warn_of_frameworks.cache_clear()
    yield Framework(monkeypatch)
    warn_of_frameworks.cache_clear()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged of versions from here on."""
    said: list[str] = []
    logger = logging.getLogger("vllm.epochkv.version")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    return said


def test_another_version_of_a_framework_is_named_once(framework: Framework, warnings: list[str]) -> None:
    framework.load("0.31.0")
    for _ in range(3):
        warn_of_frameworks()
    assert warnings == [
        "EpochKV was tested with skyrl 0.3, and this is 0.31.0. Nothing is switched off. Compare `epochkv weights` after the first push."
    ]


@pytest.mark.parametrize("version", ["0.3", "0.3.0", "0.3.7"])
def test_a_tested_version_is_no_news(framework: Framework, warnings: list[str], version: str) -> None:
    framework.load(version)
    warn_of_frameworks()
    assert warnings == []


def test_a_framework_that_is_installed_and_not_loaded_is_no_news(framework: Framework, warnings: list[str]) -> None:
    framework.version = "9.9"
    warn_of_frameworks()
    assert warnings == []


def test_an_engine_without_our_connector_is_told_nothing(framework: Framework, warnings: list[str]) -> None:
    framework.load("9.9")
    plugin.check(SimpleNamespace(kv_transfer_config=None))
    assert warnings == []


def documented() -> dict[str, str]:
    """Of each framework in the table of docs/trainers.md that was run: name and version."""
    rows = re.findall(r"^\| \[([^]]+)\]\(trainers/[^)]+\) \|([^|]*)\|", (ROOT / "docs/trainers.md").read_text(), re.MULTILINE)
    return {name: version.strip() for name, version in rows if version.strip() != "not run"}


def pinned() -> dict[str, str]:
    """What the tests of frameworks install, by distribution."""
    texts = [path.read_text() for path in (ROOT / "hack/requirements/trainers").glob("*.in")]
    return {name: version for text in texts for name, version in re.findall(r"^([a-z-]+)(?:\[[a-z,]+\])?==(\S+)", text, re.MULTILINE)}


def test_the_documentation_has_the_versions_that_the_tests_run() -> None:
    names = {"Ray Serve LLM": "ray"}
    versions = {names.get(name, name.lower()): version for name, version in documented().items()}
    assert versions
    assert versions == {name: pinned()[name] for name in versions}
    assert dict(FRAMEWORKS.values()) == {name: version.rpartition(".")[0] for name, version in versions.items()}
