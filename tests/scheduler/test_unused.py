"""No engine is silently without hits: what it cannot use is one line of its log, and what it tells the hub and its metrics."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from epochkv_connector.weights import rank
from epochkv_connector.wire import RankLayout
from tests.scheduler.rigs import LENGTH, FailsOnce, MakeRig, Patch, filled, found
from tests.support.scheduler import BLOCK, SharedStore, prompt
from tests.support.scheduler_config import EngineOptions, kv_cache_config
from tests.support.scheduler_worker import FakeExecutor

Prepare = Callable[[Patch], dict[str, Any]]
"""Brings about a state in which an engine lacks tiers; returns options of its rig."""


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("vllm.epochkv") and one.levelno == logging.WARNING]


@pytest.fixture(autouse=True)
def heard() -> None:
    """What vLLM's logger is told reaches pytest."""
    logging.getLogger("vllm").propagate = True


def reported(rig: Any) -> float:
    rig.connector._reporter._at = float("-inf")
    return float(rig.connector.get_kv_connector_stats().to_dict()["gauges"]["tiers_off"])


def with_states(options: EngineOptions) -> KVCacheConfig:
    """The second group has recurrent states, of which vLLM keeps no earlier ones."""
    made = kv_cache_config(options)
    spec = MambaSpec(block_size=BLOCK, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="none")
    made.kv_cache_groups[1] = KVCacheGroupSpec(["layer1"], spec)
    return made


# ------------------------------------------------------------------------------------------------------------ every reason
def unsupported(patch: Patch) -> dict[str, Any]:
    patch.setattr("tests.support.scheduler.kv_cache_config", with_states)
    return {"store": SharedStore(), "groups": ("full", "48"), "caching": False}


def scales(patch: Patch) -> dict[str, Any]:
    def change(config: VllmConfig) -> None:
        object.__setattr__(config.cache_config, "cache_dtype", "fp8")
        object.__setattr__(config.cache_config, "calculate_kv_scales", True)

    return {"change_config": change}


def experts(patch: Patch) -> dict[str, Any]:
    return {"change_config": lambda config: object.__setattr__(config.parallel_config, "enable_eplb", True)}


def seed(patch: Patch) -> dict[str, Any]:
    patch.setattr("epochkv_connector.engine.blocks.hash_seed_is_random", lambda algorithm: True)
    return {"store": SharedStore()}


def routes(patch: Patch) -> dict[str, Any]:
    connector = pytest.importorskip("vllm.distributed.aux_output_connector.connector").AuxOutputSchedulerConnector
    patch.setattr(connector, "cap_external_hit", None, raising=False)  # as 0.33 has it
    # The ranks of tests compute no routes that it could take.
    patch.setattr("vllm.v1.core.sched.scheduler.AuxOutputSchedulerConnector", lambda: None)

    def change(config: VllmConfig) -> None:
        config.aux_output_config.enable_return_routed_experts = True

    return {"store": SharedStore(), "change_config": change}


def lost_routes(patch: Patch) -> dict[str, Any]:
    options = routes(patch)
    patch.delattr("vllm.distributed.aux_output_connector.connector.AuxOutputSchedulerConnector.cap_external_hit")
    return options


def seed_without_l1(patch: Patch) -> dict[str, Any]:
    return {**seed(patch), "l1_bytes": None}


def unbuilt(patch: Patch) -> dict[str, Any]:
    def fails(*_: Any) -> None:
        raise OSError("no threads left")

    patch.setattr("epochkv_connector.scheduler.role.build_tiers", fails)
    return {}


def refusing(patch: Patch) -> dict[str, Any]:
    class Executor(FakeExecutor):
        def _of_ours(self, method: Any, args: tuple[Any, ...]) -> list[Any] | None:
            if method is rank.layout:
                return [self.layouts[0], RankLayout(refusal="LayoutError: layer0: shape (3,) has overlapping elements")]
            return super()._of_ours(method, args)

    patch.setattr("tests.support.scheduler.FakeExecutor", Executor)
    return {"num_ranks": 2}


REASONS: dict[str, tuple[Prepare, str, str, str]] = {
    "layout": (unsupported, "LayoutUnsupported", "no tier is used: KV cache group 1 (MambaSpec)", "turn prefix caching on"),
    "scales": (scales, "TiersOff", "no tier is used: calculate_kv_scales is on", "turn it off"),
    "weights": (experts, "OwnCache", "the engine keeps its cache to itself: expert rebalancing", "turn it off"),
    "seed": (seed, "L1Only", "L2 is off: block hashes (sha256) have a random seed", "set PYTHONHASHSEED"),
    "routes": (routes, "L1Only", "L2 is off: vLLM takes blocks only with", "leave out --enable-return-routed-experts"),
    "routes that are lost": (lost_routes, "TiersOff", "no tier is used: answers say which experts", "use 0.33, or leave out"),
    "seed without an L1": (seed_without_l1, "TiersOff", "L2 is off: ", "set PYTHONHASHSEED"),
    "tiers that cannot be built": (unbuilt, "TiersBroken", "no tier is used: the tiers could not be built (OSError: no", "restart"),
    "a rank that cannot copy": (refusing, "TiersBroken", "no tier is used: rank 1 cannot copy KV blocks (LayoutError: layer0: ", "restart"),
}  # fmt: skip


@pytest.mark.unclean
@pytest.mark.parametrize("case", list(REASONS))
def test_every_reason_is_one_line_with_what_to_change(
    make_rig: MakeRig, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    prepare, reason, says, remedy = REASONS[case]
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        rig = make_rig(**prepare(monkeypatch))
    (line,) = lines(caplog)
    told, note = rig.connector.scheduler.hooks.tiers()
    assert told == reason
    assert note.startswith(says)
    assert remedy in note
    assert note in line
    assert reported(rig) == 1.0


WISHES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "a producer": ({"transfer": {"kv_role": "kv_producer"}}, "loads are off: kv_role"),
    "a consumer": ({"transfer": {"kv_role": "kv_consumer"}}, "saves are off: kv_role"),
    "no tiers": ({"l1_bytes": None}, ""),
}


@pytest.mark.parametrize("case", list(WISHES))
def test_what_the_user_asked_for_is_said_and_no_problem(make_rig: MakeRig, caplog: pytest.LogCaptureFixture, case: str) -> None:
    options, says = WISHES[case]
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        rig = make_rig(**options)
    said = lines(caplog)
    assert len(said) == bool(says)
    assert all(says in line for line in said)
    assert rig.connector.scheduler.hooks.tiers() == ("", "")
    assert reported(rig) == 0.0


def test_who_is_to_load_nothing_saves_and_never_loads(make_rig: MakeRig) -> None:
    rig = make_rig(transfer={"kv_role": "kv_producer"}, epoch=0)
    assert found(rig) == 0
    assert rig.tiers.stats()["slots_indexed"] == 8  # there to be loaded
    assert rig.block_pool.reset_prefix_cache()
    assert found(rig) == 0


def test_a_consumer_loads_what_others_saved_and_saves_nothing(make_rig: MakeRig, store: SharedStore) -> None:
    for role, expected in (("kv_both", 0), ("kv_consumer", 8 * BLOCK)):
        rig = make_rig(transfer={"kv_role": role}, store=store, epoch=0)
        assert found(rig) == expected
        rig.serve(prompt(2, LENGTH))  # computed by both
        assert rig.tiers.stats()["saves_emitted"] == (2 if role == "kv_both" else 0)
        assert len(store.objects) == 16


def test_all_reasons_are_told_at_once_and_the_worst_first(make_rig: MakeRig, monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    """One restart with all of them changed is enough."""
    options = {**refusing(monkeypatch), **seed(monkeypatch), **experts(monkeypatch)}
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        rig = make_rig(**options)
    (line,) = lines(caplog)
    places = [line.index(says) for says in ("expert rebalancing", "rank 1 cannot copy", "PYTHONHASHSEED")]
    assert places == sorted(places)
    assert rig.connector.scheduler.hooks.tiers()[0] == "TiersBroken"


@pytest.mark.unclean
def test_tiers_that_break_while_the_engine_runs_are_told(make_rig: MakeRig, monkeypatch: Patch) -> None:
    rig, tokens = filled(make_rig)
    assert rig.connector.scheduler.hooks.tiers() == ("", "")
    failure = FailsOnce(rig.tiers, "adopt", monkeypatch)
    rig.adopt(1, weights="w1")
    rig.serve(tokens)
    assert failure.raised
    reason, note = rig.connector.scheduler.hooks.tiers()
    assert reason == "TiersBroken"
    assert note.startswith("no tier is used: an error turned the tiers off; restart the engine")
    assert reported(rig) == 1.0


def test_a_rank_whose_memory_cannot_be_laid_out_tells_why(make_rig: MakeRig) -> None:
    """What the scheduler role asks the ranks, answered by the real worker role."""
    from epochkv_connector.connector import EpochKVConnector
    from epochkv_connector.engine import interface

    rig = make_rig()
    connector = EpochKVConnector(rig.vllm_config, interface.KVConnectorRole.WORKER, rig.kv_cache_config)
    worker = SimpleNamespace(vllm_config=rig.vllm_config)
    assert rank.layout(worker).refusal == ""
    try:
        connector.register_kv_caches({"layer0": torch.zeros(3, 5)})  # 64 blocks fit in no dimension
        assert rank.layout(worker).refusal.startswith("LayoutError: layer0: no dimension of shape (3, 5) counts 64 blocks")
        connector.register_kv_caches({"layer0": torch.zeros(2, 64, BLOCK, 1, 16)})
        assert rank.layout(worker).refusal == ""
        assert rank.layout(worker).num_slots > 0
    finally:
        connector.shutdown()
    assert connector._engine_id not in rank._ranks, "a process that goes on keeps no weights of engines that ended"


def test_where_answers_have_routes_of_experts_l2_is_not_asked(make_rig: MakeRig, monkeypatch: Patch) -> None:
    rig, tokens = filled(make_rig, **routes(monkeypatch))
    assert found(rig, tokens) > 0, "in L1"
    assert rig.store.asked == []
    assert not rig.store.objects


@pytest.mark.parametrize("held", [False, True])
def test_a_hit_that_vllm_caps_at_its_routes_is_given_up_whole(make_rig: MakeRig, monkeypatch: Patch, held: bool) -> None:
    connector = pytest.importorskip("vllm.distributed.aux_output_connector.connector").AuxOutputSchedulerConnector
    if not hasattr(connector, "cap_external_hit"):
        pytest.skip("this version of vLLM does not cap")
    rig, tokens = filled(make_rig)
    capped = SimpleNamespace(
        max_cache_hit=lambda request: request.num_tokens - 1,
        cap_external_hit=lambda request, local, external: external if held else 0,
        request_loading=lambda request, number: None,
        request_finished=lambda request: None,
        build_connector_meta=lambda *_: None,
        take_output=lambda request, output: None,
    )
    monkeypatch.setattr(rig.scheduler, "aux_output_connector", capped)
    assert (found(rig, tokens) > 0) is held
    monkeypatch.setattr(rig.scheduler, "aux_output_connector", None)
