"""Prometheus metrics of the operator. Names are part of the interface: dashboards and alerts use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epochkv_fence.protocol.pool import ENGINE_STATES

REGISTRY = CollectorRegistry(auto_describe=True)

API_REQUESTS = Counter(
    "epochkv_operator_api_requests",
    "Requests to the API server by verb and answer",
    ["verb", "code"],
    registry=REGISTRY,
)
API_WRITES = Counter(
    "epochkv_operator_api_writes",
    "Objects written by kind and operation (apply, create, delete, status)",
    ["kind", "operation"],
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge("epochkv_operator_queue_depth", "Keys waiting to be reconciled", registry=REGISTRY)
QUEUE_OLDEST = Gauge("epochkv_operator_queue_oldest_seconds", "Age of the oldest key that is waiting or in work", registry=REGISTRY)
RECONCILES = Counter("epochkv_operator_reconciles", "Reconciles by kind and result", ["kind", "result"], registry=REGISTRY)
RECONCILE_SECONDS = Histogram(
    "epochkv_operator_reconcile_seconds",
    "Time from the first event of a key until it was served",
    ["kind"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
LAST_LIST = Gauge(
    "epochkv_operator_last_list_timestamp_seconds",
    "When a kind was last listed as a whole (unix time)",
    ["kind"],
    registry=REGISTRY,
)
LEADER = Gauge("epochkv_operator_leader", "1 while this process holds the Lease", registry=REGISTRY)
HUB_MESSAGES = Counter(
    "epochkv_hub_messages",
    "What the hub of this process took, sent, refused and failed at, by outcome",
    ["outcome"],
    registry=REGISTRY,
)
HUB_FAULTS: Final = ("steps_failed", "take_failed", "tasks_failed", "turns_failed", "unencodable")
"""Outcomes that are defects of the hub: there from the start, at 0, so that an alert sees the first one."""
for _outcome in HUB_FAULTS:
    HUB_MESSAGES.labels(outcome=_outcome)

TARGET_EPOCH = Gauge("epochkv_pool_target_epoch", "Highest epoch recorded for the pool", ["namespace", "pool"], registry=REGISTRY)
PUBLISHED_EPOCH = Gauge(
    "epochkv_pool_published_epoch",
    "Highest epoch proved: no engine uses an older one",
    ["namespace", "pool"],
    registry=REGISTRY,
)
RESET_SECONDS = Histogram(
    "epochkv_pool_reset_seconds",
    "Time from recording an epoch to publishing it",
    ["namespace", "pool"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
POOL_ENGINES = Gauge(
    "epochkv_pool_engines",
    f"Engine processes heard of, by state ({', '.join(ENGINE_STATES)})",
    ["namespace", "pool", "state"],
    registry=REGISTRY,
)
CARRIED_REQUESTS = Gauge(
    "epochkv_pool_carried_requests",
    "Requests that run on under an older epoch",
    ["namespace", "pool"],
    registry=REGISTRY,
)
WEIGHTS_DIVERGED = Gauge(
    "epochkv_pool_weights_diverged_engines",
    "Engine processes that hold other weights than most of their kind",
    ["namespace", "pool"],
    registry=REGISTRY,
)
RECLAIMED_KEYS = Gauge(
    "epochkv_pool_reclaimed_keys",
    "Keys of older epochs and weights removed from the store since this operator leads",
    ["namespace", "pool"],
    registry=REGISTRY,
)
RECLAIMED_BYTES = Gauge(
    "epochkv_pool_reclaimed_bytes",
    "Bytes of the store given back since this operator leads, as far as they are known",
    ["namespace", "pool"],
    registry=REGISTRY,
)
_BY_POOL = (TARGET_EPOCH, PUBLISHED_EPOCH, RESET_SECONDS, CARRIED_REQUESTS, WEIGHTS_DIVERGED, RECLAIMED_KEYS, RECLAIMED_BYTES)


def forget_pool(namespace: str, pool: str) -> None:
    """Drop the series of a pool that is gone, so that it does not linger on dashboards."""
    for family in _BY_POOL:
        try:
            family.remove(namespace, pool)
        except KeyError:
            continue
    for state in ENGINE_STATES:
        try:
            POOL_ENGINES.remove(namespace, pool, state)
        except KeyError:
            continue


class HubCounts:
    """Takes the counters of one hub over into `HUB_MESSAGES`: they only grow, and so does the metric, whatever hub comes after."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, counters: Mapping[str, int]) -> None:
        """Add what was counted since the last call."""
        for outcome, count in counters.items():
            HUB_MESSAGES.labels(outcome=outcome).inc(count - self._taken.get(outcome, 0))
            self._taken[outcome] = count
