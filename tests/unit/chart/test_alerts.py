"""The chart's alerts, parsed as Prometheus would, against the metrics that the operator has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser as promql

from epochkv_operator.metrics import HUB_FAULTS, REGISTRY
from tests.unit.chart.conftest import Rendered

Render = Callable[..., Rendered]
ON = ("--set", "monitoring.prometheusRule.enabled=true")
SCRAPED = {"namespace", "le"}
"""Labels that a scrape, or a histogram, adds."""
REFERENCE = re.compile(r"\$labels\.(\w+)")


def alerts(render: Render, *arguments: str) -> dict[str, dict[str, Any]]:
    rule = render(*ON, *arguments).one("PrometheusRule", "epochkv-operator")
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}


def parts(node: Any) -> Iterator[Any]:
    """The node and all below it."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
        below = getattr(node, name, None)
        for part in below if isinstance(below, list) else [below] if below is not None else []:
            yield from parts(part)


def metrics() -> dict[str, set[str]]:
    """Labels of each series that the operator exports, by name."""
    found: dict[str, set[str]] = {}
    for collector, names in REGISTRY._collector_to_names.items():
        for name in names:
            found[name] = set(collector._labelnames)  # type: ignore[attr-defined]
    return found


def test_rules_only_on_request(render: Render) -> None:
    assert render().all("PrometheusRule") == []
    rule = render(*ON, "--set", "monitoring.prometheusRule.labels.release=mon").one("PrometheusRule", "epochkv-operator")
    assert rule["metadata"]["labels"]["release"] == "mon"
    assert render("--set", "monitoring.prometheusRule.enable=true").status != 0


def test_every_series_and_label_of_an_alert_exists(render: Render) -> None:
    known, seen = metrics(), set()
    for name, alert in alerts(render).items():
        labels: set[str] = set()
        for node in parts(promql.parse(alert["expr"])):
            if isinstance(node, promql.VectorSelector):
                metric = str(node.name)
                seen.add(metric)
                assert metric in known, f"{name}: no metric {metric}"
                labels |= known[metric] | SCRAPED
                assert {matcher.name for matcher in node.matchers.matchers} <= known[metric] | SCRAPED, name
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                selectors = [part for part in parts(node.expr) if isinstance(part, promql.VectorSelector)]
                assert all(set(node.modifier.labels) <= known[str(part.name)] | SCRAPED for part in selectors), name
        spoken = set(REFERENCE.findall(" ".join(alert["annotations"].values())))
        assert spoken <= labels | {"exported_namespace"}, name
    assert {"epochkv_operator_loop_lag_seconds_bucket", "epochkv_operator_lease_renewal_seconds_bucket"} <= seen
    assert {"epochkv_pool_target_epoch", "epochkv_operator_queue_oldest_seconds"} <= seen


def test_values_of_labels_are_those_that_the_operator_uses(render: Render) -> None:
    found = alerts(render)
    values: dict[str, set[str]] = {}
    for alert in found.values():
        for node in parts(promql.parse(alert["expr"])):
            for matcher in node.matchers.matchers if isinstance(node, promql.VectorSelector) else ():
                values.setdefault(matcher.name, set()).update(matcher.value.split("|"))
    assert values == {"namespace": {"epochkv-system"}, "loop": {"hub", "main"}, "outcome": set(HUB_FAULTS)}


def test_a_late_renewal_is_told_before_the_operator_ends_whatever_the_duration(render: Render) -> None:
    for seconds in (5, 15, 60):
        alert = alerts(render, "--set", f"operator.leaseDurationSeconds={seconds}")["EpochKVLeaseRenewalSlow"]
        compared: Any = promql.parse(alert["expr"])
        bound = float(compared.rhs.val)
        assert seconds / 5 < bound < seconds * 2 / 3
        assert f"at {seconds * 2 // 3} s the operator ends" in alert["annotations"]["description"]


def test_everybody_who_is_woken_reads_what_to_do(render: Render) -> None:
    for name, alert in alerts(render).items():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description"} == set(alert["annotations"]), name
