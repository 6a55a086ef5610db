"""Rendering the chart with the real Helm, and reading what comes out."""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.preview import _Loader
from hack.cluster import binaries

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/epochkv"


@dataclass(frozen=True)
class Rendered:
    """What `helm template` said: the objects when it succeeded, its message when not."""

    status: int
    objects: tuple[dict[str, Any], ...]
    error: str

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [obj for obj in self.objects if obj["kind"] == kind]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        found = [obj for obj in self.all(kind) if obj["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind}/{name}"
        return found[0]


def tool(name: str) -> str:
    """A binary named by its variable (`$HELM`), of the cluster's cache, or on PATH."""
    built = [folder / name for folder in binaries.locate().folders if (folder / name).is_file()]
    found = os.environ.get(name.upper()) or (str(built[0]) if built else shutil.which(name))
    if found is None:
        pytest.fail(f"no {name}: run 'python -m hack.cluster build prometheus', or set {name.upper()}=/path/to/{name}")
    return found


@pytest.fixture(scope="session")
def helm() -> str:
    return tool("helm")


@pytest.fixture(scope="session")
def promtool() -> str:
    return tool("promtool")


@pytest.fixture(scope="session")
def render(helm: str) -> Callable[..., Rendered]:
    @functools.cache
    def run(*arguments: str) -> Rendered:
        command = [helm, "template", "demo", str(CHART), "--namespace", "epochkv-system", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        objects = tuple(obj for obj in yaml.load_all(result.stdout, _Loader) if obj) if result.returncode == 0 else ()
        return Rendered(result.returncode, objects, result.stderr)

    return run
