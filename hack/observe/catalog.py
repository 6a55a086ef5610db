"""The one table of every series that a page, a board or an alert may name.

Ours are read from the code that serves them, so a renamed metric is renamed here. Those of vLLM and Mooncake are written down;
tests compare them with what a real engine and a real master serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from prometheus_client import Counter

from epochkv_connector import metrics as families
from epochkv_fence.metrics import exposition
from epochkv_fence.protocol.pool import ENGINE_STATES, PoolSnapshot
from epochkv_operator.metrics import REGISTRY

Owner = Literal["engine", "operator", "hub", "vllm", "mooncake"]
Kind = Literal["counter", "gauge", "histogram"]
LABELS_OF_TARGETS: Final[Mapping[Owner, frozenset[str]]] = {
    "engine": frozenset({"namespace", "pod", "instance", "job", "pool", "inference_engine"}),
    "vllm": frozenset({"namespace", "pod", "instance", "job", "pool", "inference_engine"}),
    "operator": frozenset({"namespace", "pod", "instance", "job"}),
    "hub": frozenset({"instance", "job"}),
    "mooncake": frozenset({"namespace", "pod", "instance", "job", "pool"}),
}
"""What a scrape adds, by who is scraped: `operator/epochkv_operator/planning/connection.py`, the chart's ServiceMonitor."""
_VLLM: Final = ("model_name", "engine")
_CLOSED: Final[Mapping[str, tuple[str, ...]]] = {"state": ENGINE_STATES, "loop": ("hub", "main")}
"""Values of labels of the operator, where they are all known."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is scraped, a histogram without `_bucket`.
        unit: what it counts or measures; empty where nobody wrote it down.
        labels: its own, with their values where these are all known, else none.
    """

    name: str
    owner: Owner
    kind: Kind
    unit: str
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its time series."""
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count")) if self.kind == "histogram" else (self.name,)

    def allowed(self, series: str) -> frozenset[str]:
        """Every label that a query of this series may name."""
        return frozenset(self.labels) | LABELS_OF_TARGETS[self.owner] | ({"le"} if series.endswith("_bucket") else frozenset())


def of_connector() -> Iterator[Metric]:
    """What the connector adds to an engine's page."""
    for family in families.COUNTERS:
        yield _family(family, f"{families.PREFIX}{family.name}_total", "counter")
    for family in families.GAUGES:
        yield _family(family, f"{families.PREFIX}{family.name}", "gauge")


def _family(family: families.Family, name: str, kind: Kind) -> Metric:
    labels: dict[str, tuple[str, ...]] = dict.fromkeys(_VLLM, ())
    if family.per_rank:
        labels["rank"] = ()
    for place, label in enumerate(family.labels):
        labels[label] = tuple(dict.fromkeys(values[place] for values in family.series()))
    return Metric(name, "engine", kind, family.unit, family.meaning, labels)


def of_operator() -> Iterator[Metric]:
    """What the operator's registry holds."""
    for collector, names in REGISTRY._collector_to_names.items():
        kind: Kind = collector._type  # type: ignore[attr-defined]
        name = min(names, key=len) + ("_total" if isinstance(collector, Counter) else "")
        labels = {label: _CLOSED.get(label, ()) for label in collector._labelnames}  # type: ignore[attr-defined]
        yield Metric(name, "operator", kind, "", f"{collector._documentation}.", labels)  # type: ignore[attr-defined]


def of_hub() -> Iterator[Metric]:
    """What a hub without Kubernetes serves under names that the operator does not have."""
    known = {metric.name for metric in of_operator()}
    snapshot = PoolSnapshot(1, 1, asked=1, started_at=0.0, published_at=0.0, reset_seconds=0.5)
    text = exposition("pool", snapshot, {"received": 1}, 30.0, 0.0)
    told = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE))
    for name, kind in re.findall(r"^# TYPE (\w+) (counter|gauge)$", text, re.MULTILINE):
        if name not in known:
            labels = re.findall(r'(\w+)="', next(line for line in text.splitlines() if line.startswith(name + "{")))
            yield Metric(name, "hub", kind, "", f"{told[name]}.", dict.fromkeys(labels, ()))


VLLM: Final = tuple(
    Metric(name, "vllm", kind, unit, meaning, dict.fromkeys(_VLLM, ()))
    for name, kind, unit, meaning in (
        ("vllm:time_to_first_token_seconds", "histogram", "seconds", "Time until the first token of an answer."),
        ("vllm:inter_token_latency_seconds", "histogram", "seconds", "Time between tokens of an answer."),
        ("vllm:num_requests_running", "gauge", "requests", "Requests that are computed now."),
        ("vllm:num_requests_waiting", "gauge", "requests", "Requests that wait for room."),
        ("vllm:kv_cache_usage_perc", "gauge", "share", "Share of the GPU's blocks in use, from 0 to 1."),
        ("vllm:num_preemptions_total", "counter", "requests", "Requests that lost their blocks to others."),
        ("vllm:prompt_tokens_total", "counter", "tokens", "Tokens of prompts."),
        ("vllm:prefix_cache_hits_total", "counter", "tokens", "Tokens found in the engine's own GPU cache."),
    )
)
MOONCAKE: Final = tuple(
    Metric(name, "mooncake", kind, unit, meaning)
    for name, kind, unit, meaning in (
        ("master_allocated_bytes", "gauge", "bytes", "Memory of the stores in use."),
        ("master_total_capacity_bytes", "gauge", "bytes", "Memory of the stores."),
        ("master_key_count", "gauge", "keys", "Keys in the store."),
        ("master_active_clients", "gauge", "clients", "Clients that the master hears from: engines and stores."),
        ("master_evicted_key_count", "counter", "keys", "Keys that the store evicted for lack of room."),
        ("master_put_start_alloc_failures_total", "counter", "puts", "Puts for which no store had room."),
    )
)


def catalog() -> dict[str, Metric]:
    """Every metric by the name of each of its series."""
    metrics = (*of_connector(), *of_operator(), *of_hub(), *VLLM, *MOONCAKE)
    return {series: metric for metric in metrics for series in metric.series}
