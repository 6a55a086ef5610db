"""What a vLLM `Scheduler` with our connector is configured with, in tests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq
from vllm import config as configs
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

from epochkv_connector.wire import RankLayout
from hack.models import Shape

BLOCK = 16
HEAD = 16
MAX_MODEL_LEN = 4096
STATE = "state"
CHUNK = "chunk"

MODEL_CONFIG = {**Shape(hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=16, positions=8192).config(), "eos_token_id": 2}


def write_model_dir(path: Path) -> Path:
    """A Hugging Face configuration without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return path


def write_credentials(path: Path) -> Path:
    """A credentials directory whose hub nobody listens to; grants are given by the tests."""
    path.mkdir(parents=True, exist_ok=True)
    hub_public, _ = zmq.curve_keypair()
    public, private = zmq.curve_keypair()
    for name, value in (("hub.pub", hub_public), ("client.pub", public), ("client.key", private)):
        (path / name).write_bytes(value)
    (path / "root.secret").write_text("ab" * 32)
    return path


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is started with.

    Attributes:
        l1_bytes: capacity of L1; None: it has none.
        groups: of its layers: `full`, `state` (recurrent), `chunk` with its length in tokens, the window in tokens, or `unlike` (two
            full layers, the second with pages seven times as large).
        num_layers: on each rank, in each group; pipeline stages may have unlike numbers. Empty: one.
        checkpoints: layers with states hand out the state inside of a chunk, too, as Mamba-2 does on GPUs. Without drafts.
        retention: vLLM's `prefix_cache_retention_interval`. None: every state that it makes is kept.
        extra: of our configuration.
        transfer: of vLLM's configuration of connectors.
        caching: vLLM's own prefix cache.
        connector: ours is there.
    """

    num_blocks: int = 64
    l1_bytes: int | None = 1 << 20
    hub: bool = True
    num_ranks: int = 1
    groups: Sequence[str] = ("full",)
    num_layers: Sequence[int] = ()
    retention: int | None = None
    max_batched_tokens: int = 8192
    max_num_seqs: int = 16
    extra: dict[str, Any] | None = None
    transfer: dict[str, Any] | None = None
    kv_events: bool = False
    pool_uid: str = "6f1c2d3e-0000-4000-8000-000000000001"
    caching: bool = True
    connector: bool = True
    num_drafts: int = 0
    checkpoints: bool = False
    async_scheduling: bool = False


def vllm_config(tmp: Path, options: EngineOptions, has_store: bool) -> VllmConfig:
    """The configuration of an engine whose files are in and beside `tmp`."""
    files = str(write_model_dir(tmp.parent / "model"))
    model = ModelConfig(model=files, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0)
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=options.caching)
    cache.num_gpu_blocks = options.num_blocks
    sizes: Any = {"max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.max_batched_tokens, "watermark": 0.0}
    off = dict.fromkeys(("is_encoder_decoder", "disable_hybrid_kv_cache_manager", "async_scheduling"), False)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=True, **sizes, **off),
        device_config=configs.DeviceConfig("cpu"),
        parallel_config=configs.ParallelConfig(),
        kv_events_config=configs.KVEventsConfig(enable_kv_cache_events=True, publisher="null") if options.kv_events else None,
        kv_transfer_config=_kv_transfer_config(tmp, options, has_store),
    )
    config.parallel_config.world_size = options.num_ranks
    if options.num_drafts:
        target: dict[str, Any] = {"target_model_config": model, "target_parallel_config": config.parallel_config}
        drafts = {"num_speculative_tokens": options.num_drafts, "prompt_lookup_max": 2}
        config.speculative_config = configs.SpeculativeConfig(method="ngram", **drafts, **target)
    config.scheduler_config.async_scheduling = options.async_scheduling
    if STATE in options.groups:  # as `MambaModelConfig` does for a model that has such layers
        cache.mamba_cache_mode, cache.mamba_block_size = "align", BLOCK
    if not options.connector:
        config.kv_transfer_config = None
    return config


def _kv_transfer_config(tmp: Path, options: EngineOptions, has_store: bool) -> KVTransferConfig:
    pool = {"name": "policy", "namespace": "default", "uid": options.pool_uid}
    ours: dict[str, Any] = {"pool": pool, "lookup_wait_ms": 50.0, "lookup_deadline_ms": 200.0, **(options.extra or {})}
    if options.hub:
        ours["hub"] = {"endpoint": "tcp://127.0.0.1:9", "credentials_dir": str(write_credentials(tmp / "fence"))}
    if options.l1_bytes is not None:
        ours["local"] = {"capacity_bytes": options.l1_bytes}
    if has_store:
        ours["distributed"] = {"master_address": "127.0.0.1:1"}
    given: dict[str, Any] = {"kv_role": "kv_both", **(options.transfer or {})}
    place = "epochkv_connector.connector"
    return KVTransferConfig(kv_connector="EpochKVConnector", kv_connector_module_path=place, kv_connector_extra_config=ours, **given)


def rank_kv_cache_config(options: EngineOptions, rank: int = 0) -> specs.KVCacheConfig:
    """What one rank gets: groups of layers of one head."""
    made = []
    for index, kind in enumerate(options.groups):
        names = [f"layer{index}"]
        spec: specs.KVCacheSpec
        if kind == "unlike":
            names.append(f"layer{index}.drafter")
            spec = specs.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={names[0]: _full(HEAD), names[1]: _full(7 * HEAD)})
        else:
            names += [f"layer{index}.{number}" for number in range(1, options.num_layers[rank] if options.num_layers else 1)]
            spec = _state(options) if kind == STATE else _attention(kind)
        made.append(specs.KVCacheGroupSpec(names, spec))
    return specs.KVCacheConfig(
        num_blocks=options.num_blocks, kv_cache_tensors=[], kv_cache_groups=made, prefix_cache_retention_interval=options.retention
    )


def _state(options: EngineOptions) -> specs.MambaSpec:
    shapes, dtypes = ((4, 4), (8,)), (torch.float32, torch.float32)
    inside = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if options.checkpoints else {}
    return specs.MambaSpec(
        block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align", num_speculative_blocks=options.num_drafts, **inside
    )


def _attention(kind: str) -> specs.KVCacheSpec:
    if kind == "full":
        return _full(HEAD)
    if kind.startswith(CHUNK):
        return specs.ChunkedLocalAttentionSpec(**_layer(HEAD), attention_chunk_size=int(kind.removeprefix(CHUNK)))
    return specs.SlidingWindowSpec(**_layer(HEAD), sliding_window=int(kind))


def _layer(head_size: int) -> dict[str, Any]:
    return {"block_size": BLOCK, "num_kv_heads": 1, "head_size": head_size, "dtype": torch.float32}


def _full(head_size: int) -> specs.FullAttentionSpec:
    return specs.FullAttentionSpec(**_layer(head_size))


def kv_cache_config(options: EngineOptions) -> specs.KVCacheConfig:
    """What vLLM shows the scheduler role of it."""
    return generate_scheduler_kv_cache_config([rank_kv_cache_config(options, rank) for rank in range(options.num_ranks)])


def rank_layout(options: EngineOptions, rank: int) -> RankLayout:
    """What a rank finds out about its tensors: layers lie in a slot one after the other, between ends of 128 bytes, aligned to 256."""
    payloads = []
    for group in rank_kv_cache_config(options, rank).kv_cache_groups:
        unlike = isinstance(group.kv_cache_spec, specs.UniformTypeKVCacheSpecs)
        payloads.append(group.kv_cache_spec.page_size_bytes * (1 if unlike else len(group.layer_names)))
    stride = -(-(max(payloads) + 256) // 256) * 256
    ring = int((options.extra or {}).get("staging_slots", 64))
    num_slots = ring if options.l1_bytes is None else options.l1_bytes // options.num_ranks // stride
    return RankLayout(b"", num_slots, dict(enumerate(payloads)))
