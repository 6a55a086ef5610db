"""A journey through everything that the operator writes for, and how to kill it after any of its writes."""

import copy
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hack.chaos.manifests import manifest
from hack.chaos.snapshot import Snapshot
from tests.cluster.fault_proxy import NO_ANSWER, Fault, is_write
from tests.cluster.operator_harness import ENGINES, POOLS, Namespace

Json = dict[str, Any]
L2: Json = {"mooncake": {"store": {"replicas": 1, "segmentSize": "64Mi"}}}
RESET: Json = {"leaseSeconds": 1, "reclaimPolicy": "Retain"}
"""Sweeps of the store take their time, and write nothing but a status."""
POOL: Json = {"resetEpoch": 1, "reset": RESET, "local": {"capacity": "64Mi"}, "distributed": L2}
ENGINE: Json = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}, "replicas": 2}
BUSY = frozenset(
    {
        *("OldKeyInUse", "Rotating", "Reclaiming", "WaitingForEngines", "Recording"),
        *("NameConflict", "HubUnavailable", "NotCreated", "WaitingForPool"),
    }
)
"""Reasons of conditions that pass by themselves."""
NO_POD_YET = re.compile(r"replicas of the \w+ are ready($|: it has no pod)")
"""No kubelet makes a pod ready here, so a message that names none is about to."""


def _pool(space: Namespace, spec: Json) -> None:
    space.plane.api.apply(f"{POOLS.format(space.name)}/policy", manifest("KVCachePool", "policy", spec))


def _engine(space: Namespace, spec: Json) -> None:
    space.plane.api.apply(f"{ENGINES.format(space.name)}/rollout", manifest("InferenceEngine", "rollout", spec))


def _with(spec: Json, **fields: Any) -> Json:
    return {**copy.deepcopy(spec), **fields}


BUMPED = _with(POOL, resetEpoch=2)
ROTATED = _with(BUMPED, keys={"generation": 1})
IMAGED = _with(ROTATED, distributed={"mooncake": {**L2["mooncake"], "image": "example/store:2"}})
SCALED = _with(ROTATED, distributed={"mooncake": {**IMAGED["distributed"]["mooncake"], "store": {"replicas": 2, "segmentSize": "64Mi"}}})
WITHOUT_L2 = {name: value for name, value in ROTATED.items() if name != "distributed"}
ANEW = _with(POOL, resetEpoch=1)
NEW_ENGINE = _with(ENGINE, image="example/engine:2")


@dataclass(frozen=True)
class Flow:
    """One thing that a user does."""

    name: str
    steps: tuple[Callable[[Namespace], object], ...]

    def act(self, space: Namespace) -> None:
        for step in self.steps:
            step(space)


FLOWS = (
    Flow("create", (lambda space: _pool(space, POOL), lambda space: _engine(space, ENGINE))),
    Flow("bump", (lambda space: _pool(space, BUMPED),)),
    Flow("rotate the key", (lambda space: _pool(space, ROTATED),)),
    Flow("change images", (lambda space: _pool(space, IMAGED), lambda space: _engine(space, NEW_ENGINE))),
    Flow("scale", (lambda space: _pool(space, SCALED), lambda space: _engine(space, _with(NEW_ENGINE, replicas=3)))),
    Flow("remove a tier", (lambda space: _pool(space, WITHOUT_L2),)),
    Flow("add a tier", (lambda space: _pool(space, ROTATED),)),
    Flow("recreate the pool", (lambda space: space.delete(POOLS, "policy"), lambda space: _pool(space, ANEW))),
    Flow("delete the pool", (lambda space: space.delete(POOLS, "policy"),)),
    Flow("delete the engine", (lambda space: space.delete(ENGINES, "rollout"),)),
)


def at_rest(found: Snapshot) -> bool:
    """Whether all is said and done, as far as statuses tell. Engines have joined the pool."""
    for key, obj in found.items():
        if not key.startswith(("kvcachepools/", "inferenceengines/")):
            continue
        status = obj["status"]
        if status.get("observedGeneration") != "newest":
            return False
        if any(each["reason"] in BUSY or NO_POD_YET.search(each["message"]) for each in status["conditions"]):
            return False
        if key.startswith("inferenceengines/") and status.get("replicas") != obj["spec"]["replicas"]:
            return False  # the controller of Deployments is replacing pods
        if key.startswith("kvcachepools/") and (
            status.get("epoch") != obj["spec"]["resetEpoch"] or status["engines"]["summary"] != "1/1" or not status["externalEngines"]
        ):
            return False
    return True


class KillAfter:
    """`FaultProxy.decide`: counts writes, lets the last of them through without an answer, and holds all later ones back.

    Attributes:
        writes: what was let through.
        reached: set when the last of them is on its way to the API server.
    """

    def __init__(self, last: int | None) -> None:
        self._last = last
        self._lock = threading.Lock()
        self.writes: list[str] = []
        self.reached = threading.Event()

    def __call__(self, method: str, path: str) -> Fault | None:
        if not is_write(method, path):
            return None
        with self._lock:
            if self._last is not None and len(self.writes) >= self._last:
                return Fault(NO_ANSWER)
            self.writes.append(f"{method} {path}")
            if len(self.writes) != self._last:
                return None
            self.reached.set()
            return Fault(NO_ANSWER, carried_out=True)
