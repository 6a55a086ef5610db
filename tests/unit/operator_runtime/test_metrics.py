"""The operator's metrics against their page in the documentation, and what the hub counts in them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from prometheus_client import generate_latest

import epochkv_fence.net
from epochkv_operator.metrics import HUB_FAULTS, REGISTRY, HubCounts

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/metrics.md"
ROW = re.compile(r"^\| `(epochkv_(?:operator|hub|pool)_\w+)` \| (\w+) \| ([^|]+) \| ([^|]+)\. \|$", re.MULTILINE)


def families() -> dict[str, tuple[str, str, str]]:
    """Name as scraped, type, labels and meaning of every metric of the operator."""
    found = {}
    for collector, names in REGISTRY._collector_to_names.items():
        kind, labels = collector._type, collector._labelnames  # type: ignore[attr-defined]
        name = min(names, key=len) + ("_total" if kind == "counter" else "")
        found[name] = (kind, ", ".join(f"`{label}`" for label in labels) or "-", collector._documentation)  # type: ignore[attr-defined]
    return found


def test_the_page_names_every_metric_of_the_operator_and_no_other() -> None:
    page = {name: (kind, labels, meaning) for name, kind, labels, meaning in ROW.findall(PAGE.read_text())}
    assert page == families()
    assert len(ROW.findall(PAGE.read_text())) == len(page)


def test_every_metric_that_the_documentation_speaks_of_exists() -> None:
    names = set(families()) | {"epochkv_hub_leading", "epochkv_pool_last_reset_seconds"}  # of a standalone hub
    names |= {"epochkv_pool_reclaimed_keys_total", "epochkv_pool_reclaimed_bytes_total"}
    names |= {f"{name}_bucket" for name, (kind, *_) in families().items() if kind == "histogram"}
    pattern = r"(?<![\w:])epochkv_(?:operator|hub|pool)_\w+"
    spoken = {(path.name, name) for path in (ROOT / "docs").rglob("*.md") for name in re.findall(pattern, path.read_text())}
    assert len(spoken) > 20
    assert {(page, name) for page, name in spoken if name not in names} == set()


def sample(outcome: str) -> float | None:
    return REGISTRY.get_sample_value("epochkv_hub_messages_total", {"outcome": outcome})


def test_what_a_hub_counts_only_grows_whatever_hub_comes_after() -> None:
    before = sample("steps_failed")
    assert before is not None, "there from the start"
    counts, counters = HubCounts(), Counter(steps_failed=2, unencodable=1, received=7)
    counts.take(counters)
    counters["steps_failed"] += 3
    counts.take(counters)
    counts.take(counters)
    assert sample("steps_failed") == before + 5
    HubCounts().take(Counter(steps_failed=1))
    assert sample("steps_failed") == before + 6
    assert (sample("received") or 0) >= 7
    assert b'epochkv_hub_messages_total{outcome="unencodable"}' in generate_latest(REGISTRY)


def test_every_failure_that_the_hub_counts_is_on_the_page_and_there_from_the_start() -> None:
    sources = Path(epochkv_fence.net.__file__).parent
    text = "".join(path.read_text() for room in ("gate", "serving") for path in (sources / room).glob("*.py"))
    counted = set(re.findall(r'counters\["(\w+_failed|unencodable)"\]', text))
    documented = set(re.findall(r"^\| `(\w+_failed|unencodable)` \|", PAGE.read_text(), re.MULTILINE))
    assert counted == documented == set(HUB_FAULTS)
    assert all(sample(outcome) is not None for outcome in HUB_FAULTS)
