"""The operator is killed right after each of its writes, on a journey through everything that it writes for; the next one ends where the
first would have.

`make test` kills after the last write of each flow, and after one before it; `make test-all` after each of them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hack.chaos.epochs import EpochWatch
from hack.chaos.manifests import manifest
from hack.chaos.run import chaos
from hack.chaos.snapshot import Snapshot, differences, equal, snapshot
from hack.cluster.controlplane import ControlPlane
from hack.loopback import free_port
from hack.waiting import eventually, poll
from tests.cluster.fault_proxy import NO_ANSWER, Fault, FaultProxy, is_write
from tests.cluster.operator_harness import ENGINES, LEASES, POOLS, Namespace, OperatorProcess
from tests.support.nursery import Nursery

Json = dict[str, Any]
IMPORTED = "epochkv_operator.__main__", "epochkv_operator.control.runtime", "epochkv_operator.logs"
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


# --------------------------------------------------------------------------------------------------------- the kills
SIDE_BY_SIDE = 4
QUIET_SECONDS = 2.0
POLL_SECONDS = 0.4
PATIENCE_SECONDS = 90.0
SETTLE_SECONDS = 1.0
"""Until the next operator has looked: what the last one has left may be right, and be changed."""
HUB = "tcp://epochkv-hub.example:7700"
"""What objects name, so that those of all journeys are equal; engines of the tests dial loopback."""
_numbers = itertools.count()


@dataclass
class Journey:
    """All flows in one namespace, one after the other. Each operator that is killed is followed by one that takes the next flow, too."""

    space: Namespace
    proxy: FaultProxy
    operator: OperatorProcess
    epochs: EpochWatch
    killed_early: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def begin(cls, plane: ControlPlane, folder: Path) -> Iterator[Journey]:
        space = Namespace.create_in(plane, f"operator-kills-{next(_numbers)}")
        port = free_port()
        with FaultProxy(plane, folder) as proxy, EpochWatch(space, f"tcp://127.0.0.1:{port}", engines=1) as epochs:
            popen = Nursery(*IMPORTED).popen
            operator = OperatorProcess(plane, space.name, folder, hub_port=port, hub_endpoint=HUB, kubeconfig=proxy.kubeconfig, popen=popen)
            with operator:
                yield cls(space, proxy, operator.wait_ready(), epochs)

    def undisturbed(self, flow: Flow) -> tuple[int, Snapshot]:
        """Go through a flow: how many writes it takes, and how it ends."""
        self.proxy.decide = counted = KillAfter(None)
        flow.act(self.space)
        seen, since = 0, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            # The operator writes in each of them but the last, where the garbage collector does its work.
            begun = counted.writes or flow is FLOWS[-1]
            if (now := len(counted.writes)) != seen or not begun or not at_rest(snapshot(self.space, (POOLS, ENGINES))):
                seen, since = now, time.monotonic()
            return time.monotonic() - since > QUIET_SECONDS

        eventually(quiet, lambda: f"{flow.name} at rest; log:\n{self.operator.tail()}", PATIENCE_SECONDS, POLL_SECONDS)
        return len(counted.writes), snapshot(self.space)

    def killed_after(self, flow: Flow, last: int | None, wanted: Snapshot) -> list[str]:
        """Go through a flow with an operator that dies after so many writes, and its successor. Returns what is wrong afterwards."""
        self.proxy.decide = fatal = KillAfter(last)
        hits = len(self.proxy.faults)
        flow.act(self.space)
        poll(lambda: fatal.reached.is_set() or equal(self.space, wanted), PATIENCE_SECONDS, POLL_SECONDS)
        if last is not None:
            # A run may need fewer writes than the one that counted them, where two changes of a status came together. It dies at rest.
            if fatal.reached.is_set():
                eventually(lambda: any(fault.carried_out for _, _, fault in self.proxy.faults[hits:]), f"{fatal.writes[-1]} carried out")
                self.killed_early.append(flow.name)
            self.operator.process.kill()
            # Its holder is dead: the next one need not wait until the Lease is over.
            self.space.delete(LEASES, "epochkv-operator")
            self.proxy.decide = lambda method, path: None
            self.operator.start().wait_ready()
            time.sleep(SETTLE_SECONDS)
        wrong: list[str] = []

        def ended() -> bool:
            wrong[:] = [*differences(snapshot(self.space), wanted), *self.epochs.problems]
            return bool(self.epochs.problems) or not wrong

        poll(ended, PATIENCE_SECONDS, POLL_SECONDS)
        about = f"{flow.name}, killed after write {last} ({fatal.writes[-1:]})"
        return [f"{about}: {each}" for each in wrong] + ([self.operator.tail(), self.epochs.agents()] if wrong else [])


@dataclass(frozen=True)
class Undisturbed:
    """How often the operator writes in each flow when nobody kills it, and how each flow ends."""

    writes: dict[str, int]
    ends: dict[str, Snapshot]


@pytest.fixture(scope="module")
def undisturbed(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    with Journey.begin(plane, tmp_path_factory.mktemp("undisturbed")) as journey:
        found = {flow.name: journey.undisturbed(flow) for flow in FLOWS}
        assert not journey.epochs.problems
    return Undisturbed({name: writes for name, (writes, _) in found.items()}, {name: end for name, (_, end) in found.items()})


def points(undisturbed: Undisturbed, every: bool) -> list[dict[str, int]]:
    """After which write of each flow each journey kills."""
    writes = undisturbed.writes
    if every:
        return [{name: number for name, count in writes.items() if number <= count} for number in range(1, max(writes.values()) + 1)]
    seed = random.SystemRandom().randrange(1 << 31)
    drawn = random.Random(seed)
    print(f"seed {seed}, writes {writes}")
    return [
        {name: number(count) for name, count in writes.items() if count}
        for number in (lambda count: count, lambda count: drawn.randint(1, count))
    ]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
def test_killed_after_a_write_the_next_operator_ends_where_the_first_would_have(
    plane: ControlPlane, undisturbed: Undisturbed, tmp_path: Path, every: bool
) -> None:
    def travel(number: int, kills: dict[str, int]) -> tuple[list[str], list[str]]:
        """The flows of one journey that a kill cut short, and what was wrong after the first one after which something was."""
        folder = tmp_path / str(number)
        folder.mkdir()
        with Journey.begin(plane, folder) as journey:
            for flow in FLOWS:
                if wrong := journey.killed_after(flow, kills.get(flow.name), undisturbed.ends[flow.name]):
                    return journey.killed_early, wrong
            return journey.killed_early, []

    journeys = points(undisturbed, every)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        results = list(threads.map(travel, itertools.count(), journeys))
    wrong = [line for _, lines in results for line in lines]
    assert not wrong, "\n".join(wrong)
    early = [flow for flows, _ in results for flow in flows]
    meant = sum(len(kills) for kills in journeys)
    print(f"{len(early)} kills before the end of a flow, of {meant}; each flow takes {undisturbed.writes}")
    assert len(early) >= meant / 3, early


# -------------------------------------- random edits while the API server fails and operators die (more: make chaos)
SECONDS = float(os.environ.get("EPOCHKV_CHAOS_SECONDS", "45"))


@pytest.mark.slow  # each kind of edit, fault and death has a test of its own in this layer
@pytest.mark.timeout(900)
def test_a_storm_ends_as_a_fresh_install(plane: ControlPlane, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    verdict = chaos(plane, tmp_path, "operator-chaos", SECONDS, seed, print)
    assert not verdict.problems, "\n".join((f"replay: python -m hack.chaos --minutes {SECONDS / 60:g} --seed {seed}", *verdict.problems))
    # What was meant to happen did.
    assert verdict.edits >= SECONDS / 2, verdict.lines
    assert verdict.faults >= 5, verdict.lines
    assert verdict.kills >= 1, verdict.lines
    assert verdict.epochs >= 1, verdict.lines
