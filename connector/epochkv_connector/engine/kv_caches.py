"""What vLLM does with KV blocks that neither its configuration nor the shapes of its tensors tell.

Exists because equal configurations and equal shapes can hold unlike bytes: vLLM picks attention backends by itself, CPU
kernels pack keys for the instructions that the machine has, and some backends keep scales beside the blocks. Checked
against vLLM 0.32; a name that another version lacks is described as unknown.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

UNKNOWN = "unknown"


def describe_layers(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, list[str]]:
    """Layer -> [class of the attention backend that runs it, type its KV is stored as], of the layers in this process."""
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    return {name: _describe_layer(layers[name]) for name in layer_names if name in layers}


def _describe_layer(layer: Any) -> list[str]:
    pick = getattr(layer, "get_attn_backend", None)
    backend = pick() if pick is not None else None
    used = f"{backend.__module__}.{backend.__qualname__}" if isinstance(backend, type) else UNKNOWN
    return [used, str(getattr(layer, "kv_cache_dtype", UNKNOWN))]


def describe_platform(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """What this machine does to the bytes of a block: packing of CPU kernels by group, ROCm's shuffled layout."""
    if on_cpu():
        return {"machine": platform.machine(), "packing": [_cpu_packing(vllm_config, group) for group in kv_cache_config.kv_cache_groups]}
    return {"shuffled": _is_shuffled()}


def on_cpu() -> bool:
    """Whether vLLM computes on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _cpu_packing(vllm_config: Any, group: Any) -> str:
    """The instruction set that keys of this group are packed for (`CPUAttentionMetadataBuilder` chooses it like this)."""
    spec = group.kv_cache_spec
    inner = spec.first_spec if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache_dtype = vllm_config.cache_config.cache_dtype
        return str(_get_attn_isa(vllm_config.model_config.dtype, int(spec.block_size), getattr(inner, "head_size", None), cache_dtype))
    except Exception:  # another version's function, or a model that it refuses
        return f"{UNKNOWN}, amx {_has_amx()}, avx512 {_has('_is_avx512_supported')}"


def _has(instructions: str) -> bool:
    import torch

    look = getattr(torch.cpu, instructions, None)
    return bool(look()) if look is not None else False


def _has_amx() -> bool:
    return _has("_is_amx_tile_supported")


def _is_shuffled() -> bool:
    """Whether ROCm's kernels keep blocks in an order of their own."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False))


def why_no_tiers(vllm_config: Any) -> str | None:
    """Why KV that leaves this engine's blocks, or comes into them, would be wrong or unused; None: it would not."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if on_cpu() and bool(getattr(model, "use_mla", False)) and not _cpu_mla_reads_context(vllm_config):
        return (
            "this model has multi-head latent attention, and vLLM's reference kernel for it, which runs on CPUs without AMX, ignores "
            "cached context, so every hit would answer wrongly; use a CPU with AMX or a GPU"
        )
    quantized = str(cache.cache_dtype) not in ("auto", "float16", "bfloat16", "float32")
    if quantized and not on_cpu() and _is_shuffled():
        return (
            "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set and KV is quantized: its scales lie outside of the blocks, so no connector can "
            "restore them; unset it, or set kv_cache_dtype to auto"
        )
    if quantized and bool(getattr(cache, "calculate_kv_scales", False)):  # before 0.32
        return (
            "calculate_kv_scales is on: each start takes the scales of quantized KV from its first prompt, and another engine would "
            "read blocks with other ones; turn it off and have the checkpoint bring them"
        )
    return None


def _cpu_mla_reads_context(vllm_config: Any) -> bool:
    """Whether a kernel that reads cached context runs (as `CpuPlatform.get_attn_backend_cls` chooses)."""
    from vllm.v1.attention.backends import registry

    kinds = registry.AttentionBackendEnum.__members__
    asked = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    if not _has_amx() or "AMX_MLA" not in kinds:
        return False
    own_kernels = getattr(vllm_config.model_config.hf_config, "model_type", None) == "deepseek_v4"
    return own_kernels or asked is None or asked is not kinds.get("CPU_MLA")
