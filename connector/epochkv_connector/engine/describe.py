"""Everything but weights that decides what a byte of KV is, as plain values that a fingerprint digests.

Equal configurations and equal shapes can hold unlike bytes. vLLM picks attention backends by itself. CPU kernels pack keys for the
instructions that the machine has. Some backends keep scales beside the blocks. Knows of vLLM 0.30 to 0.33: fields
of its configurations (those it adds are described too), `static_forward_context`, `cpu_attn._get_attn_isa` of 0.32, and the
variable for ROCm's shuffled layout. A name that another version lacks is described as unknown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Iterable
from typing import Any

import vllm

from epochkv_connector.engine.topology import group_replicas

UNKNOWN = "unknown"

_LORA_CAPACITIES = frozenset(
    ("max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels", "default_mm_loras", "specialize_active_lora")
)
"""Fields of `LoRAConfig` that do not change how an adapter is applied. Every other field counts, including later ones."""

_VOLATILE_HF_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "_attn_implementation_autoset")


def describe_engine(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Everything but weights that changes KV bytes or their layout, as JSON (`identity.fingerprint` digests it).

    The path that the model was loaded from is left out: its configuration and the digest of its weights say what it held. The
    layout of tensors is left out, too: each rank reports its own (`worker.copying.layout.layout_digest`). Tensor-parallel size
    and number of shards are in, because rank 1 of 2 holds other heads than rank 1 of 4. The interpreter's minor version is in
    for hash algorithms that pickle.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    speculative = getattr(vllm_config, "speculative_config", None)
    return {
        "vllm": vllm.__version__,
        "remote_code": _remote_code(model),
        "hf_config": _model_digest(model),
        "max_model_len": _plain(getattr(model, "max_model_len", None)),  # picks LongRoPE factors and Llama 4's temperature
        "dtype": str(model.dtype),
        "quantization": _plain(getattr(model, "quantization", None)),
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
    return {"shuffled": is_shuffled()}


def _cpu_packing(vllm_config: Any, group: Any) -> str:
    """The instruction set that keys of this group are packed for (`CPUAttentionMetadataBuilder` chooses it like this)."""
    spec = group.kv_cache_spec
    inner = spec.first_spec if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache_dtype = vllm_config.cache_config.cache_dtype
        return str(_get_attn_isa(vllm_config.model_config.dtype, int(spec.block_size), getattr(inner, "head_size", None), cache_dtype))
    except Exception:  # another version's function, or a model that it refuses
        return f"{UNKNOWN}, amx {has_amx()}, avx512 {_has('_is_avx512_supported')}"


def on_cpu() -> bool:
    """Whether vLLM computes on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _has(instructions: str) -> bool:
    import torch

    look = getattr(torch.cpu, instructions, None)
    return bool(look()) if look is not None else False


def has_amx() -> bool:
    """Whether this CPU has AMX tiles."""
    return _has("_is_amx_tile_supported")


def is_shuffled() -> bool:
    """Whether ROCm's kernels keep blocks in an order of their own."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False))


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
