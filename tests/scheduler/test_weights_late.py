"""Weights that change behind a step, and ranks that hold different ones, on the real scheduler."""

from typing import Any

import pytest

from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, begin_load, every_layout, found, num_saved
from tests.support.scheduler import BLOCK, SharedStore, prompt


# ---------------------------------------------------------------------------------------------- H2: a change behind a step
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


def test_an_ended_digest_stays_ended_until_the_next_epoch(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    found(rig)
    old = rig.watch.value
    late_hit(rig)
    rig.run()
    for _ in range(3):
        rig.weights = "w2"
        found(rig)
        rig.weights = "w0"
        before = len(store.objects)
        assert found(rig) == 0, "a digest that ended was used again"
        assert found(rig, prompt(5, LENGTH)) == 0
        assert rig.watch.value == old
        assert rig.connector.scheduler.gauges()["bypass"] == 1.0
        assert len(store.objects) == before
    rig.adopt(1)
    assert found(rig) == 0
    assert found(rig) == WHOLE
    assert not any(rig.stale_tokens.values())


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
def test_a_change_behind_a_step_that_completes_no_block_is_seen_too(make_rig: MakeRig, store: SharedStore) -> None:
    """Its part of a block would be named with the rest of it, after the weights that were there before and after."""
    rig = make_rig(store=store, epoch=0)
    request = rig.add(TOKENS, max_tokens=2 * BLOCK)
    rig.steps(3)
    before = len(store.objects)
    for weights in ("w1", "w0"):
        output = rig.scheduler.schedule()
        assert output.num_scheduled_tokens == {request.request_id: 1}
        rig.write_past(weights)
        rig.update(output)
    rig.run()
    assert rig.watch.counters["late"] == 2
    assert len(store.objects) == before


# ---------------------------------------------------------------------------------------------- H3: ranks that differ
@every_layout
def test_no_shard_is_stored_before_every_rank_has_agreed(make_rig: MakeRig, layout: tuple[str, ...], store: SharedStore) -> None:
    rig = make_rig(store=store, num_ranks=2, epoch=0)
    rig.workers[1].hold_saves = True
    request = rig.add(TOKENS, max_tokens=4)
    for _ in range(4):
        rig.step()
        assert store.objects == {}
    rig.workers[1].hold_saves = False
    rig.workers[1].work()
    rig.run()
    assert request.request_id in rig.finished
    assert len(store.objects) == 2 * num_saved(layout)
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
