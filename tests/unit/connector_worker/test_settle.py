"""Saves whose GPU blocks were given back early: a step may write to them, so what was not reported before has failed. And a rank whose
job runner breaks down: everything it took is answered once, and never before its copies have ended.
"""

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.weights import rank
from epochkv_connector.wire import Phase, StepMetadata, Tier
from epochkv_connector.worker.jobs import Report
from epochkv_connector.worker.role import WorkerRole
from hack.waiting import eventually
from tests.unit.connector_worker.worker_rig import NAMESPACE, HeldCopies, ObedientStore, Rig, load, move, save


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
@pytest.mark.parametrize("ended", [False, True])
def test_a_copy_that_was_not_reported_before_its_blocks_are_used_again_has_failed(
    monkeypatch: pytest.MonkeyPatch, ended: bool, namespace: str | None
) -> None:
    """vLLM's second model runner writes to blocks and then calls us: nobody knows what a copy has read that ended meanwhile."""
    store = ObedientStore()
    rig = Rig(store)
    copies = HeldCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)], namespace), save(2, [move(4, 1, 40)], namespace)])
    assert copies.began.wait(10)
    rig.kv[:, 3:5] = 0
    if ended:
        copies.go_on.set()
        assert rig.worker.wait_copied(10)
    else:
        threading.Timer(0.2, copies.go_on.set).start()
    rig.worker.settle()
    for job in (1, 2):
        assert rig.until_acked(job, Phase.COPIED).failed
        assert namespace is None or rig.until_acked(job, Phase.STORED).failed
    assert not store.objects
    rig.step(loads=[load(3, [move(8, 0, 30)])])
    assert rig.until_acked(3, Phase.LOADED).failed, "the slot holds nothing"
    assert rig.worker.stats()["save_failed_overtaken"] == 2


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_copy_that_ended_before_the_step_is_kept(sleeps: bool) -> None:
    """It was reported, or the engine slept meanwhile."""
    store = ObedientStore()
    rig = Rig(store)
    wanted = rig.block(3)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)])
    if sleeps:
        assert rig.worker.settle_for_sleep(10) == 0
        rig.worker.woken()
    else:
        rig.until_acked(1, Phase.COPIED)
    rig.kv[:, 3] = 0
    rig.worker.settle()
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert not rig.until_acked(1, Phase.STORED).failed
    assert list(store.objects.values()) == [wanted]
    rig.step(loads=[load(2, [move(8, 0, 30)])])
    rig.until_acked(2, Phase.LOADED)
    assert rig.block(8) == wanted


@pytest.mark.parametrize("given_back", [False, True])
def test_what_an_idle_engine_copies_last_is_stored_unless_its_blocks_are_given_back(
    monkeypatch: pytest.MonkeyPatch, given_back: bool
) -> None:
    """No step follows that could report it. The scheduler role, which asks from this process, says at once what it gives back."""
    store = ObedientStore()
    rig = Rig(store)
    side = WorkerRole(0, rig.worker)
    copies = HeldCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)])
    assert copies.began.wait(10)
    assert side.drain(0.0).acks == []
    if given_back:
        side.settle(StepMetadata(settle=True))
    copies.go_on.set()
    eventually(lambda: bool(store.objects) or rig.worker.stats().get("save_failed_overtaken") == 1, "it has ended")
    assert bool(store.objects) is not given_back


def test_a_half_that_was_given_up_settles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    copies = HeldCopies(monkeypatch)
    side = WorkerRole(0, rig.worker)
    side.new_step()
    side.finish(StepMetadata(saves=(save(1, [move(3, 0, 30)]),)))
    assert copies.began.wait(10)
    monkeypatch.setattr("epochkv_connector.worker.role.REFUSE_SECONDS", 0.05)
    side.refuse(StepMetadata())
    side.settle(StepMetadata(settle=True))
    copies.go_on.set()
    assert rig.until_acked(1, Phase.COPIED).failed


def test_sleep_waits_for_copies_and_fails_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM unmaps the memory next."""
    store = ObedientStore(policy=lambda kind, transfers: None)
    rig = Rig(store)
    rank.held_by("an-engine").runners.add(rig.worker)
    vllms = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="an-engine")))
    copies = HeldCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)])], loads=[load(2, [move(8, 1, 31, Tier.STORE)], NAMESPACE)])
    assert copies.began.wait(10)
    threading.Timer(0.2, copies.go_on.set).start()
    assert rank.settle_for_sleep(vllms) == 0
    assert copies.go_on.is_set()
    rig.kv[:] = 0  # nobody may touch it any more
    store.end_all()
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(2, Phase.LOADED).failed
    assert not rig.kv.any()
    assert rig.worker.stats()["load_failed_sleep"] == 1


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


@pytest.mark.parametrize("num_errors", [1, 2])
def test_a_copy_under_way_is_reported_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, num_errors: int) -> None:
    """A reported load's blocks are given to others at once, so a late copy would overwrite somebody else's KV.

    Whatever breaks a step may break the next one, too.
    """
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
    acks = [(ack.job_id, ack.phase, ack.failed, ack.num_blocks) for ack in side.acks().acks]
    assert acks == [(1, Phase.LOADED, True, 0), (2, Phase.COPIED, True, 0), (2, Phase.STORED, True, 0), (3, Phase.COPIED, True, 0)]
    assert side.acks().acks == []


def test_what_a_drain_collects_is_kept_for_the_next_results() -> None:
    """An in-process engine drains between steps; a load that ended meanwhile must still be reported to vLLM, once."""
    side = WorkerRole(0, None)
    side.new_step()
    side.start(StepMetadata(loads=(load(1, []),)), idle=False)
    assert [ack.job_id for ack in side.drain(0.0).acks] == [1]
    assert side.results() == ({"r1"}, {"r1"})
    assert side.acks().acks == []
