"""Metrics of vLLM and of the connector on `/metrics` of real engines."""

import re
from pathlib import Path

from hack.observe.catalog import VLLM
from hack.standalone.engine import Engine
from tests.engine.conftest import CACHED, Pair, Prompts, Reference, check

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"


def metrics_page(engine: Engine) -> str:
    """`/metrics`, with the connector's numbers none older than this call."""
    engine.report_metrics([5, 6, 7])
    return engine.request("GET", "/metrics").decode()


def test_hits_are_told_by_tier(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    pair.save_through_a(prompt)
    for engine, tier, source in ((pair.b, "L2", "external_unspecified"), (pair.a, "L1", "host")):
        assert engine.reset_prefix_cache(external=False)
        metrics_page(engine)  # what it found for earlier tests is counted by now
        before = [
            engine.metric("vllm:prompt_tokens_cached_by_source_total", source=source),
            engine.metric("vllm:epochkv_hit_tokens_total", tier=tier),
            engine.metric("vllm:epochkv_load_bytes_total", tier=tier),
        ]
        answer = engine.complete(prompt)
        check(answer, CACHED, reference(prompt, pair.model))
        metrics_page(engine)
        assert engine.metric("vllm:prompt_tokens_cached_by_source_total", source=source) - before[0] == CACHED
        assert engine.metric("vllm:epochkv_hit_tokens_total", tier=tier) - before[1] == CACHED
        assert engine.metric("vllm:epochkv_load_bytes_total", tier=tier) > before[2]


def test_the_page_of_an_engine_is_that_of_the_documentation(pair: Pair, prompts: Prompts) -> None:
    pair.save_through_a(prompts())
    text = metrics_page(pair.a)
    served = set(re.findall(r"^# TYPE (vllm:epochkv_\w+) (?:counter|gauge)$", text, re.MULTILINE))
    served = {name for name in served if not name.endswith("_created")}
    documented = set(re.findall(r"^\| `(vllm:epochkv_\w+)`", PAGE.read_text(), re.MULTILINE))
    assert served == documented
    with_values = set(re.findall(r"^(vllm:epochkv_\w+)[{ ]", text, re.MULTILINE))
    assert documented <= with_values, "a gauge is never reported"
    assert pair.a.metric("vllm:epochkv_broken") == 0
    assert 0 < pair.a.metric("vllm:epochkv_lease_remaining_seconds") <= 6.0
    assert pair.a.metric("vllm:epochkv_epoch") == pair.pool.snapshot().published
    assert pair.a.metric("vllm:epochkv_store_state", rank="0") == pair.a.metric("vllm:epochkv_store_state", rank="scheduler") == 2
    assert pair.a.metric("vllm:epochkv_errors_total") == 0


def test_what_boards_and_alerts_ask_of_vllm_is_served(pair: Pair, prompts: Prompts) -> None:
    """By the names and labels that this vLLM has."""
    pair.a.complete(prompts(8), 2)
    text = metrics_page(pair.a)
    for metric in VLLM:
        for series in metric.series:
            found = re.search(rf"^{series}{{(.*)}} ", text, re.MULTILINE)
            assert found is not None, f"vLLM does not serve {series}"
            assert set(metric.labels) == set(re.findall(r'(\w+)="', found[1])) - {"le"}, series
