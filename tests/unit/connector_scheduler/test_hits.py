"""The length of a hit, against a definition by brute force, and against vLLM's own coordinator."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epochkv_connector.tiers import hits
from epochkv_connector.tiers.hits import ABSENT, PromptBlocks
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, longest_hit
from epochkv_connector.tiers.state import HostIndex

KINDS = [GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.STATE, GroupKind.PRIVATE]


def group_strategy(eagle: bool, sizes: list[int]) -> st.SearchStrategy[GroupLayout]:
    return st.builds(
        GroupLayout,
        kind=st.sampled_from(KINDS),
        block_size=st.sampled_from(sizes),
        window_tokens=st.integers(2, 40),
        eagle=st.booleans() if eagle else st.just(False),
    )


@st.composite
def cases(draw: st.DrawFn, eagle: bool = True) -> tuple[CacheLayout, int, int, frozenset[tuple[int, int]]]:
    sizes = draw(st.sampled_from([[4, 8, 16], [4], [16]]))  # vLLM has chunks only beside blocks of the same size
    groups = tuple(draw(st.lists(group_strategy(eagle, sizes), min_size=1, max_size=4)))
    assume(any(group.kind is not GroupKind.PRIVATE for group in groups))
    assume(len(sizes) == 1 or not any(group.kind is GroupKind.CHUNKED for group in groups))
    # vLLM has no drafts beside chunks, and none with recurrent layers.
    groups = tuple(replace(g, eagle=g.eagle and g.kind not in (GroupKind.STATE, GroupKind.CHUNKED)) for g in groups)
    alignment = max(group.block_size for group in groups)
    num_blocks = 64 // alignment
    local = draw(st.integers(0, num_blocks)) * alignment
    all_blocks = [(g, b) for g, group in enumerate(groups) for b in range(64 // group.block_size + 1)]
    gone = draw(st.sets(st.sampled_from(all_blocks), max_size=6))
    return CacheLayout(groups, alignment), local, draw(st.integers(0, 64)), frozenset(all_blocks) - gone


def brute_force(layout: CacheLayout, local: int, limit: int, present: frozenset[tuple[int, int]]) -> int:
    """By definition: a length counts if, in every group, each token that the next one attends to is local or present."""
    for total in range(limit - limit % layout.alignment_tokens, local, -layout.alignment_tokens):
        if all(group_serves(group, index, local, total, present) for index, group in enumerate(layout.groups)):
            return total
    return local


def group_serves(group: GroupLayout, index: int, local: int, total: int, present: frozenset[tuple[int, int]]) -> bool:
    match group.kind:
        case GroupKind.PRIVATE:
            return True
        case GroupKind.SLIDING:
            attended = range(max(0, total - (group.window_tokens - 1)), total)
        case GroupKind.CHUNKED:
            attended = range(total - total % group.window_tokens, total)
        case GroupKind.STATE:
            attended = range(total - 1, total)
        case _:
            attended = range(total)
    blocks = {token // group.block_size for token in attended if token >= local}
    if group.eagle:
        blocks.add(total // group.block_size)
    return all((index, block) in present for block in blocks)


def hit_of(layout: CacheLayout, local: int, limit: int, held: frozenset[tuple[int, int]]) -> int:
    """`longest_hit` over these blocks."""

    def first_absent(group: int, first: int, end: int) -> int:
        return next((block for block in range(first, end) if (group, block) not in held), max(first, end))

    return longest_hit(layout, local, limit, lambda group, block: (group, block) in held, first_absent)


@given(cases())
@settings(max_examples=400, deadline=None)
def test_equals_the_definition(case: tuple[CacheLayout, int, int, frozenset[tuple[int, int]]]) -> None:
    layout, local, limit, present = case
    answer = hit_of(layout, local, limit, present)
    assert answer == brute_force(layout, local, limit, present)


def spec_of(group: GroupLayout, index: int):
    import torch
    from vllm.v1 import kv_cache_interface as specs

    # Different head sizes keep vLLM from merging groups that have the same window.
    common = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 8 + index, "dtype": torch.float32}
    match group.kind:
        case GroupKind.FULL:
            return specs.FullAttentionSpec(**common)
        case GroupKind.SLIDING:
            return specs.SlidingWindowSpec(**common, sliding_window=group.window_tokens)
        case GroupKind.CHUNKED:
            return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.window_tokens)
        case GroupKind.STATE:
            return specs.MambaSpec(block_size=group.block_size, shapes=((8 + index,),), dtypes=(torch.float32,), mamba_cache_mode="align")
        case _:
            return specs.CircularBufferSpec(**common)


@pytest.fixture(scope="module")
def vllm_answer():
    """vLLM's own answer for its own pool, holding exactly the blocks of `present`."""
    pytest.importorskip("vllm", reason="compares with vLLM's coordinator")
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    def answer(layout: CacheLayout, limit: int, present: frozenset[tuple[int, int]]) -> int:
        groups = [KVCacheGroupSpec([f"layer{i}"], spec_of(g, i)) for i, g in enumerate(layout.groups)]
        hash_block_size = min(group.block_size for _, group in layout.restored)
        config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)
        sizes: Any = {"scheduler_block_size": layout.alignment_tokens, "hash_block_size": hash_block_size, "max_model_len": 1024}
        sizes |= {"enable_caching": True, "enable_kv_cache_events": False, "dcp_world_size": 1, "pcp_world_size": 1}
        coordinator = get_kv_cache_coordinator(kv_cache_config=config, max_in_flight_tokens=1024, use_eagle=False, **sizes)
        hashes = [f"block {i}".encode() for i in range(80 // hash_block_size)]
        pool = coordinator.block_pool
        for group, block in sorted(one for one in present if layout.groups[one[0]].kind is not GroupKind.PRIVATE):
            scale = layout.groups[group].block_size // hash_block_size
            cached = pool.get_new_blocks(1)[0]
            key = make_block_hash_with_group_id(hashes[(block + 1) * scale - 1], group)
            pool.cached_block_hash_to_block.insert(key, cached)
        return int(coordinator.find_longest_cache_hit(hashes, limit)[1])

    return answer


@given(case=cases(eagle=False))
@settings(max_examples=150, deadline=None)
def test_equals_vllms_coordinator(vllm_answer, case) -> None:
    layout, _, limit, present = case
    # With chunks that end inside of a block, vLLM finds hits whose last chunk is not there.
    assume(all(group.window_tokens % group.block_size == 0 for group in layout.groups if group.kind is GroupKind.CHUNKED))
    # vLLM leaves a private group out of its alignment, and we do not: where its blocks are the largest, our hit may be shorter.
    assume(layout.alignment_tokens == math.lcm(*(group.block_size for _, group in layout.restored)))
    answer = hit_of(layout, 0, limit, present)
    theirs = vllm_answer(layout, limit, present)
    assume(theirs % layout.alignment_tokens == 0)  # with blocks of 16 and 4 tokens and a state every 8, it may be 8
    assert answer == theirs


HASHES = [b"hash %d" % number for number in range(41)]
SCALES = (1, 2, 4)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[PromptBlocks, dict[tuple[int, bytes], int]]:
    """A prompt of which a random part is in L1, in L2, or in neither."""
    index = HostIndex(200, len(SCALES))
    gone = draw(st.sets(st.integers(0, 40), max_size=4))
    held: dict[tuple[int, bytes], int] = {}
    remote: set[tuple[int, bytes]] = set()
    for group, scale in enumerate(SCALES):
        for block in range(len(HASHES) // scale):
            name = HASHES[(block + 1) * scale - 1]
            if block in gone:
                continue
            if draw(st.booleans()):
                (slot,) = index.allocate(1)
                index.insert(slot, group, name)
                held[group, name] = slot
            else:
                remote.add((group, name))
    return PromptBlocks(index, HASHES, SCALES, frozenset(remote)), held


@given(prompts(), st.integers(0, 2), st.integers(0, 45), st.integers(0, 45), st.integers(1, 9), st.data())
def test_columns_say_what_single_questions_say(
    prompt: tuple[PromptBlocks, dict[tuple[int, bytes], int]], group: int, first: int, end: int, stretch: int, data: st.DataObject
) -> None:
    found, held = prompt
    before = hits.FIRST_STRETCH
    hits.FIRST_STRETCH = stretch  # type: ignore[misc]  # several stretches in a short prompt
    try:
        absent = found.first_absent(group, first, end)
    finally:
        hits.FIRST_STRETCH = before  # type: ignore[misc]
    assert absent == next((block for block in range(first, end) if not found.present(group, block)), max(first, end))
    if absent > first:  # what was walked is remembered, and what is asked beside it is looked up
        start = data.draw(st.integers(0, absent - 1))
        blocks = range(start, data.draw(st.integers(start + 1, absent)))
        span = found.locate(group, blocks)
        names = [HASHES[(block + 1) * SCALES[group] - 1] for block in blocks]
        assert (span.group, span.first, span.names) == (group, start, names)
        assert span.slots == [held.get((group, name), ABSENT) for name in names]
        assert span.num_absent == span.slots.count(ABSENT)
        assert span.held() == [slot for slot in span.slots if slot != ABSENT]
