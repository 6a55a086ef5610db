"""Two engines, L1 and L2, one pool: what is shared, what an epoch takes away, what a lost hub or a restarted engine may not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from epochkv_fence.messages import Mode
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import BLOCKS, CACHED, PATIENT, PATIENT_ENVIRON, Prompts, Reference, Weights, eventually, settled_keys

L1_BYTES = 64 << 20


class Pair:
    """Engines A and B of the pool, and which weights they have."""

    def __init__(self, a: Engine, b: Engine, weights: Weights, pool: Pool, mooncake: Mooncake) -> None:
        self.a, self.b, self.pool, self.mooncake = a, b, pool, mooncake
        self.model = weights.base

    def save_through_a(self, prompt: list[int]) -> tuple[int, ...]:
        """A computes the prompt; returns its answer once its blocks are in the store."""
        before = settled_keys(self.mooncake)
        answer = self.a.complete(prompt)
        assert answer.cached == 0
        eventually(lambda: len(set(self.mooncake.keys()) - before) == BLOCKS, f"{BLOCKS} blocks in the store")
        return answer.tokens


@pytest.fixture(scope="module")
def pair(weights: Weights, folder: Path, pool: Pool, mooncake: Mooncake) -> Iterator[Pair]:
    connector = pool.connector(local_bytes=L1_BYTES, master_address=mooncake.address, **PATIENT)
    with ExitStack() as stack:
        a, b = (Engine(name, weights.base, folder, connector, environ=PATIENT_ENVIRON) for name in "AB")
        for engine in (a, b):
            stack.callback(engine.process.end)
        for engine in (a, b):
            engine.wait_ready()
        pool.wait_engines(2)
        yield Pair(a, b, weights, pool, mooncake)


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
    pair.a.complete(first)
    settled_keys(pair.mooncake)
    assert pair.b.complete(second, 1).cached == 512
    assert pair.b.complete(second).tokens == reference(second, pair.model)


def test_a_new_epoch_hides_everything_and_sharing_goes_on(pair: Pair, prompts: Prompts, reference: Reference, weights: Weights) -> None:
    prompt = prompts()
    old = pair.save_through_a(prompt)
    assert pair.b.complete(prompt).cached == CACHED
    for engine in (pair.a, pair.b):
        engine.reload_weights(weights.new)
    pair.model = weights.new
    epoch = pair.pool.bump()
    assert pair.pool.snapshot().published == epoch
    assert reference(prompt, weights.new) != old, "the weights do not differ enough to show anything"
    assert pair.save_through_a(prompt) == reference(prompt, weights.new)
    answer = pair.b.complete(prompt)
    assert answer.cached == CACHED
    assert answer.tokens == reference(prompt, weights.new)


def test_vllms_own_reset_hides_everything_of_this_engine(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    pair.save_through_a(prompt)
    assert pair.a.reset_prefix_cache(external=True)
    answer = pair.a.complete(prompt)
    assert answer.cached == 0
    assert answer.tokens == reference(prompt, pair.model)
    pair.pool.bump()
    pair.save_through_a(prompt)
    assert pair.b.complete(prompt).cached == CACHED


def test_without_a_hub_the_lease_runs_out_and_nothing_is_reused(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    pair.save_through_a(prompt)
    pair.pool.stop_hub()
    eventually(lambda: pair.a.complete(prompt, 1).cached == 0, "A in bypass", 20.0)
    answer = pair.a.complete(prompt)
    assert (answer.cached, answer.tokens) == (0, reference(prompt, pair.model))
    pair.pool.start_hub()
    # The epoch is the same, so what was named under it is good again as soon as there is a lease.
    eventually(lambda: pair.a.complete(prompt, 1).cached == CACHED, "A uses the epoch again")
    answer = pair.a.complete(prompt)
    assert (answer.cached, answer.tokens) == (CACHED, reference(prompt, pair.model))


def test_a_restarted_engine_with_base_weights_does_not_join(
    pair: Pair, prompts: Prompts, reference: Reference, weights: Weights, folder: Path
) -> None:
    assert pair.model == weights.new
    prompt = prompts()
    pair.save_through_a(prompt)
    keys = settled_keys(pair.mooncake)
    pair.b.process.end()
    connector = pair.pool.connector(local_bytes=L1_BYTES, master_address=pair.mooncake.address, **PATIENT)
    pair.b = Engine("B-restarted", weights.base, folder, connector, environ=PATIENT_ENVIRON)
    try:
        pair.b.wait_ready()
        eventually(lambda: any(view.alive and view.mode is Mode.BYPASS for view in pair.pool.snapshot().engines), "B in bypass")
        answer = pair.b.complete(prompt)
        assert (answer.cached, answer.tokens) == (0, reference(prompt, weights.base))
        assert settled_keys(pair.mooncake) <= keys, "an engine in bypass has written to the store"  # reclaim may take old ones
        pair.b.reload_weights(weights.new)
        eventually(lambda: all(view.age_seconds > 4.0 for view in pair.pool.snapshot().engines if view.alive), "B is old enough to join")
        pair.pool.bump()
        pair.pool.wait_engines(2)
        assert pair.save_through_a(prompt) == reference(prompt, weights.new)
        assert pair.b.complete(prompt).cached == CACHED
    finally:
        pair.b.process.end()


def _items(metrics: str, name: str) -> float:
    values = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)]
    assert values, f"the master has no metric {name}"
    return sum(values)
