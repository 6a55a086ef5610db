"""Steps of a scale-in over a small world: pods that come and go late, a master that moves blocks, refuses, fails and is silent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epochkv_operator.planning.context import ScaleIn
from epochkv_operator.stores.admin import Job, Segment
from epochkv_operator.stores.steps import Seen, Step, begin, step

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
TIMEOUT, BLOCK = 600, 1000


@dataclass
class Store:
    """A pod's process and its segment."""

    blocks: int = 0
    status: str = "OK"


@dataclass
class World:
    """Replicas of the StatefulSet and of the pool, the pods, and the master's only job."""

    live: int
    wanted: int
    stores: dict[int, Store]
    state: ScaleIn | None = None
    now: datetime = START
    silent: bool = False
    hot: bool = False
    """Every block is read, so none moves; a job can be cancelled then."""
    job: Job | None = None
    targets: set[int] = field(default_factory=set)
    lost: int = 0
    forgotten: set[int] = field(default_factory=set)
    """Stores that a new master does not know yet."""
    asked: list[str] = field(default_factory=list)

    def tick(self, seconds: float = 1.0) -> None:
        """A look of the keeper, the reconciler's apply, the master's work."""
        self.now += timedelta(seconds=seconds)
        self._move()
        if self.state is None or self.state.completed is not None:
            if self.wanted >= self.live:
                self.live = self.wanted
                return
            self.state = begin(self.live, self.wanted, self.now, TIMEOUT)
        found = step(self.state, self._seen(), self.now, TIMEOUT)
        self.state = self._carried_out(found)
        self.live = self.state.hold if self.state.completed is None else self.wanted

    def kubelet(self) -> None:
        """Pods follow the StatefulSet."""
        for ordinal in [ordinal for ordinal in self.stores if ordinal >= self.live]:
            gone = self.stores.pop(ordinal)
            late = self.state is not None and self.state.lossy
            self.lost += 0 if late else gone.blocks
        for ordinal in range(self.live):
            self.stores.setdefault(ordinal, Store())

    def settle(self) -> None:
        self.silent = self.hot = False
        for _ in range(200):
            self.tick(30.0)
            self.kubelet()

    def _seen(self) -> Seen:
        pods = {ordinal: f"10.0.0.{ordinal}" for ordinal in self.stores}
        segments = [Segment(f"10.0.0.{n}:1", s.status, s.blocks * BLOCK if s.status == "OK" else 0) for n, s in self.stores.items()]
        segments = [segment for segment in segments if int(segment.host.rpartition(".")[2]) not in self.forgotten]
        job = self.job if self.state is not None and self.job is not None and self.state.job == self.job.id else None
        return Seen(self.live, self.wanted, pods, None if self.silent else segments, job, "frozen" if self.silent else "")

    def _carried_out(self, found: Step) -> ScaleIn:
        self.asked.append(found.action)
        if found.action == "Drain":
            self.targets = {int(name.split(":")[0].rpartition(".")[2]) for name in found.segments}
            assert all(self.stores[ordinal].status == "OK" for ordinal in self.targets)
            self.job = Job(str(len(self.asked)), "RUNNING", found.segments)
            for ordinal in self.targets:
                self.stores[ordinal].status = "DRAINING"
            return replace(found.state, job=self.job.id)
        if found.action == "Cancel" and self.hot and self.job is not None:
            self.job = replace(self.job, status="CANCELED")
            for ordinal in self.targets & set(self.stores):
                self.stores[ordinal].status = "OK"
        return found.state

    def _move(self) -> None:
        if self.job is None or not self.job.open or self.hot:
            return
        rest = [store for number, store in self.stores.items() if number not in self.targets and store.status == "OK"]
        for ordinal in self.targets & set(self.stores):
            store = self.stores[ordinal]
            if store.blocks and rest:
                store.blocks, rest[0].blocks = store.blocks - 1, rest[0].blocks + 1
                self.job = replace(self.job, moved_bytes=self.job.moved_bytes + BLOCK)
            store.status = "DRAINED" if not store.blocks else "DRAINING"
        if not any(self.stores[ordinal].blocks for ordinal in self.targets & set(self.stores)):
            self.job = replace(self.job, status="SUCCEEDED")


def world(live: int = 3, wanted: int = 2, blocks: int = 3) -> World:
    return World(live, wanted, {ordinal: Store(blocks) for ordinal in range(live)})


def test_a_store_goes_when_it_is_empty_and_not_before() -> None:
    found = world()
    for _ in range(4):
        found.tick()
        found.kubelet()
        assert found.live == (3 if 2 in found.stores and found.stores[2].blocks else 2)
    found.settle()
    assert found.asked.count("Drain") == 1
    assert (found.live, found.lost, sum(store.blocks for store in found.stores.values())) == (2, 0, 9)
    assert found.state is not None
    assert (found.state.moved, found.state.bytes, found.state.lossy) == (3 * BLOCK, 3 * BLOCK, False)


def test_stores_go_from_the_top() -> None:
    found = world(live=4, wanted=1)
    found.stores[3].blocks = 0
    found.tick()
    assert found.live == 4, "first it takes no more blocks"
    found.tick()
    assert found.live == 3, "the top one is empty already"
    found.settle()
    assert (found.live, found.lost) == (1, 0)


def test_without_an_answer_all_stay_until_the_time_is_over() -> None:
    found = world()
    found.silent = True
    for _ in range(TIMEOUT // 100):
        found.tick(90.0)
        found.kubelet()
        assert found.live == 3
        assert found.state is not None
        assert found.state.silent == "frozen"
    found.tick(150.0)
    assert found.live == 2
    assert found.state is not None
    assert found.state.lossy


def test_a_job_that_fails_is_asked_for_again_after_a_while() -> None:
    found = world()
    found.hot = True
    found.tick()
    assert found.job is not None
    for _ in range(5):
        found.job = replace(found.job, status="FAILED")
        found.stores[2].status = "OK"  # as Mooncake does
        found.tick()
    assert found.asked.count("Drain") == 1
    assert found.state is not None
    assert found.state.failed
    assert found.live == 3
    found.tick(10.0)
    assert found.asked.count("Drain") == 2


def test_a_master_that_restarts_knows_no_job_and_no_block() -> None:
    found = world()
    found.hot = True
    found.tick()
    found.job = None
    found.stores[2] = Store(blocks=0)
    found.hot = False
    found.settle()
    assert (found.live, found.lost) == (2, 0)


def test_a_ready_store_that_the_master_does_not_know_yet_stays() -> None:
    """As after another master has taken over: the stores come back with all their blocks."""
    found = world()
    found.forgotten = {0, 1, 2}
    for _ in range(5):
        found.tick()
    assert found.live == 3
    found.forgotten = set()
    found.settle()
    assert (found.live, found.lost) == (2, 0)


def test_stores_that_were_emptied_and_are_wanted_back_restart() -> None:
    """Mooncake has no way back from DRAINED."""
    found = world(live=4, wanted=2)
    found.tick()
    found.wanted = 4
    found.tick()  # blocks move: it cannot be cancelled
    assert found.asked[-1] == "Cancel"
    for _ in range(8):
        found.tick()
    assert found.live == 2, "emptied, and still there"
    assert [found.stores[ordinal].status for ordinal in (2, 3)] == ["DRAINED", "DRAINED"]
    found.tick()
    assert found.live == 2, "scaled up now, the pods would be kept"
    found.kubelet()
    found.settle()
    assert (found.live, found.lost) == (4, 0)
    assert {store.status for store in found.stores.values()} == {"OK"}


def test_lowered_again_the_new_ones_have_as_much_time() -> None:
    found = world(live=4, wanted=3)
    found.hot = True
    found.tick()
    found.wanted = 1
    found.tick(TIMEOUT - 10.0)
    found.tick(20.0)
    assert found.live == 4
    found.tick(TIMEOUT)
    assert found.live == 1
    assert found.state is not None
    assert found.state.lossy


EVENTS = st.one_of(
    st.tuples(st.just("scale"), st.integers(1, 5)),
    st.tuples(st.just("tick"), st.integers(1, 3)),
    st.tuples(st.just("kubelet"), st.just(0)),
    st.tuples(st.just("silent"), st.booleans()),
    st.tuples(st.just("hot"), st.booleans()),
    st.tuples(st.just("put"), st.integers(0, 4)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=40))
@example([("scale", 1), ("tick", 2), ("silent", True), ("scale", 3), ("tick", 2)])  # wanted back while no master answers
def test_whatever_happens_no_block_is_lost_in_time_and_all_ends_as_wanted(events: list[tuple[str, int]]) -> None:
    found = world(live=3, wanted=3)
    for name, value in events:
        if name == "scale":
            found.wanted = value
        elif name == "tick":
            for _ in range(value):
                found.tick()
        elif name == "kubelet":
            found.kubelet()
        elif name == "put" and value in found.stores and found.stores[value].status == "OK":
            found.stores[value].blocks += 1
        elif name in ("silent", "hot"):
            setattr(found, name, bool(value))
    assert found.lost == 0
    found.settle()
    assert found.lost == 0
    assert found.live == found.wanted == len(found.stores)
    assert {store.status for store in found.stores.values()} == {"OK"}
    assert found.state is None or found.state.completed is not None


@pytest.mark.parametrize(
    ("name", "host"),
    [("10.1.2.3:12345", "10.1.2.3"), ("[fd00::7]:12345", "fd00::7"), ("[FD00:0::7]:1", "fd00::7"), ("store-0:1", "store-0")],
)
def test_the_address_of_a_segment(name: str, host: str) -> None:
    assert Segment(name, "OK", 0).host == host
