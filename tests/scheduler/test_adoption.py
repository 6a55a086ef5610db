"""Requests in every state across an adoption: none of them, and nobody after them, sees KV of the epoch before."""

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from epochkv_connector.naming.root import PinnedHasher, plain_hasher
from tests.scheduler import rigs
from tests.scheduler.rigs import LENGTH, TOKENS, MakeRig, every_layout, filled, found, num_saved, preempt_last, push_out, release
from tests.support.scheduler import BLOCK, RequestStatus, Rig, SharedStore, global_root, prompt
from tests.support.scheduler_config import STATE


@every_layout
@pytest.mark.parametrize("how", ["waits", "was hashed before, and comes after", "is a session"])
def test_a_request_that_was_never_scheduled_is_named_anew(rig: Any, how: str) -> None:
    """The input thread hashes with the global of its moment."""
    rig.serve(TOKENS)
    request = rig.request(TOKENS, max_tokens=2)
    request.resumable = how == "is a session"
    late = how.startswith("was hashed")
    if not late:
        rig.scheduler.add_request(request)
    before = request.block_hashes
    assert rig.block_pool.get_cached_block(before[0], [0]) is not None  # old KV lies under the name it now carries
    rig.adopt(1, weights="w1")
    if late:
        rig.scheduler.add_request(request)
    rig.steps(3)
    assert request.block_hashes is not before  # never in place
    assert request.block_hashes[0] != before[0]
    assert rig.cached[request.request_id] == 0
    if request.resumable:
        rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert found(rig) == 8 * BLOCK  # and reuse works in the new epoch


class FineRig(Rig):
    """A block has two hashes, as with vLLM's `prefix_match_unit`, and vLLM's own hits may end inside of a block."""

    hash_size = BLOCK // 2


def test_a_request_whose_old_hit_is_a_part_of_a_block_is_named_anew(make_rig: MakeRig) -> None:
    """vLLM tells connectors of whole blocks alone, and here of none."""
    rig = make_rig(FineRig, epoch=0, groups=("full", STATE), num_blocks=128)
    tokens = prompt(1, BLOCK // 2 + 3)
    rig.serve(tokens)
    request = rig.add(tokens)
    if rig.scheduler.kv_cache_manager.get_computed_blocks(request)[1] != BLOCK // 2:
        pytest.skip("this vLLM finds whole blocks alone")
    rig.adopt(1, weights="w1")
    rig.run()
    assert rig.cached[request.request_id] == 0


@every_layout
@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_that_skips_the_prefix_cache_is_repinned_at_once(rig: Any, preempted: bool) -> None:
    """vLLM goes on with it in the same step, and caches its blocks under whatever its hashes are then."""
    skipping = rig.add(TOKENS, max_tokens=4, skip_reading_prefix_cache=True)
    if preempted:
        rig.step()
        preempt_last(rig)
        assert skipping.status is RequestStatus.PREEMPTED
    rig.adopt(1, weights="w1")
    output = rig.step()
    assert output.num_scheduled_tokens[skipping.request_id] >= 8 * BLOCK, "all of it is computed"
    rig.run()
    assert found(rig) == 8 * BLOCK  # named in the new epoch


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
    preempt_last(rig)
    assert preempted.status is RequestStatus.PREEMPTED
    hashes = preempted.block_hashes
    assert rig.block_pool.get_cached_block(hashes[0], [0]) is not None  # its own old KV is still findable by the old name
    rig.adopt(1, weights="w1")
    output = rig.step()
    assert preempted.request_id not in output.num_scheduled_tokens  # the local hit was dropped
    output = rig.step()
    assert output.num_scheduled_tokens[preempted.request_id] >= 8 * BLOCK
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
    request = rigs.begin_load(rig, tokens)
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


def test_kv_of_another_engine_without_a_tag_is_private_under_a_private_root_too(make_rig: MakeRig) -> None:
    """No root is shared, so we have no tag; a producer that shows none must not pass for one of ours."""
    rig = make_rig(hub=False)
    rig.serve(TOKENS, params={"do_remote_prefill": True, "remote_engine_id": "x"})
    assert rig.pins.counters["foreign_kv_requests"] == 1
    assert rig.tiers.stats()["saves_emitted"] == 0
    assert found(rig) == 0
    assert found(rig) == 8 * BLOCK


# ---------------------------------------------------------------------------------------------- sessions, hashes
def test_rehashing_is_spread_over_steps(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget that one request exceeds, each step re-hashes one and the others wait their turn."""
    monkeypatch.setattr("epochkv_connector.naming.root.REHASH_BUDGET_SECONDS", 1e-9)
    rig = make_rig(num_blocks=128, epoch=0)
    waiting = [rig.add(prompt(seed, LENGTH)) for seed in range(5)]
    rig.adopt(1, weights="w1")
    scheduled_in: dict[str, int] = {}
    for step in range(12):
        for request_id in rig.step().num_scheduled_tokens:
            scheduled_in.setdefault(request_id, step)
    assert len(scheduled_in) == len(waiting)
    assert len(set(scheduled_in.values())) == len(waiting)  # one a step
    rig.run()


def test_a_streaming_session_keeps_its_root_and_is_counted_apart(rig: Any) -> None:
    session = rig.request(prompt(1, LENGTH), max_tokens=3)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.step()
    rig.adopt(1, weights="w1")
    assert rig.pins.old_epoch_requests() == 0
    assert rig.pins.old_epoch_requests(sessions=True) == 1
    root = rig.pins.pin_of(session).root
    rig.steps(4)
    assert rig.pins.pin_of(session).root == root
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert rig.pins.old_epoch_requests(sessions=True) == 0
    assert found(rig, prompt(1, LENGTH)) == 0


def first_name(rig: Any, request: Any, root: bytes) -> Any:
    """What the request's first block has to be called under this root."""
    return rig.connector.scheduler.hashing.first(request, root)


def test_a_short_prompt_gives_its_first_hash_to_us_and_the_next_to_vllm(rig: Any) -> None:
    request = rig.add(prompt(1, BLOCK - 3), max_tokens=2 * BLOCK)
    root = rig.pins.pin_of(request).root
    rig.step()
    assert isinstance(request._block_hasher, PinnedHasher)
    assert plain_hasher(request) is rig.hasher
    rig.adopt(1)
    while not request.block_hashes:
        rig.step()
    assert request.block_hashes[0] == first_name(rig, request, root) != first_name(rig, request, global_root())
    assert request._block_hasher is rig.hasher
    rig.run()
    assert len(request.block_hashes) == 2


def test_a_session_whose_only_hash_vllm_cuts_off_is_named_by_its_pin_again(make_rig: MakeRig) -> None:
    # 15 tokens and one sampled are a block; the next input takes the place of the sampled one, and the hash goes with it.
    rig = make_rig(epoch=0)
    session = rig.request(prompt(1, BLOCK - 1), max_tokens=1)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.step()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert len(session.block_hashes) == 1
    root = rig.pins.pin_of(session).root
    rig.adopt(1, weights="w1")
    rig.pins.root.refresh()
    more = rig.request(prompt(2, BLOCK), max_tokens=1, request_id=session.request_id)
    more.resumable = True
    rig.scheduler.add_request(more)
    assert session.num_tokens == 2 * BLOCK - 1
    assert session.block_hashes == [first_name(rig, session, root)]
    assert session.block_hashes != [first_name(rig, session, global_root())]
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
