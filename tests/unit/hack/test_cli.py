"""The command line: errors are one sentence, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hack.demo.kube import DemoError, Kube
from hack.demo.volumes import provide_folder


def _run(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "EPOCHKV_RUN": str(tmp_path / "run"), "EPOCHKV_DATA": str(tmp_path / "data"), **env}
    full.pop("CLUSTER", None) if "CLUSTER" not in env else None
    return subprocess.run([sys.executable, "-m", "hack.cluster", *args], check=False, capture_output=True, text=True, env=full)


def test_status_of_nothing_has_its_own_exit_code(tmp_path: Path) -> None:
    done = _run(tmp_path, "status")
    assert done.returncode == 3
    assert "no cluster 'epochkv'" in done.stdout


def test_unknown_provider_and_bad_name(tmp_path: Path) -> None:
    done = _run(tmp_path, "up", CLUSTER="minikube")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: unknown cluster provider 'minikube'")
    done = _run(tmp_path, "up", "--name", "Bad_Name")
    assert done.returncode == 1
    assert "lower-case" in done.stderr
    assert not (tmp_path / "run").exists()


def test_folder_that_is_not_there_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="is not a folder"):
        provide_folder(Kube.__new__(Kube), "ml", "vllm-env", tmp_path / "absent")
