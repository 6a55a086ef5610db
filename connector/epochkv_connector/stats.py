"""What the connector tells vLLM's logger and Prometheus, at most once a second: one class for both roles, because vLLM merges them.

Counters travel as increments since the last report and are added; gauges travel as values and the latest wins, those of
worker ranks apart for each rank. All are dictionaries of numbers, so that they survive the trip to the API process. `metrics` names
the series.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epochkv_connector import metrics
from epochkv_connector.engine.interface import KVConnectorPromMetrics, KVConnectorStats
from epochkv_connector.metrics import PREFIX, Family
from epochkv_connector.store.connection import AGAIN_SECONDS
from epochkv_fence.common import Seldom

logger = logging.getLogger("vllm.epochkv.stats")

COUNTERS, GAUGES, RANKS = "counters", "gauges", "ranks"


@dataclass
class EpochKVStats(KVConnectorStats):
    """`data = {"counters": {name: increment}, "gauges": {name: value}, "ranks": {rank: {name: value}}}`."""

    data: dict[str, Any] = field(default_factory=lambda: {COUNTERS: {}, GAUGES: {}, RANKS: {}})

    @classmethod
    def of(
        cls,
        counters: Mapping[str, float],
        gauges: Mapping[str, float] | None = None,
        ranks: Mapping[str, Mapping[str, float]] | None = None,
    ) -> EpochKVStats:
        """Build from plain numbers. Only increments above zero are kept: the API process dies of a counter that falls."""
        return cls(
            {
                COUNTERS: {name: value for name, value in counters.items() if value > 0},
                GAUGES: dict(gauges or {}),
                RANKS: {rank: dict(values) for rank, values in (ranks or {}).items() if values},
            }
        )

    def reset(self) -> None:
        self.data = {COUNTERS: {}, GAUGES: {}, RANKS: {}}

    def aggregate(self, other: KVConnectorStats) -> EpochKVStats:
        """Add the other's counters to mine and take its gauges (it is the later one, or another rank)."""
        mine = self.data.setdefault(COUNTERS, {})
        for name, value in other.data.get(COUNTERS, {}).items():
            mine[name] = mine.get(name, 0) + value
        self.data.setdefault(GAUGES, {}).update(other.data.get(GAUGES, {}))
        ranks = self.data.setdefault(RANKS, {})
        for rank, values in other.data.get(RANKS, {}).items():
            ranks[rank] = {**ranks.get(rank, {}), **values}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        ranks = {f"{name}[{rank}]": value for rank, values in self.data.get(RANKS, {}).items() for name, value in values.items()}
        return {**self.data.get(COUNTERS, {}), **self.data.get(GAUGES, {}), **ranks}

    def is_empty(self) -> bool:
        return not any(self.data.get(kind) for kind in (COUNTERS, GAUGES, RANKS))


class EpochKVPromMetrics(KVConnectorPromMetrics):
    """Prometheus series `vllm:epochkv_*` (`metrics`), with the labels of vLLM's own.

    Counters exist from the start, at 0, so that a rate over a rare event is not blind to its first one. A gauge exists once
    it was reported, since 0 would be a claim.
    """

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._warn = Seldom(logger, AGAIN_SECONDS)
        self._counters = {family.name: self._counter(family) for family in metrics.COUNTERS}
        self._gauges = {family.name: self._gauge(family) for family in metrics.GAUGES}
        for family in metrics.COUNTERS:
            for values in family.series():
                for labels in per_engine_labelvalues.values():
                    self._counters[family.name].labels(*labels, *values).inc(0)

    def _counter(self, family: Family) -> Any:
        labelnames = [*self._labelnames, *family.labels]
        return self._counter_cls(name=PREFIX + family.name, documentation=family.meaning, labelnames=labelnames)

    def _gauge(self, family: Family) -> Any:
        labelnames = [*self._labelnames, *(("rank",) if family.per_rank else ()), *family.labels]
        return self._gauge_cls(
            name=PREFIX + family.name, documentation=family.meaning, multiprocess_mode="mostrecent", labelnames=labelnames
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report. Never raises: that would end vLLM's output handler, and with it every request."""
        try:
            labels = self.per_engine_labelvalues[engine_idx]
            for name, value in transfer_stats_data.get(COUNTERS, {}).items():
                if (found := metrics.COUNTER_OF.find(name)) is not None:
                    self._counters[found[0].name].labels(*labels, *found[1]).inc(value)
            self._set(labels, transfer_stats_data.get(GAUGES, {}))
            for rank, values in transfer_stats_data.get(RANKS, {}).items():
                self._set(labels, values, rank)
        except Exception as error:
            self._warn("error", logging.WARNING, "EpochKV: metrics of engine %d cannot be recorded: %r", engine_idx, error)

    def _set(self, labels: list[object], values: Mapping[str, float], *rank: str) -> None:
        for name, value in values.items():
            if (found := metrics.GAUGE_OF.find(name)) is not None:
                self._gauges[found[0].name].labels(*labels, *rank, *found[1]).set(value)


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

    def worker_stats(self, totals: Mapping[str, float], rank: int, *, refusing: bool) -> EpochKVStats:
        """What one rank tells.

        Args:
            totals: counters since the start and gauges of now.
            refusing: it has tiers and answers every job as failed.
        """
        named = {name if name.startswith("store_") else f"worker_{name}": value for name, value in totals.items()}
        counters, gauges = metrics.split({**named, "worker_failed": float(refusing)})
        return self.report(counters, {}, str(rank), gauges)

    def report(self, totals: Mapping[str, float], gauges: Mapping[str, float], rank: str, of_rank: Mapping[str, float]) -> EpochKVStats:
        """What these counters have grown by since the last report, with errors, and what holds now."""
        totals = {**totals, **{f"error_{where}": float(count) for where, count in dict(self._errors).items()}}
        increments = {name: value - self._sent.get(name, 0.0) for name, value in totals.items()}
        self._sent.update(totals)  # a part that could not be asked this time is not forgotten: it would be told twice
        return EpochKVStats.of(increments, gauges, {rank: of_rank})
