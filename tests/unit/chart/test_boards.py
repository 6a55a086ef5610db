"""Every query of the boards on Prometheus' own engine, over a fleet that has every series of the table of metrics.

Each one gives an answer, and none ends in an error, such as of matching.
"""

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hack.observe.catalog import Metric, catalog

from .conftest import CHART

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


def evaluate(promtool: str, folder: Path, series: list[dict[str, str]], asked: list[str]) -> subprocess.CompletedProcess[str]:
    """The test that each of these gives at least one sample."""
    answers: list[dict[str, Any]] = [
        {"expr": f"count({query}) > bool 0", "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": 1}]} for query in asked
    ]
    tests = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": answers}]}
    (folder / "boards.yaml").write_text(yaml.safe_dump(tests))
    command = [promtool, "test", "rules", str(folder / "boards.yaml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_query_of_every_board_has_an_answer(promtool: str, tmp_path: Path) -> None:
    asked = list(dict.fromkeys(queries()))
    assert len(asked) > 80
    result = evaluate(promtool, tmp_path, list(fleet()), asked)
    assert result.returncode == 0, (result.stdout + result.stderr)[:4000]
