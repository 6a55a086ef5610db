"""A GRPO run of real TRL with EpochKV on its server is, token for token, the run without any cache.

Nothing in the trainer knows of EpochKV but the proof of each push, as `docs/trainers/trl.md` has it. TRL resets vLLM's own prefix
cache after a push, and no connector: L1 and L2 keep the KV of every step, under names that hold its weights.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from trl import GRPOTrainer

from epochkv_fence import client
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import PATIENT, PATIENT_ENVIRON
from tests.trainers.trl import grpo, server

pytestmark = pytest.mark.timeout(1200)  # two servers, and their training

L1_BYTES = 2 << 20
"""Ten blocks: less than a step needs, so that L2 has its share."""


@dataclass(frozen=True)
class Cached:
    """The run with EpochKV: what vLLM had found after each generation, the weights of each push, tokens found by tier."""

    run: grpo.Run
    hits: list[grpo.Hits]
    weights: list[str]
    base: str
    by_tier: dict[str, int]


def prove_pushes(trainer: GRPOTrainer, pool: client.Pool, found: list[str]) -> None:
    """Have every push of the trainer proved; `found` gets the digest of each."""
    push = trainer.vllm_generation.sync_weights

    def proved_push() -> None:
        if trainer.state.global_step == 0:  # the server has these weights already
            push()
            pool.wait_weights(timeout_s=60)
        else:
            with pool.weight_update(timeout_s=60):
                push()
        (group,) = pool.weights().groups
        found.append(group.id)

    trainer.vllm_generation.sync_weights = proved_push


@pytest.fixture(scope="session")
def cached(starting: Engine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    folder = tmp_path_factory.mktemp("cached")
    with Mooncake(folder) as mooncake, Pool(folder) as pool:
        connector = pool.connector(L1_BYTES, mooncake.address, **PATIENT)
        engine = server.start("cached", model, folder, connector, PATIENT_ENVIRON)
        try:
            engine.wait_ready(server.START_SECONDS)
            pool.wait_engines(1)
            file = folder / "connection.json"
            file.write_text(json.dumps(pool.connection()))
            with client.Pool.connect(file) as trainer:
                (base,) = trainer.wait_weights(timeout_s=60).groups
                weights: list[str] = []
                run = server.train(
                    engine, model, folder / "trained", lambda: server.hits(engine), lambda it: prove_pushes(it, trainer, weights)
                )
            engine.report_metrics([5] * 8)
            by_tier = {tier: int(engine.metric("vllm:epochkv_hit_tokens_total", tier=tier)) for tier in ("L1", "L2")}
            yield Cached(run, [batch.observed for batch in run.batches], weights, base.id, by_tier)
        finally:
            engine.end()


def test_completions_and_weights_are_those_of_the_run_without_a_cache(cached: Cached, uncached: grpo.Run) -> None:
    cached.run.check(uncached)


def test_the_run_learns_so_that_old_kv_would_show(uncached: grpo.Run) -> None:
    assert len(uncached.batches) == 2 * grpo.STEPS
    assert uncached.learns


def test_every_step_shares_within_itself_and_nothing_across(cached: Cached) -> None:
    server.BATCH.check_hits(cached.hits)


def test_both_tiers_took_part(cached: Cached) -> None:
    assert cached.by_tier["L1"] > 0
    assert cached.by_tier["L2"] > 0


def test_every_push_of_other_weights_has_another_name(cached: Cached) -> None:
    assert cached.weights[0] == cached.base, "the first push brings what the server has read from its file"
    assert len(cached.weights) == len(set(cached.weights)) == grpo.STEPS
