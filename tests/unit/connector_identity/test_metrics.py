"""The table of metrics against what the roles count."""

import re
from pathlib import Path

import epochkv_connector
from epochkv_connector import metrics
from epochkv_connector.store import client as envelope
from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.tiers.manager import COUNTERS

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
    counted = set(COUNTERS) | literals("scheduler", r'(?:_count|counts|counters)\["(\w+)"\]') | literals("naming", r'counters\["(\w+)"\]')
    assert len(counted) > 30
    assert {name for name in counted if metrics.COUNTER_OF.find(name) is None} == set()


def test_what_the_workers_count_has_a_series() -> None:
    counted = literals("worker", r'counters\.add\("(\w+)"') | {
        f"copy_{kind}_{unit}" for kind in ("load", "save") for unit in ("blocks", "bytes", "seconds")
    }
    assert len(counted) > 8
    assert {name for name in counted if metrics.COUNTER_OF.find(f"worker_{name}") is None} == set()
    reasons = literals("worker", r'JobFailed\("(\w+)"') | literals("worker", r'fail(?:_copy|_put)?\((?:load|save|)(?:, )?"(\w+)"')
    assert {"deadline", "no_store", "invalidated", "shutdown", "error", "slot_busy"} <= reasons
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
