"""Host folders for pods through static PersistentVolumes: how a vLLM environment of 6 GB gets into engine pods without an image.

Pod Security `restricted` refuses hostPath volumes in pods, but allows a claim bound to a hostPath volume that the admin made.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from hack.cluster.binaries import locate
from hack.cluster.errors import ClusterError

ENV_CLAIM = "vllm-env"
PYTHON_CLAIM = "vllm-python"


def volume_objects(namespace: str, claim: str, path: Path) -> list[dict[str, object]]:
    """A read-only hostPath volume reserved for the claim, and the claim."""
    name = f"{namespace}-{claim}"
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim},
                "hostPath": {"path": str(path), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": name},
        },
    ]


def provide_folder(kubeconfig: Path, namespace: str, claim: str, path: Path, seconds: float = 60) -> str:
    """Create (or keep) the claim in the namespace, which is created when absent; returns when it is Bound. Says what it did.

    On kind, `up --mount PATH` must have made the folder visible to the node.
    """
    path = path.resolve()
    if not path.is_dir():
        raise ClusterError(f"{path} is not a folder on this machine: claim {namespace}/{claim} needs it")
    kubectl = _Kubectl(kubeconfig)
    if kubectl.get("namespace", namespace) is None:
        kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    volume, wanted = volume_objects(namespace, claim, path)
    name = f"{namespace}-{claim}"
    existing = kubectl.get("pv", name)
    if existing is not None:
        # A volume whose claim was deleted never binds again; a volume's source cannot be changed.
        stale = existing["status"].get("phase") in ("Released", "Failed")
        if stale or existing["spec"]["hostPath"]["path"] != str(path):
            if not stale and kubectl.get("-n", namespace, "pvc", claim) is not None:
                old = existing["spec"]["hostPath"]["path"]
                raise ClusterError(
                    f"claim {namespace}/{claim} shows {old}, not {path}: delete it (and the pods that use it) first:"
                    f" kubectl -n {namespace} delete pvc {claim}"
                )
            kubectl.run("delete", "pv", name, "--wait=true", "--timeout=30s")
    kubectl.apply(volume)
    kubectl.apply(wanted)
    deadline = time.monotonic() + seconds
    while (found := kubectl.get("-n", namespace, "pvc", claim)) is None or found["status"].get("phase") != "Bound":
        if time.monotonic() > deadline:
            raise ClusterError(f"claim {namespace}/{claim} is not Bound after {seconds:.0f} s: kubectl describe pv {name}")
        time.sleep(0.2)
    return f"claim {namespace}/{claim} shows {path} (read-only)"


def provide(kubeconfig: Path, namespace: str, venv: Path, python: Path | None) -> list[str]:
    """Claim `vllm-env` for the environment and, with `python`, claim `vllm-python` for the interpreter's prefix."""
    done = [provide_folder(kubeconfig, namespace, ENV_CLAIM, venv)]
    if python is not None:
        done.append(provide_folder(kubeconfig, namespace, PYTHON_CLAIM, python))
    return done


class _Kubectl:
    def __init__(self, kubeconfig: Path) -> None:
        try:
            binary = str(locate().path("kubectl"))
        except ClusterError:
            found = shutil.which("kubectl")
            if found is None:
                raise
            binary = found
        self._command = [binary, f"--kubeconfig={kubeconfig}"]

    def run(self, *args: str, stdin: str | None = None) -> str:
        done = subprocess.run([*self._command, *args], check=False, capture_output=True, text=True, input=stdin)
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *args: str) -> dict[str, Any] | None:
        text = self.run("get", *args, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def apply(self, obj: dict[str, object]) -> None:
        self.run("apply", "--server-side", "--field-manager=epochkv-cluster", "--force-conflicts", "-f", "-", stdin=json.dumps(obj))
