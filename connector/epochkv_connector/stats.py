"""What the connector tells vLLM's logger and Prometheus: one class for both halves, because vLLM merges them.

Counters travel as increments since the last report and are added; gauges travel as values and the latest wins. Both are
flat dictionaries of numbers, so that they survive the trip to the API process.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from epochkv_connector.compat import KVConnectorPromMetrics, KVConnectorStats

logger = logging.getLogger("vllm.epochkv.stats")

PREFIX = "vllm:epochkv_"
COUNTERS, GAUGES = "counters", "gauges"


def _numbers(data: object, kind: str) -> dict[str, float]:
    """The numbers of one kind in a report, by name; of counters the finite ones."""
    values = data.get(kind) if isinstance(data, dict) else None
    if not isinstance(values, dict):
        return {}
    return {
        str(name): value for name, value in values.items() if isinstance(value, (int, float)) and (kind == GAUGES or math.isfinite(value))
    }


@dataclass
class EpochKVStats(KVConnectorStats):
    """`data = {"counters": {name: increment}, "gauges": {name: value}}`."""

    data: dict[str, Any] = field(default_factory=lambda: {COUNTERS: {}, GAUGES: {}})

    @classmethod
    def of(cls, counters: dict[str, float], gauges: dict[str, float] | None = None) -> EpochKVStats:
        """Build from plain numbers. Only increments above zero are kept: the API process dies of a counter that falls."""
        return cls({COUNTERS: {k: v for k, v in counters.items() if v > 0}, GAUGES: dict(gauges or {})})

    @classmethod
    def received(cls, data: object) -> EpochKVStats:
        """What another process sent, without whatever in it is no number: an error here would end vLLM's output handler."""
        counters, gauges = (_numbers(data, kind) for kind in (COUNTERS, GAUGES))
        return cls.of(counters, gauges)

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
        self._said = False
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
        """Record one report. Never raises, whatever comes: that would end vLLM's output handler, and with it every request."""
        try:
            labels = self.per_engine_labelvalues[engine_idx]
            stats = EpochKVStats.received(transfer_stats_data).data
            for name, value in stats[COUNTERS].items():
                self._events.labels(*labels, name).inc(value)
            for name, value in stats[GAUGES].items():
                self._state.labels(*labels, name).set(value)
        except Exception as error:
            if not self._said:
                self._said = True
                logger.warning("EpochKV: metrics of engine %s cannot be recorded: %r (said once)", engine_idx, error)
