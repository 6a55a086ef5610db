"""From a hit to its load: what is committed, refused, given back or cut."""

import pytest

from epochkv_connector.tiers.hits import PLAN_TTL_SECONDS
from tests.unit.connector_scheduler.rig import L1, PROMPT, SLIDING_FIRST, SNAP, World, commit, config, planned, snap_of, stored, view


@pytest.mark.parametrize(
    ("num", "snap", "blocks", "why"),
    [
        (44, SNAP, None, "more than planned"),
        (40, snap_of(2), None, "another root"),
        (40, SNAP, [[1, 2]], "blocks missing"),
        (40, SNAP, [[0, *range(1, 10)]], "null block in full attention"),
    ],
)
def test_a_promise_that_cannot_be_kept_fails_before_it_is_sent(num: int, snap, blocks, why: str) -> None:
    world = planned()
    assert commit(world, num, snap, blocks) is False, why
    assert commit(world, num, snap, blocks) is False
    step = world.step()
    assert (step.loads, world.named) == ((), ["b"])
    world.tiers.finish("b")
    world.assert_idle()


def test_a_hit_without_a_plan_fails_before_it_is_sent() -> None:
    world = World(L1)
    assert commit(world, 8) is False
    world.step()
    assert world.named == ["b"]


def test_a_shrunk_window_is_refused() -> None:
    world = planned(layout=SLIDING_FIRST, l1_tokens=24)  # the plan for 40 tokens holds blocks 8 and 9; 24 end with blocks 4 and 5
    assert commit(world, 24) is False
    world.step()
    world.tiers.finish("b")
    world.assert_idle()


def test_a_block_that_vllm_would_cache_unfilled_fails_before_it_is_sent() -> None:
    world = planned(layout=SLIDING_FIRST)
    blocks = world.allocate(0, 40)
    blocks[0][6] = world.pool.new()  # below the window, yet allocated: vLLM would cache it under its name
    assert commit(world, 40, blocks=blocks) is False


def test_plans_that_nobody_asks_for_expire_by_time() -> None:
    world = planned()
    world.clock.now += PLAN_TTL_SECONDS
    world.step()
    assert world.tiers.leak_report()["held_slots"] == 0
    assert world.tiers.stats()["plans_expired"] == 1


def test_the_oldest_plan_goes_when_plans_hold_too_much() -> None:
    world = World(config(l1_slots=20))
    prompts = {f"r{n}": [100 * n + token for token in range(21)] for n in range(3)}
    for request_id, tokens in prompts.items():
        world.free(world.save(f"save {request_id}", tokens, SNAP))
        world.tiers.finish(f"save {request_id}")
    for request_id, tokens in prompts.items():
        assert world.tiers.hits.answer(view(request_id, tokens, SNAP.root), 0, SNAP) == 20
    assert world.tiers.leak_report()["plan_slots"] == 10
    assert world.tiers.stats()["plans_over_cap"] == 1
    for request_id, tokens in list(prompts.items())[1:]:
        blocks = world.allocate(0, 20)
        assert world.commit(view(request_id, tokens, SNAP.root), blocks, 20, SNAP) is True


def test_a_hit_that_lacks_slots_waits_two_steps_for_saves_that_give_theirs_back() -> None:
    other = [1000 + token for token in range(41)]

    def saving() -> World:
        """Ten of sixteen slots are held by a save that nobody has acknowledged; another prompt of ten blocks is in L2."""
        world = World(config(l1_slots=16, l2=True))
        stored(world, PROMPT)
        world.begin_save("a", other, SNAP)
        assert world.tiers.leak_report()["held_slots"] == 10
        assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) is None
        return world

    world = saving()
    world.step()
    world.work()
    world.tiers.finish("a")
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40
    assert world.tiers.stats()["hits_shrunk"] == 1
    world.tiers.finish("b")
    world.assert_idle()

    world = saving()
    world.step()
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) is None
    world.step()
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 24, "not acknowledged: what can be had"
    world.tiers.finish("b")
    world.work()
    world.tiers.finish("a")
    world.assert_idle()


def test_a_ring_without_a_free_slot_is_a_miss_and_a_shrunk_hit_gives_back_what_it_does_not_need() -> None:
    world = World(config(l2=True, staging_slots=8))
    stored(world, PROMPT)
    requests = [f"r{number}" for number in range(9)]
    answers = [world.load(request, PROMPT, SNAP) for request in requests]
    assert answers == [(40, True)] * 8 + [(0, None)]
    assert world.tiers.leak_report()["reserved_slots"] == 8
    world.step()
    world.work()
    assert [failed for _, failed in world.workers[0].reports] == [False] * 8
    for request in requests:
        world.tiers.finish(request)
    world.assert_idle()
    world = World(config(l2=True, staging_slots=17))
    stored(world, PROMPT)
    for request in requests:
        assert world.load(request, PROMPT, SNAP) == (40, True), "the last one gets the only slot that is left"
    assert world.tiers.leak_report()["reserved_slots"] == 17
    world = World(config(l2=True, staging_slots=40))
    stored(world, PROMPT)
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40
    assert world.tiers.leak_report()["reserved_slots"] == 5
    assert world.commit(view("b", PROMPT, SNAP.root), world.allocate(0, 8), 8, SNAP) is True
    assert world.tiers.leak_report()["reserved_slots"] == 2, "two blocks need no five slots"
    world.step()
    world.work()
    world.tiers.finish("b")
    world.assert_idle()
