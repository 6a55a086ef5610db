"""What an engine is: how its KV is cut (groups, ranks, shards, replicas, machines), and what else decides what a byte of KV is.

The latter, without weights, is plain values that a fingerprint digests. Equal configurations and equal shapes can hold unlike bytes:
vLLM picks attention backends by itself, CPU kernels pack keys for the instructions that the machine has, some backends keep scales
beside the blocks. How many bytes a block takes, only ranks know (`wire.RankLayout`).

A name that another version of vLLM lacks is described as unknown.
"""

import dataclasses
import hashlib
import json
import math
import platform
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import vllm

from epochkv_connector.engine.interface import kv_cache_interface, kv_cache_planning, kv_cache_utils
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout

_KINDS = (
    (kv_cache_interface.FullAttentionSpec, GroupKind.FULL),
    (kv_cache_interface.SlidingWindowSpec, GroupKind.SLIDING),
    (kv_cache_interface.ChunkedLocalAttentionSpec, GroupKind.CHUNKED),
)

_NUMBERS = (
    "B12X_MOE_FP4_FORCE_A16", "BATCH_INVARIANT", "CPU_INT4_W4A8", "DEEPEPLL_NVFP4_DISPATCH", "FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "FLOAT32_MATMUL_PRECISION", "HUMMING_INPUT_QUANT_CONFIG", "HUMMING_USE_F16_ACCUM", "MARLIN_INPUT_DTYPE",
    "MOE_ROUTING_SIMULATION_STRATEGY", "ROCM_FP8_MFMA_PAGE_ATTN", "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "ROCM_QUICK_REDUCE_QUANTIZATION",
    "ROCM_USE_AITER_FP4BMM", "ROCM_USE_AITER_FP8BMM", "ROCM_USE_AITER_MOE_A4W4_DSV4", "ROCM_MUSE_MOE_REDUCE_DTYPE", "USE_DEEP_GEMM_E8M0",
    "VIDEO_LOADER_BACKEND",
)  # fmt: skip
"""Variables of vLLM that say in which numbers a pass computes, which experts it takes, or how it reads videos."""


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


_CORES = "epochkv_cores_here"


def note_cores(vllm_config: Any) -> None:
    """Keep how many data-parallel ranks vLLM starts on this machine: it tells each one of a dense model that it is the only one. Called
    where the configuration is made; every process of the engine gets it from there."""
    setattr(vllm_config.parallel_config, _CORES, int(vllm_config.parallel_config.data_parallel_size_local))


def ranks_here(vllm_config: Any) -> int:
    """Worker ranks that vLLM starts on one machine, of all data-parallel ranks. Where Ray puts them, nobody knows: all of one."""
    parallel = vllm_config.parallel_config
    cores = int(getattr(parallel, _CORES, parallel.data_parallel_size_local))
    machines = int(getattr(parallel, "nnodes_within_dp", 1) or 1)
    return max(1, cores) * num_worker_ranks(vllm_config) // max(1, machines)


def has_ranks_here(vllm_config: Any) -> bool:
    """Whether ranks of the engine are certain to run on the machine of the process that makes it."""
    parallel = vllm_config.parallel_config
    started_here = parallel.distributed_executor_backend in ("mp", "uni") and getattr(parallel, "data_parallel_backend", "mp") == "mp"
    return started_here and int(parallel.data_parallel_size_local) > 0


def group_replicas(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Consecutive tensor-parallel ranks that hold identical KV, by KV cache group (unknown before 0.31: 1).

    Latent attention is the same on all ranks. A model may have recurrent layers beside it, which are not.
    """
    name = "kv_cache_groups_tp_replicas"
    count = getattr(kv_cache_utils, name, None) or getattr(kv_cache_planning, name, None)  # the latter from 0.33 on
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


def ends_no_step(vllm_config: Any) -> bool:
    """vLLM's first model runner ends a step behind the drafts that the last pipeline stage makes. The others are never told."""
    size, stages = num_worker_ranks(vllm_config), int(vllm_config.parallel_config.pipeline_parallel_size)
    return getattr(vllm_config, "speculative_config", None) is not None and worker_rank(vllm_config) < size - size // stages


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
    if getattr(spec, "non_causal", False) or hasattr(spec, "rswa_window"):
        return GroupKind.UNSUPPORTED, "KV of this model does not depend on the tokens before alone; start the engine without EpochKV"
    if (kind := next((kind for base, kind in _KINDS if isinstance(spec, base)), None)) is not None:
        return kind, ""
    return GroupKind.UNSUPPORTED, "this version of EpochKV does not know this kind of layer; start the engine without EpochKV"


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
    """New tokens that a request may get in one step, at most. 0: several steps decide a token, as in diffusion models."""
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return 0
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", None) or 0
    return 1 + int(drafts)


UNKNOWN = "unknown"

_LORA_CAPACITIES = frozenset(
    ("max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels", "default_mm_loras", "specialize_active_lora")
)
"""Fields of `LoRAConfig` that do not change how an adapter is applied. Every other field counts, including later ones."""

_MEDIA_CAPACITIES = frozenset(
    ("limit_per_prompt", "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
     "mm_tensor_ipc", "skip_mm_profiling")
)  # fmt: skip
"""The same of `MultiModalConfig`. Hashes of media tell what a request asks for, and not how its engine reads them."""

_KERNEL_WARMUP = frozenset(
    ("enable_jit_warmup", "enable_flashinfer_autotune", "enable_cutedsl_warmup", "enable_rocm_segmented_attn_autotune", "ir_op_priority")
)
"""The same of `KernelConfig`. vLLM sets them by its mode of compilation, which does not count either."""

_VOLATILE_HF_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "_attn_implementation_autoset")


def describe_engine(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Everything but weights that changes KV bytes or their layout, as JSON (`identity.fingerprint` digests it).

    The path that the model was loaded from is left out: its configuration and the digest of its weights say what it held. The
    layout of tensors is left out, too: each rank reports its own (`worker.layout.layout_digest`). Tensor-parallel size
    and number of shards are in, because rank 1 of 2 holds other heads than rank 1 of 4. The interpreter's minor version is in
    for hash algorithms that pickle.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm, media = str(cache.prefix_caching_hash_algo), _options(getattr(model, "multimodal_config", None), _MEDIA_CAPACITIES)
    speculative = getattr(vllm_config, "speculative_config", None)
    return {
        "vllm": vllm.__version__,
        "remote_code": [_remote_code(model), _plain(getattr(model, "model_class_overrides", None))],
        "hf_config": _model_digest(model),
        "max_model_len": _plain(getattr(model, "max_model_len", None)),  # picks LongRoPE factors and Llama 4's temperature
        "dtype": str(model.dtype),
        "quantization": [_plain(getattr(model, name, None)) for name in ("quantization", "quantization_config")],
        "media": media and [media, _plain(getattr(model, "hf_image_processor_config", None)), version("transformers")],  # beyond bytes
        "kernels": _options(getattr(vllm_config, "kernel_config", None), _KERNEL_WARMUP),
        "mamba": _options(getattr(vllm_config, "mamba_config", None)),
        "numbers": [_plain(getattr(vllm.envs, f"VLLM_{name}", None)) for name in _NUMBERS],
        "cache_dtype": str(cache.cache_dtype),
        "skip_layers": sorted(str(layer) for layer in getattr(cache, "kv_cache_dtype_skip_layers", None) or ()),
        "layout": _plain(getattr(kv_cache_config, "kv_cache_layout", None) or getattr(cache, "kv_cache_layout", None)),
        "hash_block_size": _plain(getattr(kv_cache_config, "hash_block_size", None) or getattr(cache, "prefix_match_unit", None)),
        "groups": [
            {"spec": _plain(group.kv_cache_spec), "layers": list(group.layer_names), "eagle": bool(getattr(group, "is_eagle_group", False))}
            for group in kv_cache_config.kv_cache_groups
        ],
        "platform": describe_platform(vllm_config, kv_cache_config),
        "tensor": int(parallel.tensor_parallel_size),
        "world": int(parallel.world_size),
        "replicas": group_replicas(vllm_config, kv_cache_config),
        "pipeline": int(parallel.pipeline_parallel_size),
        "domain": _domain(vllm_config) if int(parallel.data_parallel_size) > 1 else None,
        "decode_context": int(getattr(parallel, "decode_context_parallel_size", 1)),
        "prefill_context": int(getattr(parallel, "prefill_context_parallel_size", 1)),
        "context_interleave": [
            _plain(getattr(parallel, name, None)) for name in ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
        ],
        "hash_algorithm": algorithm,
        "interpreter": ".".join(platform.python_version_tuple()[:2]) if "cbor" not in algorithm else "",
        "attention": _options(getattr(vllm_config, "attention_config", None)),
        "speculative": [
            _plain(getattr(speculative, "method", None)),
            _model_digest(getattr(speculative, "draft_model_config", None)),
            _plain(getattr(speculative, "num_speculative_tokens", None)),
        ]
        if speculative is not None
        else None,
    }


def _domain(vllm_config: Any) -> list[Any]:
    """How experts lie on data-parallel ranks, and how tokens get there. Which rank computes a token decides nothing."""
    names = ("data_parallel_size", "enable_expert_parallel", "all2all_backend", "expert_placement_strategy")
    return [_plain(getattr(vllm_config.parallel_config, name, None)) for name in names]


def describe_adapters(vllm_config: Any) -> str:
    """How adapters are applied: a digest of every option but the limits on their number. Empty without adapters."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return ""
    options = _options(lora, _LORA_CAPACITIES)
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()


def describe_layers(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, list[str]]:
    """Layer -> [class of the attention backend that runs it, type its KV is stored as], of the layers in this process."""
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    return {name: _describe_layer(layers[name]) for name in layer_names if name in layers}


def layers_digest(vllm_config: Any) -> bytes:
    """16 bytes for `describe_layers` of all layers of this process that have a backend."""
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    described = describe_layers(vllm_config, sorted(name for name, layer in layers.items() if hasattr(layer, "get_attn_backend")))
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()[:16]


def _describe_layer(layer: Any) -> list[str]:
    pick = getattr(layer, "get_attn_backend", None)
    backend = pick() if pick is not None else None
    used = f"{backend.__module__}.{backend.__qualname__}" if isinstance(backend, type) else UNKNOWN
    return [used, str(getattr(layer, "kv_cache_dtype", UNKNOWN))]


def describe_platform(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """What this machine does to the bytes of a block: packing of CPU kernels by group, ROCm's shuffled layout."""
    if on_cpu():
        return {"machine": platform.machine(), "packing": [_cpu_packing(vllm_config, group) for group in kv_cache_config.kv_cache_groups]}
    return {"shuffled": is_set("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")}


def _cpu_packing(vllm_config: Any, group: Any) -> str:
    """The instruction set that keys of this group are packed for (`CPUAttentionMetadataBuilder` chooses it like this)."""
    spec = group.kv_cache_spec
    inner = spec.first_spec if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache_dtype = vllm_config.cache_config.cache_dtype
        return str(_get_attn_isa(vllm_config.model_config.dtype, int(spec.block_size), getattr(inner, "head_size", None), cache_dtype))
    except Exception:  # another version's function, or a model that it refuses
        return f"{UNKNOWN}, amx {_has('_is_amx_tile_supported')}, avx512 {_has('_is_avx512_supported')}"


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _has(instructions: str) -> bool:
    import torch

    look = getattr(torch.cpu, instructions, None)
    return bool(look()) if look is not None else False


def is_set(variable: str) -> bool:
    """Whether this variable of vLLM is on; False where this version has none."""
    from vllm import envs

    return bool(getattr(envs, variable, False))


def _plain(value: Any) -> Any:
    """JSON of a value of a vLLM configuration, without memory addresses."""
    if value is None or isinstance(value, (bool, int, float, str)):
        plain: Any = value
    elif isinstance(value, dict):
        plain = {str(key): _plain(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        plain = [_plain(item) for item in value]
    elif isinstance(value, (set, frozenset)):
        plain = sorted(str(_plain(item)) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        plain = {"type": type(value).__name__, **fields}
    elif isinstance(getattr(value, "name", None), str):
        plain = value.name
    else:
        plain = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return plain


def _options(config: Any, left_out: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Every field of one of vLLM's configurations, including fields that later versions add. None: there is no such configuration."""
    return None if config is None else {key: _plain(value) for key, value in vars(config).items() if key not in left_out}


def _model_digest(model_config: Any) -> str:
    hf_config = getattr(model_config, "hf_config", None)
    described = hf_config.to_dict() if hf_config is not None and hasattr(hf_config, "to_dict") else {}
    kept = {key: value for key, value in described.items() if key not in _VOLATILE_HF_KEYS}
    text = json.dumps(_plain(kept), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _remote_code(model: Any) -> list[Any] | None:
    """Where the model's own code comes from; None: the model runs on vLLM's code."""
    if not (getattr(model, "trust_remote_code", False) and getattr(getattr(model, "hf_config", None), "auto_map", None)):
        return None
    return [str(model.model), _plain(getattr(model, "revision", None)), _plain(getattr(model, "code_revision", None))]
