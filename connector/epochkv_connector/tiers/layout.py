"""What the tiers are told of vLLM's KV cache groups and requests, and which blocks a hit of so many tokens needs of each group.

`longest_hit` gives the same answer as vLLM's coordinator gives for its own pool (`HybridKVCacheCoordinator.find_longest_cache_hit`; a
test compares them), written anew because ours is asked about two tiers and must not touch vLLM's blocks: full attention
needs every block of the prefix, a sliding window or a chunk only the blocks that the next token attends to, a recurrent
state only the block that ends there, and a length counts only where all groups agree.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from epochkv_connector.wire import Tier


class GroupKind(enum.Enum):
    """How a KV cache group reuses blocks."""

    FULL = "full"  # every block of the prefix is needed
    SLIDING = "sliding"  # only the blocks of the last window are needed
    CHUNKED = "chunked"  # only the blocks of the chunk that the next token is in are needed
    STATE = "state"  # recurrent state: the block that ends at the hit holds all; vLLM says when one is worth keeping
    PRIVATE = "private"  # vLLM makes it anew for every request: nothing is saved or loaded
    UNSUPPORTED = "unsupported"  # blocks cannot restore it: no hits


@dataclass(frozen=True, slots=True)
class GroupLayout:
    kind: GroupKind
    block_size: int  # tokens per block as vLLM's manager of the group counts them
    window_tokens: int = 0  # `sliding_window` of the spec (SLIDING), or `attention_chunk_size` (CHUNKED)
    extra_retained_tokens: int = 0  # `SlidingWindowSpec.extra_retained_tokens`: blocks kept alive below the window
    eagle: bool = False  # the last position of a block depends on the next token (EAGLE, MTP): a hit needs one block more than it uses
    name: str = ""  # for messages, e.g. the spec's class name
    remedy: str = ""  # what would make it work, in words (UNSUPPORTED only)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[GroupLayout, ...]  # of an engine, in vLLM's order (index = KV cache group id)
    alignment_tokens: int  # hits end on multiples of this (vLLM's scheduler block size: LCM of the groups' block sizes)
    restored: tuple[tuple[int, GroupLayout], ...] = field(init=False)  # (index, group) of those that are saved and loaded: all but PRIVATE

    def __post_init__(self) -> None:
        shared = tuple((index, group) for index, group in enumerate(self.groups) if group.kind is not GroupKind.PRIVATE)
        object.__setattr__(self, "restored", shared)

    def problem(self) -> str | None:
        """Why external hits are impossible with this layout, or None."""
        for index, group in self.restored:
            if group.kind is GroupKind.UNSUPPORTED:
                remedy = f"; {group.remedy}" if group.remedy else ""
                return f"KV cache group {index} ({group.name or 'unknown'}) cannot be restored block by block{remedy}"
            if self.alignment_tokens % group.block_size:
                return f"alignment of {self.alignment_tokens} tokens is no multiple of group {index}'s block size {group.block_size}"
        return None if self.restored else "the engine has no KV cache groups that can be shared"


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as a lookup sees it.

    Attributes:
        hear_of_l2: called when L2 has said what it holds of the prompt, which is asked for as a whole: the sender waits until L2 holds it,
            and it may have lost what we gave it. None: nobody waits for that.
    """

    request_id: str
    num_tokens: int  # prompt, and outputs so far of a request that was preempted
    block_hashes: Sequence[bytes]  # vLLM's, made under the current root; only read
    hear_of_l2: Callable[[], None] | None = None


class ScheduledRequestView(msgspec.Struct, frozen=True):
    """A request that computes in this step (or computed before) under the current root, as saving sees it.

    Attributes:
        num_confirmed_tokens: length of the prefix whose KV is in its blocks once this step's forward has run, and cannot be taken
            back. Draft tokens and placeholders of async scheduling do not count.
        group_block_ids: the request's GPU blocks per group, null blocks included.
        states: (group, GPU block, tokens) of recurrent states that vLLM offers in this step alone: each is that of so many tokens
            once this step's forward has run, and its place in the chain of blocks may change with the next step.
    """

    request_id: str
    num_confirmed_tokens: int
    block_hashes: Sequence[bytes]
    group_block_ids: Sequence[Sequence[int]]
    states: Sequence[tuple[int, int, int]] = ()


KeysOf = Callable[[str, int, bytes], Sequence[str]]
"""(namespace, group, block hash) -> the L2 keys of all shards of that block. The block exists if all of them do."""


Present = Callable[[int, int], bool]
"""(group, block index in units of the group's block size) -> some tier holds that block."""

FirstAbsent = Callable[[int, int, int], int]
"""(group, first, end) -> the first of these blocks that no tier holds, or `end`: `Present` for many blocks in a row."""


def cdiv(a: int, b: int) -> int:
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


def longest_hit(layout: CacheLayout, num_local_tokens: int, max_tokens: int, present: Present, first_absent: FirstAbsent) -> int:
    """Longest prefix (tokens, at least `num_local_tokens`) that the local blocks and the tiers give together.

    Args:
        num_local_tokens: prefix that the GPU holds already; a multiple of `layout.alignment_tokens`.
        max_tokens: the answer does not exceed it. vLLM must compute at least one token, so callers give at most the
            number of tokens less one (`KVCacheManager.get_computed_blocks`).
        first_absent: says the same as `present`, faster.
    """
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
