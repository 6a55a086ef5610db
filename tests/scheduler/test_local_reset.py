"""Somebody resets this engine's caches alone: which root is left, for how long, and what goes with it; with the real Scheduler."""

from typing import Any

import pytest

from epochkv_connector.scheduler.role import FenceHooks
from tests.scheduler.rigs import LENGTH, TOKENS, MakeRig, found, push_out, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, global_root, prompt


def test_a_local_reset_before_anything_was_admitted_keeps_the_root(rig: Any) -> None:
    rig.serve(prompt(1, LENGTH))
    rig.adopt(1, weights="w1")
    root = global_root()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert global_root() is root
    tokens = prompt(2, LENGTH)
    rig.serve(tokens)
    assert found(rig, tokens) == 8 * BLOCK


def test_a_local_reset_goes_private_until_the_next_epoch(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    rig.serve(TOKENS)
    saved = set(store.objects)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.weights = "w1"  # what the caller does next
    assert found(rig) == 0
    assert found(rig) == 0
    assert set(store.objects) == saved
    assert rig.connector.scheduler.gauges()["waiting_after_reset"] == 1.0
    rig.adopt(1)
    rig.serve(TOKENS)
    assert found(rig) == 8 * BLOCK
    assert set(store.objects) > saved


def test_the_hub_is_told_at_once_of_a_local_reset(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the proposal: whoever hears of the reset knows by then that somebody asked for its end."""
    told: list[str] = []
    monkeypatch.setattr("epochkv_connector.scheduler.role.HubLink.poke", lambda self: told.append(f"poke {hooks.isolated()}"))
    monkeypatch.setattr("epochkv_connector.scheduler.role.HubLink.propose", lambda self, epoch: told.append(f"propose {epoch}"))
    rig = make_rig()
    hooks: FenceHooks = rig.connector.scheduler.hooks
    rig.adopt(0)
    assert not hooks.isolated()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert (told, hooks.isolated()) == ([], False), "nothing was admitted: the root is kept"
    rig.serve(prompt(1, LENGTH))
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert (told, hooks.isolated()) == (["propose 1", "poke True"], True)
    rig.adopt(0)
    assert hooks.isolated(), "the same epoch granted again changes nothing"
    rig.adopt(1)
    assert not hooks.isolated()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_vllms_own_reset_does_not_wait_for_saves(make_rig: MakeRig, num_ranks: int) -> None:
    """It refuses while a block is held. Saves let go meanwhile, and nobody gets the blocks before they are copied."""
    rig = make_rig(num_blocks=24, num_ranks=num_ranks, epoch=0)
    for worker in rig.workers:
        worker.hold_saves = True
    tokens = prompt(1, LENGTH)
    finished = rig.add(tokens, max_tokens=1)
    running = rig.add(prompt(2, LENGTH), max_tokens=8)
    rig.steps(2)
    assert finished.request_id in rig.finished
    assert running.status is RequestStatus.RUNNING
    read = list(rig.tiers.state.jobs.gpu_blocks())
    assert len(read) == rig.tiers.state.jobs.num_gpu_blocks > 0
    for _ in range(2):
        assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert rig.block_pool.get_num_free_blocks() == rig.free_at_start - len(set(read))
    other = rig.add(prompt(3, BLOCK), max_tokens=8)
    rig.steps(2)
    assert not set(read) & set(rig.scheduler.kv_cache_manager.get_block_ids(other.request_id)[0])
    release(rig)
    rig.run()
    assert found(rig, tokens) == 8 * BLOCK
    assert rig.block_pool.get_num_free_blocks() == rig.free_at_start


def test_an_engine_without_requests_is_stepped_until_saves_that_let_go_are_acknowledged(rig: Any) -> None:
    (worker,) = rig.workers
    worker.hold_saves = True
    request = rig.add(prompt(1, LENGTH), max_tokens=1)
    rig.step()
    rig.step()
    assert request.request_id in rig.finished
    assert rig.scheduler.reset_prefix_cache()
    assert rig.connector.has_pending_push_work()
    assert rig.connector.has_pending_block_frees()
    worker.hold_saves = False
    rig.steps(2)
    assert not rig.connector.has_pending_push_work()


@pytest.mark.unclean
def test_what_fails_while_saves_let_go_is_no_error_of_vllms(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.serve(prompt(1, LENGTH))
    monkeypatch.setattr(rig.tiers.state.jobs, "gpu_blocks", lambda: 1 // 0)
    assert rig.scheduler.reset_prefix_cache()
    assert rig.connector._guard.errors["let_go"] == 1


@pytest.mark.parametrize("preempts", [False, True])
def test_a_reset_while_a_request_holds_blocks_leaves_old_kv_unreachable_all_the_same(rig: Any, preempts: bool) -> None:
    """vLLM refuses to clear its own cache, or preempts the request, which comes back under the private root."""
    tokens = prompt(1, LENGTH)
    running = rig.add(tokens, max_tokens=8)
    rig.steps(2)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=preempts, reset_connector=True) is preempts
    assert rig.pins.root.snapshot.shared is False
    rig.weights = "w1"
    assert found(rig, tokens) == 0
    assert running.request_id in rig.finished


def test_a_reset_while_the_lease_is_lost_is_remembered(rig: Any) -> None:
    """The lease may return; the shared root named KV of weights that the caller is about to replace."""
    tokens = prompt(1, LENGTH)
    running = rig.add(tokens, max_tokens=4 * BLOCK)
    rig.step()
    rig.lease_until = 0.0
    assert rig.scheduler.reset_prefix_cache(reset_connector=True) is False
    rig.weights = "w1"
    rig.lease_until = float("inf")
    assert found(rig, tokens) == 0
    assert running.request_id in rig.finished


def test_without_a_hub_an_engine_uses_l1_under_a_private_root_which_a_reset_replaces(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(hub=False, num_blocks=12, store=store)
    rig.serve(TOKENS)
    push_out(rig)
    assert found(rig) == 8 * BLOCK
    root = global_root()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert global_root() is not root
    assert found(rig) == 0
    assert found(rig) == 8 * BLOCK
    assert (store.objects, store.asked) == ({}, [])  # private names never leave the engine
