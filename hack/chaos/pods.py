"""Pods without a node: their statuses are patched, as a kubelet would, ready or in trouble."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from typing import Any

from tests.cluster.operator_harness import Namespace

PODS = "/api/v1/namespaces/{}/pods"
REPLICASETS = "/apis/apps/v1/namespaces/{}/replicasets"
STATEFULSETS = "/apis/apps/v1/namespaces/{}/statefulsets"
EVERY_SECONDS = 0.4
TROUBLES = ("ErrImagePull", "CrashLoopBackOff", "CreateContainerConfigError")


class Kubelet:
    """Context manager: gives pods statuses until the end; random ones, and after `heal` only ready ones."""

    def __init__(self, space: Namespace, seed: object, *, healed: bool = False) -> None:
        self._space = space
        self._random = random.Random(f"{seed}:pods")
        self._healed = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.counts: Counter[str] = Counter()
        if healed:
            self._healed.set()

    def __enter__(self) -> Kubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def heal(self) -> None:
        """Every pod becomes ready, and stays so."""
        self._healed.set()

    def _run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            with contextlib.suppress(AssertionError, OSError):  # a pod that is gone by now; a server that is slow
                self._look()

    def _look(self) -> None:
        for pod in self._space.request("GET", PODS.format(self._space.name))["items"]:
            is_ready = any(item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions") or ())
            if self._healed.is_set():
                if not is_ready:
                    self._set(pod, "", True)
            elif self._random.random() < (0.05 if is_ready else 0.4):
                trouble = self._random.choice(TROUBLES) if self._random.random() < 0.15 else ""
                self._set(pod, trouble, not is_ready and not trouble)

        if self._healed.is_set():
            self._kick()

    def _kick(self) -> None:
        """Have controllers look again now that failed to make pods: their backoff grows to many minutes while a ServiceAccount is away."""
        for kind in (REPLICASETS, STATEFULSETS):
            for item in self._space.request("GET", kind.format(self._space.name))["items"]:
                if item["status"].get("replicas", 0) < item["spec"]["replicas"]:
                    note = {"metadata": {"annotations": {"chaos": item["metadata"]["resourceVersion"]}}}
                    with contextlib.suppress(AssertionError):
                        path = f"{kind.format(self._space.name)}/{item['metadata']['name']}"
                        self._space.request("PATCH", path, note, "application/merge-patch+json")

    def _set(self, pod: Any, trouble: str, ready: bool) -> None:
        self.counts["pod ready" if ready else "pod in trouble" if trouble else "pod not ready"] += 1
        state = {"waiting": {"reason": trouble, "message": "by chaos"}} if trouble else {"running": {}}
        container = pod["spec"]["containers"][0]
        about = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{**about, "ready": ready, "state": state}],
        }
        path = f"{PODS.format(self._space.name)}/{pod['metadata']['name']}/status"
        with contextlib.suppress(AssertionError):  # gone
            self._space.request("PATCH", path, {"status": status}, "application/merge-patch+json")
