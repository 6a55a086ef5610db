"""Engines that cannot know by their configuration what their KV depends on: hits as stock vLLM has them, and for nobody else."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from epochkv_connector.engine import limits
from epochkv_connector.naming.root import is_private
from tests.scheduler.rigs import TOKENS, WHOLE, FailsOnce, MakeRig, Patch, found, push_out
from tests.scheduler.test_adapters import adapter, load, serve
from tests.scheduler.test_fenced import FencedRig, MooncakeStore, Offloading, Stock
from tests.support.scheduler import BLOCK, Rig, SharedStore, prompt
from tests.support.scheduler_worker import FakeExecutor


class RayDistributedExecutor(FakeExecutor):
    """By its name, vLLM's old Ray executor."""


def wide(config: VllmConfig, patch: Patch) -> None:
    object.__setattr__(config.parallel_config, "data_parallel_size", 2)
    patch.setattr(type(config.model_config), "is_moe", True)


REASONS: dict[str, tuple[Callable[[VllmConfig, Patch], object], str]] = {
    "wide": (wide, "VLLM_ENABLE_V1_MULTIPROCESSING"),  # in the process of its user; with the fence alone, ranks compare nothing
    "expert rebalancing": (lambda config, _: object.__setattr__(config.parallel_config, "enable_eplb", True), "enable_eplb"),
    "prefetch offloading": (lambda config, _: setattr(config.offload_config.prefetch, "offload_group_size", 4), "offload_group_size"),
    "old Ray executor": (lambda config, _: None, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"),  # its executor is another one
}
every_reason = pytest.mark.parametrize("reason", list(REASONS))


def test_no_wide_engine_joins_its_domain_under_the_fence() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2), model_config=SimpleNamespace(is_moe=True))
    own = limits.why_own(config, None, fenced=True)
    assert own is not None
    assert "EPOCHKV_FENCE" in own.why


def test_an_encoder_whose_scales_follow_what_it_sees_is_one_of_them_until_they_are_given() -> None:
    media = SimpleNamespace(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=None)
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1), model_config=SimpleNamespace(multimodal_config=media))
    own = limits.why_own(config, None)
    assert own is not None
    assert "mm_encoder_fp8_scale_path" in own.why
    assert not own.asks, "its buffers change with each picture"
    media.mm_encoder_fp8_scale_path = "scales.json"
    assert limits.why_own(config, None) is None


@pytest.fixture
def make_own(make_rig: MakeRig, monkeypatch: Patch) -> Callable[..., Any]:
    """An engine that names for itself alone, for this reason."""

    def make(reason: str, kind: type[Rig] = Rig, **options: Any) -> Any:
        if reason == "old Ray executor":
            monkeypatch.setattr("tests.support.scheduler.FakeExecutor", RayDistributedExecutor)
        return make_rig(kind, **options, change_config=lambda config: REASONS[reason][0](config, monkeypatch))

    return make


@every_reason
@pytest.mark.parametrize("hub", ["a grant", "no grant"])
def test_its_gpu_cache_and_l1_work_and_nothing_leaves(make_own: MakeRig, caplog: pytest.LogCaptureFixture, reason: str, hub: str) -> None:
    store = SharedStore()
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        rig = make_own(reason, store=store, num_blocks=12)
    (said,) = {record.getMessage() for record in caplog.records if "keeps its cache to itself" in record.getMessage()}
    assert REASONS[reason][1] in said
    assert "join_domain" not in rig.executor.calls, "a worker that has joined compares each step with what nobody tells"
    if hub == "a grant":
        rig.adopt(0)
    rig.lease_until = 0.0  # an own root needs none
    assert found(rig) == 0
    assert found(rig) == WHOLE
    push_out(rig)
    assert found(rig) == WHOLE
    assert store.objects == {}
    assert store.asked == []
    running = rig.add(TOKENS, max_tokens=3, params={"do_remote_decode": True})
    rig.step()
    assert is_private(rig.pins, running), "routers are told nothing of it"
    rig.run()
    assert "epochkv_tag" not in (rig.handed.get(running.request_id) or {})
    gauges = rig.connector.scheduler.gauges()
    assert (gauges["own_cache"], gauges["bypass"], gauges["weights_known"], gauges["root_shared"]) == (1.0, 0.0, 0.0, 0.0)
    value, note = rig.connector.scheduler.hooks.weights()
    assert value is None
    assert REASONS[reason][1] in note
    assert rig.connector.scheduler.tiers_told()[0] == "OwnCache"


@every_reason
def test_its_gpu_cache_finds_what_an_adapter_has_computed_until_it_is_loaded_again(make_own: MakeRig, reason: str) -> None:
    rig = make_own(reason, num_blocks=12, epoch=0)
    load(rig, adapter(), "one")
    assert [serve(rig, adapter(), TOKENS) for _ in range(2)] == [0, WHOLE]
    load(rig, adapter(load_inplace=True), "two")
    assert [serve(rig, adapter(), TOKENS) for _ in range(2)] == [0, WHOLE]
    push_out(rig)
    assert serve(rig, adapter(), TOKENS) == 0, "no tier has it"


def test_weights_that_a_kernel_hides_are_seen_with_the_first_look(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store, num_ranks=2, epoch=0)
    rig.executor.answers = lambda answer: {**answer, "weights": None, "note": "hidden", "alone": "hidden"} if answer["rank"] else answer
    call(rig)
    assert [found(rig), found(rig)] == [0, WHOLE]
    call(rig)
    assert found(rig) == 0, "the call may have written"
    assert store.objects == {}
    assert rig.connector.scheduler.hooks.weights() == (None, "hidden")
    assert rig.connector.scheduler.tiers_told()[0] == "OwnCache"


def call(rig: Any) -> None:
    """A call that may write, and writes the same again."""
    rig.executor.collective_rpc("never_heard_of")


def write_past(rig: Any) -> None:
    """Nobody hears of it, and the engine idles."""
    rig.write_past("w2")
    rig.watch._scheduled_at -= 1.0


EVENTS: dict[str, Callable[[Any], object]] = {
    "a call that may write": call,
    "a push": lambda rig: setattr(rig, "weights", "w1"),
    "a wake-up": lambda rig: [rig.executor.collective_rpc(method) for method in ("sleep", "wake_up")],
    "a local reset": lambda rig: rig.scheduler.reset_prefix_cache(reset_connector=True),
    "an adopted epoch": lambda rig: rig.adopt(1),
}


@every_reason
@pytest.mark.parametrize("event", list(EVENTS))
def test_whatever_may_make_it_stale_hides_all_of_it(make_own: MakeRig, monkeypatch: Patch, reason: str, event: str) -> None:
    proposed: list[int] = []
    monkeypatch.setattr("epochkv_connector.scheduler.role.HubLink.propose", lambda self, epoch: proposed.append(epoch))
    rig = make_own(reason, num_blocks=64, epoch=0)
    found(rig)
    assert found(rig) == WHOLE
    running = rig.add([*TOKENS, *prompt(5, BLOCK)], max_tokens=2 * BLOCK)
    rig.step()
    EVENTS[event](rig)
    assert found(rig) == 0
    assert found(rig) == WHOLE
    rig.run()
    assert running.request_id in rig.finished
    assert found(rig, list(running.all_token_ids)) <= WHOLE + 2 * BLOCK
    assert proposed == [], "the pool has nothing of it"
    assert not rig.connector.scheduler.hooks.isolated()


def test_a_call_hides_it_before_the_call_is_made(make_own: MakeRig) -> None:
    rig = make_own("wide", epoch=0)
    found(rig)
    seen: list[int] = []
    write = rig.executor.write

    def writing(*args: Any) -> None:
        seen.append(found(rig))
        write(*args)

    rig.executor.write = writing
    rig.weights = "w1"
    assert seen == [0]


@pytest.mark.parametrize("when", ["idle", "during a step"])
def test_a_sample_that_differs_hides_it_where_samples_last(make_own: MakeRig, when: str) -> None:
    rig = make_own("wide", epoch=0)
    found(rig)
    assert found(rig) == WHOLE
    if when == "idle":
        write_past(rig)
    else:
        rig.add(prompt(7, BLOCK), max_tokens=3)
        output = rig.scheduler.schedule()
        rig.write_past("w1")
        rig.update(output)
        rig.run()
    assert found(rig) == 0
    assert found(rig) == WHOLE
    assert rig.block_pool.get_num_free_blocks() == rig.free_at_start


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason != "wide"])
def test_ranks_that_hold_something_else_at_each_step_are_not_asked(make_own: MakeRig, reason: str) -> None:
    rig = make_own(reason, epoch=0)
    for tokens in (TOKENS, prompt(2, 3 * BLOCK), TOKENS):
        found(rig, tokens)
        rig.watch._scheduled_at -= 1.0
    call(rig)
    found(rig)
    assert not {"digest_weights", "is_unchanged"} & set(rig.executor.calls)


@pytest.mark.unclean
def test_an_error_while_its_weights_change_leaves_it_in_bypass(make_own: MakeRig, monkeypatch: Patch) -> None:
    rig = make_own("wide", epoch=0)
    found(rig)
    FailsOnce(rig.side.weights, "hold", monkeypatch)
    rig.weights = "w1"
    assert [found(rig), found(rig)] == [0, 0]
    assert rig.connector.scheduler.gauges()["bypass"] == 1.0


@every_reason
@pytest.mark.parametrize("stock", [Stock, Offloading], ids=["no connector", "offloading"])
def test_the_fence_alone_keeps_such_engines_hits_too(make_own: MakeRig, reason: str, stock: Callable[[], Stock]) -> None:
    rig = make_own(reason, kind=FencedRig, stock=stock(), num_blocks=64)
    assert [found(rig), found(rig)] == [0, WHOLE]
    events = [*EVENTS.values(), *([write_past] if reason == "wide" else [])]
    for event in events:
        event(rig)
        assert [found(rig), found(rig)] == [0, WHOLE]


def test_other_engines_do_not_find_what_such_an_engine_puts_into_a_store_that_they_share(make_own: MakeRig) -> None:
    objects: dict[str, Any] = {}
    a, b = (make_own("wide", kind=FencedRig, stock=MooncakeStore(objects), epoch=0) for _ in range(2))
    assert found(a) == 0
    assert objects
    assert found(b) == 0
