"""Copies end before memory is unmapped. And a rank whose job runner breaks down: everything it took is answered once, and never before
its copies have ended.
"""

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.connector import EpochKVConnector
from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.weights import rank
from epochkv_connector.wire import Phase, StepMetadata, Tier
from epochkv_connector.worker.jobs import Report
from epochkv_connector.worker.role import WorkerRole
from tests.unit.connector_worker.worker_rig import NAMESPACE, HeldCopies, ObedientStore, Rig, load, move, save


@pytest.mark.parametrize("engine", ["told by the executor", "told by vLLM 0.33"])
def test_sleep_waits_for_copies_and_fails_what_has_not_begun(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """vLLM unmaps the memory next."""
    store = ObedientStore(policy=lambda kind, transfers: None)
    rig = Rig(store)
    rank.held_by(engine).runners.add(rig.worker)
    connector = EpochKVConnector.__new__(EpochKVConnector)
    connector._engine_id = engine
    vllms = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine)))
    copies = HeldCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)])], loads=[load(2, [move(8, 1, 31, Tier.STORE)], NAMESPACE)])
    assert copies.began.wait(10)
    threading.Timer(0.2, copies.go_on.set).start()
    assert not (connector.unregister_kv_caches() if "0.33" in engine else rank.settle_for_sleep(vllms))
    assert copies.go_on.is_set()
    rig.kv[:] = 0  # nobody may touch it any more
    store.end_all()
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(2, Phase.LOADED).failed
    assert not rig.kv.any()
    assert rig.worker.stats()["load_failed_sleep"] == 1
    connector.restore_kv_caches() if "0.33" in engine else rank.woken(vllms)
    rig.step(loads=[load(3, [move(8, 0, 30)])])
    assert not rig.until_acked(3, Phase.LOADED).failed


def test_a_load_in_pieces_ends_with_the_piece_that_sleep_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next piece would be copied to memory that is gone. After the wake-up, loads are copied again."""
    store = ObedientStore()
    rig = Rig(store)
    copies = HeldCopies(monkeypatch, "scatter")
    rig.step(saves=[save(1, [move(3, 0, 30), move(4, 1, 31)], NAMESPACE)])
    assert not rig.until_acked(1, Phase.STORED).failed
    rig.kv[:, 8:10] = 0
    rig.step(loads=[load(2, [move(8, 2, 30, Tier.STORE), move(9, 2, 31, Tier.STORE)], NAMESPACE)])
    assert copies.began.wait(10)
    threading.Timer(0.2, copies.go_on.set).start()
    assert rig.worker.settle_for_sleep(10) == 0
    assert rig.until_acked(2, Phase.LOADED).failed
    assert rig.kv[:, 8].any()
    assert not rig.kv[:, 9].any(), "the piece behind it"
    rig.step(loads=[load(3, [move(8, 0, 30)])])
    assert rig.until_acked(3, Phase.LOADED).failed, "it sleeps"
    rig.worker.woken()
    rig.step(loads=[load(4, [move(9, 1, 31)])])
    assert not rig.until_acked(4, Phase.LOADED).failed
    assert rig.worker.stats()["load_failed_sleep"] == 2


def test_sleep_is_told_of_copies_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    copies = HeldCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)]), save(2, [move(4, 1, 40)])])
    assert copies.began.wait(10)
    assert rig.worker.settle_for_sleep(0.05) == 1, "the second has not begun and never will"
    copies.go_on.set()
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(2, Phase.COPIED).failed
    assert rig.worker.settle_for_sleep(10) == 0


class Side(Rig):
    def __init__(self, store: ObedientStore | None = None) -> None:
        super().__init__(store)
        self.errors: list[str] = []
        self.side = WorkerRole(0, self.worker, lambda where, error: self.errors.append(where))

    def step(self, finish: bool = True, raising: str = "", **parts: Any) -> None:
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

    def collect(self, wait_seconds: float = 0.0) -> Report:
        return self.note(Report(*self.side.results(), self.side.acks().acks))


@pytest.mark.parametrize("raising", ["start_step", "finish_step", "results"])
def test_a_runner_that_breaks_down_owes_nothing_afterwards(raising: str) -> None:
    """Loads and saves of earlier steps are open then, and those of the step it broke down in."""
    store = ObedientStore(policy=lambda kind, transfers: None)  # leaves every request open
    side = Side(store)
    side.step(saves=[save(1, [move(1, 0, 1)], NAMESPACE)])
    side.until_acked(1, Phase.COPIED)
    side.step(loads=[load(2, [move(2, 1, 2, Tier.STORE)], NAMESPACE)])
    assert side.finished == {}
    for request in store.open:  # a real store answers what waits when it is closed
        store.answer(request, StoreOutcome.CLOSED) if request.kind == "put" else None
    more = load(3, [move(3, 2, 3, Tier.STORE)], NAMESPACE)
    side.step(raising=raising, loads=[more], saves=[save(4, [move(4, 3, 4)])], invalidated=["p"])
    for job, phase in ((1, Phase.COPIED), (1, Phase.STORED), (2, Phase.LOADED), (3, Phase.LOADED), (4, Phase.COPIED)):
        side.until_acked(job, phase)
    assert side.finished == side.failed == {"r2": 1, "r3": 1, "p": 1}
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
        for job in busy:
            side.until_acked(job, Phase.RELEASED)
    side.step(loads=[load(9, [move(5, 4, 5)])])
    assert side.finished == side.failed == {"r2": 1, "r3": 1, "p": 1, "r9": 1}


def test_a_forward_pass_that_raises_saves_nothing() -> None:
    side = Side()
    side.side.new_step()
    try:
        side._raise()
    except MemoryError:  # vLLM's first model runner ends the step all the same
        side.side.finish(StepMetadata(saves=(save(1, [move(1, 0, 1)]),)))
        side.step(saves=[save(2, [move(2, 1, 1)])])  # of a program that handles the exception, and goes on
    assert side.until_acked(1, Phase.COPIED).failed
    assert not side.until_acked(2, Phase.COPIED).failed


@pytest.mark.parametrize("num_errors", [1, 2])
def test_a_copy_under_way_is_reported_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, num_errors: int) -> None:
    """A reported load's blocks are given to others at once. Whatever breaks a step may break the next one, too."""
    monkeypatch.setattr("epochkv_connector.worker.role.REFUSE_SECONDS", 0.05)
    side = Side()
    side.step(saves=[save(1, [move(1, 0, 1)])])
    side.until_acked(1, Phase.COPIED)
    copies = HeldCopies(monkeypatch, "scatter")
    side.step(loads=[load(2, [move(1, 0, 1)])])
    assert copies.began.wait(10)
    side.step(raising="start_step", loads=[load(3, [move(1, 0, 1)])])
    for _ in range(1, num_errors):
        side.side.refuse(StepMetadata())
        side.collect()
    assert side.finished == {"r3": 1}
    copies.go_on.set()
    side.until_acked(2, Phase.LOADED)
    assert side.finished == {"r3": 1, "r2": 1}
    assert side.failed == {"r3": 1}, "the copy came to its end: what it loaded is good"


def test_a_rank_that_cannot_be_staged_answers_every_job_once() -> None:
    side = WorkerRole(1, None)
    one = [move(5, 0, 1)]
    step = StepMetadata(loads=(load(1, one),), saves=(save(2, one, NAMESPACE), save(3, one)), invalidated=("c",))
    there = pickle.loads(pickle.dumps(step))  # as vLLM tells a rank in another process
    assert there == step
    side.new_step()
    side.start(there, idle=True)
    side.finish(there)
    side.start(there, idle=True)  # asked twice, as vLLM does
    assert side.results() == ({"r1", "c"}, {"r1", "c"})
    assert side.results() == (set(), set())
    acks = [(ack.job_id, ack.phase, ack.failed) for ack in side.acks().acks]
    assert acks == [(1, Phase.LOADED, True), (2, Phase.COPIED, True), (2, Phase.STORED, True), (3, Phase.COPIED, True)]
    assert side.acks().acks == []


def test_what_a_drain_collects_is_kept_for_the_next_results() -> None:
    """An in-process engine drains between steps; a load that ended meanwhile must still be reported to vLLM, once."""
    side = WorkerRole(0, None)
    side.new_step()
    side.start(StepMetadata(loads=(load(1, []),)), idle=False)
    assert [ack.job_id for ack in side.drain(0.0).acks] == [1]
    assert side.results() == ({"r1"}, {"r1"})
    assert side.acks().acks == []
