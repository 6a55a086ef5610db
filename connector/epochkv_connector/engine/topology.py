"""How an engine's KV is cut: groups, ranks, shards, replicas and machines. How many bytes that makes, only ranks know (`wire.layout`).

Knows of vLLM 0.30 to 0.33: `ParallelConfig`, `SpeculativeConfig`, the classes of KV cache specs by name,
`parallel_state.get_world_group`; from 0.32 on `kv_tp_replicas` and `use_eagle_block_drop`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from epochkv_connector.scheduler.tiers.views import CacheLayout, GroupKind, GroupLayout


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """The KV cache groups as the scheduler role sees them."""
    dcp = int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))
    groups = tuple(_group_layout(group, dcp) for group in kv_cache_config.kv_cache_groups)
    if _drops_last_block(vllm_config) and not any(group.eagle for group in groups):
        groups = tuple(dataclasses.replace(group, eagle=True) for group in groups)  # as `KVCacheCoordinator.__init__` does
    return CacheLayout(groups, alignment_tokens=math.lcm(*(group.block_size for group in groups)))


def _drops_last_block(vllm_config: Any) -> bool:
    """Whether vLLM drops the last block of every hit (EAGLE/MTP: its last position depends on the next token)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", None) or speculative.use_eagle  # the former from 0.32 on
    return bool(drops())


def num_worker_ranks(vllm_config: Any) -> int:
    """Worker ranks that acknowledge every job."""
    return int(vllm_config.parallel_config.world_size)


def num_machines(vllm_config: Any) -> int:
    """Machines that the engine's worker ranks are spread over."""
    return max(1, int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) or 1))


def has_ranks_here(vllm_config: Any) -> bool:
    """Whether ranks of the engine are certain to run on the machine of the process that makes it."""
    parallel = vllm_config.parallel_config
    started_here = parallel.distributed_executor_backend in ("mp", "uni") and getattr(parallel, "data_parallel_backend", "mp") == "mp"
    return started_here and int(parallel.data_parallel_size_local) > 0


def l1_share(vllm_config: Any, num_bytes: int) -> int:
    """The bytes of an engine's L1 that are on one machine."""
    return num_bytes // num_machines(vllm_config)


def num_kv_shards(vllm_config: Any, kv_cache_config: Any) -> int:
    """Distinct KV shards of the engine: ranks less replicas of KV heads."""
    return max(1, num_worker_ranks(vllm_config) // num_kv_replicas(kv_cache_config))


def num_kv_replicas(kv_cache_config: Any) -> int:
    """Consecutive tensor-parallel ranks that hold identical KV in every layer (unknown before 0.32: none)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)


def worker_rank(vllm_config: Any) -> int:
    """This worker's rank in its engine; vLLM's world group may span the engines of a data-parallel group, one after another."""
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_world_group()
    except AssertionError:  # nobody has set it up: a single rank
        return 0
    return int(group.rank_in_group) % num_worker_ranks(vllm_config)


def _group_layout(group: Any, dcp: int) -> GroupLayout:
    spec = group.kv_cache_spec
    block_size = int(spec.block_size) * (dcp if getattr(spec, "dcp_sharded", False) else 1)
    inner = spec.first_spec if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
    name = type(inner).__name__
    eagle = bool(getattr(group, "is_eagle_group", False))
    transferable = bool(getattr(group, "enable_kv_transfer", True)) and bool(getattr(spec, "prefix_cacheable", True))
    if transferable and name in ("FullAttentionSpec", "MLAAttentionSpec"):
        return GroupLayout(GroupKind.FULL, block_size, eagle=eagle, name=name)
    if transferable and name == "SlidingWindowSpec":
        return GroupLayout(
            GroupKind.SLIDING,
            block_size,
            window_tokens=int(inner.sliding_window),
            extra_retained_tokens=int(getattr(inner, "extra_retained_tokens", 0)),
            eagle=eagle,
            name=name,
        )
    return GroupLayout(GroupKind.UNSUPPORTED, block_size, eagle=eagle, name=name)


def tokens_per_step(vllm_config: Any) -> int:
    """New tokens that a request may get in one step, at most."""
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", None) or 0
    return 1 + int(drafts)
