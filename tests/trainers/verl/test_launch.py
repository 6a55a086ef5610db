"""A launch while the store is not there: with `on_failure: fallback`, rollouts run without the connector."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hack.engine_api import Answer
from hack.loopback import free_port
from hack.standalone.pool import Pool
from tests.trainers.verl.command_line import enabled
from tests.trainers.verl.lab import ROLLOUT, Verl
from tests.trainers.verl.world import CACHED


@pytest.mark.timeout(1200)  # with the start of two engines; on a machine with other work
def test_fallback_starts_rollouts_that_answer_and_stay_out_of_the_pool(
    expected: dict[str, list[tuple[int, ...]]], weights: dict[str, Path], prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="v") as name, Pool(Path(name)) as pool:
        options = (*lost_master(pool), f"{ROLLOUT}.load_format=auto")
        with Verl(weights["base"], Path(name), options, {}, num_rollouts=1) as verl:
            answers = [verl.answer(verl.generate(0, prompts[0])) for _ in range(2)]
        assert "on_failure is fallback, so rollout engines run without the connector" in caplog.text
        assert answers == [Answer(expected["base"][0], cached) for cached in (0, CACHED)], "wrong tokens, or vLLM's own cache is off"
        assert not pool.snapshot().engines


def lost_master(pool: Pool, *more: str) -> tuple[str, ...]:
    """The block of a pool whose store is not there."""
    lost = f"extra_config.distributed.master_address=127.0.0.1:{free_port()}"
    return enabled(pool.credentials / "connection.json", lost, *more)
