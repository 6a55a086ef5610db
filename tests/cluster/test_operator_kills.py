"""The operator is killed right after each of its writes, in everything that it writes for; the next one ends where the first would have.

`make test` kills after the last write of each flow, and after one before it; `make test-all` after each of them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hack.chaos.epochs import EpochWatch
from hack.chaos.snapshot import Snapshot, differences, equal, snapshot
from hack.cluster.controlplane import ControlPlane
from hack.loopback import free_port
from hack.waiting import eventually, poll
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.kill_flows import FLOWS, Flow, KillAfter, at_rest
from tests.cluster.operator_harness import ENGINES, POOLS, Namespace, OperatorProcess
from tests.cluster.operator_nursery import popen

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
SIDE_BY_SIDE = 4
QUIET_SECONDS = 2.0
POLL_SECONDS = 0.4
PATIENCE_SECONDS = 90.0
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
        poll(lambda: equal(self.space, wanted), PATIENCE_SECONDS, POLL_SECONDS)
        wrong = [*differences(snapshot(self.space), wanted), *self.epochs.problems]
        about = f"{flow.name}, killed after write {last} ({fatal.writes[-1:]})"
        return [f"{about}: {each}" for each in wrong] + ([self.operator.tail()] if wrong else [])


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
