"""What kind is asked for, and what is taken from a container where root lacks capabilities."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hack.cluster import less_runc
from hack.cluster.kind import AGREE, KindCluster, kind_config
from hack.cluster.provider import ClusterError


def test_every_node_shows_the_folders(tmp_path: Path) -> None:
    config = kind_config([tmp_path], "node:x", workers=1, address="10.102.255.2")
    assert [(node["role"], node["extraMounts"], node["image"]) for node in config["nodes"]] == [  # type: ignore[attr-defined]
        (role, [{"hostPath": str(tmp_path), "containerPath": str(tmp_path), "readOnly": True}], "node:x")
        for role in ("control-plane", "worker")
    ]
    assert config["networking"] == {"apiServerAddress": "10.102.255.2", "apiServerPort": 6443}
    assert "networking" not in kind_config([], "node:x")


def test_no_daemon_is_started_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHKV_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("EPOCHKV_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.delenv(AGREE, raising=False)
    with pytest.raises(ClusterError, match=f"no Docker daemon answers.*{AGREE}=start.*CLUSTER=local"):
        KindCluster("none").up(print)
    assert KindCluster("none").status() == []
    KindCluster("none").down(print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "file"), [(["create", "--bundle"], "config.json"), (["exec", "--process"], "process.json")])
def test_runc_gets_no_capability_that_root_lacks(tmp_path: Path, words: list[str], file: str) -> None:
    """The file is run as Docker runs it, with a `runc` that shows its arguments."""
    process = {"capabilities": {"bounding": [f"CAP_{name}" for name in less_runc.NAMES], "ambient": None}}
    (tmp_path / file).write_text(json.dumps(process if words[0] == "exec" else {"process": process}))
    runc = tmp_path / "runc"
    runc.write_text('#!/bin/sh\necho "$@"\n')
    runc.chmod(0o755)
    arguments = [*words, str(tmp_path / file if words[0] == "exec" else tmp_path), "id"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([less_runc.__file__, *arguments], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == arguments
    left = json.loads((tmp_path / file).read_text())
    granted = (left if words[0] == "exec" else left["process"])["capabilities"]
    shown = subprocess.run(["grep", "CapBnd", "/proc/self/status"], capture_output=True, text=True, check=True).stdout.split()[1]
    assert len(granted["bounding"]) == int(shown, 16).bit_count()
    assert granted["ambient"] == []
