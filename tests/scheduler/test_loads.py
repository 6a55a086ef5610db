"""Loads that fail, are lost, late or invalidated: each is reported exactly once per rank and costs a recompute, never an answer."""

from typing import Any

import pytest

from tests.scheduler.rigs import LENGTH, MakeRig, begin_load, every_layout, filled, found, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt


@every_layout
def test_a_failed_load_is_recomputed_and_not_tried_again(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    loads: list[str] = []

    def fail(job: Any) -> bool:
        loads.append(job.request_id)
        return True

    rig.workers[0].fail_loads = fail
    request = rig.serve(tokens)
    assert loads == [request]
    assert rig.cached[request] == 0


def test_an_invalidated_load_with_barely_enough_blocks_does_not_hang(make_rig: MakeRig) -> None:
    """vLLM leaves it in `_inflight_prefills`; a second load that must fit beside its own reservation never schedules."""
    rig, tokens = filled(make_rig, num_blocks=10)
    assert rig.block_pool.get_num_free_blocks() == 9  # exactly what the prompt needs
    request = begin_load(rig, tokens)
    rig.adopt(1, weights="w1")
    release(rig)
    rig.run(50)
    assert request.request_id in rig.finished


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_load_does_not_stand_in_the_way_of_others_that_hold_blocks(make_rig: MakeRig, failing: int, store: SharedStore) -> None:
    """With a sliding window a load holds fewer blocks than computing takes, so the failed one may have to wait for others to end.

    vLLM 0.32 keeps it at the head of those that hold blocks, and looks at none behind it while it does not fit.
    """
    options: dict[str, Any] = {"groups": ("48", "full"), "store": store, "l1_bytes": None, "extra": {"staging_slots": 64}}
    filler = make_rig(num_blocks=64, **options)
    filler.adopt(0)
    prompts = [prompt(seed, 9 * BLOCK + 1) for seed in (1, 2)]
    for tokens in prompts:
        filler.serve(tokens)
    rig = make_rig(num_blocks=28, **options, epoch=0)
    (worker,) = rig.workers
    worker.hold_loads = True
    requests = [rig.add(tokens) for tokens in prompts]
    rig.step()
    assert {request.status for request in requests} == {RequestStatus.WAITING_FOR_REMOTE_KVS}
    assert rig.block_pool.get_num_free_blocks() < 20  # what the first one needs when it computes, less what it holds itself
    worker.fail_loads = lambda job: job.request_id in [request.request_id for request in requests[:failing]]
    release(rig)
    rig.run(60)
    assert {request.request_id for request in requests} <= rig.finished
    assert rig.tiers.stats()["loads_failed"] == failing


def test_the_cooldown_ends_when_the_request_was_scheduled(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    rig.workers[0].fail_loads = lambda job: True
    rig.serve(tokens)
    rig.workers[0].fail_loads = lambda job: False
    assert rig.leaks() == {}
    for seed in range(100, 104):
        rig.serve(prompt(seed, LENGTH))
    assert found(rig, tokens) == 8 * BLOCK


@every_layout
def test_aborted_between_the_taken_back_success_and_the_final_report(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens)
    rig.adopt(1, weights="w1")
    release(rig)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.request_id not in rig.scheduler.finished_recving_kv_req_ids  # the success was taken back
    assert rig.connector.has_pending_push_work()
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert not rig.connector.has_pending_push_work()


def test_a_shrunk_hit_loads_what_was_accepted(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, tokens = filled(make_rig)
    answer = rig.connector.get_num_new_matched_tokens
    asked: list[int] = []

    def shrunk(request: Any, num_local: int) -> Any:
        found, load = answer(request, num_local)
        if found:
            asked.append(found)
            found -= 3 * BLOCK
        return found, load

    monkeypatch.setattr(rig.connector, "get_num_new_matched_tokens", shrunk)
    request = rig.serve(tokens)
    assert asked == [8 * BLOCK]
    assert rig.cached[request] == 5 * BLOCK


def test_a_multiconnector_loser_gets_real_blocks_and_zero_tokens(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, tokens = filled(make_rig)
    answer = rig.connector.get_num_new_matched_tokens
    hits: list[int] = []

    def lost(request: Any, num_local: int) -> Any:
        hits.append(answer(request, num_local)[0])
        return 0, False

    monkeypatch.setattr(rig.connector, "get_num_new_matched_tokens", lost)
    request = rig.serve(tokens)
    assert hits == [8 * BLOCK]
    assert rig.cached[request] == 0


@every_layout
def test_an_adoption_between_the_reports_of_two_ranks(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig, num_ranks=2)
    request = begin_load(rig, tokens)
    first, second = rig.workers
    first.hold_loads = False
    first.work()
    rig.step()
    rig.adopt(1, weights="w1")
    second.hold_loads = False
    second.work()
    rig.run()
    assert first.invalidated == second.invalidated == [request.request_id]
    assert rig.cached[request.request_id] == 0


def test_loads_are_off_unless_failed_ones_are_recomputed(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig, tokens = filled(make_rig, transfer={"kv_load_failure_policy": "fail"})
    assert found(rig, tokens) == 0
    assert rig.tiers.stats()["slots_indexed"] > 0  # it was there to be loaded
