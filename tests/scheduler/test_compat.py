"""The borders with vLLM: KV that it would use wrongly, hashes, drafts, ranks; and what a reclaim removes."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import PoolerConfig
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

from epochkv_connector.engine import describe, limits, patches
from epochkv_connector.naming.identity import Pin, older_pattern, other_weights_pattern, pool_prefix
from epochkv_connector.scheduler import role
from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore


def test_kv_that_would_be_wrong_is_neither_loaded_nor_saved(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reference kernel for MLA on CPUs ignores cached context; a draft of diffusion has not the KV of its tokens; scales beside the
    blocks cannot be restored; some pooling, and some backends, know no cached part of a prompt."""
    rig = make_rig()
    config = rig.vllm_config
    why = limits.why_no_tiers
    assert why(config) is None
    with monkeypatch.context() as patch:
        patch.setattr(type(config.model_config), "use_mla", True)
        assert "ignores cached context" in (why(config) or "")
        patch.setattr(describe, "on_cpu", lambda: False)
        assert why(config) is None
    with monkeypatch.context() as patch:
        patch.setitem(vars(config.model_config), "is_diffusion", True)  # a cached property
        assert "by diffusion" in (why(config) or "")
        assert describe.tokens_per_step(config) == 0
    with monkeypatch.context() as patch:
        patch.setattr(describe, "on_cpu", lambda: False)
        patch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
        assert why(config) is None
        patch.setattr(config.cache_config, "cache_dtype", "fp8")
        assert "outside of the blocks" in (why(config) or "")
    with monkeypatch.context() as patch:
        patch.setattr(config.model_config, "runner_type", "pooling")
        assert why(config) is None
        patch.setattr(config.model_config, "pooler_config", PoolerConfig(seq_pooling_type="MEAN"))
        assert "in one pass" in (why(config) or "")
    with monkeypatch.context() as patch:
        patch.setattr(config.cache_config, "enable_prefix_caching", False)
        assert why(config) is None
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert "keeps no prefixes" in (why(config) or "")
    with monkeypatch.context() as patch:
        patch.setattr(config.cache_config, "cache_dtype", "fp8")
        assert why(config) is None
        patch.setattr(config.cache_config, "calculate_kv_scales", True, raising=False)
        assert "calculate_kv_scales is on" in (why(config) or "")


def test_hashes_that_go_on_with_the_last_picture_name_those_before_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.30's hasher does where a request has hashes."""
    monkeypatch.setattr(kv_cache_utils, "_gen_mm_extra_hash_keys", kv_cache_utils._gen_mm_extra_hash_keys)
    monkeypatch.delattr(kv_cache_utils, "get_mm_features_in_window", raising=False)
    patches.mend_hashes()
    places = {"a": 4, "b": 20, "c": 40}
    pictures = [SimpleNamespace(identifier=one, mm_position=SimpleNamespace(offset=at, length=8)) for one, at in places.items()]
    request: Any = SimpleNamespace(lora_request=None, cache_salt=None, mm_features=pictures, prompt_embeds=None)
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 16, 48, -1)
    assert [name for key in keys or () for name in key if name in places] == ["b", "c"]


def test_hashes_of_requests_that_we_have_pinned_say_nothing_of_an_adapters_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", kv_cache_utils._gen_lora_extra_hash_keys)
    patches.mend_hashes()
    patches.mend_hashes()  # a second engine of the process

    def keys(pin: Pin | None) -> Any:
        request = SimpleNamespace(lora_request=LoRARequest("a", 1, "/a"), cache_salt=None, mm_features=[], prompt_embeds=None)
        if pin is not None:
            request.epochkv_pin = pin
        return kv_cache_utils.generate_block_hash_extra_keys(request, 0, 16, 0)[0]  # type: ignore[arg-type]

    assert keys(Pin(b"r", 1, adapter=1)) is None
    assert keys(None) is not None
    assert keys(Pin(b"r", 1)) is not None


def drafts(eagle: bool, drop: bool) -> Any:
    """vLLM's speculative configuration, as far as blocks are concerned."""
    return SimpleNamespace(use_eagle=lambda: eagle, use_eagle_block_drop=lambda: drop)


@pytest.mark.parametrize(
    ("speculative", "flagged", "expected"),
    [
        (None, (), [False, False]),
        (drafts(False, False), (), [False, False]),  # ngram
        (drafts(True, True), (), [True, True]),  # nobody is flagged: vLLM drops the last block of all groups
        (drafts(True, True), (1,), [False, True]),
        (drafts(True, False), (), [False, False]),  # disable_eagle_block_drop
    ],
)
def test_groups_drop_a_block_where_vllm_does(make_rig: MakeRig, speculative: Any, flagged: tuple[int, ...], expected: list[bool]) -> None:
    rig = make_rig(groups=("48", "full"))
    for index in flagged:
        rig.kv_cache_config.kv_cache_groups[index].is_eagle_group = True
    object.__setattr__(rig.vllm_config, "speculative_config", speculative)
    assert [group.eagle for group in describe.cache_layout(rig.vllm_config, rig.kv_cache_config).groups] == expected
    sizes: Any = {"max_model_len": 4096, "max_in_flight_tokens": 8192, "hash_block_size": BLOCK, "scheduler_block_size": BLOCK}
    sizes |= {"enable_caching": True, "enable_kv_cache_events": False, "dcp_world_size": 1, "pcp_world_size": 1}
    drops = bool(speculative and speculative.use_eagle_block_drop())
    coordinator = get_kv_cache_coordinator(kv_cache_config=rig.kv_cache_config, use_eagle=drops, **sizes)
    assert [manager.use_eagle for manager in coordinator.single_type_managers] == expected


@pytest.mark.parametrize(("rank_in_world", "expected"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_ranks_are_counted_within_the_engine(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, rank_in_world: int, expected: int) -> None:
    """With data parallelism vLLM's world group spans several engines; keys must name the shard within one."""
    rig = make_rig(num_ranks=2)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(rank_in_group=rank_in_world))
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
    def broken(*_: Any) -> None:
        raise OSError("no threads left")

    monkeypatch.setattr(role, "build_tiers", broken)
    rig = make_rig(store=SharedStore())
    with pytest.raises(RuntimeError, match="tiers could not be built"):
        rig.connector.scheduler.reclaim(3, ())
