"""Whatever breaks under a job, and whatever the store does in any schedule, its rank answers it once and gives its slots back."""

import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from epochkv_connector.store.client import Ticket, Transfer
from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.wire import Phase, Tier
from epochkv_connector.worker.staging import StagingStream
from hack.waiting import eventually
from tests.unit.connector_worker.worker_rig import NAMESPACE, NUM_SLOTS, HeldCopies, ObedientStore, Rig, load, move, save


class BrokenStore(ObedientStore):
    """Raises where the protocol says that nothing may."""

    broken = True

    def _take(self, kind: str, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        if self.broken:
            raise MemoryError("injected")
        return super()._take(kind, transfers, timeout)


def test_a_store_client_that_raises_fails_the_jobs_and_holds_no_slot() -> None:
    store = BrokenStore()
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)], loads=[load(2, [move(8, 5, 40, Tier.STORE)], NAMESPACE)])
    assert rig.until_acked(2, Phase.LOADED).failed
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(1, Phase.STORED).failed
    stats = rig.worker.stats()
    assert (stats["load_failed_error"], stats["save_put_dropped_error"], stats["held_slots"]) == (1, 1, 0)
    store.broken = False
    rig.step(saves=[save(3, [move(4, 0, 31)], NAMESPACE)])
    assert not rig.until_acked(3, Phase.STORED).failed, "the slot is free"
    for _ in range(3):
        rig.collect()
    assert (rig.finished, rig.failed) == ({"r2": 1}, {"r2": 1})


@pytest.mark.parametrize("broken", ["gather", "scatter"])
def test_an_exception_in_a_copy_thread_is_answered_and_the_thread_lives_on(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    rig = Rig()
    calls: list[int] = []

    def fail(*args: Any) -> None:
        calls.append(1)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        rig.step(saves=[save(1, [move(3, 0, 30)])])
        assert not rig.until_acked(1, Phase.COPIED).failed
        patch.setattr(StagingStream, broken, fail)
        if broken == "gather":
            rig.step(saves=[save(5, [move(4, 0, 40)])])
            assert rig.until_acked(5, Phase.COPIED).failed
        rig.step(loads=[load(2, [move(8, 0, 30)])])
        assert rig.until_acked(2, Phase.LOADED).failed, "the bytes of a slot whose copy broke off may be half overwritten"
    assert len(calls) == 1
    wanted = rig.block(3)
    rig.step(saves=[save(3, [move(3, 1, 31)])])
    assert not rig.until_acked(3, Phase.COPIED).failed
    rig.step(loads=[load(4, [move(9, 1, 31)])])
    assert not rig.until_acked(4, Phase.LOADED).failed
    assert rig.block(9) == wanted
    assert set(rig.finished.values()) == {1}
    assert set(rig.failed) == {"r2"}


def test_a_stream_that_cannot_be_opened_is_an_error_at_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is out of memory, or without a CUDA runtime."""

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    before = {thread.name for thread in threading.enumerate()}
    monkeypatch.setattr(StagingStream, "__init__", fail)
    with pytest.raises(RuntimeError, match="injected"):
        Rig()
    assert {thread.name for thread in threading.enumerate()} <= before


@pytest.mark.parametrize("direction", ["load", "save"])
def test_a_shutdown_answers_what_is_copied_behind_the_copy_and_the_rest_at_once(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    store = ObedientStore()
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    copies = HeldCopies(monkeypatch, "scatter" if direction == "load" else "gather")
    rig.step(loads=[load(2, [move(8, 0, 30)])] if direction == "load" else [], saves=[save(3, [move(4, 1, 40)], NAMESPACE)])
    assert copies.began.wait(10)
    if direction == "load":
        rig.until_acked(3, Phase.STORED)  # while the store answers
    store.policy = lambda kind, transfers: None
    rig.step(finish=False, loads=[load(4, [move(9, 5, 50, Tier.STORE)], NAMESPACE)], saves=[save(5, [move(5, 2, 41)], NAMESPACE)])
    assert not rig.worker.shutdown(0.2), "a copy is under way"
    rig.collect()
    assert rig.acks[4, Phase.LOADED].failed
    assert [rig.acks[5, phase].failed for phase in (Phase.COPIED, Phase.STORED)] == [True, True]
    under_way = (2, Phase.LOADED) if direction == "load" else (3, Phase.COPIED)
    assert under_way not in rig.acks, "its blocks are being touched"
    copies.go_on.set()
    assert not rig.until_acked(*under_way).failed
    rig.until_acked(3, Phase.STORED)
    store.end_all()
    for _ in range(3):
        rig.collect(0.001)
    assert set(rig.finished.values()) == {1}
    assert rig.finished.keys() == ({"r2", "r4"} if direction == "load" else {"r4"})
    told = {key for key in rig.acks if key[1] is not Phase.RELEASED}
    loads = {(2, Phase.LOADED), (4, Phase.LOADED)} if direction == "load" else {(4, Phase.LOADED)}
    saves = {(job, phase) for job in (3, 5) for phase in (Phase.COPIED, Phase.STORED)}
    assert told == {(1, Phase.COPIED), *loads, *saves}


class Schedule:
    """Random jobs, from a scheduler that gives a slot to nobody before it is over.

    Attributes:
        expected: every phase that has to be acknowledged.
        num_reads: how often the slots of a job were still written to, summed over all looks. How soon depends on threads.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.store = ObedientStore(policy=self._fails_at_random)
        self.rig = Rig(self.store)
        self.expected: dict[tuple[int, Phase], None] = {}
        self.num_loads = self.num_reads = 0
        self._free_slots = list(range(NUM_SLOTS))
        self._taken: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def _fails_at_random(self, kind: str, transfers: Sequence[Transfer]) -> StoreOutcome | None:
        with self._lock:
            return self.dice.choice([StoreOutcome.OK, StoreOutcome.OK, StoreOutcome.OK, StoreOutcome.TRANSFER, StoreOutcome.FULL, None])

    def turn(self, job_id: int) -> None:
        """Results are taken in, the store may answer an old request, and if there are slots, a job begins."""
        dice = self.dice
        self.rig.collect(dice.choice([0.0, 0.001]))
        for done in [job for job in self._taken if self._is_over(job)]:
            self._free_slots += self._taken.pop(done)
        if dice.random() < 0.3 and self.store.open:
            request = self.store.open.pop(dice.randrange(len(self.store.open)))
            self.store.answer(request, dice.choice([StoreOutcome.OK, StoreOutcome.ABSENT, StoreOutcome.TIMEOUT]))
            self.store.release(request)
        self.num_reads += self._num_written()
        count = dice.randint(1, 3)
        if len(self._free_slots) >= count:
            self._begin(job_id, [self._free_slots.pop() for _ in range(count)])

    def _begin(self, job_id: int, slots: list[int]) -> None:
        dice = self.dice
        self._taken[job_id] = slots
        deadline = dice.choice([0.0, 0.01, 20.0])
        names = [dice.randrange(6) for _ in slots]
        if dice.random() < 0.5:
            namespace = dice.choice([None, NAMESPACE])
            moves = [move(dice.randrange(8), slot, name) for slot, name in zip(slots, names, strict=True)]
            self.rig.step(dice.random() < 0.8, saves=[save(job_id, moves, namespace, deadline)])
            self.expected[job_id, Phase.COPIED] = None
            if namespace:
                self.expected[job_id, Phase.STORED] = None
        else:
            count = dice.choice([1, 1, 3])  # of pieces: a load with more blocks than slots
            moves = [move(8 + i, slots[i % len(slots)], names[i % len(slots)], Tier.STORE) for i in range(count * len(slots))]
            self.rig.step(loads=[load(job_id, moves, NAMESPACE, deadline)])
            self.expected[job_id, Phase.LOADED] = None
            self.num_loads += 1

    def _num_written(self) -> int:
        """Jobs to whose slots the store may still write."""
        written = {transfer.address for request in self.store.open if request.kind == "get" for transfer in request.transfers}
        return sum(bool(written & {self.rig.address(slot) for slot in held}) for held in self._taken.values())

    def _is_over(self, job: int) -> bool:
        """The acknowledgements say that the job's slots are free."""
        acks = {phase: ack for (job_id, phase), ack in self.rig.acks.items() if job_id == job}
        last = acks.get(Phase.LOADED) or acks.get(Phase.STORED if (job, Phase.STORED) in self.expected else Phase.COPIED)
        return last is not None and not (last.busy_slots and Phase.RELEASED not in acks)

    def end(self) -> None:
        """The store is down, and then everything that it left open ends."""
        rig = self.rig
        self.store.policy = lambda kind, transfers: StoreOutcome.DOWN
        rig.worker.finish_step()
        eventually(lambda: rig.collect(0.001) and rig.worker.stats()["open_copies"] == 0, "copies over", 10)

        def acknowledged() -> bool:
            self.store.end_all()  # again: a thread may have been told to leave a request open just before the store went down
            return self.expected.keys() <= rig.acks.keys()

        rig.until(acknowledged, "every phase acknowledged")
        rig.until(lambda: all((job, Phase.RELEASED) in rig.acks for (job, _), ack in list(rig.acks.items()) if ack.busy_slots), "released")


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, pytest.param(random.SystemRandom().randrange(10**6), id="random")])
def test_any_schedule_ends_with_every_job_answered_once(seed: int) -> None:
    print(f"seed {seed}")
    schedule = Schedule(seed)
    for job_id in itertools.count(1):
        schedule.turn(job_id)
        if job_id >= 120 and schedule.num_reads:
            break
    schedule.end()
    rig = schedule.rig
    assert rig.finished.total() == schedule.num_loads
    assert set(rig.finished.values()) <= {1}
    assert {key for key in rig.acks if key[1] is not Phase.RELEASED} == schedule.expected.keys()
    assert {f"r{job}" for (job, phase), ack in rig.acks.items() if phase is Phase.LOADED and ack.failed} == set(rig.failed)
    assert [rig.worker.stats()[name] for name in ("held_slots", "open_loads", "open_copies")] == [0, 0, 0]
