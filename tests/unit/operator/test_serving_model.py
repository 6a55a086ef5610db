"""The rule of `spec.serve` in random schedules: pushes, restarts, silence, new hubs, operators that die between two writes, a kubelet that
comes late. What has to hold is said here in terms of the schedule, not of the rule.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from epochkv_fence.protocol.pool import EngineView
from epochkv_operator.api.base import Serve
from epochkv_operator.planning.context import PUSH_SECONDS, HubView, Serving, WeightsGroup
from epochkv_operator.planning.serving import serving
from tests.unit.operator.cluster_state import NOW

Json = dict[str, Any]
LEASE = 10.0
BASE = "ba5e" * 8
SCHEDULES, STEPS = 300, 40
GATE = "epochkv.io/weights"


def moment(seconds: float) -> str:
    return (NOW + timedelta(seconds=int(seconds))).isoformat()


@dataclass
class Pod:
    """A pod with one engine. `changes`: of what it holds, says or is, since its gate changed."""

    name: str
    group: str
    life: int = 0
    started: float = 0.0
    holds: str = BASE
    since: float = 0.0
    pushed: bool = False
    silent: float | None = None
    up: float | None = None
    gate: Json = field(default_factory=dict)
    wrote: float = 0.0
    ready: bool = False
    changes: int = 1
    told: tuple[bool, ...] = ()

    @property
    def open(self) -> bool:
        return self.gate.get("status") == "True"


class World:
    def __init__(self, seed: int, serve: Serve) -> None:
        self.random, self.serve = random.Random(seed), serve
        self.now, self.lives, self.pushes = 1000.0, 0, 0
        self.weights: Mapping[str, str] = {}
        self.pods = [Pod(f"p{number}", f"service-{number % 2}") for number in range(self.random.randint(1, 7))]
        self.leads = self.now
        self.differ_since: float | None = None
        for pod in self.pods:
            self.restart(pod)

    # ---- what happens ----

    def restart(self, pod: Pod) -> None:
        """The container is started again, in place, and reads base weights."""
        self.lives += 1
        pod.life, pod.started, pod.holds, pod.since = self.lives, self.now, BASE, self.now
        pod.pushed, pod.silent, pod.up, pod.ready = False, None, None, False
        pod.changes += 1

    def start_ends(self, pod: Pod) -> None:
        if pod.up is None and self.now > pod.started + 3:
            pod.up = self.now
            pod.changes += 1

    def push(self, pod: Pod) -> None:
        """The newest weights, or ones that nobody has yet."""
        if self.random.random() < 0.25 or not self.pushes:
            self.pushes += 1
        weights = f"{self.pushes:032x}"
        if weights != pod.holds and pod.up is not None:
            pod.holds, pod.since, pod.pushed = weights, self.now, True
            pod.changes += 1

    def mute(self, pod: Pod) -> None:
        pod.silent = self.now if pod.silent is None else None

    def new_hub(self, _: Pod) -> None:
        """It knows nothing of pushes, and nobody for a lease."""
        self.leads, self.differ_since = self.now, None
        for pod in self.pods:
            pod.pushed = False

    def kubelet(self, pod: Pod) -> None:
        pod.ready = pod.up is not None and pod.open

    def wait(self, _: Pod) -> None:
        self.now += self.random.choice((0.3, 1.0, 5.0, LEASE, PUSH_SECONDS))

    # ---- what the operator sees and does ----

    def alive(self, pod: Pod) -> bool:
        return pod.silent is None or self.now < pod.silent + LEASE

    def hub(self) -> HubView:
        live = [pod for pod in self.pods if self.alive(pod) and pod.up is not None]
        if len({pod.holds for pod in live}) < 2:
            self.differ_since = None
        elif self.differ_since is None:
            self.differ_since = self.now
        engines = [
            EngineView(
                pod.life.to_bytes(16),
                0,
                True,
                True,
                age_seconds=self.now - pod.started,
                pod=pod.name,
                weights=bytes.fromhex(pod.holds),
                weights_since=self.now - pod.since,
                pushed=pod.pushed,
            )
            for pod in live
        ]
        groups = [WeightsGroup(weights, 1, NOW) for weights in sorted({pod.holds for pod in live})]
        overdue = self.differ_since is not None and self.now >= self.differ_since + PUSH_SECONDS
        return HubView(0, 0, engines, weights=groups, overdue=overdue, complete=self.now >= self.leads + LEASE)

    def objects(self) -> list[Json]:
        return [
            {
                "kind": "Pod",
                "metadata": {
                    "name": pod.name,
                    "uid": pod.name,
                    "namespace": "rl",
                    "ownerReferences": [{"uid": pod.group, "controller": True}],
                },
                "spec": {"readinessGates": [{"conditionType": GATE}]},
                "status": {
                    "conditions": [
                        {"type": "Ready", "status": str(pod.ready)},
                        {
                            "type": "ContainersReady",
                            "status": str(pod.up is not None),
                            "lastTransitionTime": moment(pod.up or pod.started),
                        },
                        *([pod.gate] if pod.gate else []),
                    ],
                    "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": moment(pod.started)}}}],
                },
            }
            for pod in self.pods
        ]

    def look(self) -> Serving:
        found = serving(self.objects(), self.serve, {}, self.hub(), self.weights, LEASE, NOW + timedelta(seconds=self.now))
        assert found is not None
        return found

    def operate(self, _: Pod | None = None, *, dies: bool = False) -> int:
        """One pass; returns the number of writes. One that `dies` has written some gates and not others."""
        for pod in self.pods:  # whether the hub hears it, knows everybody, and may have heard it
            told = self.alive(pod), self.now >= self.leads + LEASE, pod.up is not None and self.now >= pod.up + LEASE
            pod.changes += told != pod.told
            pod.told = told
        found = self.look()
        if found.weights != self.weights:
            self.weights = found.weights
            for pod in self.pods:
                pod.changes += 1
        turns = sorted(found.turns, key=lambda turn: not turn.opens)
        written = turns[: self.random.randint(0, len(turns))] if dies else turns
        before = {pod.name: (pod.open and pod.wrote >= pod.started, pod.ready) for pod in self.pods}
        by_name = {pod.name: pod for pod in self.pods}
        for turn in written:
            pod = by_name[turn.pod["metadata"]["name"]]
            if pod.gate.get("status", "False") != turn.condition["status"]:
                assert pod.changes, f"{pod.name} flaps: {pod.gate} -> {turn.condition}"
                pod.changes = 0
            pod.gate, pod.wrote = turn.condition, self.now
        self.half_stays(before)
        return len(written)

    def half_stays(self, before: Mapping[str, tuple[bool, bool]]) -> None:
        for group in {pod.group for pod in self.pods}:
            members = [pod for pod in self.pods if pod.group == group and pod.up is not None]
            left = [pod for pod in members if before[pod.name] == (True, True) and not pod.open]
            if left and not self.serve.strict:
                serve = [pod for pod in members if pod.open and before[pod.name][1]]
                assert 2 * len(serve) >= len(members), f"{[pod.name for pod in left]} left, {len(serve)} of {len(members)} serve"

    def rest(self) -> None:
        """Nothing happens any more: the operator and the kubelet come to their end."""
        for _ in range(14):
            self.now += 15.0
            for pod in self.pods:
                self.start_ends(pod)
            self.operate()
            for pod in self.pods:
                self.kubelet(pod)


def run(seed: int, serve: Serve) -> World:
    world = World(seed, serve)
    steps: list[tuple[Callable[[Pod], object], int]] = [
        (world.restart, 2), (world.start_ends, 8), (world.push, 8), (world.mute, 1), (world.new_hub, 1), (world.kubelet, 12),
        (world.wait, 8), (world.operate, 12), (lambda _: world.operate(dies=True), 2),
    ]  # fmt: skip
    actions, odds = zip(*steps, strict=True)
    for _ in range(STEPS):
        world.random.choices(actions, odds)[0](world.random.choice(world.pods))
        world.now += 0.05
    return world


SERVES = [Serve(weights="Converged"), Serve(weights="Converged", strict=True), Serve(weights=f"{1:032x}")]


@pytest.mark.parametrize("serve", SERVES, ids=["converged", "strict", "named"])
def test_random_schedules(serve: Serve) -> None:
    """While they run: `half_stays`, and no gate changes without a reason (`operate`). Then they come to rest."""
    out = opened = 0
    for seed in range(SCHEDULES):
        world = run(seed, serve)
        world.rest()
        reporting = [pod for pod in world.pods if world.alive(pod)]
        wanted = set(world.weights.values()) if serve.weights == "Converged" else {serve.weights} & {pod.holds for pod in reporting}
        for group in {pod.group for pod in world.pods}:
            members = [pod for pod in world.pods if pod.group == group]
            right = [pod for pod in members if pod in reporting and pod.holds in wanted]
            wrong = [pod for pod in members if pod in reporting and pod.holds not in wanted]
            silent = [pod for pod in members if pod not in reporting]
            assert all(pod.open for pod in right), (seed, "holds the weights, and is out")
            if wanted:  # else there is no majority, or nobody holds what is named
                stay = [pod for pod in wrong if pod.open]
                assert not stay or (not serve.strict and 2 * len(right + silent) < len(members)), (seed, "wrong answers")
                out += len(wrong) - len(stay)
            assert all(pod.open is not serve.strict for pod in silent), (seed, "nobody can tell")
            opened += len(silent)
        if serve.weights == "Converged" and reporting:
            counts = [sum(pod.holds == held for pod in reporting) for held in sorted({pod.holds for pod in reporting})]
            chosen = [sum(pod.holds == held for pod in reporting) for held in wanted]
            assert chosen == [max(counts)] or (not wanted and counts.count(max(counts)) > 1), (seed, "not what most hold")
        assert world.operate() == 0, (seed, "writes at rest")
        world.leads = world.now  # another operator, whose hub knows nobody yet
        assert world.operate() == 0, (seed, "a new operator writes")
    assert out > 30, "no schedule has a pod that holds others"
    assert opened > 30, "no schedule has a pod that does not report"


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_push_from_engine_to_engine_takes_each_out_once_at_most(size: int) -> None:
    world = World(1, SERVES[0])
    world.pods = [Pod(f"p{number}", "service") for number in range(size)]
    for pod in world.pods:
        world.restart(pod)
    world.rest()
    assert all(pod.ready for pod in world.pods)
    world.pushes, changes = 1, dict.fromkeys((pod.name for pod in world.pods), 0)
    for pod in world.pods:
        pod.holds, pod.since, pod.pushed = f"{1:032x}", world.now, True
        for _ in range(4):
            before = {one.name: one.open for one in world.pods}
            for one in world.pods:
                one.changes = 1
            world.now += 1.0
            world.operate()
            for one in world.pods:
                world.kubelet(one)
                changes[one.name] += one.open is not before[one.name]
            assert 2 * sum(one.ready for one in world.pods) >= size
        moved = world.weights[""] == f"{1:032x}"
        assert moved is (2 * (world.pods.index(pod) + 1) > size), "W moves with the majority"
    assert all(pod.ready for pod in world.pods)
    late = (size - 1) // 2  # those that the push had not reached when the majority moved
    assert sorted(changes.values()) == [0] * (size - late) + [2] * late
