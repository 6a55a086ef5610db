"""Requests of vLLM's scheduler, the GPU blocks that they hold, and the hashes of these blocks, under vLLM's root or one of ours."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epochkv_connector.engine.interface import kv_cache_utils

Hasher = Callable[[Any], list[bytes]]


class GlobalRoot:
    """vLLM's module global that starts every block-hash chain, and the sentinel that tells when vLLM has set its own.

    The connector is built before vLLM's `init_none_hash` runs; a root bound earlier would be overwritten.
    """

    def __init__(self) -> None:
        # A fresh object: `is` must tell it from any value that vLLM computes, also in a second engine of the process.
        self._sentinel = bytes(bytearray(os.urandom(32)))
        kv_cache_utils.NONE_HASH = self._sentinel

    def ready(self) -> bool:
        """True once vLLM has replaced the sentinel by its own value."""
        return kv_cache_utils.NONE_HASH is not self._sentinel

    def bind(self, root: bytes) -> None:
        """Make `root` the parent of every chain begun from now on."""
        kv_cache_utils.NONE_HASH = root

    def is_bound(self, root: bytes) -> bool:
        """Whether the global is this very object; another engine of the process may have overwritten it."""
        return kv_cache_utils.NONE_HASH is root


class BlockHashing:
    """Hashes a request's first block under an explicit parent, and a whole request through vLLM's own hasher."""

    def __init__(self, algorithm: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name

        self.hash_block_size = 0  # known when the block pool is bound
        self._function = get_hash_fn_by_name(algorithm)

    def first(self, request: Any, root: bytes) -> bytes | None:
        """Hash of block 0 with `root` as explicit parent; None while the request has no full block."""
        size = self.hash_block_size
        if size <= 0 or request.num_tokens < size:
            return None
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, size, 0)
        tokens = request.all_token_ids[0:size]
        return bytes(kv_cache_utils.hash_block_tokens(self._function, root, tokens, extra))

    def chain(self, request: Any, root: bytes, inner: Hasher) -> list[bytes]:
        """All block hashes of a request that has none yet, begun with `root`; a new list.

        vLLM's hasher continues from the last hash the request holds, so it is shown a one-element list for the
        duration of the call; the request's own list is not touched.
        """
        head = self.first(request, root)
        if head is None:
            return []
        held = request.block_hashes
        request.block_hashes = [head]
        try:
            return [head, *inner(request)]
        finally:
            request.block_hashes = held


CLIENT_MARK, CONTENT_MARK = "id of a client: ", "digest of content: "
"""Before ids of media that `patches.mark_media_ids` has seen a client give, or vLLM make."""


def owner_of(salt: str | None) -> str:
    """What stands before an id of a client, so that ids under two salts are never the same."""
    return f"{len(salt or '')}:{salt or ''}:"


def first_client_media(request: Any) -> int | None:
    """Position of the first picture, video or sound whose id may stand for other content, too. None: all ids are vLLM's digests of what
    they stand for, or of whoever has the request's salt.

    Only a front end in which ids are marked can tell. vLLM's Rust front end marks none, and takes a mark from a client as it is.
    """
    if not request.mm_features:
        return None
    told = os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "0"
    known = (CONTENT_MARK, CLIENT_MARK + owner_of(request.cache_salt)) if request.cache_salt else CONTENT_MARK
    ids = ((one.mm_position.offset, one.mm_hash or "") for one in request.mm_features)
    return min((offset for offset, name in ids if not (told and name.startswith(known))), default=None)


def hash_seed_is_random(algorithm: str) -> bool:
    """Whether vLLM seeds this algorithm at random in each process (non-cryptographic ones without PYTHONHASHSEED)."""
    return "xxhash" in algorithm and os.environ.get("PYTHONHASHSEED") is None


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
    size = int(block_pool.hash_block_size)
    managers = manager.coordinator.single_type_managers
    named = (one.num_cached_block.get(request.request_id, 0) * int(one.block_size) // size for one in managers)
    return min(max(named, default=0), len(request.block_hashes))


def encoder_outputs_in_use(scheduler: Any) -> bool:
    """Whether a request refers to cached outputs of an encoder."""
    cached = getattr(getattr(scheduler, "encoder_cache_manager", None), "cached", None) or {}
    return any(cached.values())


class BlockPoolAdapter:
    """vLLM's block pool by block id: eight stable names of it and nothing else."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool

    @property
    def null_block_id(self) -> int:
        """Id of the placeholder block; 0.32 counts references to it, 0.33 does not."""
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

    def holds(self, group: int, name: bytes) -> bool:
        """Whether vLLM's own cache holds a block of this name (a block hash)."""
        return self._pool.get_cached_block(name, [group]) is not None

    def touch(self, block_ids: Sequence[int]) -> None:
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


def has_finer_hashes(manager: Any) -> bool:
    """Whether blocks of a group have several hashes, so that vLLM's own hits may end inside of one: it tells connectors of whole blocks."""
    size = int(manager.block_pool.hash_block_size)
    return any(int(one.block_size) > size for one in manager.coordinator.single_type_managers)


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
