"""Builds the tiers of an engine from its configuration: the bookkeeping, and the L2 client that it looks blocks up with.

Slots and sizes are those that the ranks have laid out (`wire.layout`), and shards are counted as `worker.runner` does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.engine import describe
from epochkv_connector.naming.identity import pool_prefix
from epochkv_connector.naming.object_keys import object_key, older_pattern, other_weights_pattern
from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping
from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.connection import StoreSettings
from epochkv_connector.wire.layout import RankLayout, common_slots
from epochkv_connector.worker.layout import object_bytes

CLOSE_SECONDS = 2.0


@dataclass
class Tiers:
    """The bookkeeping of the scheduler role, and its L2 client.

    Attributes:
        store: for existence and removal only; None: there is no L2.
        object_bytes: size of an L2 object of this engine, by KV cache group, on average over its ranks.
    """

    books: Bookkeeping
    store: StoreClient | None
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
        if self.store is not None:
            self.store.close(CLOSE_SECONDS)


def build_tiers(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, layouts: Sequence[RankLayout]) -> Tiers | None:
    """None when no tier is configured: the fence works alone.

    Args:
        layouts: what the ranks have answered; without the answers of all of them, the tiers have no slots.
    """
    if not config.has_tiers:
        return None
    layout = describe.cache_layout(vllm_config, kv_cache_config)
    settings = StoreSettings.of(config)
    store = start_client(settings) if settings is not None else None
    num_ranks = describe.num_worker_ranks(vllm_config)
    shards = [range(num_ranks // replicas) for replicas in describe.group_replicas(vllm_config, kv_cache_config)]

    def keys_of(namespace: str, group: int, block_hash: bytes) -> Sequence[str]:
        return [object_key(namespace, group, shard, block_hash) for shard in shards[group]]

    books = Bookkeeping(
        config,
        layout,
        num_ranks=num_ranks,
        num_slots=common_slots(layouts, num_ranks),
        store=store,
        ids=itertools.count(1),
        clock=time.monotonic,
        keys_of=keys_of if store is not None else None,
    )
    return Tiers(books, store, mean_object_bytes(layouts, len(layout.groups)))


def mean_object_bytes(layouts: Sequence[RankLayout], num_groups: int) -> tuple[int, ...]:
    """Size of an L2 object by KV cache group; ranks may hold unlike numbers of layers. 0 where no rank knows."""
    known = [layout.payload_bytes for layout in layouts]
    sizes = [[object_bytes(payloads[group]) for payloads in known if group in payloads] for group in range(num_groups)]
    return tuple(round(sum(one) / len(one)) if one else 0 for one in sizes)


def start_client(settings: StoreSettings) -> StoreClient:
    """A client without memory of its own, on its own threads; it connects in the background."""
    client = StoreClient(settings)
    client.start()
    return client
