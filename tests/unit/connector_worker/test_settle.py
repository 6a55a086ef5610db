"""Saves whose GPU blocks were given back early: before a step writes to them the copies have ended, or count as failed."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.weights import rank
from epochkv_connector.wire import Phase, StepMetadata, Tier
from epochkv_connector.worker import role as runner
from epochkv_connector.worker.role import WorkerRole
from epochkv_connector.worker.staging import StagingStream
from tests.unit.connector_worker.worker_rig import NAMESPACE, ObedientStore, Rig, load, move, save


class SlowCopies:
    """Every copy in one direction (`gather`: to the host) says that it began and waits to be let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, direction: str = "gather") -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        copy = getattr(StagingStream, direction)

        def slow(*args: Any) -> None:
            self.began.set()
            assert self.go_on.wait(10)
            copy(*args)

        monkeypatch.setattr(StagingStream, direction, slow)


def test_a_settled_step_begins_when_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    copies = SlowCopies(monkeypatch)
    wanted = rig.block(3)
    side = WorkerRole(0, rig.worker)
    side.new_step()
    side.finish(StepMetadata(saves=(save(1, [move(3, 0, 30)]),)))
    assert copies.began.wait(10)
    threading.Timer(0.2, copies.go_on.set).start()
    side.settle(StepMetadata(settle=True))
    rig.kv[:, 3] = 0  # what the step writes
    side.new_step()
    side.finish(StepMetadata(loads=(load(2, [move(8, 0, 30)]),)))
    rig.until_acked(2, Phase.LOADED)
    assert not rig.acks[1, Phase.COPIED].failed
    assert rig.block(8) == wanted


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
def test_a_copy_that_is_late_has_failed(monkeypatch: pytest.MonkeyPatch, namespace: str | None) -> None:
    """What it read may be of the step that used its blocks again; the one behind it does not begin."""
    store = ObedientStore()
    rig = Rig(store)
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.05)
    copies = SlowCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)], namespace), save(2, [move(4, 1, 40)], namespace)])
    assert copies.began.wait(10)
    rig.worker.settle()
    rig.kv[:, 3:5] = 0
    copies.go_on.set()
    for job in (1, 2):
        assert rig.until_acked(job, Phase.COPIED).failed
        assert namespace is None or rig.until_acked(job, Phase.STORED).failed
    assert not store.objects
    rig.step(loads=[load(3, [move(8, 0, 30)])])
    assert rig.until_acked(3, Phase.LOADED).failed, "the slot holds nothing"
    assert rig.worker.stats()["save_failed_overtaken"] == 2


def test_a_half_that_was_given_up_settles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    copies = SlowCopies(monkeypatch)
    side = WorkerRole(0, rig.worker)
    side.new_step()
    side.finish(StepMetadata(saves=(save(1, [move(3, 0, 30)]),)))
    assert copies.began.wait(10)
    monkeypatch.setattr("epochkv_connector.worker.role.REFUSE_SECONDS", 0.05)
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.05)
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
    copies = SlowCopies(monkeypatch)
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
    copies = SlowCopies(monkeypatch, "scatter")
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
    copies = SlowCopies(monkeypatch)
    rig.step(saves=[save(1, [move(3, 0, 30)]), save(2, [move(4, 1, 40)])])
    assert copies.began.wait(10)
    assert rig.worker.settle_for_sleep(0.05) == 1, "the second has not begun and never will"
    copies.go_on.set()
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(2, Phase.COPIED).failed
    assert rig.worker.settle_for_sleep(10) == 0
