"""The borders with vLLM: versions, fingerprint fields, layouts, stats, registration by name, the worker facade."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore


def test_tested_versions_are_taken_and_others_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from epochkv_connector.engine.interface import UnsupportedEngine, check_version

    for version in ("0.30.0", "0.31.2", "0.32.0", "0.33.0rc1"):
        monkeypatch.setattr(vllm, "__version__", version)
        check_version(False)
    for version in ("0.29.9", "0.34.0", "1.32.0", "dev"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(UnsupportedEngine, match=r"0\.30 to 0\.33.*allow_untested_vllm"):
            check_version(False)
        check_version(True)


def test_kv_that_would_be_wrong_is_neither_loaded_nor_saved(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reference kernel for MLA on CPUs ignores cached context; scales beside the blocks cannot be restored."""
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from epochkv_connector.engine import describe, limits

    rig = make_rig()
    config = rig.vllm_config
    why = limits.why_no_tiers
    assert why(config) is None
    with monkeypatch.context() as patch:
        patch.setattr(type(config.model_config), "use_mla", True)
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert "ignores cached context" in (why(config) or "")
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        assert why(config) is None
        patch.setattr(config.attention_config, "backend", AttentionBackendEnum.CPU_MLA)
        assert "ignores cached context" in (why(config) or "")
        patch.setattr(config.model_config.hf_config, "model_type", "deepseek_v4")  # has kernels of its own where there is AMX
        assert why(config) is None
        patch.setattr(describe, "on_cpu", lambda: False)
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert why(config) is None
    with monkeypatch.context() as patch:
        patch.setattr(describe, "on_cpu", lambda: False)
        patch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
        assert why(config) is None
        patch.setattr(config.cache_config, "cache_dtype", "fp8")
        assert "outside of the blocks" in (why(config) or "")
    with monkeypatch.context() as patch:
        patch.setattr(config.cache_config, "cache_dtype", "fp8")
        assert why(config) is None
        patch.setattr(config.cache_config, "calculate_kv_scales", True, raising=False)
        assert "calculate_kv_scales is on" in (why(config) or "")


def test_hashes_of_requests_that_we_have_pinned_say_nothing_of_an_adapters_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core import kv_cache_utils

    from epochkv_connector.engine import patches
    from epochkv_connector.naming.identity import Pin

    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", kv_cache_utils._gen_lora_extra_hash_keys)
    patches.hide_adapters_from_hashes()
    patches.hide_adapters_from_hashes()  # a second engine of the process

    def keys(pin: Pin | None) -> Any:
        request = SimpleNamespace(lora_request=LoRARequest("a", 1, "/a"), cache_salt=None, mm_features=[], prompt_embeds=None)
        if pin is not None:
            request.epochkv_pin = pin
        return kv_cache_utils.generate_block_hash_extra_keys(request, 0, 16, 0)[0]  # type: ignore[arg-type]

    assert keys(Pin(b"r", 1, adapter=1)) is None
    assert keys(None) is not None
    assert keys(Pin(b"r", 1)) is not None


class Speculative:
    """vLLM's speculative configuration, as far as blocks are concerned."""

    def __init__(self, eagle: bool, drop: bool) -> None:
        self.use_eagle, self.use_eagle_block_drop = lambda: eagle, lambda: drop


@pytest.mark.parametrize(
    ("speculative", "flagged", "expected"),
    [
        (None, (), [False, False]),
        (Speculative(False, False), (), [False, False]),  # ngram
        (Speculative(True, True), (), [True, True]),  # nobody is flagged: vLLM drops the last block of all groups
        (Speculative(True, True), (1,), [False, True]),
        (Speculative(True, False), (), [False, False]),  # disable_eagle_block_drop
    ],
)
def test_groups_drop_their_last_block_where_vllm_drops_it(
    make_rig: MakeRig, speculative: Any, flagged: tuple[int, ...], expected: list[bool]
) -> None:
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

    from epochkv_connector.engine import describe

    rig = make_rig(groups=("48", "full"))
    for index in flagged:
        rig.kv_cache_config.kv_cache_groups[index].is_eagle_group = True
    object.__setattr__(rig.vllm_config, "speculative_config", speculative)
    assert [group.eagle for group in describe.cache_layout(rig.vllm_config, rig.kv_cache_config).groups] == expected
    coordinator = get_kv_cache_coordinator(
        kv_cache_config=rig.kv_cache_config,
        max_model_len=4096,
        max_in_flight_tokens=8192,
        use_eagle=bool(speculative and speculative.use_eagle_block_drop()),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
    )
    assert [manager.use_eagle for manager in coordinator.single_type_managers] == expected


@pytest.mark.parametrize(("rank_in_world", "expected"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_ranks_are_counted_within_the_engine(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, rank_in_world: int, expected: int) -> None:
    """With data parallelism vLLM's world group spans several engines; keys must name the shard within one."""
    from vllm.distributed import parallel_state

    from epochkv_connector.engine import describe

    class Group:
        rank_in_group = rank_in_world

    rig = make_rig(num_ranks=2)
    monkeypatch.setattr(parallel_state, "get_world_group", Group)
    assert describe.worker_rank(rig.vllm_config) == expected


def test_data_parallel_ranks_of_a_dense_model_report_under_names_of_their_own(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells each of them that it is rank 0."""
    started: list[int] = []
    monkeypatch.setattr("epochkv_connector.scheduler.role.HubLink.start", lambda link, hooks, fingerprint, rank: started.append(rank))

    def second(config: Any) -> None:
        object.__setattr__(config.parallel_config, "data_parallel_index", 1)
        config.parallel_config.reconfigure_for_independent_dp_rank()

    make_rig(change_config=second)
    assert started == [1]


def test_a_reclaim_walks_the_names_of_each_own_group_and_then_those_of_others(make_rig: MakeRig) -> None:
    from epochkv_connector.naming.identity import older_pattern, other_weights_pattern, pool_prefix

    class Store(SharedStore):
        asked_to_remove: list[str] = []  # noqa: RUF012

        def remove_matching(self, pattern: str, timeout: float = 10.0) -> int:
            self.asked_to_remove.append(pattern)
            return 10 ** int(pattern[-3]) if "g" in pattern[-5:] else 1000

    store = Store()
    rig = make_rig(store=store, pool_uid="u-1", groups=("full", "64"))
    own = rig.connector.scheduler.fingerprint
    block_bytes = 2 * BLOCK * 16 * 4 + 256  # keys and values of a block of float32 with one head of 16; header and trailer
    assert rig.connector.scheduler.reclaim(700, ()) == (1011, 11 * block_bytes)
    pool = pool_prefix("u-1")
    older = [older_pattern(pool, 700, own, group) for group in (0, 1, None)]
    assert store.asked_to_remove == older
    store.asked_to_remove.clear()
    keep = (b"k" * 16, b"l" * 16)
    assert rig.connector.scheduler.reclaim(700, keep) == (2022, 22 * block_bytes)
    others = [other_weights_pattern(pool, keep, own, group) for group in (0, 1, None)]
    assert store.asked_to_remove == older + others
    store.asked_to_remove.clear()
    assert rig.connector.scheduler.reclaim(0, keep) == (1011, 11 * block_bytes)
    assert store.asked_to_remove == others


@pytest.mark.unclean
def test_an_engine_without_its_store_client_does_not_say_that_nothing_is_left(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    from epochkv_connector.scheduler import role as build

    def broken(*_: Any) -> None:
        raise OSError("no threads left")

    monkeypatch.setattr(build, "build_tiers", broken)
    rig = make_rig(store=SharedStore())
    with pytest.raises(RuntimeError, match="tiers could not be built"):
        rig.connector.scheduler.reclaim(3, ())


def test_a_rank_that_cannot_be_staged_answers_every_job_once() -> None:
    from epochkv_connector.wire import BlockMove, LoadJob, Phase, SaveJob, StepMetadata
    from epochkv_connector.worker.role import WorkerRole

    side = WorkerRole(1, None)
    move = BlockMove(0, 0, 5, 0, b"h")
    step = StepMetadata(
        loads=(LoadJob(1, "a", None, (move,), 1.0),),
        saves=(SaveJob(2, "b", "ns", 0, 1, (move,), 1.0), SaveJob(3, "b", None, 1, 1, (move,), 1.0)),
        invalidated=("c",),
    )
    side.new_step()
    side.start(step, idle=True)
    side.finish(step)
    side.start(step, idle=True)  # asked twice, as vLLM does
    assert side.results() == ({"a", "c"}, {"a", "c"})
    assert side.results() == (set(), set())
    acks = [(ack.job_id, ack.phase, ack.failed, ack.num_blocks) for ack in side.acks().acks]
    assert acks == [(1, Phase.LOADED, True, 0), (2, Phase.COPIED, True, 0), (2, Phase.STORED, True, 0), (3, Phase.COPIED, True, 0)]
    assert side.acks().acks == []


def test_what_a_drain_collects_is_kept_for_the_next_results() -> None:
    """An in-process engine drains between steps; a load that ended meanwhile must still be reported to vLLM, once."""
    from epochkv_connector.wire import LoadJob, StepMetadata
    from epochkv_connector.worker.role import WorkerRole

    side = WorkerRole(0, None)
    side.new_step()
    side.start(StepMetadata(loads=(LoadJob(1, "a", None, (), 1.0),)), idle=False)
    assert [ack.job_id for ack in side.drain(0.0).acks] == [1]
    assert side.results() == ({"a"}, {"a"})
    assert side.acks().acks == []
