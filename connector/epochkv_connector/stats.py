"""What the connector tells vLLM's logger and Prometheus: one class for both halves, because vLLM merges them.

Counters travel as increments since the last report and are added; gauges travel as values and the latest wins. Both are
flat dictionaries of numbers, so that they survive the trip to the API process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "vllm:epochkv_"
COUNTERS, GAUGES = "counters", "gauges"


@dataclass
class EpochKVStats(KVConnectorStats):
    """`data = {"counters": {name: increment}, "gauges": {name: value}}`."""

    data: dict[str, Any] = field(default_factory=lambda: {COUNTERS: {}, GAUGES: {}})

    @classmethod
    def of(cls, counters: dict[str, float], gauges: dict[str, float] | None = None) -> EpochKVStats:
        """Build from plain numbers. Only increments above zero are kept: the API process dies of a counter that falls."""
        return cls({COUNTERS: {k: v for k, v in counters.items() if v > 0}, GAUGES: dict(gauges or {})})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {COUNTERS: {}, GAUGES: {}}

    def aggregate(self, other: KVConnectorStats) -> EpochKVStats:
        """Add the other's counters to mine and take its gauges (it is the later one)."""
        mine = self.data.setdefault(COUNTERS, {})
        for name, value in other.data.get(COUNTERS, {}).items():
            mine[name] = mine.get(name, 0) + value
        self.data.setdefault(GAUGES, {}).update(other.data.get(GAUGES, {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {**self.data.get(COUNTERS, {}), **self.data.get(GAUGES, {})}

    def is_empty(self) -> bool:
        """True when there is nothing to tell."""
        return not self.data.get(COUNTERS) and not self.data.get(GAUGES)


class EpochKVPromMetrics(KVConnectorPromMetrics):
    """Prometheus series `vllm:epochkv_*`, with the labels of vLLM's own.

    Two families, labelled by name: the set of names is closed (it is written in our sources), so cardinality is bounded,
    and a new counter needs no registration in another process.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = self._counter_cls(
            name=f"{PREFIX}events", documentation="What the EpochKV connector counted.", labelnames=[*labelnames, "event"]
        )
        self._state = self._gauge_cls(
            name=f"{PREFIX}state",
            documentation="What holds now in the EpochKV connector.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "of"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report."""
        labels = self.per_engine_labelvalues.get(engine_idx, [])
        for name, value in transfer_stats_data.get(COUNTERS, {}).items():
            self._events.labels(*labels, name).inc(value)
        for name, value in transfer_stats_data.get(GAUGES, {}).items():
            self._state.labels(*labels, name).set(value)
