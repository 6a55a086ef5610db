"""All metrics against what the documentation says of them, and what the hub counts in the operator's."""

import re
from collections import Counter
from pathlib import Path

from prometheus_client import generate_latest

from epochkv_fence.net import gate, server
from epochkv_operator.metrics import HUB_FAULTS, REGISTRY, HubCounts
from hack.observe.catalog import catalog

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/metrics.md"


def test_every_metric_that_the_documentation_speaks_of_exists() -> None:
    pattern = r"(?<![\w:])(?:vllm:epochkv|epochkv_(?:operator|hub|pool))_\w*[a-z]\b(?!\*)"
    known = {name for series, metric in catalog().items() for name in (series, metric.name)}
    spoken = {(path.name, name) for path in (ROOT / "docs").rglob("*.md") for name in re.findall(pattern, path.read_text())}
    assert len(spoken) > 60
    assert {(page, name) for page, name in spoken if name not in known} == set()


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
    text = "".join(Path(str(module.__file__)).read_text() for module in (gate, server))
    counted = set(re.findall(r'counters\["(\w+_failed|unencodable)"\]', text))
    documented = set(re.findall(r"^\| `(\w+_failed|unencodable)` \|", PAGE.read_text(), re.MULTILINE))
    assert counted == documented == set(HUB_FAULTS)
    assert all(sample(outcome) is not None for outcome in HUB_FAULTS)
