"""Loads that fail, are lost, late or invalidated: each is reported exactly once per rank and costs a recompute, never an answer. Hybrid
layouts, and defects of connectors in public use (docs/reference/peers-defects.md lists all).
"""

from typing import Any

import pytest

from epochkv_connector.wire import Tier
from tests.scheduler.rigs import LENGTH, SLOT_BYTES, WHOLE, MakeRig, begin_load, every_layout, filled, found, push_out, release
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
    assert rig.connector.get_block_ids_with_load_errors() == set(), "block ids are ambiguous over groups"
    rig.workers[0].fail_loads = lambda job: False
    push_out(rig)
    assert found(rig, tokens) == WHOLE, "the cooldown ended when the request was scheduled"


def test_an_invalidated_load_with_barely_enough_blocks_does_not_hang(make_rig: MakeRig) -> None:
    """vLLM leaves it in `_inflight_prefills`; a second load that must fit beside its own reservation never schedules."""
    rig, tokens = filled(make_rig, num_blocks=10)
    assert rig.block_pool.get_num_free_blocks() == 9  # exactly what the prompt needs
    request = begin_load(rig, tokens)
    rig.adopt(1, weights="w1")
    release(rig)
    rig.run(50)
    assert request.request_id in rig.finished


@pytest.mark.parametrize("caching", [True, False])
def test_of_requests_with_one_prompt_one_loads_it(make_rig: MakeRig, caching: bool) -> None:
    """The others find it in vLLM's own cache then, and hold no second copy. They wait for one load: where that brings nothing, they go."""
    rig, tokens = filled(make_rig, num_blocks=40, caching=caching)
    (worker,) = rig.workers
    requests = [begin_load(rig, tokens, max_tokens=4), rig.add(tokens, max_tokens=4), rig.add(tokens, max_tokens=4)]
    rig.steps(2)
    assert [job.request_id for job in worker.loads] == [requests[0].request_id]
    worker.hold_loads = False
    rig.step()
    worker.hold_loads = True
    rig.steps(2)
    assert len(worker.loads) == (0 if caching else 2)
    release(rig)
    rig.run()
    assert {rig.cached[request.request_id] for request in requests} == {WHOLE}
    rig.adopt(1, weights="w1")
    assert found(rig) == 0


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


@pytest.mark.parametrize("taken", [5 * BLOCK, 0])
def test_a_shrunk_hit_loads_what_was_accepted(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Of a hit that loses to another connector of a MultiConnector, vLLM takes 0 tokens, with real blocks."""
    rig, tokens = filled(make_rig)
    answer = rig.connector.get_num_new_matched_tokens
    asked: list[int] = []

    def shrunk(request: Any, num_local: int) -> Any:
        asked.append(answer(request, num_local)[0])
        return taken, taken > 0

    monkeypatch.setattr(rig.connector, "get_num_new_matched_tokens", shrunk)
    request = rig.serve(tokens)
    assert asked == [WHOLE]
    assert rig.cached[request] == taken


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


# ---------------------------------------------------------------------------------------------- hybrid layouts
WINDOWS = [("full", "48"), ("48", "full"), ("full", "32", "80")]
STATES = [("full", "state"), ("state", "full"), ("full", "state", "48")]
CHUNKS = [("full", "chunk64"), ("full", "chunk40")]


@pytest.mark.parametrize("tier", ["l1", "l2"])
@pytest.mark.parametrize("groups", [*WINDOWS, *STATES, *CHUNKS], ids="+".join)
def test_hybrid_groups_come_back_whole(make_rig: MakeRig, groups: tuple[str, ...], tier: str) -> None:
    """Windows, chunks and states load only what the next token needs; the oracle checks all that it needs."""
    store = SharedStore() if tier == "l2" else None
    options: dict[str, Any] = {"l1_bytes": None, "extra": {"staging_slots": 64}} if tier == "l2" else {}
    rig = make_rig(groups=groups, num_blocks=12 * len(groups), store=store, **options, epoch=0)
    tokens = prompt(1, LENGTH)
    first = rig.serve(tokens, max_tokens=4)
    for seed in range(100, 108):
        rig.serve(prompt(seed, LENGTH))
    again = rig.serve(tokens, max_tokens=4)
    assert rig.tiers.stats()["loads_done"] >= 1
    assert rig.cached[again] == 8 * BLOCK
    assert rig.outputs[again] == rig.outputs[first]
    rig.adopt(1, weights="w1")
    assert found(rig, tokens) == 0


# ---------------------------------------------------------------------------------------------- defects of others
def test_a_request_that_a_reset_preempted_is_loaded_although_the_same_step_names_it_as_preempted(make_rig: MakeRig) -> None:
    """vllm PR#57810: who drops the load of a preempted request loses it for ever."""
    rig, tokens = filled(make_rig, num_blocks=48)
    request = rig.add(tokens, max_tokens=4)
    while request.num_output_tokens < 2:
        rig.step()
    rig.workers[0].hold_loads = True
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)  # not the connector's
    output = rig.step()
    assert request.request_id in (output.preempted_req_ids or ())
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    release(rig)
    rig.run()
    assert request.request_id in rig.finished
    assert rig.tiers.stats()["loads_done"] == 1


def test_a_save_outlives_its_request_and_a_namesake_gets_nothing_of_it(make_rig: MakeRig, store: SharedStore) -> None:
    """vllm#52360: jobs keyed by request id took the second request for the first."""
    rig = make_rig(store=store, epoch=0)
    rig.workers[0].hold_saves = True
    first = rig.add(prompt(1, LENGTH), max_tokens=8, request_id="same")
    rig.step()
    rig.scheduler.finish_requests("same", RequestStatus.FINISHED_ABORTED)
    second = rig.add(prompt(2, LENGTH), max_tokens=3, request_id="same")
    assert first is not second
    rig.step()
    release(rig)
    rig.run()
    assert len(store.objects) == 16
    rig.scheduler.reset_prefix_cache()
    for seed in (1, 2):
        assert found(rig, prompt(seed, LENGTH)) == 8 * BLOCK  # the oracle compares every position


# ---------------------------------------------------------------------------------------------- allocation in two phases


def stored(make_rig: MakeRig, groups: tuple[str, ...], prompts: list[list[int]]) -> SharedStore:
    """A store in which another engine has put these prompts."""
    store = SharedStore()
    filler = make_rig(groups=groups, num_blocks=40 * len(groups), store=store)
    filler.adopt(0)
    for tokens in prompts:
        filler.serve(tokens)
    return store


def watched(rig: Any) -> list[Any]:
    """Load jobs of the rig; each is checked when it is sent: one owner for each slot and GPU block, over all jobs of the step."""
    jobs: list[Any] = []
    build = rig.connector.build_connector_meta

    def noted(output: Any) -> Any:
        metadata = build(output)
        moves = [move for job in metadata.loads for move in job.moves]
        assert len({move.gpu_block for move in moves}) == len(moves), "a GPU block has two owners"
        indexed = rig.tiers.state.index.indexed  # a staging ring is used in turns within a load
        fetched = [move.slot for move in moves if move.source is Tier.STORE]
        held = {move.slot for move in moves if move.source is Tier.HOST}
        assert not indexed or len(set(fetched)) == len(fetched), "a slot is filled twice"
        assert not held & set(fetched), "a slot of a hit was given to another block of the step"
        jobs.extend(metadata.loads)
        return metadata

    rig.connector.build_connector_meta = noted
    return jobs


@pytest.mark.parametrize("groups", [("48", "full"), ("full", "32", "80"), ("state", "full"), ("full", "chunk48")], ids="+".join)
def test_slots_of_a_hit_stay_while_its_other_groups_get_theirs(make_rig: MakeRig, groups: tuple[str, ...]) -> None:
    """L1 is full, its oldest blocks are one group's part of the hit, and the other groups' parts come from L2 and need slots."""
    tokens = prompt(1, LENGTH)
    store = stored(make_rig, groups, [tokens])
    elsewhere = dict(store.objects)
    store.objects.clear()
    rig = make_rig(groups=groups, num_blocks=14 * len(groups), store=store, l1_bytes=8 * len(groups) * SLOT_BYTES, epoch=0)
    rig.serve(tokens)
    index = rig.tiers.state.index
    for group in range(len(groups) - 1):
        for name in list(index._maps[group]):
            index.forget(group, name)
    seed = 100
    while len(index._free) >= len(groups):  # the rest of L1 fills up with younger blocks
        rig.serve(prompt(seed, BLOCK + 1))
        seed += 1
    assert rig.scheduler.reset_prefix_cache()
    store.objects.clear()
    store.objects.update(elsewhere)
    rig.tiers.state.known.clear()
    jobs, evicted = watched(rig), index.evictions
    again = rig.serve(tokens)
    assert rig.cached[again] == 8 * BLOCK
    assert {Tier.HOST, Tier.STORE} == {move.source for job in jobs for move in job.moves}, "the hit was not mixed"
    assert {move.group for job in jobs for move in job.moves if move.source is Tier.HOST} == {len(groups) - 1}
    assert index.evictions > evicted, "nothing had to be evicted"


@pytest.mark.parametrize(
    ("groups", "num_blocks", "filler"), [(("112", "full"), 19, 4), (("full", "112"), 19, 4), (("full", "96", "80"), 24, 3)]
)
def test_gpu_blocks_of_a_local_hit_stay_while_other_groups_load(
    make_rig: MakeRig, groups: tuple[str, ...], num_blocks: int, filler: int
) -> None:
    """vLLM's half of it, on which our load rests: a prefix is on the GPU, the rest is loaded, and every idle block is needed."""
    tokens = prompt(1, LENGTH)
    store = stored(make_rig, groups, [tokens])
    rig = make_rig(groups=groups, num_blocks=num_blocks, store=store, l1_bytes=None, extra={"staging_slots": 64}, epoch=0)
    rig.serve([*tokens[: 4 * BLOCK], 7])
    rig.serve(prompt(50, filler * BLOCK - 2))  # takes what was never used: the hit's own blocks are the oldest now
    jobs = watched(rig)
    request = rig.serve(tokens)
    assert [job.request_id for job in jobs] == [request]
    assert {move.block for job in jobs for move in job.moves if groups[move.group] == "full"} == {4, 5, 6, 7}, "no local hit"
    assert rig.cached[request] == 8 * BLOCK


def test_a_preempted_request_gets_two_groups_again(make_rig: MakeRig) -> None:
    """Preempted, its blocks are idle and the first to go; coming back it hits some of them and needs others in both groups."""
    groups = ("48", "full")
    rig = make_rig(groups=groups, num_blocks=34, l1_bytes=400 * SLOT_BYTES, epoch=0)
    tokens = prompt(1, LENGTH)
    request = rig.add(tokens, max_tokens=3 * BLOCK)
    other = rig.add(prompt(2, 5 * BLOCK), max_tokens=2 * BLOCK)
    while request.num_output_tokens < BLOCK + 2:
        rig.step()
    jobs = watched(rig)
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    rig.scheduler.waiting.remove_request(request)
    for seed in (50, 51, 52):  # others take some of its blocks meanwhile
        rig.add(prompt(seed, 4 * BLOCK + 1))
    rig.steps(6)
    assert request.num_preemptions == 1
    rig.scheduler.waiting.prepend_request(request)
    rig.run()
    assert [job.request_id for job in jobs] == [request.request_id], "it was not loaded again"
    assert {move.group for job in jobs for move in job.moves} == {0, 1}
    assert {request.request_id, other.request_id} <= rig.finished
