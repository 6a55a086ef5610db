"""Statistics reach vLLM's API process, where a falling counter would end the output handler and with it the engine."""

from __future__ import annotations

from epochkv_connector.stats import EpochKVStats


def test_only_growing_counters_are_reported() -> None:
    stats = EpochKVStats.of({"loads": 2.0, "same": 0.0, "fell": -1.0}, {"state": -1.0})
    assert stats.data == {"counters": {"loads": 2.0}, "gauges": {"state": -1.0}}


def test_merging_adds_counters_and_takes_the_later_gauges() -> None:
    first, second = EpochKVStats.of({"a": 1.0}, {"g": 1.0}), EpochKVStats.of({"a": 2.0, "b": 3.0}, {"g": 5.0})
    assert first.aggregate(second).reduce() == {"a": 3.0, "b": 3.0, "g": 5.0}
