"""A rank whose job runner breaks down: everything it took is answered once, and never before its copies have ended."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, StepMetadata, Tier
from epochkv_connector.worker.layout import GroupSpec
from epochkv_connector.worker.role import JobRunner, WorkerRole
from epochkv_connector.worker.staging import Staging, StagingStream
from hack.waiting import eventually
from tests.unit.connector_worker.worker_rig import NAMESPACE, ObedientStore

NUM_BLOCKS = 8


class Side:
    """A worker role over a real runner, and a collector that insists on exactly once."""

    def __init__(self, store: ObedientStore | None = None) -> None:
        self.kv = torch.zeros((NUM_BLOCKS, 64), dtype=torch.uint8)
        staging = Staging({"l0": self.kv}, {0: GroupSpec(["l0"], 16)}, 6, NUM_BLOCKS)
        open_store: Any = (lambda region: store) if store else None
        self.runner = JobRunner(staging, open_store=open_store)
        self.errors: list[str] = []
        self.side = WorkerRole(0, self.runner, lambda where, error: self.errors.append(where))
        self.finished: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.acks: dict[tuple[int, Phase], JobAck] = {}

    def step(self, raising: str = "", **parts: Any) -> None:
        """One step as the connector makes it; `raising`: the call of the runner that raises."""
        metadata = StepMetadata(**parts)
        self.side.new_step()
        if raising:
            setattr(self.side.runner, raising, self._raise)
        try:
            self.side.start(metadata, idle=True)
            self.side.finish(metadata)
        except MemoryError:
            self.side.refuse(metadata)
        self.collect()

    @staticmethod
    def _raise(*_: Any) -> Any:
        raise MemoryError("no more")

    def collect(self) -> None:
        finished, failed = self.side.results()
        assert failed <= finished
        self.finished.update(finished)
        self.failed |= failed
        for ack in self.side.acks().acks:
            assert (ack.job_id, ack.phase) not in self.acks, f"acknowledged twice: {ack}"
            self.acks[ack.job_id, ack.phase] = ack

    def until(self, wanted: set[tuple[int, Phase]]) -> None:
        def arrived() -> bool:
            self.collect()
            return wanted <= set(self.acks)

        eventually(arrived, f"acknowledgements {wanted}", 10.0)


def move(block: int, slot: int, source: Tier = Tier.HOST) -> BlockMove:
    return BlockMove(0, block, block, slot, bytes([block]) * 32, source)


def load(job_id: int, moves: Sequence[BlockMove]) -> LoadJob:
    return LoadJob(job_id, f"r{job_id}", NAMESPACE, tuple(moves), 30.0)


def save(job_id: int, moves: Sequence[BlockMove], namespace: str | None = None) -> SaveJob:
    return SaveJob(job_id, f"s{job_id}", namespace, 0, len(moves), tuple(moves), 30.0)


@pytest.mark.parametrize("raising", ["start_step", "finish_step", "results"])
def test_a_runner_that_breaks_down_owes_nothing_afterwards(raising: str) -> None:
    """Loads and saves of earlier steps are open then, and those of the step it broke down in."""
    store = ObedientStore(policy=lambda kind, transfers: None)  # leaves every request open
    side = Side(store)
    side.step(saves=[save(1, [move(1, 0)], NAMESPACE)])
    side.until({(1, Phase.COPIED)})
    side.step(loads=[load(2, [move(2, 1, Tier.STORE)])])
    assert side.finished == {}
    for request in store.open:  # a real store answers what waits when it is closed
        store.answer(request, StoreOutcome.CLOSED) if request.kind == "put" else None
    side.step(raising=raising, loads=[load(3, [move(3, 2, Tier.STORE)])], saves=[save(4, [move(4, 3)])], invalidated=["p"])
    expected = {(1, Phase.COPIED), (1, Phase.STORED), (2, Phase.LOADED), (3, Phase.LOADED), (4, Phase.COPIED)}
    side.until(expected)
    assert side.finished == {"r2": 1, "r3": 1, "p": 1}
    assert side.failed == {"r2", "r3", "p"}
    assert side.errors == (["results"] if raising == "results" else [])
    assert store.closed
    # Transfers that are still under way hold their slots until they end; for ever where nobody can tell when that is.
    busy = [job for job in (2, 3) if side.acks[job, Phase.LOADED].busy_slots]
    assert 2 in busy
    for request in store.open:
        store.release(request)
    if raising == "results":
        side.collect()
        assert not {key for key in side.acks if key[1] is Phase.RELEASED}
    else:
        side.until({*expected, *((job, Phase.RELEASED) for job in busy)})
    side.step(loads=[load(9, [move(5, 4)])])
    assert side.finished == {"r2": 1, "r3": 1, "p": 1, "r9": 1}
    assert "r9" in side.failed


@pytest.mark.parametrize("num_errors", [1, 2])
def test_a_copy_under_way_is_reported_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, num_errors: int) -> None:
    """A reported load's blocks are given to others at once, so a late copy would overwrite somebody else's KV.

    Whatever breaks a step may break the next one, too.
    """
    monkeypatch.setattr("epochkv_connector.worker.role.REFUSE_SECONDS", 0.05)
    side = Side()
    side.step(saves=[save(1, [move(1, 0)])])
    side.until({(1, Phase.COPIED)})
    begun, may_end = threading.Event(), threading.Event()
    scatter = StagingStream.scatter

    def slow(self: StagingStream, *args: Any) -> None:
        begun.set()
        assert may_end.wait(10.0)
        scatter(self, *args)

    monkeypatch.setattr(StagingStream, "scatter", slow)
    side.step(loads=[load(2, [move(1, 0)])])
    assert begun.wait(10.0)
    side.step(raising="start_step", loads=[load(3, [move(1, 0)])])
    assert side.finished == {"r3": 1}
    for _ in range(1, num_errors):
        side.side.refuse(StepMetadata())
        side.collect()
    assert side.finished == {"r3": 1}
    may_end.set()
    side.until({(2, Phase.LOADED)})
    assert side.finished == {"r3": 1, "r2": 1}
    assert side.failed == {"r3"}, "the copy came to its end: what it loaded is good"
