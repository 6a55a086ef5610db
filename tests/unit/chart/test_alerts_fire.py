"""Each alert of the chart on Prometheus' own rule engine: when it fires, with which labels and words, and when it does not.

`alerts/NAME.yaml` is the test of the alert NAME, in the format of `promtool test rules`.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .test_alerts import Render, alerts

CASES = Path(__file__).with_name("alerts")
NAMES = sorted(path.stem for path in CASES.glob("*.yaml"))


def run(promtool: str, folder: Path, rules: list[dict[str, Any]], case: str) -> subprocess.CompletedProcess[str]:
    """The test of one alert on these rules. Of the annotations the summary is compared."""
    told = [{**rule, "annotations": {"summary": rule["annotations"]["summary"]}} for rule in rules]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": told}]}))
    shutil.copy(CASES / f"{case}.yaml", folder)
    return subprocess.run(
        [promtool, "test", "rules", str(folder / f"{case}.yaml")], capture_output=True, text=True, timeout=60, check=False
    )


def test_every_alert_has_a_test_and_every_test_an_alert(render: Render) -> None:
    assert set(NAMES) == set(alerts(render))


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
    assert f"SUCCESS: {len(NAMES)} rules found" in result.stdout
