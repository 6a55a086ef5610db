"""What an engine tells its hub of the packages that it runs, and the versions of frameworks that our documentation names."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import vllm

from epochkv_connector.engine.interface import running

ROOT = Path(__file__).resolve().parents[3]


def test_the_versions_are_those_of_the_installed_packages() -> None:
    names = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    mooncake = {version for name, version in names.items() if name.startswith("mooncake-transfer-engine")}
    assert running() == {"epochkv": names["epochkv"], "vllm": vllm.__version__, "mooncake": mooncake.pop()}


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
