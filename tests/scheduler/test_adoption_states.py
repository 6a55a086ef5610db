"""More states a request can be in when an epoch is adopted: paused, between vLLM's own lookup and its admission, on a P/D path."""

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, begin_load, every_layout, filled, found, num_saved, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt


@every_layout
def test_requests_that_a_keep_pause_holds_across_an_adoption(make_rig: MakeRig, store: SharedStore) -> None:
    """`pause(mode="keep")` without clearing: everybody keeps his blocks while weights are pushed and the epoch is raised."""
    rig, tokens = filled(make_rig, num_blocks=48, store=store)
    rig.scheduler.reset_prefix_cache()
    running = rig.add(prompt(50, LENGTH), max_tokens=2 * BLOCK)
    rig.step()
    rig.workers[0].hold_loads = True
    loaded = rig.add(tokens)  # recorded, and not promoted, when the pause begins
    rig.step()
    release(rig)
    waiting = rig.request(tokens)
    while loaded.request_id not in rig.scheduler.finished_recving_kv_req_ids:
        rig.step()
    rig.scheduler.add_request(waiting)
    rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    saved = set(store.objects)
    rig.step()
    rig.adopt(1, weights="w1")
    for _ in range(3):
        output = rig.step()
        assert output.total_num_scheduled_tokens == 0
    assert not rig.pins.busy(), "a paused engine is never inside schedule()"
    assert rig.pins.old_epoch_requests() == 2
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    rig.run()
    assert {running.request_id, loaded.request_id, waiting.request_id} <= rig.finished
    assert (rig.cached[loaded.request_id], rig.cached[waiting.request_id]) == (8 * BLOCK, 0)
    assert {key for key in set(store.objects) - saved if "/e0/" in key} == set(), "a request on an old epoch saved"
    assert rig.pins.old_epoch_requests() == 0
    assert found(rig, [*running.all_token_ids, 9]) == 0


@every_layout
def test_a_load_under_way_across_a_keep_pause_and_an_adoption(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens)
    rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    rig.adopt(1, weights="w1")
    release(rig)
    rig.steps(4)
    assert rig.workers[0].invalidated == [request.request_id], "its end waits for no resume"
    assert not rig.connector.has_pending_push_work(), "a pause would wait for it"
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    rig.run()
    assert rig.cached[request.request_id] == 0


@every_layout
def test_an_adoption_between_vllms_own_lookup_and_our_answer(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has found the prompt in its own cache, by the old names: it must drop that."""
    rig.serve(TOKENS)
    find = rig.scheduler._get_local_prefix_cache_hit
    found: list[int] = []

    def overtaken(*args: Any) -> Any:
        hit = find(*args)
        found.append(hit[1])
        if len(found) == 1:
            rig.adopt(1, weights="w1")
        return hit

    monkeypatch.setattr(rig.scheduler, "_get_local_prefix_cache_hit", overtaken)
    request = rig.serve(TOKENS)
    assert found == [8 * BLOCK, 0]
    assert rig.cached[request] == 0


@every_layout
def test_an_adoption_between_our_answer_and_the_admission_of_a_local_hit(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too late to drop it: the request is admitted under the old root, inside the step, and carried; nobody else sees its KV."""
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    tokens = prompt(1, LENGTH)
    rig.serve(tokens)
    saved = set(store.objects)
    allocate = rig.scheduler.kv_cache_manager.allocate_slots
    inside: list[bool] = []

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        if not inside:
            inside.append(rig.pins.busy())
            rig.pins.root.adopt(1)  # the push waits for the acknowledgement, and that for the end of the step
        return allocate(*args, **kwargs)

    monkeypatch.setattr(rig.scheduler.kv_cache_manager, "allocate_slots", overtaken)
    request = rig.add(tokens, max_tokens=2 * BLOCK)
    rig.step()
    assert inside == [True]
    assert rig.cached[request.request_id] == 8 * BLOCK
    assert rig.pins.old_epoch_requests() == 1
    assert not rig.pins.busy()
    rig.weights = "w1"
    rig.run()
    assert set(store.objects) == saved, "it saved under a root that is not current"
    assert found(rig, list(request.all_token_ids)) == 0


@every_layout
def test_saves_under_way_keep_the_names_they_were_born_with(make_rig: MakeRig, layout: tuple[str, ...], store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    (worker,) = rig.workers
    worker.hold_saves = True
    rig.add(prompt(1, LENGTH), max_tokens=2)
    rig.step()
    assert len(worker.saves) == 1
    rig.adopt(1, weights="w1")
    rig.step()
    release(rig)
    rig.run()
    assert len(store.objects) == num_saved(layout)
    assert all("/e0/" in key for key in store.objects), "garbage at worst, never a wrong name"
    assert rig.tiers.stats()["slots_indexed"] == 0, "and not indexed in L1"
    assert found(rig, prompt(1, LENGTH)) == 0


def test_l1_of_older_roots_goes_first(make_rig: MakeRig) -> None:
    rig = make_rig(l1_bytes=20 * 2304, epoch=0)
    rig.serve(prompt(1, LENGTH))
    rig.adopt(1, weights="w1")
    rig.serve(prompt(2, LENGTH))
    assert rig.tiers.stats()["slots_other_roots"] == 8
    rig.serve(prompt(3, LENGTH))
    assert rig.tiers.stats()["slots_other_roots"] == 4
    rig.scheduler.reset_prefix_cache()
    assert found(rig, prompt(2, LENGTH)) == 8 * BLOCK, "a block of the current root was evicted before old ones"


def multimodal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochkv_connector.engine.limits.is_multimodal", lambda config: True)


def test_a_multimodal_engine_shares_until_its_encoders_outputs_are_of_other_weights(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoder outputs are cached by content: KV could be made from old ones. They go as soon as nobody refers to them."""
    multimodal(monkeypatch)
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    rig.serve(TOKENS)
    assert found(rig) == 8 * BLOCK
    in_use = [True]
    monkeypatch.setattr("epochkv_connector.engine.blocks.encoder_outputs_in_use", lambda scheduler: in_use[0])
    rig.weights = "w1"
    rig.serve(TOKENS)
    assert found(rig) == 0
    assert rig.pins.root.snapshot.shared is False
    in_use[0] = False
    rig.serve(TOKENS)
    assert found(rig) == 8 * BLOCK
    assert rig.pins.root.snapshot.shared is True


@every_layout
def test_a_skipping_request_that_is_preempted_across_an_adoption(rig: Any) -> None:
    request = rig.add(prompt(1, LENGTH), max_tokens=4, skip_reading_prefix_cache=True)
    rig.step()
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    assert request.status is RequestStatus.PREEMPTED
    rig.adopt(1, weights="w1")
    output = rig.step()
    assert output.num_scheduled_tokens[request.request_id] >= WHOLE, "it goes on in the same step, all of it computed again"
    rig.run()
    assert found(rig, prompt(1, LENGTH)) == 8 * BLOCK


def test_kv_of_another_engine_without_a_tag_is_private_under_a_private_root_too(make_rig: MakeRig) -> None:
    """No root is shared, so we have no tag; a producer that shows none must not pass for one of ours."""
    rig = make_rig(hub=False)
    rig.serve(TOKENS, params={"do_remote_prefill": True, "remote_engine_id": "x"})
    assert rig.pins.counters["foreign_kv_requests"] == 1
    assert rig.tiers.stats()["saves_emitted"] == 0
    assert found(rig) == 0
    assert found(rig) == 8 * BLOCK
