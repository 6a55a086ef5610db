"""vLLM's block hashes: the root of their chains, and chains under a root of ours.

Knows of vLLM 0.30 to 0.33: `v1.core.kv_cache_utils` (`NONE_HASH`, `hash_block_tokens`, `generate_block_hash_extra_keys`) and
`utils.hashing.get_hash_fn_by_name`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
    """Hashes a request's first block under an explicit parent, and a whole request through vLLM's own hasher.

    Args:
        algorithm: `cache_config.prefix_caching_hash_algo`.
    """

    def __init__(self, algorithm: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name

        self.algorithm = algorithm
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


def hash_seed_is_random(algorithm: str) -> bool:
    """Whether vLLM seeds this algorithm at random in each process (non-cryptographic ones without PYTHONHASHSEED)."""
    return "xxhash" in algorithm and os.environ.get("PYTHONHASHSEED") is None
