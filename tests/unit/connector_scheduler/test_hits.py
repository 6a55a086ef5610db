"""The length of a hit, against a definition by brute force, and against vLLM's own coordinator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_connector.scheduler.planning.hits import longest_hit, needed_range
from epochkv_connector.scheduler.tiers.views import CacheLayout, GroupKind, GroupLayout


def group_strategy(eagle: bool) -> st.SearchStrategy[GroupLayout]:
    return st.builds(
        GroupLayout,
        kind=st.sampled_from([GroupKind.FULL, GroupKind.SLIDING]),
        block_size=st.sampled_from([4, 8, 16]),
        window_tokens=st.integers(2, 40),
        eagle=st.booleans() if eagle else st.just(False),
    )


@st.composite
def cases(draw: st.DrawFn, eagle: bool = True) -> tuple[CacheLayout, int, int, frozenset[tuple[int, int]]]:
    groups = tuple(draw(st.lists(group_strategy(eagle), min_size=1, max_size=3)))
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
    attended = range(total)
    if group.kind is GroupKind.SLIDING:
        attended = range(max(0, total - (group.window_tokens - 1)), total)
    blocks = {token // group.block_size for token in attended if token >= local}
    if group.eagle:
        blocks.add(total // group.block_size)
    return all((index, block) in present for block in blocks)


@given(cases())
@settings(max_examples=400, deadline=None)
def test_equals_the_definition(case: tuple[CacheLayout, int, int, frozenset[tuple[int, int]]]) -> None:
    layout, local, limit, present = case
    answer = longest_hit(layout, local, limit, lambda group, block: (group, block) in present)
    assert answer == brute_force(layout, local, limit, present)


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("eagle", [False, True])
def test_every_window_with_every_single_gap(block_size: int, eagle: bool) -> None:
    blocks = {(0, block) for block in range(7)}
    for window in range(2, 4 * block_size + 3):
        layout = CacheLayout((GroupLayout(GroupKind.SLIDING, block_size, window, eagle=eagle),), block_size)
        for gap in range(7):
            for limit in range(6 * block_size):
                present = frozenset(blocks - {(0, gap)})
                answer = longest_hit(layout, 0, limit, lambda group, block, present=present: (group, block) in present)
                assert answer == brute_force(layout, 0, limit, present), (window, gap, limit)


@given(cases(eagle=False))
@settings(max_examples=200, deadline=None)
def test_everything_needed_is_present(case: tuple[CacheLayout, int, int, frozenset[tuple[int, int]]]) -> None:
    layout, local, limit, present = case
    total = longest_hit(layout, local, limit, lambda group, block: (group, block) in present)
    needed = [(group, block) for group, spec in enumerate(layout.groups) for block in needed_range(spec, local, total)]
    assert set(needed) <= present
    assert len(needed) == len(set(needed))
    assert (total > local) == bool(needed)


@pytest.fixture(scope="module")
def vllm_answer():
    """vLLM's own answer for its own pool, holding exactly the blocks of `present`."""
    pytest.importorskip("vllm", reason="compares with vLLM's coordinator")
    import torch
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    def spec(group: GroupLayout, index: int):
        # Different head sizes keep vLLM from merging groups that have the same window.
        common = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 8 + index, "dtype": torch.float32}
        if group.kind is GroupKind.FULL:
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(**common, sliding_window=group.window_tokens)

    def answer(layout: CacheLayout, limit: int, present: frozenset[tuple[int, int]]) -> int:
        groups = [KVCacheGroupSpec([f"layer{i}"], spec(g, i)) for i, g in enumerate(layout.groups)]
        hash_block_size = min(group.block_size for group in layout.groups)
        coordinator = get_kv_cache_coordinator(
            kv_cache_config=KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1024,
            max_in_flight_tokens=1024,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=layout.alignment_tokens,
            hash_block_size=hash_block_size,
        )
        hashes = [f"block {i}".encode() for i in range(80 // hash_block_size)]
        pool = coordinator.block_pool
        for group, block in sorted(present):
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
    answer = longest_hit(layout, 0, limit, lambda group, block: (group, block) in present)
    assert answer == vllm_answer(layout, limit, present)
