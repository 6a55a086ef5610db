"""How an engine's KV is cut: groups, ranks, shards, replicas and machines. How many bytes that makes, only ranks know (`wire.layout`).

Knows of vLLM 0.30 to 0.33: `VllmConfig.instance_id`, `ParallelConfig`, `SpeculativeConfig`, the classes of KV cache specs,
`parallel_state.get_world_group`; from 0.31 on `kv_cache_groups_tp_replicas`, from 0.32 on `use_eagle_block_drop`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from epochkv_connector.engine.interface import kv_cache_interface, kv_cache_planning, kv_cache_utils
from epochkv_connector.scheduler.tiers.views import CacheLayout, GroupKind, GroupLayout

_KINDS = (
    (kv_cache_interface.FullAttentionSpec, GroupKind.FULL),
    (kv_cache_interface.SlidingWindowSpec, GroupKind.SLIDING),
    (kv_cache_interface.ChunkedLocalAttentionSpec, GroupKind.CHUNKED),
)

_PLANNING = (kv_cache_utils, kv_cache_planning)
"""Where versions of vLLM have what plans KV cache groups."""

_REMEDIES = {"CrossAttentionSpec": "encoder-decoder models have no prefixes to share; start the engine without EpochKV"}

_UNKNOWN_KIND = "this version of EpochKV does not know this kind of layer; start the engine without EpochKV"


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """The KV cache groups as the scheduler role sees them."""
    dcp = int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))
    groups = tuple(_group_layout(vllm_config, group, dcp) for group in kv_cache_config.kv_cache_groups)
    if _drops_last_block(vllm_config) and not any(group.eagle for group in groups):
        # As `KVCacheCoordinator.__init__` does. Drafts have no recurrent layers, so no state is dropped.
        groups = tuple(dataclasses.replace(group, eagle=group.kind is not GroupKind.STATE) for group in groups)
    alignment = math.lcm(*(group.block_size for group in groups))  # of private ones, too (`resolve_kv_cache_block_sizes`)
    return CacheLayout(groups, alignment)


def _drops_last_block(vllm_config: Any) -> bool:
    """Whether vLLM drops the last block of every hit (EAGLE/MTP: its last position depends on the next token)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", None) or speculative.use_eagle  # the former from 0.32 on
    return bool(drops())


def engine_id(vllm_config: Any) -> str:
    """What the parts of one engine call it, in every process: the connector's id, or without a connector that of the configuration."""
    transfer = vllm_config.kv_transfer_config
    return str(transfer.engine_id if transfer is not None else vllm_config.instance_id)


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


def group_replicas(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Consecutive tensor-parallel ranks that hold identical KV, by KV cache group (unknown before 0.31: 1).

    Latent attention is the same on all ranks. A model may have recurrent layers beside it, which are not.
    """
    count = next((found for place in _PLANNING if (found := getattr(place, "kv_cache_groups_tp_replicas", None)) is not None), None)
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if count is None:
        return (1,) * len(groups)
    dcp = int(getattr(parallel, "decode_context_parallel_size", 1))
    return tuple(int(count([group], int(parallel.tensor_parallel_size), dcp)) for group in groups)


def worker_rank(vllm_config: Any) -> int:
    """This worker's rank in its engine; vLLM's world group may span the engines of a data-parallel group, one after another."""
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_world_group()
    except AssertionError:  # nobody has set it up: a single rank
        return 0
    return int(group.rank_in_group) % num_worker_ranks(vllm_config)


def _group_layout(vllm_config: Any, group: Any, dcp: int) -> GroupLayout:
    spec = group.kv_cache_spec
    inner = spec.first_spec if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
    kind, remedy = _kind(vllm_config, group, inner)
    window = {GroupKind.SLIDING: "sliding_window", GroupKind.CHUNKED: "attention_chunk_size"}.get(kind)
    return GroupLayout(
        kind,
        block_size=int(spec.block_size) * (dcp if getattr(spec, "dcp_sharded", False) else 1),
        window_tokens=int(getattr(inner, window)) if window else 0,
        extra_retained_tokens=int(getattr(inner, "extra_retained_tokens", 0)),
        eagle=bool(getattr(group, "is_eagle_group", False)) and kind is not GroupKind.STATE,
        name=type(inner).__name__,
        remedy=remedy,
    )


def _kind(vllm_config: Any, group: Any, spec: Any) -> tuple[GroupKind, str]:
    """How blocks of a group are reused, and, where they cannot be, what would help. A subclass does as its base class's manager."""
    if getattr(group, "host_resident", False):
        return GroupKind.UNSUPPORTED, "turn HiSparse off: its blocks lie in host memory of its own"
    if not getattr(group, "enable_kv_transfer", True) or not getattr(group.kv_cache_spec, "prefix_cacheable", True):
        return GroupKind.PRIVATE, ""
    if isinstance(spec, kv_cache_interface.MambaSpec):
        return _state_kind(vllm_config, spec)
    kind = next((kind for base, kind in _KINDS if isinstance(spec, base)), GroupKind.UNSUPPORTED)
    return kind, _REMEDIES.get(type(spec).__name__, _UNKNOWN_KIND) if kind is GroupKind.UNSUPPORTED else ""


def _state_kind(vllm_config: Any, spec: Any) -> tuple[GroupKind, str]:
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode == "none":
        return GroupKind.UNSUPPORTED, "turn prefix caching on (enable_prefix_caching): without it, vLLM keeps no recurrent states"
    if mode != "align":
        return GroupKind.UNSUPPORTED, f"mamba_cache_mode is {mode!r}; set it to 'align'"
    if getattr(vllm_config, "speculative_config", None) is not None and int(vllm_config.parallel_config.pipeline_parallel_size) > 1:
        return (
            GroupKind.UNSUPPORTED,
            "with drafts, states of earlier pipeline stages are final only after a step; turn drafts or pipeline parallelism off",
        )
    return GroupKind.STATE, ""


def tokens_per_step(vllm_config: Any) -> int:
    """New tokens that a request may get in one step, at most."""
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", None) or 0
    return 1 + int(drafts)
