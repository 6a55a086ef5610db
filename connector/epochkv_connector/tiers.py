"""Builds the tiers from the configuration: the scheduler half with its L2 lookup client, and the worker half.

Both halves derive slots and shards from the same numbers here, so they cannot disagree.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from epochkv_connector import compat
from epochkv_connector.config import ConnectorConfig
from epochkv_connector.keys import object_key
from epochkv_connector.records import JobAck, Phase
from epochkv_connector.scheduler.core import SchedulerHalf
from epochkv_connector.scheduler.views import KeysOf, LookupClient
from epochkv_connector.wire import StepMetadata, WorkerReport

logger = logging.getLogger("vllm.epochkv.tiers")


class ClosableLookup(LookupClient, Protocol):
    """A lookup client that owns a thread."""

    def close(self) -> None:
        """End it within its own deadline."""

    def remove_below(self, pool_prefix: str, epoch: int) -> int:
        """Remove L2 keys of the pool's epochs below `epoch`; best effort; how many went."""


@dataclass
class SchedulerTiers:
    """The scheduler half and what it owns."""

    half: SchedulerHalf
    store: ClosableLookup | None

    def close(self) -> None:
        """Close the lookup client."""
        if self.store is not None:
            self.store.close()


def build_scheduler_tiers(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any) -> SchedulerTiers | None:
    """None when no tier is configured: the fence works alone."""
    if config.local is None and config.distributed is None:
        return None
    layout = compat.cache_layout(vllm_config, kv_cache_config)
    store = make_lookup_client(config) if config.distributed is not None else None
    half = SchedulerHalf(
        config,
        layout,
        num_ranks=compat.num_worker_ranks(vllm_config),
        store=store,
        ids=itertools.count(1),
        clock=time.monotonic,
        keys_of=make_keys_of(compat.num_kv_shards(vllm_config, kv_cache_config)) if store is not None else None,
    )
    return SchedulerTiers(half, store)


def make_keys_of(num_shards: int) -> KeysOf:
    """Names of all shards of one block; the block exists if all of them do."""

    def keys_of(namespace: str, group: int, block_hash: bytes) -> Sequence[str]:
        return [object_key(namespace, group, shard, block_hash) for shard in range(num_shards)]

    return keys_of


def make_lookup_client(config: ConnectorConfig) -> ClosableLookup:
    """The scheduler half's own store client, on its own thread."""
    raise RuntimeError("the distributed tier is not built yet")


class AbsentWorker:
    """Answers every job at once as failed: what a rank without a host region owes the scheduler half."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failed: set[str] = set()
        self._acks: list[JobAck] = []

    def start_step(self, metadata: StepMetadata) -> None:
        """Fail the loads, drop the saves, report the poisoned."""
        for load in metadata.loads:
            self._failed.add(load.request_id)
            self._acks.append(JobAck(load.job_id, self._rank, Phase.LOADED, 0, 0, failed=True))
        self._failed.update(metadata.poisoned)
        for save in metadata.saves:
            phases = (Phase.COPIED,) if save.namespace is None else (Phase.COPIED, Phase.STORED)
            for phase in phases:
                self._acks.append(JobAck(save.job_id, self._rank, phase, save.start_block, 0, failed=True))

    def results(self) -> tuple[set[str], set[str]]:
        """(finished, failed) since the last call."""
        failed, self._failed = self._failed, set()
        return set(failed), failed

    def poll_acks(self) -> WorkerReport:
        """Acknowledgements since the last call."""
        acks, self._acks = self._acks, []
        return WorkerReport(acks=acks)

    def stats(self) -> dict[str, float]:
        """Nothing is moved."""
        return {}

    def shutdown(self) -> None:
        """Nothing to end."""
