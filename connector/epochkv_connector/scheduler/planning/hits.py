"""How much of a prompt the tiers can give, over all KV cache groups.

The same answer as vLLM's coordinator gives for its own pool (`HybridKVCacheCoordinator.find_longest_cache_hit`; a test
compares them), written anew because ours is asked about two tiers and must not touch vLLM's blocks: full attention
needs every block of the prefix, a sliding window or a chunk only the blocks that the next token attends to, a recurrent
state only the block that ends there, and a length counts only where all groups agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from epochkv_connector.scheduler.tiers.views import CacheLayout, GroupKind, GroupLayout
from epochkv_connector.wire.jobs import Tier

Present = Callable[[int, int], bool]
"""(group, block index in units of the group's block size) -> some tier holds that block."""

FirstAbsent = Callable[[int, int, int], int]
"""(group, first, end) -> the first of these blocks that no tier holds, or `end`: `Present` for many blocks in a row."""


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def align_down(num_tokens: int, alignment: int) -> int:
    """Largest multiple of `alignment` that is not above `num_tokens`."""
    return num_tokens - num_tokens % alignment


def num_skipped_blocks(group: GroupLayout, num_tokens: int) -> int:
    """Leading blocks that nobody attends to once `num_tokens` are computed (`get_num_skipped_tokens` in vLLM)."""
    match group.kind:
        case GroupKind.SLIDING:
            skipped = max(0, num_tokens - group.window_tokens + 1 - group.extra_retained_tokens)
        case GroupKind.CHUNKED:
            skipped = align_down(num_tokens, group.window_tokens)
        case GroupKind.STATE:
            skipped = max(0, num_tokens - 1)
        case _:
            skipped = 0
    return skipped // group.block_size


def needed_range(group: GroupLayout, num_local_tokens: int, num_total_tokens: int) -> range:
    """Blocks of a group that must be loaded so that `num_total_tokens` are computed, given the local ones."""
    first = max(num_local_tokens // group.block_size, num_skipped_blocks(group, num_total_tokens))
    return range(first, cdiv(num_total_tokens, group.block_size))


def one_by_one(present: Present) -> FirstAbsent:
    return lambda group, first, end: next((block for block in range(first, end) if not present(group, block)), max(first, end))


def longest_hit(
    layout: CacheLayout, num_local_tokens: int, max_tokens: int, present: Present, first_absent: FirstAbsent | None = None
) -> int:
    """Longest prefix (tokens, at least `num_local_tokens`) that the local blocks and the tiers give together.

    Args:
        num_local_tokens: prefix that the GPU holds already; a multiple of `layout.alignment_tokens`.
        max_tokens: the answer does not exceed it. vLLM must compute at least one token, so callers give at most the
            number of tokens less one (`KVCacheManager.get_computed_blocks`).
        first_absent: says the same as `present`, faster.
    """
    first_absent = first_absent or one_by_one(present)
    limit = align_down(max_tokens, layout.alignment_tokens)
    partial: list[int] = []  # those that need the last blocks only
    for index, group in layout.restored:
        if group.kind is not GroupKind.FULL:
            partial.append(index)
        elif limit > num_local_tokens:
            limit = _full_limit(layout, index, num_local_tokens, limit, first_absent)
    while limit > num_local_tokens:
        before = limit
        for index in partial:
            limit = _partial_limit(layout, index, num_local_tokens, limit, present)
        if limit == before:
            return limit
    return num_local_tokens


def _full_limit(layout: CacheLayout, index: int, local: int, limit: int, first_absent: FirstAbsent) -> int:
    group = layout.groups[index]
    size, margin = group.block_size, 1 if group.eagle else 0
    block = first_absent(index, local // size, limit // size + margin)
    return max(local, min(limit, align_down((block - margin) * size, layout.alignment_tokens)))


def _partial_limit(layout: CacheLayout, index: int, local: int, limit: int, present: Present) -> int:
    """Longest aligned length up to `limit` whose last blocks, as far as they are needed, are there; one scan from the right."""
    group = layout.groups[index]
    size, margin, first = group.block_size, 1 if group.eagle else 0, local // group.block_size
    total = limit
    while total > local:
        lowest = max(first, num_skipped_blocks(group, total))
        block = total // size + margin - 1
        while block >= lowest and present(index, block):
            block -= 1
        if block < lowest:
            return total
        # `block` is missing: every length that needs it fails too.
        total = min(total - layout.alignment_tokens, align_down(max(block - margin, 0) * size, layout.alignment_tokens))
    return local


def tokens_by_tier(layout: CacheLayout, host: Mapping[int, int], store: Mapping[int, int], num_tokens: int) -> dict[Tier, int]:
    """Tokens of a hit, of which so many blocks of each group come from each tier.

    Every token is in the first full-attention group, so that one is counted; without one, all are.
    """
    counted = [(index, group) for index, group in layout.restored if group.kind is GroupKind.FULL][:1] or layout.restored
    from_host, from_store = (sum(blocks.get(index, 0) * group.block_size for index, group in counted) for blocks in (host, store))
    whole = from_host + from_store
    host_tokens = num_tokens * from_host // whole if whole else 0
    return {s: n for s, n in ((Tier.HOST, host_tokens), (Tier.STORE, num_tokens - host_tokens)) if n}
