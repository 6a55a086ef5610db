"""Rendering the chart with the real Helm, and reading what comes out."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

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


@pytest.fixture(scope="session")
def helm() -> str:
    """Helm from `$HELM`, the cluster's cache of built binaries, or PATH."""
    if explicit := os.environ.get("HELM"):
        return explicit
    built = [folder / "helm" for folder in binaries.locate().folders if (folder / "helm").is_file()]
    found = str(built[0]) if built else shutil.which("helm")
    if found is None:
        pytest.fail("no helm: run 'python -m hack.cluster build', or set HELM=/path/to/helm")
    return found


@pytest.fixture(scope="session")
def render(helm: str) -> Callable[..., Rendered]:
    def run(*arguments: str, namespace: str = "epochkv-system") -> Rendered:
        command = [helm, "template", "demo", str(CHART), "--namespace", namespace, "--kube-version", "1.34.4", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        objects = tuple(obj for obj in yaml.safe_load_all(result.stdout) if obj) if result.returncode == 0 else ()
        return Rendered(result.returncode, objects, result.stderr)

    return run
