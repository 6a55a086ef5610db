"""Statistics reach vLLM's API process, where a falling counter would end the output handler and with it the engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epochkv_connector.stats import EpochKVPromMetrics, EpochKVStats


def test_only_growing_counters_are_reported() -> None:
    stats = EpochKVStats.of({"loads": 2.0, "same": 0.0, "fell": -1.0}, {"state": -1.0})
    assert stats.data == {"counters": {"loads": 2.0}, "gauges": {"state": -1.0}}


def test_merging_adds_counters_and_takes_the_later_gauges() -> None:
    first, second = EpochKVStats.of({"a": 1.0}, {"g": 1.0}), EpochKVStats.of({"a": 2.0, "b": 3.0}, {"g": 5.0})
    assert first.aggregate(second).reduce() == {"a": 3.0, "b": 3.0, "g": 5.0}


@pytest.mark.parametrize(
    ("data", "engine"),
    [
        (None, 0),
        ([1, 2], 0),
        ({"counters": None, "gauges": 3}, 0),
        ({"counters": {"falls": -1.0, "odd": "x", "nan": math.nan, "endless": math.inf, 7: 1.0}, "gauges": {"odd": None}}, 0),
        ({"counters": {"good": 1.0}}, 5),  # no such engine
    ],
)
def test_no_report_ends_the_output_handler(data: Any, engine: int) -> None:
    registry = CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **arguments: kind(registry=registry, **arguments)

    kinds = {kind: made(kind) for kind in (Gauge, Counter, Histogram)}
    metrics = EpochKVPromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    metrics.observe(data, engine)
    metrics.observe({"counters": {"good": 2.0}, "gauges": {"level": math.inf}})
    assert registry.get_sample_value("vllm:epochkv_events_total", {"engine": "0", "event": "good"}) == 2.0
    assert registry.get_sample_value("vllm:epochkv_state", {"engine": "0", "of": "level"}) == math.inf
    accumulated = EpochKVStats.of({"good": 1.0}).aggregate(EpochKVStats.received(data))
    assert accumulated.reduce()["good"] >= 1.0
