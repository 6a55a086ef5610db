"""The chart's alerts and boards: against the metrics that the operator has, and on Prometheus' own engine.

`alerts/NAME.yaml` is the test of the alert NAME, in the format of `promtool test rules`. Each query of a board gives an answer over a
fleet that has every series of the table of metrics.
"""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from epochkv_operator.metrics import HUB_FAULTS
from hack.observe.catalog import Metric, catalog
from hack.observe.queries import check, selectors
from tests.unit.chart.conftest import CHART, ROOT, Rendered

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


# ------------------------------------------------------------------------------------ on Prometheus' own rule engine
CASES = Path(__file__).with_name("alerts")
NAMES = sorted(path.stem for path in CASES.glob("*.yaml"))


def judged(promtool: str, tests: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, "test", "rules", str(tests)], capture_output=True, text=True, timeout=120, check=False)


def run(promtool: str, folder: Path, rules: list[dict[str, Any]], case: str) -> subprocess.CompletedProcess[str]:
    """The test of one alert on these rules. Of the annotations the summary is compared."""
    told = [{**rule, "annotations": {"summary": rule["annotations"]["summary"]}} for rule in rules]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": told}]}))
    return judged(promtool, Path(shutil.copy(CASES / f"{case}.yaml", folder)))


@pytest.mark.parametrize("name", NAMES)
def test_it_fires_when_it_must_and_only_then(name: str, render: Render, promtool: str, tmp_path: Path) -> None:
    rules = list(alerts(render).values())
    result = run(promtool, tmp_path, rules, name)
    assert result.returncode == 0, result.stdout + result.stderr
    told = [check for case in yaml.safe_load((CASES / f"{name}.yaml").read_text())["tests"] for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in told} == {name}
    assert {bool(check["exp_alerts"]) for check in told} == {True, False}


def test_prometheus_accepts_the_rules_as_they_are_rendered(render: Render, promtool: str, tmp_path: Path) -> None:
    rule = render("--set", "monitoring.prometheusRule.enabled=true").one("PrometheusRule", "epochkv-operator")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    command = [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "rules.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"SUCCESS: {len(NAMES)} rules found" in result.stdout, "every alert has a test"


# ------------------------------------------------------------------------------------------------------------ boards
TARGETS = {
    "engine": [{"namespace": "rl", "pool": "policy", "pod": f"rollout-{n}", "instance": f"10.0.0.{n}:8000"} for n in (1, 2)],
    "operator": [{"namespace": "epochkv-system", "pod": f"epochkv-operator-{n}", "instance": f"10.0.1.{n}:9090"} for n in (1, 2)],
    "hub": [{"instance": "10.0.2.1:9090"}],
    "mooncake": [{"namespace": "rl", "pool": "policy", "pod": "policy-master-0", "instance": "10.0.3.1:9003"}],
}
TARGETS["vllm"] = TARGETS["engine"]
OWN = {"namespace": ("rl",), "pool": ("policy",), "model_name": ("m",), "engine": ("0",), "rank": ("0", "scheduler")}


def fleet() -> Iterator[dict[str, str]]:
    """All counters grow; gauges are 1 on the first target of a kind, and 0 on the second."""
    for series, metric in catalog().items():
        for place, target in enumerate(TARGETS[metric.owner]):
            for labels in own_labels(series, metric):
                text = ", ".join(f'{name}="{value}"' for name, value in ({**target, **labels}).items())
                yield {"series": f"{series}{{{text}}}", "values": f"{1 - place}x60" if metric.kind == "gauge" else "0+30x60"}


def own_labels(series: str, metric: Metric) -> Iterator[dict[str, str]]:
    choices = [[(name, value) for value in values or OWN.get(name, ("some",))] for name, values in metric.labels.items()]
    if series.endswith("_bucket"):
        choices.append([("le", bound) for bound in ("0.1", "1", "+Inf")])
    return (dict(chosen) for chosen in itertools.product(*choices))


def queries() -> Iterator[str]:
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield re.sub(r"\$(namespace|pool|engine)\b", ".*", target["expr"].replace("$__rate_interval", "5m"))


def test_every_query_of_every_board_has_an_answer(promtool: str, tmp_path: Path) -> None:
    asked = list(dict.fromkeys(queries()))
    assert len(asked) > 80
    answers = [{"expr": f"count({query}) > bool 0", "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": 1}]} for query in asked]
    tests = {"tests": [{"interval": "1m", "input_series": list(fleet()), "promql_expr_test": answers}]}
    (tmp_path / "boards.yaml").write_text(yaml.safe_dump(tests))
    result = judged(promtool, tmp_path / "boards.yaml")
    assert result.returncode == 0, (result.stdout + result.stderr)[:4000]
