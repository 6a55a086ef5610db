"""How each kind of vLLM's KV cache groups is reused: told by its class, and refused by name with what would help."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as specs

from epochkv_connector.engine import describe
from epochkv_connector.tiers.layout import CacheLayout, GroupKind

ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
STATE: dict[str, Any] = {"block_size": 16, "shapes": ((4, 4), (8,)), "dtypes": (torch.float32, torch.float32)}
LATENT: dict[str, Any] = {**ATTENTION, "cache_dtype_str": "auto"}


def mamba(mode: str) -> specs.MambaSpec:
    return specs.MambaSpec(**STATE, mamba_cache_mode=mode)


def layout_of(*groups: Any, drafts: bool = False, stages: int = 1) -> CacheLayout:
    """As an engine with these groups, or specs, would have it."""
    parallel = SimpleNamespace(pipeline_parallel_size=stages, decode_context_parallel_size=1)
    speculative = SimpleNamespace(use_eagle_block_drop=lambda: drafts, use_eagle=lambda: drafts) if drafts else None
    config = SimpleNamespace(
        parallel_config=parallel, speculative_config=speculative, model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2)
    )
    made = [group if hasattr(group, "layer_names") else specs.KVCacheGroupSpec([f"layer{i}"], group) for i, group in enumerate(groups)]
    return describe.cache_layout(config, SimpleNamespace(kv_cache_groups=made))


class PluginSpec(specs.SlidingWindowSpec):
    """As a platform plugin would make it."""


def spec_of(name: str, **values: Any) -> Any:
    """vLLM's spec of this class, or None where this version of vLLM has no such class or field."""
    made = PluginSpec if name == "PluginSpec" else getattr(specs, name, None)
    known = getattr(made, "__dataclass_fields__", {})
    return made(**values) if made is not None and values.keys() <= known.keys() else None


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("FullAttentionSpec", ATTENTION, GroupKind.FULL),
        ("MLAAttentionSpec", LATENT, GroupKind.FULL),
        ("SinkFullAttentionSpec", {**ATTENTION, "sink_len": 4}, GroupKind.FULL),
        ("SlidingWindowSpec", {**ATTENTION, "sliding_window": 48}, GroupKind.SLIDING),
        ("SlidingWindowMLASpec", {**LATENT, "sliding_window": 48}, GroupKind.SLIDING),
        ("PluginSpec", {**ATTENTION, "sliding_window": 48}, GroupKind.SLIDING),
        ("ChunkedLocalAttentionSpec", {**ATTENTION, "attention_chunk_size": 64}, GroupKind.CHUNKED),
        ("MambaSpec", {**STATE, "mamba_cache_mode": "align"}, GroupKind.STATE),
        ("CircularBufferSpec", ATTENTION, GroupKind.PRIVATE),
        ("SlidingWindowMLASpec", {**LATENT, "sliding_window": 48, "bounded_replay": True}, GroupKind.PRIVATE),
        ("FullAttentionSpec", {**ATTENTION, "non_causal": True}, GroupKind.UNSUPPORTED),
        ("RSWASpec", {**ATTENTION, "rswa_window": 48}, GroupKind.UNSUPPORTED),
    ],
)
def test_the_kind_is_told_by_the_class(name: str, values: dict[str, Any], kind: GroupKind) -> None:
    spec = spec_of(name, **values)
    if spec is None:
        pytest.skip(f"this version of vLLM has no such layers: {name} with {sorted(values)}")
    layout = layout_of(spec, specs.FullAttentionSpec(**ATTENTION))
    assert layout.groups[0].kind is kind
    assert (layout.problem() is None) == (kind is not GroupKind.UNSUPPORTED)


def test_windows_and_chunks_have_their_length() -> None:
    window = specs.SlidingWindowSpec(**ATTENTION, sliding_window=48)
    chunk = specs.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)
    assert [group.window_tokens for group in layout_of(window, chunk, mamba("align")).groups] == [48, 64, 0]


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        (layout_of(mamba("none")), "turn prefix caching on"),
        (layout_of(mamba("all")), "set it to 'align'"),
        (layout_of(mamba("align"), drafts=True, stages=2), "turn drafts or pipeline parallelism off"),
        (layout_of(specs.EncoderOnlyAttentionSpec(**ATTENTION)), "does not know this kind of layer"),
    ],
)
def test_what_cannot_be_restored_says_what_would_help(layout: CacheLayout, remedy: str) -> None:
    assert remedy in (layout.problem() or "")


def test_blocks_that_lie_in_host_memory_of_their_own_are_refused() -> None:
    group = specs.KVCacheGroupSpec(["a"], specs.FullAttentionSpec(**ATTENTION))
    if not hasattr(group, "host_resident"):
        pytest.skip("this version of vLLM has no such groups")
    group.host_resident = True
    assert "turn HiSparse off" in (layout_of(group).problem() or "")


def test_a_group_that_vllm_makes_anew_counts_for_alignment_alone() -> None:
    ring = spec_of("CircularBufferSpec", **{**ATTENTION, "block_size": 48, "head_size": 1024})
    if ring is None:
        pytest.skip("this version of vLLM has no such layers")
    layout = layout_of(ring, specs.FullAttentionSpec(**ATTENTION))
    assert layout.alignment_tokens == 48
    assert [index for index, _ in layout.restored] == [1]


def test_ranks_that_hold_the_same_bytes_are_counted_by_group() -> None:
    """As in Kimi-Linear: latent attention is the same on every rank, recurrent states are not."""
    latent = spec_of("MLAAttentionSpec", **LATENT, max_tp_shards=1)
    if latent is None:
        pytest.skip("this version of vLLM does not say so")
    groups = [specs.KVCacheGroupSpec(["a"], latent), specs.KVCacheGroupSpec(["b"], mamba("align"))]
    parallel = SimpleNamespace(tensor_parallel_size=4, decode_context_parallel_size=1)
    config, cache = SimpleNamespace(parallel_config=parallel), SimpleNamespace(kv_cache_groups=groups)
    assert describe.group_replicas(config, cache) == (4, 1)


def test_drafts_take_a_block_off_attention_and_nothing_off_states() -> None:
    layout = layout_of(specs.FullAttentionSpec(**ATTENTION), mamba("align"), drafts=True)
    assert [group.eagle for group in layout.groups] == [True, False]
