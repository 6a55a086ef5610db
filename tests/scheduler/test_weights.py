"""KV is named after the weights that the ranks hold, on the real scheduler: requests that go on over a push, weights that change behind
a step, ranks that hold different ones or cannot say, encoders, and errors of our own meanwhile.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.engine import blocks
from epochkv_connector.wire import StepMetadata
from epochkv_connector.worker.role import WorkerRole
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, Patch, alter, begin_load, every_layout, found, preempt_last
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt


@every_layout
def test_a_preemption_after_the_push_names_the_request_anew(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24, epoch=0)
    request = rig.add(TOKENS, max_tokens=BLOCK)
    rig.steps(3)
    rig.weights = "w1"
    rig.step()
    assert not rig.pins.pin_of(request).saveable
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.run()
    assert found(rig) == WHOLE


def test_a_push_while_a_session_waits_for_its_next_turn(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    session = rig.request(TOKENS, max_tokens=2 * BLOCK)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.steps(3)
    before = len(store.objects)
    rig.weights = "w1"
    rig.steps(3 * BLOCK)
    assert len(store.objects) == before
    said = list(session.all_token_ids)
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert found(rig, [*said, 5]) == 0
    rig.weights = "w0"
    assert found(rig, [*said, 6]) == WHOLE


def test_a_session_that_is_preempted_before_the_push_names_nothing_after_the_old_weights(make_rig: MakeRig) -> None:
    """It holds no block then, so it is named anew, and need not go on without names."""
    rig = make_rig(epoch=0)
    session = rig.request(TOKENS, max_tokens=4 * BLOCK)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.steps(3)
    preempt_last(rig)
    rig.weights = "w1"
    rig.steps(3 * BLOCK)
    said = list(session.all_token_ids)
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.weights = "w0"
    rig.serve(prompt(3, LENGTH))
    assert found(rig, said) == WHOLE
    rig.weights = "w1"
    rig.serve(prompt(3, LENGTH))
    assert found(rig, said) == len(said) // BLOCK * BLOCK


def late_hit(rig: Any) -> list[int]:
    """Somebody writes past vLLM while a step is under way; what was asked for."""
    asked: list[int] = []
    rig.side.weights.link.propose = asked.append
    rig.add(prompt(5, LENGTH))
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    rig.update(output)
    return asked


@every_layout
def test_a_change_behind_a_step_saves_nothing_of_it_and_asks_for_one_epoch(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    found(rig)
    old, before = rig.watch.value, len(store.objects)
    asked = late_hit(rig)
    assert asked == [1]
    rig.run()
    assert asked == [1]
    assert len(store.objects) == before
    assert rig.watch.value not in (None, old)
    assert found(rig, prompt(5, LENGTH)) == 0
    assert found(rig, prompt(5, LENGTH)) == WHOLE
    assert rig.watch.counters["late"] == 1
    assert not any(rig.foreign_tokens.values())


@pytest.mark.unclean
@every_layout
def test_a_load_that_ends_with_the_step_of_a_change_leaves_nothing_open(make_rig: MakeRig) -> None:
    """Its success is recorded and cannot be taken back: waiting for it would keep the engine stepping for ever."""
    rig = make_rig(num_blocks=24, epoch=0)
    rig.serve(TOKENS)
    for seed in range(100, 106):
        rig.serve(prompt(seed, LENGTH))
    begin_load(rig, TOKENS)
    (worker,) = rig.workers
    rig.add(prompt(5, LENGTH))
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    worker.hold_loads = False
    rig.update(output)
    assert rig.watch.counters["late"] == 1
    rig.run()
    assert rig.leaks() == {}
    assert not any(rig.foreign_tokens.values())


@every_layout
@pytest.mark.parametrize("lease_until", [float("inf"), 0.0])
def test_a_change_behind_a_step_that_completes_no_block_is_seen_too(make_rig: MakeRig, store: SharedStore, lease_until: float) -> None:
    """Its part of a block would be named with the rest of it, after the weights that were there before and after the loss of a lease."""
    rig = make_rig(store=store, epoch=0)
    request = rig.add(TOKENS, max_tokens=2 * BLOCK)
    rig.steps(3)
    before = len(store.objects)
    rig.lease_until = lease_until
    for weights in ("w1", "w0"):
        output = rig.scheduler.schedule()
        assert output.num_scheduled_tokens == {request.request_id: 1}
        rig.write_past(weights)
        rig.update(output)
    rig.lease_until = float("inf")
    rig.run()
    assert rig.watch.counters["late"] == 2
    assert len(store.objects) == before


def test_a_change_behind_the_last_step_is_heard_although_no_step_follows(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU ends the comparison after the step's results were taken. An in-process engine then idles, and asks its rank for copies."""
    rig = make_rig(epoch=0)
    asked: list[int] = []
    rig.side.weights.link.propose = asked.append
    differs: Any = SimpleNamespace(number=rig.watch.number, as_expected=True, ended=lambda: True, holds=lambda: False, settled=lambda: True)
    rank = WorkerRole(0, None, compare=lambda number: differs)
    monkeypatch.setattr(rig.side.steps, "_local_worker", lambda: rank)
    (worker,) = rig.workers
    worker.hold_saves = True
    rig.add(TOKENS)
    output = rig.scheduler.schedule()
    rank.new_step()
    rank.finish(StepMetadata(digest_number=output.kv_connector_metadata.digest_number))
    with monkeypatch.context() as patch:
        patch.setattr(rig.executor, "looked", lambda metadata: None)
        rig.write_past("w1")
        rig.update(output)
    assert rig.watch.counters["late"] == 1
    assert asked == [1]
    worker.fail_saves()
    worker.hold_saves = False
    assert found(rig) == 0
    assert found(rig) == WHOLE


@every_layout
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_holds_other_weights_after_the_step_stores_nothing_anywhere(make_rig: MakeRig, rank: int, store: SharedStore) -> None:
    rig = make_rig(store=store, num_ranks=2, epoch=0)
    asked: list[int] = []
    rig.side.weights.link.propose = asked.append
    rig.add(TOKENS, max_tokens=4)
    output = rig.scheduler.schedule()
    rig.write_past("w1", rank)
    rig.update(output)
    rig.run()
    assert store.objects == {}
    assert asked == [1]
    assert found(rig) == 0
    rig.run()
    assert len({key.split("/")[3] for key in store.objects}) == 1  # names of both ranks' weights, of one question
    assert not any(rig.foreign_tokens.values())


KINDS: dict[str, dict[str, Any]] = {
    "no tier": {"l1_bytes": None},
    "loads alone": {"store": SharedStore(), "transfer": {"kv_role": "kv_consumer"}},
    "its bookkeeping has failed": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_past_vllm_is_noticed_behind_the_next_step(make_rig: MakeRig, kind: str) -> None:
    rig = make_rig(**KINDS[kind])
    rig.adopt(1)
    rig.side.state.broken = kind == "its bookkeeping has failed"
    tokens = prompt(1, 3 * BLOCK)
    rig.serve(tokens)
    assert found(rig, tokens) == 2 * BLOCK
    rig.write_past("w1")
    rig.serve(prompt(2, 3 * BLOCK))
    assert found(rig, tokens) == 0
    assert rig.watch.counters["late"] == 1
    rig.serve(tokens)


def test_a_rank_that_cannot_say_makes_the_engine_share_nothing_and_say_so_once(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    store = SharedStore()
    rig = make_rig(store=store, num_ranks=2, epoch=0)
    found(rig)
    assert rig.connector.scheduler.gauges()["weights_known"] == 1.0
    before = len(store.objects)
    rig.executor.answers = lambda answer: alter(answer, weights=None, note="it could not look") if answer["rank"] else answer
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


def test_outputs_of_an_encoder_go_with_the_weights_that_made_them(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cached by content: KV could be made from old ones. They go as soon as nobody refers to them."""
    monkeypatch.setattr("epochkv_connector.weights.watch.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("epochkv_connector.engine.limits.is_multimodal", lambda config: True)
    rig = make_rig(epoch=0)
    cached: dict[str, set[str]] = {"picture": {"a request"}}
    rig.scheduler.encoder_cache_manager.cached = cached
    rig.scheduler.reset_encoder_cache = cached.clear
    found(rig)
    rig.executor.collective_rpc("never_heard_of")
    assert found(rig) == WHOLE
    assert cached  # the same weights
    rig.weights = "w1"
    assert [found(rig), found(rig)] == [0, 0]
    assert rig.pins.root.snapshot.shared is False
    cached["picture"].clear()
    found(rig)
    assert not cached
    assert "reset_encoder_cache" in rig.executor.calls  # those of the ranks, too
    assert found(rig) == WHOLE
    assert rig.pins.root.snapshot.shared is True


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken")


OWNERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "watch": (lambda rig: rig.watch, "before_schedule calling _digest _name _set"),
    "weights": (lambda rig: rig.side.weights, "hold"),
    "root": (lambda rig: rig.pins.root, "hold"),
    "pins": (lambda rig: rig.pins, "detach"),
    "blocks": (lambda rig: blocks, "num_named_blocks holds_blocks"),
    "state": (lambda rig: rig.side.state, "apply"),
}
PLACES = [(owner, name) for owner, (_, names) in OWNERS.items() for name in names.split()]


@pytest.mark.unclean
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_an_error_of_ours_during_a_change_leaves_nothing_named(make_rig: MakeRig, monkeypatch: Patch, owner: str, name: str) -> None:
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    rig.serve(prompt(3, LENGTH))
    running = rig.add(TOKENS, max_tokens=2 * BLOCK)
    rig.step()
    before = len(store.objects)
    with monkeypatch.context() as patched:
        patched.setattr(OWNERS[owner][0](rig), name, broken)
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
def test_an_error_of_ours_behind_a_step_leaves_nothing_named(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
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
