"""Two engines, L1 and L2, one pool: what is shared, what an epoch takes away, what a lost hub may not do."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from epochkv_fence.protocol.messages import Source
from hack.waiting import eventually
from tests.engine.conftest import CACHED, Pair, Prompts, Reference, check, fence_lines, settled_keys


def test_b_reuses_what_a_computed(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    external = pair.b.metric("vllm:external_prefix_cache_hits_total")
    assert pair.save_through_a(prompt) == reference(prompt, pair.model)
    answer = pair.b.complete(prompt)
    assert answer.cached == CACHED
    assert pair.b.metric("vllm:external_prefix_cache_hits_total") - external == CACHED
    assert answer.tokens == reference(prompt, pair.model)


def test_l1_answers_when_the_gpu_has_forgotten(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    pair.save_through_a(prompt)
    gets = pair.mooncake.admin("metrics")
    assert pair.a.reset_prefix_cache(external=False)
    external = pair.a.metric("vllm:external_prefix_cache_hits_total")
    answer = pair.a.complete(prompt)
    assert answer.cached == CACHED
    assert pair.a.metric("vllm:external_prefix_cache_hits_total") - external == CACHED
    assert answer.tokens == reference(prompt, pair.model)
    assert _items(gets, "master_batch_get_replica_list_items_total") == _items(
        pair.mooncake.admin("metrics"), "master_batch_get_replica_list_items_total"
    ), "the store was read although L1 has the blocks"


def test_shared_beginnings_of_prompts_are_reused(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    begin = prompts(512)
    first, second = begin + prompts(300), begin + prompts(300)
    before = settled_keys(pair.mooncake)
    pair.a.complete(first)
    eventually(lambda: len(set(pair.mooncake.keys()) - before) == len(first) // 128, "the whole blocks of the first in the store")
    assert pair.b.complete(second, 1).cached == 512
    assert pair.b.complete(second).tokens == reference(second, pair.model)


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


@pytest.mark.slow
def test_a_rotated_key_costs_neither_lease_nor_cache(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    begin = len(fence_lines(pair.a)), len(fence_lines(pair.b))
    instances = {view.instance for view in pair.pool.snapshot().engines if view.alive}
    pair.pool.rotate_keys()
    eventually(lambda: all(view.key_index == 0 for view in pair.pool.snapshot().engines if view.alive), "both use the new key")
    pair.pool.forget_old_keys()
    pair.check_sharing(prompt, reference(prompt, pair.model))
    assert {view.instance for view in pair.pool.snapshot().engines if view.alive} == instances
    assert (len(fence_lines(pair.a)), len(fence_lines(pair.b))) == begin, "an engine was in bypass meanwhile"


@pytest.mark.slow
def test_vllms_own_reset_succeeds_while_requests_run_and_saves_copy(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    """`reset_running_requests`: it is an error if anybody holds a block then. (So it is while a load is under way: vLLM says
    that it does not support that. These prompts are new, and each is met by one reset.)"""
    for turn in range(6):
        asked = [prompts(700) for _ in range(6)]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = [threads.submit(pair.a.complete, prompt) for prompt in asked]
            time.sleep(0.05 * (1 + turn))
            assert pair.a.reset_prefix_cache(external=False)
        assert [answer.result().tokens for answer in answers] == [reference(prompt, pair.model) for prompt in asked]
    again = pair.a.complete(asked[0])
    check(again, 640, reference(asked[0], pair.model))


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


def _items(metrics: str, name: str) -> float:
    values = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)]
    assert values, f"the master has no metric {name}"
    return sum(values)
