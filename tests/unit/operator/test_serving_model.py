"""The rule of `spec.serve` in random schedules: pushes, restarts, new pods and namesakes, rollouts to another fingerprint, silence, new
hubs, operators that die between two writes, clocks that differ, a kubelet that comes late. What has to hold is said here in terms of the
schedule, not of the rule.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from epochkv_fence.protocol.pool import EngineView, WeightsView
from epochkv_operator.api.base import Serve
from epochkv_operator.planning.context import PUSH_SECONDS, HubView, Serving
from epochkv_operator.planning.serving import Life, lives_of, serving
from tests.unit.operator.cluster_state import NOW

Json = dict[str, Any]
LEASE = 10.0
BASE = "ba5e" * 8
SCHEDULES, STEPS = 300, 40
GATE = "epochkv.io/weights"


@dataclass
class Pod:
    """A pod with one engine. `changes`: of what it holds, says or is, since its gate changed."""

    name: str
    group: str
    kind: str = ""
    life: int = 0
    started: float = 0.0
    holds: str = BASE
    since: float = 0.0
    pushed: bool = False
    writes: bool = False
    silent: float | None = None
    up: float | None = None
    gate: Json = field(default_factory=dict)
    uid: int = 0
    ready: bool = False
    changes: int = 1
    told: tuple[bool, ...] = ()

    @property
    def open(self) -> bool:
        return self.gate.get("status") == "True"

    def moment(self) -> str:
        return (NOW + timedelta(seconds=int(self.up or self.started))).isoformat()


class World:
    def __init__(self, seed: int, serve: Serve) -> None:
        self.random, self.serve = random.Random(seed), serve
        self.now, self.lives, self.pushes = 1000.0, 0, 0
        self.weights: Mapping[tuple[str, str], str] = {}
        self.containers: Mapping[str, Life] = {}
        self.dead: list[tuple[float, EngineView]] = []
        self.pods = [Pod(f"p{number}", f"service-{number % 2}") for number in range(self.random.randint(1, 7))]
        self.leads, self.clock = self.now, 0.0
        for pod in self.pods:
            self.restart(pod)

    # ---- what happens ----

    def restart(self, pod: Pod) -> None:
        """The container is started again, in place, and reads base weights. The hub hears no more of the instance before.
        An operator that has not looked yet cannot tell the two lives apart: the gate may be True until the container is ready."""
        if self.containers and self.alive(pod) and pod.up is not None:
            self.dead.append((self.now if pod.silent is None else pod.silent, self.view(pod)))
        self.lives += 1
        pod.life, pod.started, pod.holds, pod.since = self.lives, self.now, BASE, self.now
        pod.pushed, pod.writes, pod.silent, pod.up, pod.ready = False, False, None, None, False
        pod.changes += 1

    def replace(self, pod: Pod) -> None:
        """It is made anew under its name, as pods of a StatefulSet are."""
        self.restart(pod)
        pod.uid, pod.gate = self.lives, {}

    def start_ends(self, pod: Pod) -> None:
        if pod.up is None and self.now > pod.started + 3:
            pod.up = self.now
            pod.changes += 1

    def write(self, chosen: Pod) -> None:
        """A push to all that were pushed to, or to one. Until it ends nobody knows what they hold."""
        for pod in self.pods if chosen.pushed else [chosen]:
            if pod.up is not None and not pod.writes and (pod is chosen or pod.pushed):
                pod.writes, pod.since = True, self.now
                pod.changes += 1

    def push(self, pod: Pod) -> None:
        """The newest weights, or ones that nobody has yet."""
        if self.random.random() < 0.25 or not self.pushes:
            self.pushes += 1
        weights = f"{self.pushes:032x}"
        if (weights != pod.holds or pod.writes) and pod.up is not None:
            pod.pushed, pod.writes = pod.pushed or weights != pod.holds, False
            pod.holds, pod.since = weights, self.now
            pod.changes += 1

    def mute(self, pod: Pod) -> None:
        pod.silent = self.now if pod.silent is None else None

    def scale_up(self, _: Pod) -> None:
        """An autoscaler adds pods, with base weights."""
        for _number in range(self.random.randint(1, 4)):
            self.pods.append(Pod(f"p{len(self.pods)}", f"service-{len(self.pods) % 2}"))
            self.restart(self.pods[-1])

    def roll(self, pod: Pod) -> None:
        """It is replaced by one of another fingerprint."""
        pod.kind = "new"
        self.restart(pod)

    def new_hub(self, _: Pod | None = None) -> None:
        """It knows nobody for a lease, and its process has seen no container before. Its machine has a clock of its own."""
        self.leads, self.containers, self.dead = self.now, {}, []
        self.set_clock()

    def outage(self, chosen: Pod) -> None:
        """While no operator runs, all pods of a Service are started again; the gates of some are True."""
        members = [pod for pod in self.pods if pod.group == chosen.group]
        for pod in members:
            self.restart(pod)
        self.now += 4.0
        for pod in members:
            self.start_ends(pod)
            self.kubelet(pod)
        self.new_hub()

    def set_clock(self, _: Pod | None = None) -> None:
        self.clock = self.random.choice((-3600.0, -8.0, 0.0, 8.0, 3600.0))

    def kubelet(self, pod: Pod) -> None:
        pod.ready = pod.up is not None and pod.open

    def wait(self, _: Pod) -> None:
        self.now += self.random.choice((0.3, 1.0, 5.0, LEASE, PUSH_SECONDS))

    # ---- what the operator sees and does ----

    def alive(self, pod: Pod) -> bool:
        return pod.silent is None or self.now < pod.silent + LEASE

    def view(self, pod: Pod) -> EngineView:
        said = {"stats": {"weights_updating": 1.0}} if pod.writes else {"weights": bytes.fromhex(pod.holds)}
        held: Json = {**said, "weights_since": self.now - pod.since, "pushed": pod.pushed}
        known: Json = {"engine": f"vllm:{pod.life}", "fingerprint": pod.kind, "pod": pod.name, "age_seconds": self.now - pod.started}
        return EngineView(pod.life.to_bytes(16), 0, True, True, **known, **held)

    def hub(self) -> HubView:
        live = [pod for pod in self.pods if self.alive(pod) and pod.up is not None]
        engines = [msgspec.structs.replace(view, silent_seconds=self.now - at) for at, view in self.dead if self.now < at + LEASE]
        engines += map(self.view, live)
        groups = [WeightsView(bytes.fromhex(weights), "", 1, 0.0) for weights in sorted({pod.holds for pod in live if not pod.writes})]
        return HubView(0, 0, engines, weights=groups, complete=self.now >= self.leads + LEASE)

    def object(self, pod: Pod) -> Json:
        owners = [{"uid": pod.group, "controller": True}]
        metadata = {"name": pod.name, "uid": f"{pod.name}/{pod.uid}", "namespace": "rl", "ownerReferences": owners}
        up = {"type": "ContainersReady", "status": str(pod.up is not None), "lastTransitionTime": pod.moment()}
        conditions = [{"type": "Ready", "status": str(pod.ready)}, up, *([pod.gate] if pod.gate else [])]
        engine = {"name": "engine", "state": {"running": {"startedAt": f"life {pod.life}"}}}
        spec, status = {"readinessGates": [{"conditionType": GATE}]}, {"conditions": conditions, "containerStatuses": [engine]}
        return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}

    def look(self) -> Serving:
        pods, now = list(map(self.object, self.pods)), NOW + timedelta(seconds=self.now + self.clock)
        self.containers = lives_of(pods, self.containers, self.now)
        found = serving(pods, "rl", self.serve, {}, self.hub(), self.weights, self.containers, LEASE, now, self.now)
        assert found is not None
        return found

    def operate(self, _: Pod | None = None, *, dies: bool = False) -> int:
        """One pass; returns the number of writes. One that `dies` has written some gates and not others."""
        for pod in self.pods:  # whether the hub hears it, knows everybody, may have heard it, and whether a push may go on
            known = self.now >= self.leads + LEASE, self.now >= pod.since + PUSH_SECONDS
            told = self.alive(pod), *known, pod.up is not None and self.now >= pod.up + LEASE
            pod.changes += told != pod.told
            pod.told = told
        found = self.look()
        if found.weights != self.weights:
            self.moves_by_a_push(found.weights)
            self.weights = found.weights
            for pod in self.pods:
                pod.changes += 1
        turns = sorted(found.turns, key=lambda turn: not turn.opens)
        written = turns[: self.random.randint(0, len(turns))] if dies else turns
        before = {pod.name: (pod.open, pod.ready) for pod in self.pods}
        by_name = {pod.name: pod for pod in self.pods}
        for turn in written:
            pod = by_name[turn.pod["metadata"]["name"]]
            if pod.gate.get("status", "False") != turn.condition["status"]:
                assert pod.changes, f"{pod.name} flaps: {pod.gate} -> {turn.condition}"
                pod.changes = 0
            assert turn.condition["reason"] != "Holds" or pod.up is not None, f"{pod.name} has not started"
            pod.gate = turn.condition
        self.half_stays(before)
        return len(written)

    def moves_by_a_push(self, weights: Mapping[tuple[str, str], str]) -> None:
        """What serves, while an engine holds what served before; and so begins another kind, while one serves that was pushed to."""
        alive = [pod for pod in self.pods if self.alive(pod) and pod.up is not None]
        heard = [pod for pod in alive if not pod.writes]
        came = {place: held for place, held in weights.items() if self.weights.get(place) != held}
        kept = [pod for pod in heard if pod.holds == self.weights.get(("rl", pod.kind))]
        for (_, kind), held in {**{place: "" for place in self.weights if place not in weights}, **came}.items():
            last = max((pod.since for pod in heard if pod.kind == kind and pod.pushed), default=0.0)
            if self.now < last + PUSH_SECONDS and not any(self.now < at + LEASE for at, _ in self.dead):
                votes = sum((pod.kind, pod.holds, pod.pushed) == (kind, held, True) for pod in heard)
                assert not votes or votes != sum(pod.kind == kind for pod in kept), f"by as many as before: {self.weights} -> {weights}"
            away = any(pod.kind == kind and pod.writes for pod in alive) and ("rl", kind) in self.weights
            if away or any(pod.kind == kind for pod in kept) or any(pod.pushed and ("rl", pod.kind) not in came for pod in kept):
                pushed = any((pod.kind, pod.holds, pod.pushed) == (kind, held, True) for pod in heard)
                assert pushed or not any(pod.kind == kind for pod in heard), f"{self.weights} -> {weights}"

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
                if pod.writes:
                    self.push(pod)
            self.operate()
            for pod in self.pods:
                self.kubelet(pod)


def run(seed: int, serve: Serve) -> World:
    world = World(seed, serve)
    steps: list[tuple[Callable[[Pod], object], int]] = [
        (world.restart, 2), (world.start_ends, 8), (world.push, 8), (world.write, 4), (world.mute, 1), (world.new_hub, 1),
        (world.outage, 1), (world.set_clock, 1), (world.scale_up, 1), (world.roll, 1), (world.replace, 1), (world.kubelet, 12),
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
    out = opened = withheld = 0
    for seed in range(SCHEDULES):
        world = run(seed, serve)
        world.rest()
        reporting = [pod for pod in world.pods if world.alive(pod)]
        named = {serve.weights} & {pod.holds for pod in reporting}
        wanted = {kind: {world.weights.get(("rl", kind))} - {None} if serve.weights == "Converged" else named for kind in ("", "new")}
        for group in {pod.group for pod in world.pods}:
            members = [pod for pod in world.pods if pod.group == group]
            right = [pod for pod in members if pod in reporting and pod.holds in wanted[pod.kind]]
            wrong = [pod for pod in members if pod in reporting and wanted[pod.kind] - {pod.holds}]
            silent = [pod for pod in members if pod not in reporting or (serve.weights == "Converged" and not wanted[pod.kind])]
            assert all(pod.open for pod in right), (seed, "holds the weights, and is out")
            stay = [pod for pod in wrong if pod.open]
            assert not stay or (not serve.strict and 2 * len(right + silent) < len(members)), (seed, "wrong answers")
            out += len(wrong) - len(stay)
            assert all(pod.open is not serve.strict for pod in silent), (seed, "nobody can tell")
            opened += len(silent)
        for kind in {pod.kind for pod in reporting} if serve.weights == "Converged" else ():
            # No pod holds base weights that it was pushed to, so they serve where they did before all pushes, or nobody was pushed to.
            votes = [pod.holds for pod in reporting if pod.kind == kind and (pod.pushed or wanted[kind] == {BASE})]
            assert wanted[kind] or any(pod.pushed for pod in reporting), (seed, "nothing serves")
            assert not votes or votes.count(*wanted[kind]) == max(map(votes.count, votes)), (seed, "not what most hold")
            withheld += not wanted[kind]
        assert world.operate() == 0, (seed, "writes at rest")
        world.new_hub()  # of another operator
        assert world.operate() == 0, (seed, "a new operator writes")
    assert out > 30, "no schedule has a pod that holds others"
    assert opened > 30, "no schedule has a pod that does not report"
    assert withheld > 5 or serve.weights != "Converged", "no schedule has a fingerprint of which nobody knows what serves"


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
        moved = world.weights["rl", ""] == f"{1:032x}"
        assert moved is (2 * (world.pods.index(pod) + 1) > size), "W moves with the majority"
    assert all(pod.ready for pod in world.pods)
    late = (size - 1) // 2  # those that the push had not reached when the majority moved
    assert sorted(changes.values()) == [0] * (size - late) + [2] * late
