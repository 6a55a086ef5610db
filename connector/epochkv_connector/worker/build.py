"""Builds one rank's worker from the configuration and vLLM's KV tensors.

`scheduler.build` derives slots and shards from the same numbers (`engine.topology`), so scheduler and workers cannot disagree.
"""

from __future__ import annotations

import logging
from typing import Any

from epochkv_connector.config.connector_config import ConnectorConfig
from epochkv_connector.config.machine import check_fits
from epochkv_connector.engine import topology
from epochkv_connector.engine.describe import describe_layers, describe_platform
from epochkv_connector.scheduler.tiers.index import slot_count
from epochkv_connector.store import StoreClient, StoreSettings
from epochkv_connector.worker import sleeping
from epochkv_connector.worker.copying.layout import GroupSpec, layout_digest
from epochkv_connector.worker.copying.staging import HostRegion, Staging
from epochkv_connector.worker.runner import JobRunner

logger = logging.getLogger("vllm.epochkv.tiers")


def build_runner(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> JobRunner:
    """What executes this rank's jobs.

    Raises:
        LayoutError, ConfigError, OSError, RuntimeError: this engine cannot be staged.
    """
    layout = topology.cache_layout(vllm_config, kv_cache_config)
    ranks, rank = topology.num_worker_ranks(vllm_config), topology.worker_rank(vllm_config)
    shards = topology.num_kv_shards(vllm_config, kv_cache_config)
    settings = StoreSettings.of(config)
    described = kv_cache_config.kv_cache_groups
    groups = {
        index: GroupSpec(list(described[index].layer_names), described[index].kv_cache_spec.block_size) for index, _ in layout.restored
    }
    layers = describe_layers(vllm_config, [name for group in groups.values() for name in group.layer_names])
    about = {"layers": layers, "platform": describe_platform(vllm_config, kv_cache_config)}
    own_layout = layout_digest(kv_caches, list(groups.values()), kv_cache_config.num_blocks, about)

    def open_store(region: HostRegion) -> StoreClient:
        assert settings is not None
        client = StoreClient(settings, [(region.address, region.num_bytes)], layout=own_layout)
        client.start()
        return client

    num_slots = slot_count(config, max(1, layout.slot_bytes), ranks)
    if config.local is None:
        local_ranks = ranks // topology.num_machines(vllm_config)
        check_fits(num_slots * layout.slot_bytes * local_ranks, "staging_slots", config.staging_slots)
    staging = Staging(kv_caches, groups, num_slots, kv_cache_config.num_blocks)
    runner = JobRunner(
        staging,
        rank=rank,
        world_size=ranks,
        shard=rank // (ranks // shards),
        num_shards=shards,
        layout=own_layout,
        open_store=open_store if settings is not None else None,
    )
    stride = staging.region.stride
    if stride > layout.slot_bytes:  # less: a pipeline stage with fewer layers than another
        logger.warning(
            "EpochKV: a block takes %d bytes of host memory, %d were expected from the configuration; L1 uses %.2f times "
            "local.capacity_bytes",
            stride,
            layout.slot_bytes,
            stride / max(1, layout.slot_bytes),
        )
    sleeping.register(str(vllm_config.kv_transfer_config.engine_id), runner)
    return runner
