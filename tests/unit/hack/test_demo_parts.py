"""The demo's own pieces: models that can be loaded, claims that can fail, durations that survive, metrics that are summed right."""

from __future__ import annotations

from rich.console import Console

from hack.demo.claims import Claims
from hack.engine_api import metric_total
from hack.sync_chart import template

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 104.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 896.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="external_kv_transfer"} 128.0
vllm:prompt_tokens_by_source_created{engine="0",source="external_kv_transfer"} 1.7e+09
process_cpu_seconds_total 12.5
"""


def test_claims_tell_what_broke() -> None:
    claims = Claims()
    claims.equal("kept", 1, 1)
    claims.equal("broken", 896, 0)
    claims.check("said", False, "yes", "no")
    assert [(claim.what, claim.expected, claim.seen) for claim in claims.broken] == [("broken", "0", "896"), ("said", "yes", "no")]
    console = Console(width=100, record=True)
    claims.show(console, "title")
    text = console.export_text()
    assert text.count("✗") == 2
    assert text.count("✓") == 1


def test_metrics_are_summed_over_the_series_with_these_labels() -> None:
    name = "vllm:prompt_tokens_by_source_total"
    assert metric_total(METRICS, name, {"source": "external_kv_transfer"}) == 1024
    assert metric_total(METRICS, name, {}) == 1128
    assert metric_total(METRICS, "process_cpu_seconds_total", {}) == 12.5
    assert metric_total(METRICS, "absent_total", {}) == 0


def test_crd_templates_keep_the_text_and_escape_braces() -> None:
    text = "apiVersion: v1\nkind: CustomResourceDefinition\nmetadata:\n  name: x\nspec:\n  note: a {{ b }}\n"
    made = template("x.yaml", text)
    assert "helm.sh/resource-policy: keep" in made
    assert 'note: a {{ "{{" }} b }}' in made
    assert made.endswith("{{- end }}\n")
