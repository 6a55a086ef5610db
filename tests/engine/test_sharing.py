"""Two engines, L1 and L2, one pool: what is shared, what an epoch takes away, what a lost hub may not do. And metrics of vLLM and of the
connector on `/metrics`.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epochkv_fence.protocol.messages import Source
from hack.observe.catalog import VLLM
from hack.standalone.engine import Engine
from hack.waiting import eventually
from tests.engine.conftest import CACHED, Pair, Prompts, Reference, check, fence_lines


def test_a_new_epoch_hides_everything_and_sharing_goes_on(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    """The weights are the same: it is what a person orders who wants everything forgotten."""
    prompt = prompts()
    expected = reference(prompt, pair.model)
    pair.check_sharing(prompt, expected)
    epoch = pair.pool.bump()
    assert pair.pool.snapshot().published == epoch
    pair.check_sharing(prompt, expected)


def test_without_a_hub_the_lease_runs_out_and_nothing_is_reused(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    pair.save_through_a(prompt)
    begin = len(fence_lines(pair.a))
    pair.pool.stop_hub()
    eventually(lambda: pair.a.complete(prompt, 1).cached == 0, "A in bypass", 20.0)
    answer = pair.a.complete(prompt)
    check(answer, 0, reference(prompt, pair.model))
    pair.pool.start_hub()
    # The epoch is the same, so what was named under it is good again as soon as there is a lease.
    eventually(lambda: pair.a.complete(prompt, 1).cached == CACHED, "A uses the epoch again")
    answer = pair.a.complete(prompt)
    check(answer, CACHED, reference(prompt, pair.model))
    assert "INFO" in fence_lines(pair.a)[0], "an engine that starts has lost nothing"
    lost, back = fence_lines(pair.a)[begin:]
    assert "is over" in lost
    assert "in use, back from bypass" in back
    pair.b.complete(prompts(8), 1)  # every request looks at the lease
    eventually(lambda: "in use" in fence_lines(pair.b)[-1], "B uses the epoch")


def reset_one(pair: Pair) -> None:
    """vLLM's `/reset_prefix_cache` on one engine."""
    assert pair.a.reset_prefix_cache(external=True)


def pause_everywhere(pair: Pair) -> None:
    """As trainers do: `/pause` with its default `clear_cache`."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda engine: engine.pause("abort"), pair.both))
    for engine in pair.both:
        engine.resume()


@pytest.mark.parametrize("clear", [reset_one, pause_everywhere])
def test_engines_that_clear_their_caches_move_the_pool_on_once(
    pair: Pair, prompts: Prompts, reference: Reference, clear: Callable[[Pair], None]
) -> None:
    """Clear means clear, for every engine and tier, whoever was told, and nobody has to ask for an epoch."""
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))  # both have used the epoch, so both give it up
    before = pair.pool.snapshot().target
    clear(pair)
    eventually(lambda: pair.pool.snapshot().published > before, "the next epoch")
    pair.pool.wait_engines(2)
    pair.check_sharing(prompt, reference(prompt, pair.model))
    snapshot = pair.pool.snapshot()
    assert (snapshot.target, snapshot.published) == (before + 1, before + 1)
    assert snapshot.origin is not None
    assert snapshot.origin is Source.ENGINE


# ---------------------------------------------------------------------------------------------- metrics
PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"


def metrics_page(engine: Engine) -> str:
    """`/metrics`, with the connector's numbers none older than this call."""
    engine.report_metrics([5, 6, 7])
    return engine.request("GET", "/metrics").decode()


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
