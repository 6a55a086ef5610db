"""Statistics reach vLLM's API process, where a falling counter would end the output handler and with it the engine; what the roles count
has a series.
"""

import inspect
import math
import re
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine.output_processor import RequestState

import epochkv_connector
from epochkv_connector import metrics
from epochkv_connector.connector import EpochKVConnector
from epochkv_connector.stats import EpochKVStats
from epochkv_connector.store import client as envelope
from epochkv_connector.store.connection import StoreOutcome
from epochkv_fence.net import agent
from epochkv_fence.protocol.agent import Agent


class Page:
    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()

        def made(kind: Any) -> Any:
            return lambda **arguments: kind(registry=self.registry, **arguments)

        kinds = {kind: made(kind) for kind in (Gauge, Counter, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = EpochKVConnector.build_prom_metrics(config, kinds, ["engine"], {index: [str(index)] for index in range(engines)})

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:epochkv_{name}", {"engine": "0", **labels})

    def series(self) -> set[tuple[str, ...]]:
        return {
            (sample.name, *sorted(map(str, sample.labels.items())))
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


def test_only_growing_counters_are_reported() -> None:
    stats = EpochKVStats.of({"loads": 2.0, "same": 0.0, "fell": -1.0}, {"state": -1.0}, {"0": {"held": 0.0}, "1": {}})
    assert stats.data == {"counters": {"loads": 2.0}, "gauges": {"state": -1.0}, "ranks": {"0": {"held": 0.0}}}


def test_merging_adds_counters_takes_the_later_gauges_and_keeps_ranks_apart() -> None:
    first = EpochKVStats.of({"a": 1.0}, {"g": 1.0}, {"0": {"x": 1.0, "y": 2.0}})
    second = EpochKVStats.of({"a": 2.0, "b": 3.0}, {"g": 5.0}, {"0": {"x": 7.0}, "1": {"x": 8.0}})
    assert first.aggregate(second).reduce() == {"a": 3.0, "b": 3.0, "g": 5.0, "x[0]": 7.0, "y[0]": 2.0, "x[1]": 8.0}
    assert not first.is_empty()
    first.reset()
    assert first.is_empty()


@pytest.mark.parametrize(("data", "engine"), [({"counters": {"adoptions": -1.0}}, 0), ({"counters": {"adoptions": 1.0}}, 5)])
def test_no_report_ends_the_output_handler(data: dict[str, Any], engine: int) -> None:
    page = Page()
    page.metrics.observe(data, engine)
    page.metrics.observe({"counters": {"loads_done": 2.0}, "gauges": {"lease_remaining_seconds": math.inf}})
    assert page.value("loads_total") == 2.0
    assert page.value("lease_remaining_seconds") == math.inf


def test_counters_begin_at_zero_and_gauges_when_they_are_reported() -> None:
    page = Page()
    assert page.value("loads_failed_total") == 0.0
    assert page.value("hit_tokens_total", tier="L2") == 0.0
    assert page.value("errors_total", where="other") == 0.0
    assert page.value("epoch") is None
    page.metrics.observe({"gauges": {"epoch": 7.0}, "ranks": {"0": {"store_breaker_open": 0.0}, "scheduler": {"store_breaker_open": 1.0}}})
    assert page.value("epoch") == 7.0
    assert page.value("store_breaker_open", rank="0") == 0.0
    assert page.value("store_breaker_open", rank="scheduler") == 1.0


def test_both_halves_land_in_one_family_with_a_label_for_the_tier() -> None:
    page = Page()
    page.metrics.observe({"counters": {"worker_copy_load_bytes": 100.0, "store_get_bytes": 40.0, "tokens_hit_store": 16.0}})
    page.metrics.observe({"counters": {"worker_copy_load_bytes": 1.0, "plans_opened": 3.0}})
    assert page.value("load_bytes_total", tier="L1") == 101.0
    assert page.value("load_bytes_total", tier="L2") == 40.0
    assert page.value("hit_tokens_total", tier="L2") == 16.0
    assert page.value("lookups_total", result="hit") == 3.0


def test_whatever_is_reported_the_set_of_series_stays_closed() -> None:
    page = Page(engines=2)
    known = page.series()
    for number in range(50):
        counters = {f"{name}{number}": 1.0 for name in ("made_up_", "worker_load_failed_", "store_code_-", "error_place")}
        page.metrics.observe({"counters": counters, "gauges": {f"gauge_{number}": 1.0}}, 1)
    assert page.series() == known
    reported = {"engine": "1"}
    assert page.registry.get_sample_value("vllm:epochkv_load_failures_total", {**reported, "reason": "other"}) == 50.0
    assert page.registry.get_sample_value("vllm:epochkv_store_unexpected_codes_total", reported) == 50.0
    assert page.registry.get_sample_value("vllm:epochkv_errors_total", {**reported, "where": "other"}) == 50.0


SOURCES = Path(epochkv_connector.__file__).parent


def test_no_name_has_two_series() -> None:
    for families in (metrics.COUNTERS, metrics.GAUGES):
        sources = [source for family in families for source in family.sources]
        assert len(sources) == len(set(sources))
        assert len({family.name for family in families}) == len(families)
        for family in families:
            assert all(len(values) == len(family.labels) for values in family.series()), family.name


def literals(folder: str, pattern: str) -> set[str]:
    """What a pattern's group matches in the sources below a folder."""
    return {name for path in (SOURCES / folder).rglob("*.py") for name in re.findall(pattern, path.read_text())}


def test_what_the_scheduler_half_and_the_fence_count_has_a_series() -> None:
    folders = ("tiers", "scheduler", "naming")
    counted = {name for folder in folders for name in literals(folder, r'(?:_count|counts|counters)\["(\w+)"\]')}
    assert len(counted) > 30
    assert {name for name in counted if metrics.COUNTER_OF.find(name) is None} == set()


def test_what_the_agent_counts_has_a_series() -> None:
    counted = {f"agent_{name}" for name in re.findall(r'counters\["(\w+)"\]', Path(agent.__file__).read_text())}
    assert len(counted) > 5
    assert {name for name in counted if metrics.COUNTER_OF.find(name) is None} == set()
    refused = re.findall(r'return "(\w+)"', inspect.getsource(Agent._refusal))
    assert set(refused) == set(next(family for family in metrics.COUNTERS if family.name == "grants_refused").values)


def test_what_the_workers_count_has_a_series() -> None:
    counted = literals("worker", r'counters\.add\("(\w+)"') | {
        f"copy_{kind}_{unit}" for kind in ("load", "save") for unit in ("blocks", "bytes", "seconds")
    }
    assert len(counted) > 7
    assert {name for name in counted if metrics.COUNTER_OF.find(f"worker_{name}") is None} == set()
    reasons = literals("worker", r'JobFailed\("(\w+)"') | literals("worker", r'fail(?:_copy|_put)?\((?:load|save|)(?:, )?"(\w+)"')
    assert {"deadline", "no_store", "shutdown", "error", "slot_busy"} <= reasons
    listed = {family.name: set(family.values) for family in metrics.COUNTERS}
    assert reasons - {"stale", "overtaken"} <= listed["load_failures"]
    assert reasons - {"stale"} <= listed["save_failures"]
    assert reasons - {"overtaken"} <= listed["put_drops"]


def test_what_the_store_client_counts_has_a_series() -> None:
    counted = literals("store", r'_counters\.add\("(\w+)"') | {f"{call}_calls" for call in literals("store", r'\.call\(\s*"(\w+)"')}
    counted |= {f"{call}_{outcome.value}" for call in ("get", "put") for outcome in StoreOutcome} | {"get_bytes", "put_seconds"}
    assert {"exists_calls", "canary_calls", "breaker_opened", "get_foreign"} <= counted
    assert {name for name in counted if metrics.COUNTER_OF.find(f"store_{name}") is None} == set()
    defects = next(family for family in metrics.COUNTERS if family.name == "store_defects")
    assert {defect.value for defect in envelope.Defect} == set(defects.values)


def test_every_guarded_place_is_listed() -> None:
    places = literals(".", r'(?:guard\.(?:run|build)|on_error|\.fail|_rename|_step)\(\s*"([\w.]+)"')
    errors = next(family for family in metrics.COUNTERS if family.name == "errors")
    assert {"get_num_new_matched_tokens", "tiers", "record_loads", "start_step"} <= places
    assert places <= set(errors.values)


def test_names_and_stamps_are_there_where_no_plugin_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a replica of Ray Serve on GPUs, whose engine is configured in another process."""
    monkeypatch.delitem(KVConnectorFactory._registry, "EpochKVConnector", raising=False)
    monkeypatch.setattr(RequestState, "make_request_output", unwrap(RequestState.make_request_output))
    Page()
    assert KVConnectorFactory.get_connector_class_by_name("EpochKVConnector") is EpochKVConnector
    assert RequestState.make_request_output is not unwrap(RequestState.make_request_output)
