"""Host folders for pods through static PersistentVolumes: how a vLLM environment of 6 GB gets into engine pods without an image.

Pod Security `restricted` refuses hostPath volumes in pods, but allows a claim bound to a hostPath volume that the admin made.
"""

from __future__ import annotations

import json
from pathlib import Path

from hack.demo.kube import DemoError, Json, Kube
from hack.waiting import poll

ENV_CLAIM = "vllm-env"
BOUND_SECONDS = 60.0


def volume_objects(namespace: str, claim: str, path: Path) -> list[Json]:
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


def provide_folder(kube: Kube, namespace: str, claim: str, path: Path) -> str:
    """Create (or keep) the claim in the namespace, which is there; returns when it is Bound. Says what it did.

    On kind, `up --mount PATH` must have made the folder visible to the node.
    """
    path = path.resolve()
    if not path.is_dir():
        raise DemoError(f"{path} is not a folder on this machine: claim {namespace}/{claim} needs it")

    def get(*args: str) -> Json | None:
        text = kube.kubectl("get", *args, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def phase() -> str | None:
        found = get("-n", namespace, "pvc", claim)
        return found["status"].get("phase") if found is not None else None

    name = f"{namespace}-{claim}"
    existing = get("pv", name)
    if existing is not None:
        # A volume whose claim was deleted never binds again; a volume's source cannot be changed.
        stale, shown = existing["status"].get("phase") in ("Released", "Failed"), existing["spec"]["hostPath"]["path"]
        if not stale and shown != str(path) and phase() is not None:
            raise DemoError(
                f"claim {namespace}/{claim} shows {shown}, not {path}: delete it (and the pods that use it) first:"
                f" kubectl -n {namespace} delete pvc {claim}"
            )
        if stale or shown != str(path):
            kube.kubectl("delete", "pv", name, "--wait=true", "--timeout=30s")
    for wanted in volume_objects(namespace, claim, path):
        kube.kubectl(
            *("apply", "--server-side", "--field-manager=epochkv-cluster", "--force-conflicts", "-f", "-"), stdin=json.dumps(wanted)
        )
    if not poll(lambda: phase() == "Bound", BOUND_SECONDS, 0.2):
        raise DemoError(f"claim {namespace}/{claim} is not Bound after {BOUND_SECONDS:.0f} s: kubectl describe pv {name}")
    return f"claim {namespace}/{claim} shows {path} (read-only)"
