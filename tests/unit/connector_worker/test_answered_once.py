"""Whatever breaks under a job, its rank answers it once, at once, and gives its slots back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from epochkv_connector.store.queues import Ticket, Transfer
from epochkv_connector.wire import Phase, Tier
from epochkv_connector.worker.staging import StagingStream
from tests.unit.connector_worker.worker_rig import NAMESPACE, ObedientStore, Rig, load, move, save


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
        patch.setattr(StagingStream, broken, fail)
        if broken == "gather":
            rig.step(saves=[save(1, [move(3, 0, 30)])])
            assert rig.until_acked(1, Phase.COPIED).failed
        else:
            rig.step(saves=[save(1, [move(3, 0, 30)])])
            assert not rig.until_acked(1, Phase.COPIED).failed
            rig.step(loads=[load(2, [move(8, 0, 30)])])
            assert rig.until_acked(2, Phase.LOADED).failed
    assert len(calls) == 1
    wanted = rig.block(3)
    rig.step(saves=[save(3, [move(3, 1, 31)])])
    assert not rig.until_acked(3, Phase.COPIED).failed
    rig.step(loads=[load(4, [move(9, 1, 31)])])
    assert not rig.until_acked(4, Phase.LOADED).failed
    assert rig.block(9) == wanted
    assert set(rig.finished.values()) == {1}
    assert set(rig.failed) == ({"r2"} if broken == "scatter" else set())


def test_a_stream_that_cannot_be_opened_is_an_error_at_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is out of memory, or without a CUDA runtime."""

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    before = {thread.name for thread in threading.enumerate()}
    monkeypatch.setattr(StagingStream, "__init__", fail)
    with pytest.raises(RuntimeError, match="injected"):
        Rig()
    assert {thread.name for thread in threading.enumerate()} <= before


def test_a_slot_whose_copy_broke_off_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    assert not rig.until_acked(1, Phase.COPIED).failed

    def torn(self: StagingStream, pairs: Sequence[Any], after: Any = None) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(StagingStream, "gather", torn)
        rig.step(saves=[save(2, [move(4, 0, 40)])])
        assert rig.until_acked(2, Phase.COPIED).failed
    rig.step(loads=[load(3, [move(8, 0, 30)]), load(4, [move(9, 0, 40)])])
    assert rig.until_acked(3, Phase.LOADED).failed, "its bytes may be half overwritten"
    assert rig.until_acked(4, Phase.LOADED).failed


@pytest.mark.parametrize("direction", ["load", "save"])
def test_a_shutdown_in_mid_copy_answers_what_is_copied_behind_the_copy_and_the_rest_at_once(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    store = ObedientStore()
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    copying, go_on = threading.Event(), threading.Event()
    name = "scatter" if direction == "load" else "gather"
    copy = getattr(StagingStream, name)

    def slow(*args: Any) -> None:
        copying.set()
        assert go_on.wait(10)
        copy(*args)

    monkeypatch.setattr(StagingStream, name, slow)
    rig.step(loads=[load(2, [move(8, 0, 30)])] if direction == "load" else [], saves=[save(3, [move(4, 1, 40)], NAMESPACE)])
    assert copying.wait(10)
    store.policy = lambda kind, transfers: None
    rig.step(finish=False, loads=[load(4, [move(9, 5, 50, Tier.STORE)], NAMESPACE)], saves=[save(5, [move(5, 2, 41)], NAMESPACE)])
    assert not rig.worker.shutdown(0.2), "a copy is under way"
    rig.collect()
    assert rig.acks[4, Phase.LOADED].failed
    assert [rig.acks[5, phase].failed for phase in (Phase.COPIED, Phase.STORED)] == [True, True]
    under_way = (2, Phase.LOADED) if direction == "load" else (3, Phase.COPIED)
    assert under_way not in rig.acks, "its blocks are being touched"
    go_on.set()
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
