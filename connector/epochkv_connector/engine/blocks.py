"""Requests of vLLM's scheduler and the GPU blocks that they hold: what is computed, named, referenced and confirmed.

Knows of vLLM 0.30 to 0.33: fields of `Request` and `RequestStatus`, `BlockPool` by block id, `KVCacheManager.get_blocks` and
`coordinator.single_type_managers`, `EncoderCacheManager.cached`, `SchedulerOutput.kv_connector_block_state`; from 0.32 on
`CacheHitSource`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epochkv_connector.engine.interface import kv_cache_utils

try:  # 0.32 and later
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None


def holds_blocks(request: Any) -> bool:
    """Whether the request holds KV blocks now (then it must never be re-hashed)."""
    from vllm.v1.request import RequestStatus

    return bool(request.num_computed_tokens > 0 or request.status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING))


def num_named_blocks(manager: Any, request: Any, block_pool: Any) -> int:
    """How many of the request's hash blocks vLLM has named in its own cache."""
    size = hash_block_size_of(block_pool)
    managers = manager.coordinator.single_type_managers
    named = (one.num_cached_block.get(request.request_id, 0) * int(one.block_size) // size for one in managers)
    return min(max(named, default=0), len(request.block_hashes))


def encoder_outputs_in_use(scheduler: Any) -> bool:
    """Whether a request refers to cached outputs of an encoder."""
    cached = getattr(getattr(scheduler, "encoder_cache_manager", None), "cached", None) or {}
    return any(cached.values())


class BlockPoolAdapter:
    """vLLM's block pool by block id: seven stable names of it and nothing else."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool

    @property
    def null_block_id(self) -> int:
        """Id of the placeholder block; it is never touched or freed (0.32 counts references to it, 0.33 does not)."""
        return int(self._pool.null_block.block_id)

    def num_references(self, block_id: int) -> int:
        """How many requests and saves hold the block."""
        return int(self._pool.blocks[block_id].ref_cnt)

    def is_kept(self, block_id: int) -> bool:
        """Whether vLLM keeps the block in its own cache, or keeps none in it."""
        return not self._pool.enable_caching or self._pool.blocks[block_id].block_hash is not None

    def names(self, block_id: int, group: int, name: bytes) -> bool:
        """Whether vLLM's own cache holds this block under this name (a block hash)."""
        return bool(self._pool.blocks[block_id].block_hash == kv_cache_utils.make_block_hash_with_group_id(name, group))

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each block."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        """Give the references back; the first id is evicted first."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])


def offered_states(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Recurrent states that vLLM hands over in this step alone: request -> (group, GPU block, tokens)."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return getattr(state, "boundary_state_offloads", None) or {}


class _Ids(Sequence[int]):
    """Ids of vLLM's blocks, looked up on access: a request has hundreds of blocks, and a step needs one or two ids."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index].block_id


def group_block_ids(kv_cache_manager: Any, request_id: str) -> tuple[Sequence[int], ...]:
    """A request's GPU blocks by group. Read them only during the call that they are passed to."""
    return tuple(map(_Ids, kv_cache_manager.get_blocks(request_id).blocks))


def hash_block_size_of(block_pool: Any) -> int:
    """Tokens per block hash: only the bound block pool knows (the configuration's value is None)."""
    return int(block_pool.hash_block_size)


def num_confirmed_tokens(request: Any, num_scheduled: int, num_drafts: int) -> int:
    """Length of the prefix whose KV is in the request's blocks after this step and cannot be taken back.

    `num_computed_tokens` counts placeholders and drafts optimistically; a known token's position was accepted.
    """
    return int(min(request.num_computed_tokens + num_scheduled - num_drafts, request.num_tokens))


def num_final_tokens(request: Any) -> int:
    """As `num_confirmed_tokens`, for a request that has ended: only steps whose results are in count."""
    return int(max(0, min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)))


def num_expected_tokens(request: Any) -> int:
    """The largest number of tokens that the request can have once the results of all earlier steps are in."""
    return int(request.num_tokens + request.num_in_flight_tokens)


def hit_sources(host_tokens: int, store_tokens: int) -> dict[Any, int]:
    """Split of external tokens by tier, in vLLM's terms; empty before 0.32."""
    if CacheHitSource is None:
        return {}
    split = {CacheHitSource.HOST: host_tokens, CacheHitSource.EXTERNAL_UNSPECIFIED: store_tokens}
    return {source: tokens for source, tokens in split.items() if tokens}
