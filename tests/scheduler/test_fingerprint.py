"""What an engine's fingerprint and the layout of its ranks say of the real vLLM: everything that changes bytes of KV, and nothing else."""

import dataclasses
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.v1.attention.backends import cpu_attn

from epochkv_connector.engine import blocks, describe, limits
from epochkv_connector.naming.identity import fingerprint
from tests.scheduler.rigs import TOKENS, MakeRig, found
from tests.support.scheduler import SharedStore


def fingerprint_of(rig: Any) -> str:
    return fingerprint(describe.describe_engine(rig.vllm_config, rig.kv_cache_config))


def changed(rig: Any, owner: Any, name: str, value: Any) -> str:
    """The fingerprint with another value of this field."""
    before = getattr(owner, name)
    object.__setattr__(owner, name, value)
    made = fingerprint_of(rig)
    object.__setattr__(owner, name, before)
    return made


def test_the_fingerprint_names_what_changes_bytes(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    config, cache = rig.vllm_config, rig.kv_cache_config
    base = fingerprint_of(rig)
    spec = cache.kv_cache_groups[0].kv_cache_spec
    changes = [
        (config.model_config, "quantization", "fp8"),
        (config.model_config, "quantization_config", {"linear": {"activation": "mxfp8"}}),
        (config.model_config, "max_model_len", 2048),
        (config.model_config, "model_class_overrides", {"Qwen3ForCausalLM": "mine:Model"}),
        (config.cache_config, "cache_dtype", "fp8"),
        (config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        (config.cache_config, "kv_cache_dtype_skip_layers", ["1"]),
        (config.cache_config, "kv_cache_dtype_skip_layers", ["2"]),
        (config.parallel_config, "tensor_parallel_size", 2),
        (config.parallel_config, "tensor_parallel_size", 4),  # with 2 KV heads: heads 0, 0, 1, 1 under the shards 0 to 3
        (config.parallel_config, "world_size", 4),
        (config.parallel_config, "pipeline_parallel_size", 2),
        (config.parallel_config, "decode_context_parallel_size", 2),
        (config.parallel_config, "cp_kv_cache_interleave_size", 16),
        (config.parallel_config, "dcp_kv_cache_interleave_size", 16),
        (config.parallel_config, "data_parallel_size", 2),
        (spec, "max_tp_shards", 1),
        (spec, "block_size", 32),
        (spec, "num_kv_heads", 4),
        (spec, "head_size", 64),
        (cache, "kv_cache_layout", "HND"),
        *((config.kernel_config, name, "another") for name in ("moe_backend", "linear_backend", "linear_backend_per_quant")),
        (config.model_config.hf_config, "rms_norm_eps", 1e-5),
        (config, "mamba_config", SimpleNamespace(backend="another")),
        (cache.kv_cache_groups[0], "layer_names", ["other"]),
    ]
    changes = [change for change in changes if hasattr(*change[:2])]  # some versions of vLLM have not all of these
    assert len(changes) >= 18
    assert len({base, *(changed(rig, *change) for change in changes)}) == 1 + len(changes)
    object.__setattr__(config.parallel_config, "data_parallel_size", 2)
    wide = "enable_expert_parallel", "all2all_backend", "expert_placement_strategy"
    several = {fingerprint_of(rig), *(changed(rig, config.parallel_config, name, "another") for name in wide)}
    names = (
        "BATCH_INVARIANT", "ROCM_USE_AITER_FP4BMM", "MARLIN_INPUT_DTYPE", "MOE_ROUTING_SIMULATION_STRATEGY", "ROCM_USE_AITER_MOE_A4W4_DSV4",
        "VIDEO_LOADER_BACKEND", "FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "ROCM_USE_AITER_FP8BMM", "CPU_INT4_W4A8", "USE_DEEP_GEMM_E8M0",
        "DEEPEPLL_NVFP4_DISPATCH", "ROCM_FP8_MFMA_PAGE_ATTN", "FLOAT32_MATMUL_PRECISION", "HUMMING_USE_F16_ACCUM", "B12X_MOE_FP4_FORCE_A16",
        "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "HUMMING_INPUT_QUANT_CONFIG", "ROCM_MUSE_MOE_REDUCE_DTYPE", "ROCM_QUICK_REDUCE_QUANTIZATION",
    )  # fmt: skip
    for name in names:
        monkeypatch.setattr(f"vllm.envs.VLLM_{name}", "another", raising=False)
        several.add(fingerprint_of(rig))
    assert len(several) == 1 + len(wide) + len(names)


def test_the_fingerprint_names_every_field_of_the_attention_configuration(make_rig: MakeRig) -> None:
    rig = make_rig()
    attention = rig.vllm_config.attention_config
    fields = [field.name for field in dataclasses.fields(attention)]
    assert {"backend", "backend_per_kind", "indexer_kv_dtype", "use_trtllm_attention"} <= set(fields)
    seen = {fingerprint_of(rig), *(changed(rig, attention, name, "something else") for name in fields)}
    assert len(seen) == 1 + len(fields)
    object.__setattr__(rig.vllm_config, "attention_config", None)  # versions may have none
    assert fingerprint_of(rig) not in seen


def test_the_fingerprint_names_how_media_are_read(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    options: list[Any] = [{}, {"mm_processor_kwargs": {"max_pixels": 3136}}, {"media_io_kwargs": {"video": {"num_frames": 8}}}]
    options += [{"video_pruning_rate": 0.5}, {"mm_processor_cache_gb": 1}]
    model = rig.vllm_config.model_config
    plain, *others = (changed(rig, model, "multimodal_config", MultiModalConfig(**given)) for given in options)
    assert others[-1] == plain, "how much is kept decides nothing"
    model.multimodal_config = MultiModalConfig()
    others.append(changed(rig, model, "hf_image_processor_config", {"image_mean": [0.5, 0.5, 0.5]}))
    monkeypatch.setattr(describe, "version", lambda package: f"another {package}")
    assert len({plain, *others, fingerprint_of(rig)}) == 6


def test_an_engine_of_another_layout_finds_nothing_under_its_own_names(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store holds the same tokens, of the same pool and epoch, from an engine with another fingerprint."""
    store = SharedStore()
    make_rig(store=store, epoch=0).serve(TOKENS)
    theirs, plain = set(store.objects), describe.describe_engine
    monkeypatch.setattr(describe, "describe_engine", lambda *args: {**plain(*args), "dtype": "bfloat16"})
    other = make_rig(store=store, epoch=0)
    assert found(other) == 0
    ours = set(store.objects) - theirs
    assert len(ours) == len(theirs) == 8
    for part in (1, -1):  # the fingerprint, and the block's name
        assert not {key.split("/")[part] for key in ours} & {key.split("/")[part] for key in theirs}


def test_the_fingerprint_leaves_out_where_the_model_lies_but_for_its_own_code(make_rig: MakeRig) -> None:
    rig = make_rig()
    model = rig.vllm_config.model_config
    base = fingerprint_of(rig)
    model.model, model.revision = "another/place", "abc"
    assert fingerprint_of(rig) == base, "equal weights share, wherever they were loaded from"
    model.trust_remote_code = True
    assert fingerprint_of(rig) == base, "this model has no code of its own"
    model.hf_config.auto_map = {"AutoModelForCausalLM": "modeling.Own"}
    assert fingerprint_of(rig) != base


def test_the_fingerprint_names_what_cpu_kernels_pack_keys_for(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    (group,) = rig.kv_cache_config.kv_cache_groups
    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, block_size=32, head_size=64)
    rig.vllm_config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    seen = set()
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=has_amx: answer)
        packing = describe.describe_platform(rig.vllm_config, rig.kv_cache_config)["packing"]
        assert packing == ["amx" if has_amx else "vec"]
        seen.add(fingerprint_of(rig))
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")  # another version: what the machine has is all that is known
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=has_amx: answer)
        seen.add(fingerprint_of(rig))
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    seen.add(fingerprint_of(rig))
    assert len(seen) == 5


def test_the_fingerprint_names_rocms_own_order_of_blocks(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    monkeypatch.setattr(describe, "on_cpu", lambda: False)
    plain = fingerprint_of(rig)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert fingerprint_of(rig) != plain


def test_adapters_are_named_by_how_they_are_applied() -> None:
    def described(**options: Any) -> str:
        return describe.describe_adapters(SimpleNamespace(lora_config=LoRAConfig(**options)))

    assert describe.describe_adapters(SimpleNamespace(lora_config=None)) == ""
    base = described()
    assert described(max_loras=4, max_lora_rank=64, max_cpu_loras=8) == base, "how many there may be changes nothing"
    others = [described(target_modules=["o_proj"]), described(lora_dtype="float16"), described(fully_sharded_loras=True)]
    assert len({base, *others}) == 4


def test_adapters_of_encoders_and_of_wide_models_are_not_named() -> None:
    def why(multimodal: bool, ranks: int = 1, **lora: bool) -> str | None:
        model, parallel = SimpleNamespace(is_multimodal_model=multimodal, is_moe=True), SimpleNamespace(data_parallel_size=ranks)
        adapters = SimpleNamespace(**lora) if lora else None
        config = SimpleNamespace(model_config=model, lora_config=adapters, parallel_config=parallel)
        return limits.why_no_adapters(config) or limits.why_adapters_alone(config, None)

    assert why(True, enable_tower_connector_lora=True) is not None
    assert why(True, enable_tower_connector_lora=False) is None
    assert why(False, enable_tower_connector_lora=True) is None
    assert why(True) is None
    assert why(False, 2) is not None


def test_a_random_hash_seed_keeps_names_at_home(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert blocks.hash_seed_is_random("xxhash")
    assert blocks.hash_seed_is_random("xxhash_cbor")
    assert not blocks.hash_seed_is_random("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not blocks.hash_seed_is_random("xxhash")
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setattr(blocks, "hash_seed_is_random", lambda algorithm: True)
    rig = make_rig(epoch=0)
    assert rig.pins.root.snapshot.shared
    assert rig.pins.root.snapshot.namespace is None
