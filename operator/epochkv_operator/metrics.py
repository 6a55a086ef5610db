"""Prometheus metrics of the operator. Names are part of the interface: dashboards and alerts use them."""

from collections import Counter as Counts
from contextlib import suppress
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epochkv_fence.metrics import ENGINES, MESSAGES, POOL_GAUGES
from epochkv_fence.protocol.pool import ENGINE_STATES

REGISTRY = CollectorRegistry(auto_describe=True)
_POOL: Final = ("namespace", "pool")
_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_histogram = partial(Histogram, registry=REGISTRY)

API_REQUESTS = _counter("epochkv_operator_api_requests", "Requests to the API server by verb and answer", ["verb", "code"])
API_WRITES = _counter(
    "epochkv_operator_api_writes", "Objects written by kind and operation (apply, create, delete, status)", ["kind", "operation"]
)
QUEUE_DEPTH = _gauge("epochkv_operator_queue_depth", "Keys waiting to be reconciled")
QUEUE_OLDEST = _gauge("epochkv_operator_queue_oldest_seconds", "Age of the oldest key that is waiting or in work")
RECONCILES = _counter("epochkv_operator_reconciles", "Reconciles by kind and result", ["kind", "result"])
RECONCILE_SECONDS = _histogram(
    "epochkv_operator_reconcile_seconds",
    "Time from the first event of a key until it was served",
    ["kind"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
LOOP_LAG = _histogram(
    "epochkv_operator_loop_lag_seconds",
    "By how much a loop was late, measured four times a second: `hub` renews the Lease and grants, `main` reconciles",
    ["loop"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
MISSED = _counter("epochkv_operator_missed_objects", "Objects that a list showed, and the watches had not brought in time", ["kind"])
LEADER = _gauge("epochkv_operator_leader", "1 while this process holds the Lease")
LEASE_RENEWAL_SECONDS = _histogram(
    "epochkv_operator_lease_renewal_seconds",
    "Time between renewals of the Lease: a fifth of its duration, and at two thirds of it the process ends",
    buckets=(0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 120, 300),
)
HUB_MESSAGES = _counter("epochkv_hub_messages", MESSAGES, ["outcome"])
HUB_FAULTS: Final = ("loop_failed", "pool_step_failed", "receive_failed", "tasks_failed", "unencodable")
"""Outcomes that are defects of the hub: there from the start, at 0, so that an alert sees the first one."""
for _outcome in HUB_FAULTS:
    HUB_MESSAGES.labels(outcome=_outcome)

GAUGES: Final = {name: _gauge(name, text, _POOL) for name, (text, _) in POOL_GAUGES.items()}
RESET_SECONDS = _histogram(
    "epochkv_pool_reset_seconds",
    "Time from when the hub saw that an epoch was asked for to its publication",
    _POOL,
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
POOL_ENGINES = _gauge(*ENGINES, (*_POOL, "state"))


def forget_pool(namespace: str, pool: str) -> None:
    """Drop the series of a pool that is gone, so that it does not linger on dashboards."""
    for family in (RESET_SECONDS, *GAUGES.values()):
        with suppress(KeyError):
            family.remove(namespace, pool)
    for state in ENGINE_STATES:
        with suppress(KeyError):
            POOL_ENGINES.remove(namespace, pool, state)


def count_messages(counted: Counts[str], before: Counts[str]) -> None:
    """Add what a hub has counted since `before` to `HUB_MESSAGES`: they only grow, and so does the metric, whatever hub comes after."""
    for outcome, count in (counted - before).items():
        HUB_MESSAGES.labels(outcome=outcome).inc(count)
