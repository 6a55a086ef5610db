"""Host slots: each rank lays out what its tensors take, and the scheduler role uses the slots that all ranks have.

vLLM shows the scheduler role the first layer of a group and the first rank of an engine, so what it could count is often too much.
"""

from typing import Any

import pytest
import torch

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.scheduler.role import mean_object_bytes
from epochkv_connector.weights import executor as joining
from epochkv_connector.wire import RankLayout
from epochkv_connector.worker.role import JobRunner, build_runner
from epochkv_fence.connection import ConfigurationError
from tests.scheduler.rigs import LENGTH, WHOLE, MakeRig, found
from tests.support.scheduler import BLOCK, SharedStore, prompt
from tests.support.scheduler_config import rank_kv_cache_config

PAGE = 2048  # 16 tokens x (16 + 16) values x 4 bytes
UNLIKE = 8 * PAGE + 256  # the second layer's page is seven times as large; with header and trailer
SEEN = 2 * PAGE + 256  # what the scheduler role makes of it: two layers like the first
BLOCKS = 8  # of a prompt


def serve_again(rig: Any, seed: int) -> int:
    """Tokens of a prompt that are found once the GPU has forgotten it."""
    assert rig.block_pool.reset_prefix_cache()
    return found(rig, prompt(seed, LENGTH))


def check_fills_and_evicts(rig: Any, num_slots: int) -> None:
    """L1 is filled several times over: the newest prompts are found, no job names a slot that a rank lacks, and nothing fails."""
    num_prompts = 4 * num_slots // BLOCKS
    for seed in range(num_prompts):
        rig.serve(prompt(seed, LENGTH))
    stats = rig.tiers.stats()
    assert (stats["slots"], stats["slots_indexed"]) == (num_slots, num_slots)
    assert stats["evictions"] >= BLOCKS * num_prompts - num_slots
    newest = range(num_prompts - num_slots // BLOCKS, num_prompts)
    assert [serve_again(rig, seed) for seed in reversed(newest)] == [WHOLE] * len(newest)
    assert serve_again(rig, 0) == 0
    assert stats["dropped_unread"] == stats["evictions"], "nobody had loaded any of them"
    for seed in newest:
        rig.serve(prompt(1000 + seed, LENGTH))
    assert rig.tiers.stats()["dropped_unread"] < rig.tiers.stats()["evictions"]
    assert [worker.bad_jobs for worker in rig.workers] == [[]] * len(rig.workers)
    assert rig.tiers.stats()["loads_failed"] == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_l1_of_unlike_pages_evicts_when_it_is_full(make_rig: MakeRig, num_ranks: int) -> None:
    capacity = 24 * UNLIKE * num_ranks
    rig = make_rig(groups=("unlike",), num_ranks=num_ranks, num_blocks=12, l1_bytes=capacity, epoch=0)
    (group,) = rig.kv_cache_config.kv_cache_groups
    assert group.kv_cache_spec.page_size_bytes * len(group.layer_names) + 256 == SEEN, "vLLM shows the pages as they are"
    assert capacity // num_ranks // SEEN > 3 * 24
    check_fills_and_evicts(rig, 24)


@pytest.mark.parametrize("num_layers", [(1, 3), (3, 1)])
def test_the_rank_with_the_fewest_slots_decides(make_rig: MakeRig, num_layers: tuple[int, int]) -> None:
    """As pipeline stages of one layer and three: shares of L1 are equal, blocks are not."""
    rig = make_rig(num_layers=num_layers, num_ranks=2, num_blocks=12, l1_bytes=2 * 16 * (3 * PAGE + 256), epoch=0)
    assert sorted(worker.num_slots for worker in rig.workers) == [16, 44]
    check_fills_and_evicts(rig, 16)


def test_a_staging_ring_of_unlike_pages_has_the_slots_that_were_asked_for(make_rig: MakeRig) -> None:
    rig = make_rig(groups=("unlike",), num_blocks=12, store=SharedStore(), l1_bytes=None, extra={"staging_slots": 16}, epoch=0)
    assert rig.tiers.stats()["slots"] == 16
    for seed in range(6):
        rig.serve(prompt(seed, LENGTH))
    assert [serve_again(rig, seed) for seed in range(6)] == [WHOLE] * 6
    assert rig.workers[0].bad_jobs == []


def test_l1_of_another_size_shares_with_the_others(make_rig: MakeRig) -> None:
    assert make_rig(l1_bytes=1 << 20).side.fingerprint == make_rig(l1_bytes=1 << 21).side.fingerprint


@pytest.mark.unclean
@pytest.mark.parametrize("answers", ["nobody", "too few", "one without", "an error"])
def test_without_slots_on_every_rank_an_engine_serves_without_tiers_and_says_so(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: str
) -> None:
    known = RankLayout(b"", 40, {0: PAGE})

    def layouts(_: Any) -> list[RankLayout]:
        if answers == "an error":
            raise RuntimeError("a rank has gone")
        return {"nobody": [], "too few": [known], "one without": [known, RankLayout()]}[answers]

    monkeypatch.setattr(joining.EngineRanks, "layouts", layouts)
    store = SharedStore()
    rig = make_rig(num_ranks=2, num_blocks=12, store=store, epoch=0)
    assert rig.side.gauges()["broken"] == 1.0
    assert "cannot copy KV blocks" in caplog.text
    assert rig.side.hooks.tiers()[0] == "TiersBroken"
    rig.serve(prompt(1, LENGTH))
    assert serve_again(rig, 1) == 0
    assert (store.asked, store.objects, rig.leaks()) == ([], {}, {})
    assert len(rig.side.store_keys.object_bytes) == 1, "keys of this group are still removed when the pool wants it"


def test_objects_count_with_the_mean_of_what_ranks_put() -> None:
    layouts = [RankLayout(b"", 9, {0: 1000, 1: 2000}), RankLayout(b"", 5, {0: 4000, 1: 2000}), RankLayout()]
    assert mean_object_bytes(layouts, 2) == (2500 + 256, 2000 + 256)
    assert mean_object_bytes([], 2) == (0, 0)


def build(rig: Any, cores: int, **extra: Any) -> JobRunner:
    """What the worker role of this engine's first rank builds over tensors like vLLM's, beside as many data-parallel ranks."""
    config, caches = rank_kv_cache_config(rig.options), {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {name: group.kv_cache_spec})[name]
            caches[name] = torch.zeros((2, config.num_blocks, BLOCK, 1, spec.head_size), dtype=spec.dtype)
    object.__setattr__(rig.vllm_config.parallel_config, "data_parallel_size_local", cores)
    ours = ConnectorConfig.parse({**rig.vllm_config.kv_transfer_config.kv_connector_extra_config, **extra})
    return build_runner(ours, rig.vllm_config, config, caches)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    ("groups", "payloads"), [(("unlike",), {0: 8 * PAGE}), (("48", "unlike"), {0: PAGE, 1: 8 * PAGE}), (("full",), {0: PAGE})]
)
def test_a_rank_measures_its_tensors_and_stays_within_its_share(
    make_rig: MakeRig, groups: tuple[str, ...], payloads: dict[int, int], cores: int
) -> None:
    rig = make_rig(groups=groups, l1_bytes=1_000_000)
    runner = build(rig, cores, local={"capacity_bytes": cores * 1_000_000})
    try:
        slot = max(payloads.values()) + 256
        assert runner.layout.payload_bytes == payloads
        assert runner.layout.num_slots == 1_000_000 // slot == rig.tiers.stats()["slots"]
        region = runner._rank.staging.region
        assert (region.num_slots, region.stride) == (runner.layout.num_slots, slot)
        assert region.num_bytes <= 1_000_000
    finally:
        runner.shutdown()


def test_rings_of_all_data_parallel_ranks_have_to_fit(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(store=SharedStore(), l1_bytes=None, extra={"staging_slots": 16})
    monkeypatch.setattr("epochkv_connector.worker.role.StoreClient.start", lambda client: None)
    monkeypatch.setattr("epochkv_connector.config.memory_limit", lambda root: (16 * (PAGE + 256), "one ring"))
    build(rig, 1).shutdown()
    with pytest.raises(ConfigurationError, match=f"staging_slots is 16, which takes {32 * (PAGE + 256)} bytes"):
        build(rig, 2)
