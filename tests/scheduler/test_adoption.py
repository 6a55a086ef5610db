"""Requests in every state across an adoption: none of them, and nobody after them, sees KV of the epoch before."""

from typing import Any

import pytest

from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, begin_load, every_layout, filled, found, num_saved, push_out
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt


@every_layout
def test_a_short_prompt_keeps_its_pin_when_its_first_hash_is_made_after_the_adoption(rig: Any) -> None:
    short = rig.add(prompt(1, BLOCK - 6), max_tokens=BLOCK)
    rig.steps(3)
    assert short.block_hashes == []
    rig.adopt(1, weights="w1")
    assert rig.pins.old_epoch_requests() == 1
    rig.run()
    assert len(short.block_hashes) == 1
    assert found(rig, list(short.all_token_ids) + prompt(2, BLOCK)) == 0


@every_layout
def test_a_waiting_request_is_repinned(rig: Any) -> None:
    rig.serve(TOKENS)
    waiting = rig.add(TOKENS)
    before = waiting.block_hashes
    assert rig.block_pool.get_cached_block(before[0], [0]) is not None  # old KV lies under the name it now carries
    rig.adopt(1, weights="w1")
    rig.run()
    assert waiting.block_hashes is not before  # never in place
    assert waiting.block_hashes[0] != before[0]
    assert rig.cached[waiting.request_id] == 0
    assert found(rig) == 8 * BLOCK  # and reuse works in the new epoch


@every_layout
def test_a_request_hashed_with_the_old_global_and_added_after_the_adoption_is_rehashed(rig: Any) -> None:
    """The input thread hashes with the global of its moment."""
    rig.serve(TOKENS)
    late = rig.request(TOKENS)
    rig.adopt(1, weights="w1")
    rig.scheduler.add_request(late)
    rig.run()
    assert rig.cached[late.request_id] == 0


@every_layout
def test_a_waiting_request_that_skips_the_prefix_cache_is_repinned_at_once(rig: Any) -> None:
    """vLLM goes on with it in the same step, and caches its blocks under whatever its hashes are then."""
    skipping = rig.add(TOKENS, skip_reading_prefix_cache=True)
    rig.adopt(1, weights="w1")
    output = rig.step()
    assert skipping.request_id in output.num_scheduled_tokens
    rig.run()
    assert found(rig) == 8 * BLOCK  # named in the new epoch


@every_layout
def test_a_load_under_way_is_invalidated(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    loading = begin_load(rig, tokens)
    (worker,) = rig.workers
    assert len(worker.loads) == 1
    rig.adopt(1, weights="w1")
    worker.hold_loads = False
    rig.step()  # the load succeeds, and its success is taken back
    worker.work()
    rig.run()
    assert worker.invalidated == [loading.request_id]
    assert rig.cached[loading.request_id] == 0
    assert rig.pins.old_epoch_requests() == 0


@every_layout
def test_a_load_recorded_before_the_adoption_is_carried_and_stays_private(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=12, epoch=0)
    tokens = prompt(1, LENGTH)
    rig.serve(tokens)
    push_out(rig)
    loaded = rig.add(tokens, max_tokens=4)
    rig.step()
    while loaded.request_id not in rig.scheduler.finished_recving_kv_req_ids:
        rig.step()
    assert loaded.status is RequestStatus.WAITING_FOR_REMOTE_KVS  # recorded, not promoted
    rig.adopt(1, weights="w1")
    assert rig.pins.old_epoch_requests() == 1
    rig.run()
    assert rig.cached[loaded.request_id] == 8 * BLOCK  # its own, as before
    assert rig.pins.old_epoch_requests() == 0
    assert found(rig, tokens) == 0


@every_layout
def test_a_running_request_is_carried_and_saves_nothing_more(make_rig: MakeRig, layout: tuple[str, ...], store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    running = rig.add(prompt(1, LENGTH), max_tokens=3 * BLOCK)
    rig.step()
    before = set(store.objects)
    assert len(before) == num_saved(layout)
    rig.adopt(1, weights="w1")
    assert rig.pins.old_epoch_requests() == 1
    rig.run()
    assert set(store.objects) == before
    assert found(rig, list(running.all_token_ids)) == 0


@every_layout
def test_a_preempted_request_is_repinned_and_recomputes(rig: Any) -> None:
    preempted = rig.add(prompt(1, LENGTH), max_tokens=6)
    rig.step()
    rig.step()
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    assert preempted.status is RequestStatus.PREEMPTED
    hashes = preempted.block_hashes
    assert rig.block_pool.get_cached_block(hashes[0], [0]) is not None  # its own old KV is still findable by the old name
    rig.adopt(1, weights="w1")
    output = rig.step()
    assert preempted.request_id not in output.num_scheduled_tokens  # the local hit was dropped
    output = rig.step()
    assert output.num_scheduled_tokens[preempted.request_id] >= WHOLE
    rig.run()


@every_layout
def test_a_plan_that_an_adoption_overtakes_inside_schedule_is_not_sent(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the answer and the allocation: the acknowledgement waits for the step, and the load never runs."""
    rig = make_rig(num_blocks=12, epoch=0)
    rig.serve(TOKENS)
    push_out(rig)
    answer = rig.connector.get_num_new_matched_tokens
    busy: list[bool] = []

    def overtaken(request: Any, num_local: int) -> Any:
        found = answer(request, num_local)
        busy.append(rig.pins.busy())
        rig.adopt(1, weights="w1")
        return found

    hit = rig.add(TOKENS)
    monkeypatch.setattr(rig.connector, "get_num_new_matched_tokens", overtaken)
    rig.step()
    assert hit.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    monkeypatch.undo()
    assert busy == [True]
    assert not rig.pins.busy()  # the step is over
    rig.run()
    assert rig.cached[hit.request_id] == 0


@pytest.mark.unclean
def test_the_clearing_event_precedes_events_of_new_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(kv_events=True, epoch=0)
    rig.serve(prompt(1, LENGTH))
    rig.block_pool.take_events()
    rig.adopt(1)
    rig.add(prompt(1, LENGTH))
    rig.scheduler.schedule()
    kinds = [type(event).__name__ for event in rig.block_pool.take_events()]
    rig.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert kinds[0] == "AllBlocksCleared"
    assert kinds.count("AllBlocksCleared") == 1
