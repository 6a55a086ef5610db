"""The chart's alerts, parsed as Prometheus would, against the metrics that the operator has."""

import re
from collections.abc import Callable
from typing import Any

import promql_parser as promql

from epochkv_operator.metrics import HUB_FAULTS
from hack.observe.catalog import catalog
from hack.observe.queries import check, selectors
from tests.unit.chart.conftest import ROOT, Rendered

Render = Callable[..., Rendered]
ON = ("--set", "monitoring.prometheusRule.enabled=true")
RUNBOOKS = ROOT / "docs/runbooks.md"
REFERENCE = re.compile(r"\$labels\.(\w+)")


def alerts(render: Render, *arguments: str) -> dict[str, dict[str, Any]]:
    rule = render(*ON, *arguments).one("PrometheusRule", "epochkv-operator")
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}


def test_rules_only_on_request(render: Render) -> None:
    assert render().all("PrometheusRule") == []
    rule = render(*ON, "--set", "monitoring.prometheusRule.labels.release=mon").one("PrometheusRule", "epochkv-operator")
    assert rule["metadata"]["labels"]["release"] == "mon"
    assert render("--set", "monitoring.prometheusRule.enable=true").status != 0


def test_every_series_and_label_of_an_alert_exists(render: Render) -> None:
    known = catalog()
    for name, alert in alerts(render).items():
        labels = check(alert["expr"], known)
        spoken = set(REFERENCE.findall(" ".join(alert["annotations"].values())))
        assert spoken <= labels | {"exported_namespace"}, name


def test_values_of_labels_are_those_that_the_operator_uses(render: Render) -> None:
    values: dict[str, set[str]] = {}
    for alert in alerts(render).values():
        for selector in selectors(alert["expr"]):
            for matcher in selector.matchers.matchers:
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
    headings = re.findall(r"^## (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    found = alerts(render)
    assert sorted(headings) == sorted(found), "a runbook for each alert, and no other"
    for name, alert in found.items():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description", "runbook_url"} == set(alert["annotations"]), name
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    moved = alerts(render, "--set", "monitoring.prometheusRule.runbooks=https://docs.example/runbooks.html")
    assert moved["EpochKVBypass"]["annotations"]["runbook_url"] == "https://docs.example/runbooks.html#epochkvbypass"


def test_the_page_lists_every_alert(render: Render) -> None:
    page = (RUNBOOKS.parent / "observe.md").read_text()
    assert re.findall(r"^\| \[`(EpochKV\w+)`\]\(runbooks\.md#\w+\) \|", page, re.MULTILINE) == list(alerts(render))
