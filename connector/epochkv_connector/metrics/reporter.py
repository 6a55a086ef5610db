"""Collects what the roles count and hold, at most once a second, as increments and values (`metrics` names the series)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from epochkv_connector.metrics import families as metrics
from epochkv_connector.metrics.stats import EpochKVStats

if TYPE_CHECKING:
    from epochkv_connector.hub_link import HubLink
    from epochkv_connector.scheduler.role import SchedulerRole

INTERVAL_SECONDS = 1.0


class Reporter:
    """One per connector object.

    Args:
        errors: exceptions that were turned into a miss, by place.
    """

    def __init__(self, errors: Mapping[str, int]) -> None:
        self._errors = errors
        self._sent: dict[str, float] = {}
        self._at = float("-inf")

    def due(self) -> bool:
        """Whether the last report is at least a second old; if so, the next one begins now."""
        now = time.monotonic()
        due = now - self._at >= INTERVAL_SECONDS
        if due:
            self._at = now
        return due

    def scheduler_stats(self, side: SchedulerRole, tiers: Any, gauges: Mapping[str, float]) -> EpochKVStats:
        """What the scheduler role tells: its own, those of pins and root, and its store client's.

        Args:
            tiers: owner of that client (`scheduler.build.Tiers`); None: there are no tiers.
            gauges: from `gauges`.
        """
        # `dict` copies at once; the agent's thread counts there meanwhile.
        totals: dict[str, float] = {**dict(side.counters), **dict(side.pins.counters), **self._error_counts()}
        if side.weights.watch is not None:
            totals |= {f"weights_{name}": float(count) for name, count in dict(side.weights.watch.counters).items()}
        counted, held = metrics.split(gauges)
        store, clients = metrics.split(_store_stats(tiers))
        return self._increments({**totals, **counted, **store}, held, metrics.SCHEDULER_RANK, clients)

    def worker_stats(self, totals: Mapping[str, float], rank: int, *, refusing: bool) -> EpochKVStats:
        """What one rank tells.

        Args:
            totals: counters since the start and gauges of now.
            refusing: it has tiers and answers every job as failed.
        """
        named = {name if name.startswith("store_") else f"worker_{name}": value for name, value in totals.items()}
        counters, gauges = metrics.split({**named, "worker_refusing": float(refusing)})
        return self._increments({**counters, **self._error_counts()}, {}, str(rank), gauges)

    def _increments(
        self, totals: Mapping[str, float], gauges: Mapping[str, float], rank: str, of_rank: Mapping[str, float]
    ) -> EpochKVStats:
        increments = {name: value - self._sent.get(name, 0.0) for name, value in totals.items()}
        self._sent.update(totals)  # a part that could not be asked this time is not forgotten: it would be told twice
        return EpochKVStats.of(increments, gauges, {rank: of_rank})

    def _error_counts(self) -> dict[str, float]:
        return {f"error_{where}": float(count) for where, count in dict(self._errors).items()}

    def gauges(self, side: SchedulerRole, link: HubLink, *, broken: bool) -> dict[str, float]:
        """What holds now in the scheduler role, for heartbeats and metrics. Any thread."""
        pins = side.pins
        snapshot = pins.root.refresh()  # an idle engine, too, notices (and logs) that its lease is over
        gauges: dict[str, float] = {
            "epoch": float(snapshot.epoch),
            "root_shared": float(snapshot.shared),
            "bypass": float(not snapshot.in_use),
            "broken": float(broken),
            "tiers_off": float(side.tiers_told() != ("", "")),
            "weights_known": float(pins.root.weights is not None),
            "carried": float(pins.carried()),
            "carried_sessions": float(pins.carried(sessions=True)),
            "waiting_after_reset": float(pins.root.waiting_after_reset),
            "root_overwritten": float(pins.root.overwritten),
            "hub_unusable": float(link.problem is not None),
            "lease_remaining_seconds": max(0.0, link.lease_until() - time.monotonic()),
            "errors": float(sum(dict(self._errors).values())),
        }
        if side.books is not None:
            with contextlib.suppress(RuntimeError):  # a dictionary that the scheduler thread changes meanwhile
                gauges.update(side.books.stats())
        return gauges


def _store_stats(tiers: Any) -> dict[str, float]:
    store = None if tiers is None else tiers.store
    return {} if store is None else {f"store_{name}": value for name, value in store.stats().items()}
