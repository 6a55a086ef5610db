"""Builds the two halves from the configuration: the scheduler half with its L2 lookup client, and the worker half of a rank.

Both derive slots and shards from the same numbers here, so they cannot disagree.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from epochkv_connector.config.connector_config import ConnectorConfig
from epochkv_connector.config.machine import check_fits
from epochkv_connector.engine import topology
from epochkv_connector.engine.describe import describe_layers, describe_platform
from epochkv_connector.naming.identity import pool_prefix
from epochkv_connector.naming.object_keys import object_key, older_pattern, other_weights_pattern
from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping
from epochkv_connector.scheduler.tiers.index import slot_count
from epochkv_connector.scheduler.tiers.views import KeysOf, LookupClient
from epochkv_connector.store import StoreClient, StoreSettings
from epochkv_connector.worker import sleeping
from epochkv_connector.worker.copying.layout import GroupSpec, layout_digest
from epochkv_connector.worker.copying.slots import object_bytes
from epochkv_connector.worker.copying.staging import HostRegion
from epochkv_connector.worker.half import WorkerHalf

logger = logging.getLogger("vllm.epochkv.tiers")

CLOSE_SECONDS = 2.0


class LookupStore(LookupClient, Protocol):
    """`store.StoreClient` as the scheduler half uses it."""

    def close(self, timeout: float = 5.0) -> bool: ...
    def remove_matching(self, pattern: str, timeout: float = 10.0) -> int: ...
    def stats(self) -> dict[str, float]: ...


@dataclass
class SchedulerTiers:
    """The bookkeeping of the scheduler half and what it owns.

    Attributes:
        object_bytes: size of an L2 object of this engine, by KV cache group.
    """

    books: Bookkeeping
    store: LookupStore | None
    object_bytes: tuple[int, ...] = ()

    def reclaim(self, pool_uid: str, fingerprint: str, below: int, keep: Sequence[bytes] = ()) -> tuple[int, int]:
        """Remove the pool's L2 keys of epochs below `below` and, unless `keep` is empty, of all weights that are not in it.

        Keys of every layout go. Blocks: not for the scheduler thread. Keys that the store leases to a reader stay, and puts under
        way land later, so ask again after the store's lease time.

        Returns:
            How many keys went, and the bytes of those of this engine's own layout: the size of others is not known.

        Raises:
            StoreUnavailable: the store gave no answer.
        """
        if self.store is None:
            return 0, 0
        pool, keys, num_bytes = pool_prefix(pool_uid), 0, 0
        old = [partial(older_pattern, pool, below)] if below > 0 else []
        for pattern in [*old, *([partial(other_weights_pattern, pool, keep)] if keep else [])]:
            for group, size in enumerate(self.object_bytes):
                removed = self.store.remove_matching(pattern(fingerprint=fingerprint, group=group))
                keys, num_bytes = keys + removed, num_bytes + removed * size
            # Not simply the rest: an own key that lands between these calls would go uncounted.
            keys += self.store.remove_matching(pattern(fingerprint=fingerprint, others=True))
        return keys, num_bytes

    def close(self) -> None:
        """Close the lookup client."""
        if self.store is not None:
            self.store.close(CLOSE_SECONDS)


def build_scheduler_tiers(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any) -> SchedulerTiers | None:
    """None when no tier is configured: the fence works alone."""
    if config.local is None and config.distributed is None:
        return None
    layout = topology.cache_layout(vllm_config, kv_cache_config)
    store = make_lookup_client(config) if config.distributed is not None else None
    books = Bookkeeping(
        config,
        layout,
        num_ranks=topology.num_worker_ranks(vllm_config),
        store=store,
        ids=itertools.count(1),
        clock=time.monotonic,
        keys_of=make_keys_of(topology.num_kv_shards(vllm_config, kv_cache_config)) if store is not None else None,
    )
    sizes = tuple(object_bytes(topology.group_payload_bytes(group)) for group in kv_cache_config.kv_cache_groups)
    return SchedulerTiers(books, store, sizes)


def make_keys_of(num_shards: int) -> KeysOf:
    """Names of all shards of one block; the block exists if all of them do."""

    def keys_of(namespace: str, group: int, block_hash: bytes) -> Sequence[str]:
        return [object_key(namespace, group, shard, block_hash) for shard in range(num_shards)]

    return keys_of


def make_lookup_client(config: ConnectorConfig) -> LookupStore:
    """The scheduler half's own store client: existence and removal only, on its own threads; connects in the background."""
    settings = StoreSettings.of(config)
    assert settings is not None
    client = StoreClient(settings)
    client.start()
    return client


def _group_specs(kv_cache_config: Any) -> list[GroupSpec]:
    return [GroupSpec(list(group.layer_names), group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups]


def layout_of_rank(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> bytes:
    """Digest of what each byte of a block means on this rank: its tensors, and the kernels that use them (`layout_digest`).

    Raises:
        LayoutError: the tensors cannot be cut into blocks.
    """
    groups = _group_specs(kv_cache_config)
    layers = describe_layers(vllm_config, [name for group in groups for name in group.layer_names])
    about = {"layers": layers, "platform": describe_platform(vllm_config, kv_cache_config)}
    return layout_digest(kv_caches, groups, kv_cache_config.num_blocks, about)


def build_worker(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> WorkerHalf:
    """One rank's worker half over vLLM's KV tensors.

    Raises:
        LayoutError, ConfigError, OSError, RuntimeError: this engine cannot be staged.
    """
    layout = topology.cache_layout(vllm_config, kv_cache_config)
    ranks, rank = topology.num_worker_ranks(vllm_config), topology.worker_rank(vllm_config)
    shards = topology.num_kv_shards(vllm_config, kv_cache_config)
    settings = StoreSettings.of(config)

    groups = _group_specs(kv_cache_config)
    own_layout = layout_of_rank(vllm_config, kv_cache_config, kv_caches)

    def open_store(region: HostRegion) -> StoreClient:
        assert settings is not None
        client = StoreClient(settings, [(region.address, region.num_bytes)], layout=own_layout)
        client.start()
        return client

    half = WorkerHalf(
        rank=rank,
        world_size=ranks,
        shard=rank // (ranks // shards),
        num_shards=shards,
        layout=own_layout,
        open_store=open_store if settings is not None else None,
    )
    num_slots = slot_count(config, max(1, layout.slot_bytes), ranks)
    if config.local is None:
        local_ranks = ranks // topology.num_machines(vllm_config)
        check_fits(num_slots * layout.slot_bytes * local_ranks, "staging_slots", config.staging_slots)
    stride = half.register(kv_caches, groups, num_slots, kv_cache_config.num_blocks)
    if stride > layout.slot_bytes:  # less: a pipeline stage with fewer layers than another
        logger.warning(
            "EpochKV: a block takes %d bytes of host memory, %d were expected from the configuration; L1 uses %.2f times "
            "local.capacity_bytes",
            stride,
            layout.slot_bytes,
            stride / max(1, layout.slot_bytes),
        )
    sleeping.register(str(vllm_config.kv_transfer_config.engine_id), half)
    return half
