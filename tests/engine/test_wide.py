"""Experts over two data-parallel ranks: the engine's GPU cache and L1 hit as those of stock vLLM, and whatever may be stale is hidden."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from hack.standalone.engine import Engine
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.engine.conftest import CACHED, L1_BYTES, Prompts
from tests.engine.families import FAMILIES
from tests.engine.family_models import make
from tests.support import cpu_collectives

RANKS = (0, 1)
ARGUMENTS = ("--data-parallel-size", "2", "--load-format", "dummy", "--num-gpu-blocks-override", "20")
"""Twenty blocks are two prompts: the third one evicts."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), lease_seconds=6.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def wide(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("wide")
    family = next(family for family in FAMILIES if family.name == "moe")
    environ = {**cpu_collectives.install(folder / "plugin"), "EPOCHKV_ENGINE_NAME": "wide"}
    model = make(family, folder / "model")
    with Engine("wide", model, folder, pool.connector(L1_BYTES), args=ARGUMENTS, environ=environ) as engine:
        yield engine


def cached(engine: Engine, prompt: list[int], rank: int) -> int:
    """Tokens of the prompt that this rank found in a cache."""
    body = {"model": engine.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "detokenize": False}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    request = urllib.request.Request(f"http://127.0.0.1:{engine.port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        reply: Any = json.load(answer)
    return int((reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def test_each_rank_hits_in_its_gpu_cache_and_in_its_l1(wide: Engine, pool: Pool, prompts: Prompts) -> None:
    eventually(lambda: [view.state for view in pool.snapshot().engines] == ["own", "own"], lambda: f"two ranks in {pool.snapshot()}")
    assert {view.tiers_off for view in pool.snapshot().engines} == {"OwnCache"}
    assert pool.snapshot().weights == []
    for rank in RANKS:
        prompt = prompts()
        assert [cached(wide, prompt, rank) for _ in range(2)] == [0, CACHED]
        for _ in range(3):
            assert cached(wide, prompts(), rank) == 0
        assert cached(wide, prompt, rank) == CACHED, "in L1"
    wide.report_metrics(prompts())
    assert wide.metric("vllm:epochkv_loads_total") >= 1
    assert wide.metric("vllm:epochkv_own_cache") >= 1


def test_a_call_that_may_write_an_epoch_and_a_reset_hide_everything(wide: Engine, pool: Pool, prompts: Prompts) -> None:
    events = {
        "a call": lambda: wide.post("/collective_rpc", {"method": "update_max_model_len", "args": [2048]}),
        "an epoch": pool.bump,
        "vLLM's own reset": lambda: wide.reset_prefix_cache(external=True),
    }
    for name, event in events.items():
        before = [prompts() for _ in RANKS]
        for rank, prompt in zip(RANKS, before, strict=True):
            assert [cached(wide, prompt, rank) for _ in range(2)] == [0, CACHED]
        target = pool.snapshot().target
        event()
        for rank, prompt in zip(RANKS, before, strict=True):
            assert [cached(wide, prompt, rank) for _ in range(2)] == [0, CACHED], name
        assert pool.snapshot().target == target + (name == "an epoch"), "nobody else has to forget anything"
