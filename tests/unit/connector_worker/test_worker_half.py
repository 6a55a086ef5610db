"""The worker role answers every job exactly once, whatever the store does, and never touches what is not its own.

The store here is a double that obeys the test: real stores fail at moments nobody can choose (`tests/store` has those).
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from epochkv_connector.naming.object_keys import object_key
from epochkv_connector.store import Outcome, Ticket, Transfer
from epochkv_connector.store.queues import resolve
from epochkv_connector.wire.jobs import BlockMove, JobAck, LoadJob, Phase, SaveJob, Source
from epochkv_connector.worker.copying.layout import GroupSpec, LayoutError
from epochkv_connector.worker.copying.slots import HEADER_BYTES, TRAILER_BYTES
from epochkv_connector.worker.copying.staging import Staging, StagingStream
from epochkv_connector.worker.runner import JobRunner
from epochkv_connector.worker.tasks import Report
from hack.waiting import eventually

NUM_BLOCKS, NUM_SLOTS, LAYERS = 16, 12, 3
NAMESPACE = "0a1b2c3d/00112233445566ff/e7/w0123456789abcdef"


@dataclass
class Step:
    loads: Sequence[LoadJob] = ()
    saves: Sequence[SaveJob] = ()
    poisoned: Sequence[str] = ()
    newest_epoch: int = -1
    agreed: Sequence[int] = ()
    refused: Sequence[int] = ()


@dataclass
class Request:
    kind: str
    transfers: list[Transfer]
    ticket: Ticket
    timeout: float


@dataclass
class ObedientStore:
    """Keeps objects in a dictionary; `policy` decides what becomes of a request, `open` has those it decided to leave open."""

    objects: dict[str, bytes] = field(default_factory=dict)
    policy: Callable[[str, Sequence[Transfer]], Outcome | None] = lambda kind, transfers: Outcome.OK
    open: list[Request] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    ready: bool = True
    closed: bool = False

    def get(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        return self._take("get", transfers, timeout)

    def put(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        return self._take("put", transfers, timeout)

    def _take(self, kind: str, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        request = Request(kind, list(transfers), Ticket(), timeout)
        self.seen.append(request)
        outcome = self.policy(kind, transfers)
        if outcome is None:
            self.open.append(request)
        else:
            self.answer(request, outcome)
            self.release(request)
        return request.ticket

    def answer(self, request: Request, outcome: Outcome) -> None:
        outcomes = []
        for transfer in request.transfers:
            if outcome is Outcome.OK and request.kind == "put":
                self.objects[transfer.key] = bytes(transfer.view[HEADER_BYTES:-TRAILER_BYTES])
            elif outcome is Outcome.OK and transfer.key in self.objects:
                transfer.view[HEADER_BYTES:-TRAILER_BYTES] = self.objects[transfer.key]
            elif outcome is Outcome.OK:
                outcomes.append(Outcome.ABSENT)
                continue
            outcomes.append(outcome)
        resolve(request.ticket.done, outcomes)

    def release(self, request: Request) -> None:
        resolve(request.ticket.released, None)

    def end_all(self) -> None:
        for request in self.open:
            self.answer(request, Outcome.TIMEOUT)
            self.release(request)

    def close(self, timeout: float) -> bool:
        self.closed = True
        return not self.open

    def stats(self) -> dict[str, float]:
        return {"state": 2.0}


class Rig:
    """A runner over random KV tensors, and a collector that insists on exactly once."""

    def __init__(self, store: ObedientStore | None = None, **ranks: int) -> None:
        raw = np.random.default_rng(1).integers(0, 256, (LAYERS, NUM_BLOCKS, 64), dtype=np.uint8)
        self.kv = torch.from_numpy(raw)
        self.store = store
        names = [f"l{i}" for i in range(LAYERS)]
        caches = {name: self.kv[i] for i, name in enumerate(names)}
        self.staging = Staging(caches, [GroupSpec(names, 16)], NUM_SLOTS, NUM_BLOCKS)
        open_store: Any = (lambda region: store) if store else None
        self.worker = JobRunner(self.staging, open_store=open_store, **ranks)  # type: ignore[arg-type]
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.acks: dict[tuple[int, Phase], JobAck] = {}

    def address(self, slot: int) -> int:
        return self.staging.region.slot_address(slot)

    def block(self, block: int) -> bytes:
        return self.kv[:, block].numpy().tobytes()

    def step(self, finish: bool = True, **parts: object) -> None:
        self.worker.start_step(Step(**parts))  # type: ignore[arg-type]
        if finish:
            self.worker.finish_step()

    def collect(self, wait_seconds: float = 0.0) -> Report:
        report = self.worker.results(wait_seconds)
        assert report.failed_recving <= report.finished_recving
        self.finished.update(report.finished_recving)
        self.failed.update(report.failed_recving)
        for ack in report.acks:
            assert (ack.job_id, ack.phase) not in self.acks, f"acknowledged twice: {ack}"
            self.acks[ack.job_id, ack.phase] = ack
        return report

    def until(self, condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
        def poll() -> object:
            self.collect(0.001)
            return condition()

        eventually(poll, what, timeout)

    def until_acked(self, job_id: int, phase: Phase) -> JobAck:
        self.until(lambda: (job_id, phase) in self.acks, f"job {job_id} {phase.name}")
        return self.acks[job_id, phase]


@pytest.fixture
def store() -> ObedientStore:
    return ObedientStore()


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def move(block: int, slot: int, name: int, source: Source = Source.HOST, copy: bool = True) -> BlockMove:
    return BlockMove(0, block, block, slot, name_of(name), source, copy)


def save(job_id: int, moves: Sequence[BlockMove], namespace: str | None = None, deadline: float = 20.0) -> SaveJob:
    return SaveJob(job_id, f"s{job_id}", namespace, 5, len(moves), tuple(moves), deadline)


def load(job_id: int, moves: Sequence[BlockMove], namespace: str | None = None, deadline: float = 20.0) -> LoadJob:
    return LoadJob(job_id, f"r{job_id}", namespace, tuple(moves), deadline)


def test_host_blocks_come_back_byte_for_byte() -> None:
    rig = Rig()
    wanted = [rig.block(3), rig.block(9)]
    untouched = [rig.block(block) for block in range(NUM_BLOCKS) if block not in (1, 2)]
    rig.step(saves=[save(1, [move(3, 0, 30), move(9, 7, 90)])])
    copied = rig.until_acked(1, Phase.COPIED)
    assert (copied.start_block, copied.num_blocks, copied.failed) == (5, 2, False)

    rig.step(loads=[load(2, [move(1, 0, 30), move(2, 7, 90)])])
    loaded = rig.until_acked(2, Phase.LOADED)
    assert (loaded.num_blocks, loaded.failed, loaded.busy_slots) == (2, False, ())
    assert [rig.block(1), rig.block(2)] == wanted
    assert [rig.block(block) for block in range(NUM_BLOCKS) if block not in (1, 2)] == untouched
    assert (rig.finished, rig.failed) == ({"r2": 1}, {})
    assert (1, Phase.STORED) not in rig.acks, "there was no namespace, so nothing to store"


def test_a_save_waits_for_the_forward_of_its_step() -> None:
    rig = Rig()
    rig.step(finish=False, saves=[save(1, [move(3, 0, 30)])])
    time.sleep(0.05)
    rig.collect()
    assert rig.acks == {}
    rig.kv[:, 3] = 77  # the forward pass writes the block
    rig.worker.finish_step()
    rig.until_acked(1, Phase.COPIED)
    rig.step(loads=[load(2, [move(4, 0, 30)])])
    rig.until_acked(2, Phase.LOADED)
    assert set(rig.block(4)) == {77}


def test_a_step_without_finish_is_made_up_for_by_the_next() -> None:
    rig = Rig()
    rig.step(finish=False, saves=[save(1, [move(3, 0, 30)])])
    rig.step(finish=False)
    assert not rig.until_acked(1, Phase.COPIED).failed


def test_blocks_travel_through_the_store_between_two_workers(store: ObedientStore) -> None:
    one, two = Rig(store), Rig(store)
    wanted = [one.block(3), one.block(4)]
    one.step(saves=[save(1, [move(3, 0, 30), move(4, 1, 40)], NAMESPACE)])
    assert not one.until_acked(1, Phase.STORED).failed
    assert set(store.objects) == {object_key(NAMESPACE, 0, 0, name_of(n)) for n in (30, 40)}

    two.step(loads=[load(1, [move(8, 5, 30, Source.STORE), move(9, 6, 40, Source.STORE)], NAMESPACE)])
    ack = two.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.num_blocks, ack.filled_slots) == (False, 2, (5, 6))
    assert [two.block(8), two.block(9)] == wanted
    # What was fetched is verified and may be used from the host at once:
    two.step(loads=[load(2, [move(10, 5, 30)])])
    assert not two.until_acked(2, Phase.LOADED).failed
    assert two.block(10) == wanted[0]


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_a_load_that_misses_a_byte_fails_and_writes_no_block(store: ObedientStore, outcome: Outcome) -> None:
    rig = Rig(store)
    before = rig.kv.clone()
    store.policy = lambda kind, transfers: outcome
    rig.step(loads=[load(1, [move(8, 5, 30, Source.STORE)], NAMESPACE)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.num_blocks, ack.filled_slots) == (True, 0, ())
    assert (rig.finished, rig.failed) == ({"r1": 1}, {"r1": 1})
    assert torch.equal(rig.kv, before)
    assert rig.worker.stats()[f"load_failed_store_{outcome}"] == 1


def test_the_verified_part_of_a_failed_load_may_be_kept(store: ObedientStore) -> None:
    rig = Rig(store)
    store.objects[object_key(NAMESPACE, 0, 0, name_of(30))] = b"x" * (LAYERS * 64)
    rig.step(loads=[load(1, [move(8, 5, 30, Source.STORE), move(9, 6, 40, Source.STORE)], NAMESPACE)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.filled_slots) == (True, (5,))


def test_a_deadline_fails_the_load_at_once_and_names_the_slots_that_are_still_written(store: ObedientStore) -> None:
    rig = Rig(store)
    store.policy = lambda kind, transfers: None
    before = rig.kv.clone()
    rig.step(loads=[load(1, [move(8, 5, 30, Source.STORE)], NAMESPACE, deadline=0.05)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.busy_slots) == (True, (5,))
    assert (rig.finished, rig.failed) == ({"r1": 1}, {"r1": 1})
    (request,) = store.open
    assert request.ticket.cancelled
    for _ in range(5):
        rig.collect()
    assert (1, Phase.RELEASED) not in rig.acks

    # The slot is refused to others meanwhile, whoever asks.
    store.policy = lambda kind, transfers: Outcome.OK
    rig.step(saves=[save(2, [move(3, 5, 31)])], loads=[load(3, [move(9, 5, 31, Source.STORE)], NAMESPACE)])
    assert rig.until_acked(2, Phase.COPIED).failed
    assert rig.until_acked(3, Phase.LOADED).failed

    store.objects[request.transfers[0].key] = b"late" * (LAYERS * 16)
    store.answer(request, Outcome.OK)  # too late
    store.release(request)
    rig.until_acked(1, Phase.RELEASED)
    assert torch.equal(rig.kv, before), "a late answer must not reach the blocks"
    assert rig.finished["r1"] == 1
    rig.step(saves=[save(4, [move(3, 5, 31)])])
    assert not rig.until_acked(4, Phase.COPIED).failed


def test_a_put_that_outlives_its_deadline_is_dropped_and_released_later(store: ObedientStore) -> None:
    rig = Rig(store)
    store.policy = lambda kind, transfers: None
    rig.step(saves=[save(1, [move(3, 0, 30), move(4, 1, 40)], NAMESPACE)])
    assert not rig.until_acked(1, Phase.COPIED).failed, "GPU blocks are free although the put has not ended"
    (request,) = store.open
    store.answer(request, Outcome.TIMEOUT)
    stored = rig.until_acked(1, Phase.STORED)
    assert (stored.failed, stored.num_blocks, stored.busy_slots) == (True, 0, (0, 1))
    assert (1, Phase.RELEASED) not in rig.acks
    store.release(request)
    rig.until_acked(1, Phase.RELEASED)
    assert rig.worker.stats()["held_slots"] == 0


def test_the_store_gets_what_is_left_of_the_deadline(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(
        saves=[save(1, [move(3, 0, 30)], NAMESPACE, deadline=7.0)],
        loads=[load(2, [move(8, 5, 30, Source.STORE)], NAMESPACE, deadline=3.0)],
    )
    rig.until_acked(1, Phase.STORED)
    assert {request.kind: 0 < request.timeout <= limit for request, limit in zip(store.seen, (3.0, 7.0), strict=True)} == {
        "get": True,
        "put": True,
    }


def test_a_save_of_an_older_epoch_is_copied_but_not_put(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)], newest_epoch=8)
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(1, Phase.STORED).failed
    assert store.seen == []
    assert rig.worker.stats()["save_put_dropped_stale"] == 1


def test_blocks_that_are_in_their_slot_are_put_without_a_copy(store: ObedientStore) -> None:
    rig = Rig(store)
    wanted = rig.block(3)
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    rig.kv[:, 3] = 0  # the GPU block belongs to somebody else by now
    rig.step(saves=[save(2, [move(3, 0, 30, copy=False)], NAMESPACE)])
    assert not rig.until_acked(2, Phase.STORED).failed
    assert store.objects[object_key(NAMESPACE, 0, 0, name_of(30))] == wanted


def test_blocks_that_the_store_has_are_copied_and_not_put(store: ObedientStore) -> None:
    rig = Rig(store)
    wanted = rig.block(3)
    there = BlockMove(0, 3, 3, 0, name_of(30), put=False)
    rig.step(saves=[save(1, [there, move(4, 1, 40)], NAMESPACE), save(2, [BlockMove(0, 5, 5, 2, name_of(50), put=False)], NAMESPACE)])
    assert not rig.until_acked(1, Phase.STORED).failed
    assert not rig.until_acked(2, Phase.STORED).failed, "nothing to put is nothing missing"
    assert set(store.objects) == {object_key(NAMESPACE, 0, 0, name_of(40))}
    rig.step(loads=[load(3, [move(8, 0, 30)])])
    assert not rig.until_acked(3, Phase.LOADED).failed
    assert rig.block(8) == wanted


def test_a_slot_that_holds_another_block_is_refused(store: ObedientStore) -> None:
    rig = Rig(store)
    before = rig.kv.clone()
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    rig.step(
        loads=[load(2, [move(8, 0, 31)]), load(3, [move(8, 4, 30)])],
        saves=[save(4, [move(3, 0, 31, copy=False)], NAMESPACE)],
    )
    assert rig.until_acked(2, Phase.LOADED).failed
    assert rig.until_acked(3, Phase.LOADED).failed
    assert rig.until_acked(4, Phase.COPIED).failed
    assert rig.until_acked(4, Phase.STORED).failed
    assert torch.equal(rig.kv, before)
    assert store.seen == []


def test_replicas_of_a_shard_put_each_block_once(store: ObedientStore) -> None:
    ranks = [Rig(store, rank=rank, world_size=4, shard=rank // 2, num_shards=2) for rank in range(4)]
    moves = [move(block, block, 100 + block) for block in range(NUM_SLOTS)]
    for rig in ranks:
        rig.step(saves=[save(1, moves, NAMESPACE)])
        assert not rig.until_acked(1, Phase.COPIED).failed
    assert not store.seen, "a shard was stored before every rank had its own"
    for rig in ranks:
        rig.step(agreed=[1])
        assert not rig.until_acked(1, Phase.STORED).failed
    put = Counter(transfer.key for request in store.seen for transfer in request.transfers)
    assert put == {object_key(NAMESPACE, 0, shard, m.block_hash): 1 for shard in range(2) for m in moves}
    assert len(store.seen) == 4, "the work is shared"


def test_poisoned_ids_are_reported_once_more_and_only_once(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(poisoned=["a", "b"])
    report = rig.collect()
    assert report.finished_recving == report.failed_recving == {"a", "b"}
    assert rig.collect() == (set(), set(), [])
    # Should a load of that request still be under way, its own report is the only one.
    store.policy = lambda kind, transfers: None
    rig.step(loads=[load(1, [move(8, 5, 30, Source.STORE)], NAMESPACE)])
    rig.step(poisoned=["r1"])
    rig.until_acked(1, Phase.LOADED)
    for _ in range(3):
        rig.collect()
    assert (rig.finished["r1"], rig.failed["r1"]) == (1, 1)


@pytest.mark.parametrize("poison", [True, False])
def test_a_copy_into_gpu_blocks_is_reported_only_when_it_is_over(monkeypatch: pytest.MonkeyPatch, poison: bool) -> None:
    rig = Rig()
    wanted = rig.block(3)
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    copying, go_on = threading.Event(), threading.Event()
    scatter = StagingStream.scatter

    def slow_scatter(*args: Any) -> None:
        copying.set()
        assert go_on.wait(10)
        scatter(*args)

    monkeypatch.setattr(StagingStream, "scatter", slow_scatter)
    rig.step(loads=[load(2, [move(8, 0, 30)], deadline=0.05)])
    assert copying.wait(10)
    if poison:
        rig.step(poisoned=["r2"])
    time.sleep(0.1)  # past the deadline
    for _ in range(3):
        rig.collect()
    assert rig.finished == {}, "its blocks are being written, so nobody else may have them yet"
    go_on.set()
    ack = rig.until_acked(2, Phase.LOADED)
    for _ in range(3):
        rig.collect()
    assert (rig.finished["r2"], rig.failed["r2"], ack.failed) == (1, int(poison), poison)
    assert rig.block(8) == wanted


def test_jobs_without_a_store_or_a_registration_fail(store: ObedientStore) -> None:
    rig = Rig()
    rig.step(
        loads=[load(1, [move(8, 5, 30, Source.STORE)], NAMESPACE), load(2, [move(8, 99, 30)]), load(3, [move(8, 5, 30, Source.STORE)])],
        saves=[save(4, [move(3, 0, 30)], NAMESPACE), save(5, [move(99, 1, 30)]), save(6, [BlockMove(7, 0, 0, 0, b"x")])],
    )
    assert all(rig.until_acked(job, Phase.LOADED).failed for job in (1, 2, 3))
    assert not rig.until_acked(4, Phase.COPIED).failed
    assert rig.until_acked(4, Phase.STORED).failed
    assert rig.until_acked(5, Phase.COPIED).failed
    assert rig.until_acked(6, Phase.COPIED).failed
    bare = Rig().worker
    bare.shutdown()
    bare.start_step(Step(loads=[load(1, [move(8, 5, 30)])], saves=[save(2, [move(3, 0, 30)], NAMESPACE)]))  # type: ignore[arg-type]
    bare.finish_step()
    finished, failed, acks = bare.results()
    assert finished == failed == {"r1"}
    assert sorted((ack.job_id, ack.phase, ack.failed) for ack in acks) == [
        (1, Phase.LOADED, True),
        (2, Phase.COPIED, True),
        (2, Phase.STORED, True),
    ]


def test_a_layout_that_cannot_be_cut_is_an_error_at_registration() -> None:
    with pytest.raises(LayoutError, match="no dimension"):
        Staging({"a": torch.zeros(4, 4)}, [GroupSpec(["a"])], 4, num_blocks=3)


def test_waiting_for_copies_releases_the_blocks_of_an_idle_engine() -> None:
    rig = Rig()
    rig.step(finish=False, saves=[save(1, [move(3, 0, 30)])])
    assert rig.worker.wait_copied(5.0)
    rig.collect()
    assert (1, Phase.COPIED) in rig.acks


def test_shutdown_answers_everything_and_later_jobs_fail(store: ObedientStore) -> None:
    rig = Rig(store)
    store.policy = lambda kind, transfers: None
    rig.step(finish=False, loads=[load(1, [move(8, 5, 30, Source.STORE)], NAMESPACE)], saves=[save(2, [move(3, 0, 30)], NAMESPACE)])
    assert not rig.worker.shutdown(1.0), "a call is still in flight"
    assert store.closed
    rig.step(loads=[load(3, [move(8, 6, 30)])], saves=[save(4, [move(3, 1, 30)])])
    rig.collect()
    assert rig.failed == {"r1": 1, "r3": 1}
    assert {key for key in rig.acks if key[1] is not Phase.RELEASED} == {
        (1, Phase.LOADED),
        (2, Phase.COPIED),
        (2, Phase.STORED),
        (3, Phase.LOADED),
        (4, Phase.COPIED),
    }
    assert all(ack.failed for ack in rig.acks.values())
    assert rig.worker.shutdown()
    gc.collect()
    memory = store.open[0].transfers[0].view
    memory[:] = bytes(len(memory))  # the region is still mapped: the call in flight may write


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, random.SystemRandom().randrange(10**6)])
def test_any_schedule_ends_with_every_job_answered_once(seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    store = ObedientStore()
    rig = Rig(store)
    lock = threading.Lock()

    def policy(kind: str, transfers: Sequence[Transfer]) -> Outcome | None:
        with lock:
            return dice.choice([Outcome.OK, Outcome.OK, Outcome.OK, Outcome.TRANSFER, Outcome.FULL, None])

    store.policy = policy
    expected: dict[tuple[int, Phase], None] = {}
    loads = num_read = 0
    free_slots = list(range(NUM_SLOTS))  # a scheduler that gives a slot to nobody before it is over
    taken: dict[int, list[int]] = {}
    for job_id in range(1, 120):
        rig.collect(dice.choice([0.0, 0.001]))
        for done in [job for job in taken if is_over(rig, job, (job, Phase.STORED) in expected)]:
            free_slots += taken.pop(done)
        if dice.random() < 0.3 and store.open:
            request = store.open.pop(dice.randrange(len(store.open)))
            store.answer(request, dice.choice([Outcome.OK, Outcome.ABSENT, Outcome.TIMEOUT]))
            store.release(request)
        num_read += num_checked_reads(rig, store, taken)
        count = dice.randint(1, 3)
        if len(free_slots) < count:
            continue
        slots = taken[job_id] = [free_slots.pop() for _ in range(count)]
        deadline = dice.choice([0.0, 0.01, 20.0])
        names = [dice.randrange(6) for _ in slots]
        if dice.random() < 0.5:
            namespace = dice.choice([None, NAMESPACE])
            moves = [move(dice.randrange(8), slot, name) for slot, name in zip(slots, names, strict=True)]
            rig.step(dice.random() < 0.8, saves=[save(job_id, moves, namespace, deadline)])
            expected[job_id, Phase.COPIED] = None
            if namespace:
                expected[job_id, Phase.STORED] = None
        else:
            moves = [move(8 + i, slot, name, Source.STORE) for i, (slot, name) in enumerate(zip(slots, names, strict=True))]
            rig.step(loads=[load(job_id, moves, NAMESPACE, deadline)])
            expected[job_id, Phase.LOADED] = None
            loads += 1
    store.policy = lambda kind, transfers: Outcome.DOWN
    rig.worker.finish_step()
    eventually(lambda: rig.collect(0.001) and rig.worker.stats()["open_copies"] == 0, "copies over", 10)
    store.end_all()
    rig.until(lambda: expected.keys() <= rig.acks.keys(), "every phase acknowledged")
    rig.until(lambda: all((job, Phase.RELEASED) in rig.acks for (job, _), ack in list(rig.acks.items()) if ack.busy_slots), "released")
    assert rig.finished.total() == loads
    assert num_read > 0
    assert set(rig.finished.values()) <= {1}
    assert {key for key in rig.acks if key[1] is not Phase.RELEASED} == expected.keys()
    assert {f"r{job}" for (job, phase), ack in rig.acks.items() if phase is Phase.LOADED and ack.failed} == set(rig.failed)
    assert [rig.worker.stats()[name] for name in ("held_slots", "open_loads", "open_copies")] == [0, 0, 0]


def num_checked_reads(rig: Rig, store: ObedientStore, slots: dict[int, list[int]]) -> int:
    """Jobs to whose slots the store may still write."""
    written = {transfer.address for request in store.open if request.kind == "get" for transfer in request.transfers}
    read = {job for job, held in slots.items() if written & {rig.address(slot) for slot in held}}
    return len(read)


def is_over(rig: Rig, job: int, stored: bool) -> bool:
    """True when the acknowledgements say that a job's slots are free."""
    acks = {phase: ack for (job_id, phase), ack in rig.acks.items() if job_id == job}
    last = acks.get(Phase.LOADED) or acks.get(Phase.STORED if stored else Phase.COPIED)
    return last is not None and not (last.busy_slots and Phase.RELEASED not in acks)


def test_a_failed_load_blames_only_the_slots_whose_blocks_are_missing(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30), move(4, 1, 40)], NAMESPACE)])
    rig.until_acked(1, Phase.STORED)
    rig.step(loads=[load(2, [move(8, 0, 30), move(9, 1, 41)])])  # slot 1 holds another block than the scheduler role believes
    assert rig.until_acked(2, Phase.LOADED).failed_slots == (1,)
    rig.step(loads=[load(3, [move(8, 5, 30, Source.STORE), move(9, 6, 99, Source.STORE), move(10, 0, 30)], NAMESPACE)])
    ack = rig.until_acked(3, Phase.LOADED)  # nobody ever stored 99
    assert (ack.failed, ack.failed_slots, ack.filled_slots) == (True, (6,), (5,))
    rig.step(loads=[load(4, [move(8, 0, 30)])])
    assert rig.until_acked(4, Phase.LOADED).failed_slots == ()
