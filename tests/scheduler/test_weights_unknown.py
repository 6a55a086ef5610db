"""Ranks that cannot say what they hold, encoders, and errors of our own while weights change, on the real scheduler."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from epochkv_connector.engine import blocks
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, alter, found
from tests.support.scheduler import BLOCK, SharedStore, prompt

# ---------------------------------------------------------------------------------------------- engines that cannot know


SILENT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cannot": lambda answer: alter(answer, weights=None, note="the weights of x were packed away") if answer["rank"] else answer,
    "never answers": lambda answer: (_ for _ in ()).throw(TimeoutError("RPC call to ask timed out")),
}


@pytest.mark.parametrize("case", list(SILENT))
def test_a_rank_that_cannot_say_makes_the_engine_share_nothing_and_say_so_once(
    make_rig: MakeRig, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = SharedStore()
    rig = make_rig(store=store, num_ranks=2, epoch=0)
    found(rig)
    assert rig.connector.scheduler.gauges()["weights_known"] == 1.0
    before = len(store.objects)
    rig.executor.answers = SILENT[case]
    rig.weights = "w1"
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv.weights"):
        for _ in range(4):
            assert found(rig) == 0
            rig.watch._digest_at = 0.0
    said = {record.getMessage() for record in caplog.records if "weights are unknown" in record.getMessage()}
    assert len(said) == 1
    assert rig.connector.scheduler.gauges()["weights_known"] == 0.0
    assert rig.connector.scheduler.gauges()["bypass"] == 1.0
    assert len(store.objects) == before
    rig.executor.answers = lambda answer: answer
    rig.watch._digest_at = 0.0
    found(rig)
    assert found(rig) == WHOLE
    assert rig.connector.scheduler.gauges()["weights_known"] == 1.0


# ---------------------------------------------------------------------------------------------- encoders
class EncoderCache:
    """As vLLM's `EncoderCacheManager`, as far as we look at it."""

    def __init__(self) -> None:
        self.cached: dict[str, set[str]] = {"picture": set()}

    def reset(self) -> None:
        self.cached.clear()


def with_encoder(rig: Any) -> EncoderCache:
    cache = EncoderCache()
    rig.scheduler.reset_encoder_cache = cache.reset
    rig.scheduler.encoder_cache_manager.cached = cache.cached
    rig.watch._has_encoder = True
    return cache


def test_outputs_of_an_encoder_go_with_the_weights_that_made_them(rig: Any) -> None:
    found(rig)
    cache = with_encoder(rig)
    rig.executor.collective_rpc("never_heard_of")
    found(rig)
    assert cache.cached  # the same weights
    rig.weights = "w1"
    found(rig)
    assert not cache.cached
    assert "reset_encoder_cache" in rig.executor.calls  # those of the ranks, too
    assert found(rig) == WHOLE


# ---------------------------------------------------------------------------------------------- our own errors
def broken(*args: Any, **kwargs: Any) -> Any:
    """An error of ours."""
    raise RuntimeError("broken")


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "watch.before_schedule": lambda rig: (rig.watch, "before_schedule"),
    "watch.calling": lambda rig: (rig.watch, "calling"),
    "watch._digest": lambda rig: (rig.watch, "_digest"),
    "watch._name": lambda rig: (rig.watch, "_name"),
    "watch._set": lambda rig: (rig.watch, "_set"),
    "weights.hold": lambda rig: (rig.side.weights, "hold"),
    "root.hold": lambda rig: (rig.pins.root, "hold"),
    "pins.detach": lambda rig: (rig.pins, "detach"),
    "blocks.num_named_blocks": lambda rig: (blocks, "num_named_blocks"),
    "blocks.holds_blocks": lambda rig: (blocks, "holds_blocks"),
    "state.apply": lambda rig: (rig.side.state, "apply"),
}


@pytest.mark.unclean
@pytest.mark.parametrize("place", list(PLACES))
def test_an_error_of_ours_during_a_change_never_reaches_vllm_and_leaves_nothing_named(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    rig.serve(prompt(3, LENGTH))
    running = rig.add(TOKENS, max_tokens=2 * BLOCK)
    rig.step()
    before = len(store.objects)
    with monkeypatch.context() as patched:
        patched.setattr(*PLACES[place](rig), broken)
        rig.weights = "w1"
        rig.steps(4)
    assert rig.connector._guard.errors
    rig.run()
    assert running.request_id in rig.finished
    for tokens in (prompt(3, LENGTH), TOKENS, list(running.all_token_ids)):
        assert found(rig, tokens) == 0
        assert found(rig, tokens) == 0
    for weights in ("w0", "w2"):
        rig.weights = weights
        assert found(rig, prompt(3, LENGTH)) == 0
    assert len(store.objects) == before
    assert rig.connector.scheduler.gauges()["broken"] == 1.0
    assert not any(rig.foreign_tokens.values())
    assert not any(rig.stale_tokens.values())


@pytest.mark.unclean
@pytest.mark.parametrize("place", ["late", "end", "propose", "suspect"])
def test_an_error_of_ours_behind_a_step_never_reaches_vllm_and_leaves_nothing_named(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    rig.serve(prompt(3, LENGTH))
    before = len(store.objects)
    rig.add(prompt(5, LENGTH), max_tokens=3)
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    target = {"late": rig.watch, "suspect": rig.watch, "end": rig.pins.root, "propose": rig.side.weights.link}[place]
    with monkeypatch.context() as patched:
        patched.setattr(target, place, broken)
        rig.update(output)
    assert rig.connector._guard.errors
    rig.run()
    rig.weights = "w0"
    for _ in range(2):
        assert found(rig, prompt(5, LENGTH)) == 0
    assert len(store.objects) == before
    assert rig.block_pool.get_num_free_blocks() == rig.free_at_start
