"""What the bookkeeping is told about vLLM's requests and KV cache groups: frozen views, which keep it free of vLLM imports."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from epochkv_connector.wire.jobs import Tier


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
    """One KV cache group.

    Attributes:
        kind: see `GroupKind`.
        block_size: tokens per block as vLLM's manager of the group counts them.
        window_tokens: `sliding_window` of the spec (SLIDING), or `attention_chunk_size` (CHUNKED).
        extra_retained_tokens: `SlidingWindowSpec.extra_retained_tokens`: blocks kept alive below the window.
        eagle: a block's last position depends on the next token (EAGLE/MTP draft layers): a hit needs one block more
            than it uses.
        name: for messages, e.g. the spec's class name.
        remedy: what would make it work, in words (UNSUPPORTED only).
    """

    kind: GroupKind
    block_size: int
    window_tokens: int = 0
    extra_retained_tokens: int = 0
    eagle: bool = False
    name: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All groups of an engine.

    Attributes:
        groups: in vLLM's order (index = KV cache group id).
        alignment_tokens: hits end on multiples of this (vLLM's scheduler block size: LCM of the groups' block sizes).
        restored: (index, group) of those that are saved and loaded: all but PRIVATE.
    """

    groups: tuple[GroupLayout, ...]
    alignment_tokens: int
    restored: tuple[tuple[int, GroupLayout], ...] = field(init=False)

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
        num_tokens: prompt, and outputs so far of a request that was preempted.
        block_hashes: vLLM's, one per `hash_block_size` tokens. Only read, and only during the call; names are copied.
        root: compared with `Snapshot.root`. For a pin derived from the current root (adapters) give the current root:
            the hashes carry the difference.
    """

    request_id: str
    num_tokens: int
    block_hashes: Sequence[bytes]
    hash_block_size: int
    root: bytes


class ScheduledRequestView(msgspec.Struct, frozen=True):
    """A request that computes in this step (or computed before), as saving sees it.

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
    hash_block_size: int
    root: bytes
    group_block_ids: Sequence[Sequence[int]]
    states: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer of a lookup.

    Attributes:
        num_tokens: tokens beyond the local ones; None: ask again next step.
        sources: tokens by tier; their sum is `num_tokens`.
    """

    num_tokens: int | None
    sources: Mapping[Tier, int] = field(default_factory=dict)


KeysOf = Callable[[str, int, bytes], Sequence[str]]
"""(namespace, group, block hash) -> the L2 keys of all shards of that block. The block exists if all of them do."""
