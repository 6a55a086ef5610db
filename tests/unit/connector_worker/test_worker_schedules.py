"""The worker role answers every job exactly once in any schedule, over a store that answers, fails or hangs at random."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from epochkv_connector.store.queues import StoreOutcome, Transfer
from epochkv_connector.wire import Phase, Tier
from hack.waiting import eventually
from tests.unit.connector_worker.worker_rig import NAMESPACE, NUM_SLOTS, ObedientStore, Rig, load, move, save


class Schedule:
    """Random jobs, from a scheduler that gives a slot to nobody before it is over.

    Attributes:
        expected: every phase that has to be acknowledged.
        num_reads: how often the slots of a job were still written to, summed over all looks.
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
            moves = [move(8 + i, slot, name, Tier.STORE) for i, (slot, name) in enumerate(zip(slots, names, strict=True))]
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
        self.store.end_all()
        rig.until(lambda: self.expected.keys() <= rig.acks.keys(), "every phase acknowledged")
        rig.until(lambda: all((job, Phase.RELEASED) in rig.acks for (job, _), ack in list(rig.acks.items()) if ack.busy_slots), "released")


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, random.SystemRandom().randrange(10**6)])
def test_any_schedule_ends_with_every_job_answered_once(seed: int) -> None:
    print(f"seed {seed}")
    schedule = Schedule(seed)
    for job_id in range(1, 120):
        schedule.turn(job_id)
    schedule.end()
    rig = schedule.rig
    assert rig.finished.total() == schedule.num_loads
    assert schedule.num_reads > 0
    assert set(rig.finished.values()) <= {1}
    assert {key for key in rig.acks if key[1] is not Phase.RELEASED} == schedule.expected.keys()
    assert {f"r{job}" for (job, phase), ack in rig.acks.items() if phase is Phase.LOADED and ack.failed} == set(rig.failed)
    assert [rig.worker.stats()[name] for name in ("held_slots", "open_loads", "open_copies")] == [0, 0, 0]
