"""The kind provider, kept thin: for machines with a Docker daemon, and for what the local provider has not (kindnet, NetworkPolicy)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hack.cluster.config import check_name, run_root
from hack.cluster.provider import ClusterError, ComponentStatus, Report


def kind_config(mounts: Sequence[Path]) -> dict[str, object]:
    """Cluster configuration (JSON is valid YAML): one node, host folders mounted read-only at the same path."""
    extra = [{"hostPath": str(path), "containerPath": str(path), "readOnly": True} for path in mounts]
    node = {"role": "control-plane", **({"extraMounts": extra} if extra else {})}
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [node]}


class KindCluster:
    def __init__(self, name: str) -> None:
        self.name = check_name(name)

    def up(self, report: Report, mounts: Sequence[Path] = ()) -> None:
        if self.name in self._clusters():
            report(f"kind cluster {self.name} is there")
        else:
            folder = run_root() / f"kind-{self.name}"
            folder.mkdir(parents=True, exist_ok=True)
            config = folder / "kind.yaml"
            config.write_text(json.dumps(kind_config(mounts)))
            self._run("create", "cluster", "--name", self.name, "--config", str(config), "--wait", "120s",
                      "--kubeconfig", str(folder / "admin.kubeconfig"))  # fmt: skip
        report(f"cluster {self.name} is ready: export KUBECONFIG={self.kubeconfig()}")

    def down(self, report: Report) -> None:
        self._run("delete", "cluster", "--name", self.name)
        shutil.rmtree(run_root() / f"kind-{self.name}", ignore_errors=True)
        report(f"cluster {self.name} is removed")

    def status(self) -> list[ComponentStatus]:
        """Containers of the nodes."""
        nodes = self._run("get", "nodes", "--name", self.name).split() if self.name in self._clusters() else []
        return [ComponentStatus(node, True) for node in nodes]

    def kubeconfig(self) -> Path:
        """Written anew from kind, which knows the current port."""
        path = run_root() / f"kind-{self.name}" / "admin.kubeconfig"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(self._run("get", "kubeconfig", "--name", self.name))
        return path

    def load_images(self, archives: Sequence[Path], report: Report) -> None:
        for path in archives:
            self._run("load", "image-archive", str(path), "--name", self.name)
            report(f"loaded {path.name}")

    def _clusters(self) -> list[str]:
        return self._run("get", "clusters").split()

    @staticmethod
    def _run(*args: str) -> str:
        for tool, where in (("docker", "a Docker daemon is needed"), ("kind", "go install sigs.k8s.io/kind@v0.30.0")):
            if shutil.which(tool) is None:
                raise ClusterError(f"{tool} is not installed ({where}): or use CLUSTER=local")
        return _output(["kind", *args])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"'{' '.join(command)}' failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout
