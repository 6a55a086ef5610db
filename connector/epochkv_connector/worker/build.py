"""Builds one rank's worker from the configuration and vLLM's KV tensors.

What a block takes is measured on the tensors, and the scheduler role is told how many slots that makes (`wire.layout`).
"""

from __future__ import annotations

from typing import Any

from epochkv_connector.config.connector_config import ConfigError, ConnectorConfig
from epochkv_connector.config.machine import check_fits
from epochkv_connector.engine import topology
from epochkv_connector.engine.describe import describe_layers, describe_platform
from epochkv_connector.store import StoreClient, StoreSettings
from epochkv_connector.worker import sleeping
from epochkv_connector.worker.copying.layout import GroupSpec, group_view, layout_digest
from epochkv_connector.worker.copying.slots import slot_stride
from epochkv_connector.worker.copying.staging import HostRegion, Staging
from epochkv_connector.worker.runner import JobRunner


def slot_count(config: ConnectorConfig, slot_bytes: int, num_ranks: int) -> int:
    """Slots of a rank's host region: its share of L1's capacity, or the staging ring when there is no L1.

    Args:
        slot_bytes: from one slot to the next.

    Raises:
        ConfigError: the share has no room for one slot.
    """
    if config.local is None:
        return config.staging_slots
    count = config.local.capacity_bytes // (slot_bytes * num_ranks)
    if count < 1:
        raise ConfigError(
            f"local.capacity_bytes is {config.local.capacity_bytes}; one block takes {slot_bytes} bytes on each of "
            f"{num_ranks} ranks, so give at least {slot_bytes * num_ranks} (or leave local out for no L1)"
        )
    return count


def build_runner(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> JobRunner:
    """What executes this rank's jobs.

    Raises:
        LayoutError, ConfigError, OSError, RuntimeError: this engine cannot be staged.
    """
    layout = topology.cache_layout(vllm_config, kv_cache_config)
    ranks, rank = topology.num_worker_ranks(vllm_config), topology.worker_rank(vllm_config)
    settings = StoreSettings.of(config)
    described = kv_cache_config.kv_cache_groups
    groups = {
        index: GroupSpec(list(described[index].layer_names), described[index].kv_cache_spec.block_size) for index, _ in layout.restored
    }
    layers = describe_layers(vllm_config, [name for group in groups.values() for name in group.layer_names])
    about = {"layers": layers, "platform": describe_platform(vllm_config, kv_cache_config)}
    digest = layout_digest(kv_caches, list(groups.values()), kv_cache_config.num_blocks, about)

    def open_store(region: HostRegion) -> StoreClient:
        assert settings is not None
        client = StoreClient(settings, [(region.address, region.num_bytes)], layout=digest)
        client.start()
        return client

    stride = slot_stride([group_view(kv_caches, group, kv_cache_config.num_blocks).payload_bytes for group in groups.values()])
    num_slots = slot_count(config, stride, ranks)
    if config.local is None:
        local_ranks = ranks // topology.num_machines(vllm_config)
        check_fits(num_slots * stride * local_ranks, "staging_slots", config.staging_slots)
    staging = Staging(kv_caches, groups, num_slots, kv_cache_config.num_blocks)
    runner = JobRunner(
        staging,
        rank=rank,
        world_size=ranks,
        replicas=topology.group_replicas(vllm_config, kv_cache_config),
        digest=digest,
        open_store=open_store if settings is not None else None,
    )
    sleeping.register(str(vllm_config.kv_transfer_config.engine_id), runner)
    return runner
