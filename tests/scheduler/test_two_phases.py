"""Allocation in two phases over KV cache groups: no block of a hit is evicted by another group's allocation of the same step.

The fault in vLLM (vllm#33775, mended by PR#44409, and the reports on which it rests): group by group, "touch the blocks of the
hit, then allocate the rest" lets one group's allocation evict what the next group has not touched yet. Both allocators are
shown here: vLLM's for GPU blocks, with our loads as the external part, and ours for host slots. The oracle compares every
position with the tokens it must have come from, so a block with two owners is seen, whoever gave it away.
"""

from typing import Any

import pytest

from epochkv_connector.wire import Tier
from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt

LENGTH = 8 * BLOCK + 1
SLOT_BYTES = 2304
HYBRIDS = {
    "sliding window + full": ("48", "full"),
    "three groups": ("full", "32", "80"),
    "state + full": ("state", "full"),
    "full + chunk": ("full", "chunk48"),
}


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


@pytest.mark.parametrize("groups", HYBRIDS.values(), ids=HYBRIDS)
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
    ("groups", "num_blocks", "filler"),
    [
        pytest.param(("112", "full"), 19, 4, id="sliding window + full"),
        pytest.param(("full", "112"), 19, 4, id="full + sliding window"),
        pytest.param(("full", "96", "80"), 24, 3, id="three groups"),
    ],
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
