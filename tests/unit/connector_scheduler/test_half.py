"""The scheduler role as the facade sees it: lookups, a store that is slow, hits that become loads or do not, saves, loads that fail, and
changes of names.
"""

import itertools
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.tiers.hits import PLAN_TTL_SECONDS
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, ScheduledRequestView
from epochkv_connector.tiers.lookup import READ_LEASE_SECONDS
from epochkv_connector.tiers.manager import SavePlanner
from epochkv_connector.tiers.state import TierState
from epochkv_connector.wire import SaveJob
from tests.unit.connector_scheduler.rig import BOTH, FULL, L1, L2, PROMPT, SLIDING_FIRST, SNAP, World, chain, config, planned, snap_of, view


# -- the answer ------------------------------------------------------------------------------------------------------
def test_a_block_that_one_shard_misses_is_not_there() -> None:
    world = World(L2)
    assert SNAP.namespace
    world.stored(PROMPT)
    name = chain(SNAP.root, PROMPT)[5]
    del world.store.objects[f"{SNAP.namespace}/g0/r1/{name.hex()}"]
    assert world.answer("b") == 20


def test_other_local_tokens_make_another_plan() -> None:
    world = World(L1)
    world.free(world.save("a", PROMPT, SNAP))
    assert world.answer("b") == 40
    assert world.answer("b", local=32) == 8
    assert world.tiers.leak_report()["held_slots"] == 2


# -- a slow or dead store --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("late_answer", [False, True])
def test_a_slow_store_defers_until_the_deadline_then_l1_answers(late_answer: bool) -> None:
    world = World(config(l1_slots=200, l2=True, lookup_deadline_ms=20.0))
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.store.answering = False
    assert world.answer("b") is None
    assert world.tiers.leak_report()["plans"] == 0
    if late_answer:
        world.store.answer()
        world.now += READ_LEASE_SECONDS - 0.02  # in a step that lasts longer than the answer holds
    world.now += 0.0201
    assert world.answer("b") == 20
    assert world.tiers.stats()["queries_late"] == 1
    assert len(world.store.queries) == 1 + late_answer


def test_who_waits_for_a_load_asks_nothing_and_after_a_failure_does_not_wait_for_l2_once_more() -> None:
    world = World(BOTH)
    world.stored(PROMPT)
    assert world.load("a", PROMPT, SNAP) == (40, True)
    assert [world.answer("e") for _ in range(2)] == [None] * 2
    assert len(world.store.queries) == 1, "a question is a walk along the prompt"
    for waiter in "bcd":
        world.begin(waiter)
        assert world.answer(waiter) is None
    world.step()
    world.now += READ_LEASE_SECONDS
    world.work("partial")
    assert world.load("b", PROMPT, SNAP) == (36, True)
    assert [world.answer(waiter) for waiter in "cd"] == [None] * 2, "one loads what came"


@pytest.mark.parametrize("milliseconds", [20.0, 5000.0])
def test_the_store_may_take_as_long_as_the_deadline_says(milliseconds: float) -> None:
    """The client has no limit of its own: one of a second made misses of lookups that were given five."""
    world = World(config(l2=True, lookup_deadline_ms=milliseconds))
    world.begin("b")
    assert world.store.timeouts == [milliseconds / 1e3]


def test_all_lookups_of_a_step_share_one_wait(monkeypatch) -> None:
    waits: list[float] = []

    def wait(futures, timeout):
        waits.append(timeout)
        world.now += timeout
        return type("Done", (), {"not_done": set(futures)})()

    monkeypatch.setattr("epochkv_connector.tiers.lookup.wait", wait)
    world = World(config(l2=True, lookup_wait_ms=2.0))
    world.store.answering = False
    for number in range(5):
        world.answer(f"r{number}")
    assert waits == [0.002]
    world.step()
    for seconds, waited in ((0.01, 0.001), (1.0, 0.002)):
        world.now += seconds
        world.step()
        world.answer("r0")
        assert waits.pop() == pytest.approx(waited), "a tenth of the last step at most"


def test_an_answer_older_than_the_read_lease_is_not_believed() -> None:
    world = World(L2)
    world.stored(PROMPT)
    world.begin("b")
    world.now += READ_LEASE_SECONDS
    world.store.objects.clear()
    assert world.answer("b") == 0


# -- from a hit to its load ---------------------------------------------------------------------------------------------
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
    assert world.take(num, snap, blocks) is False, why
    assert world.take(num, snap, blocks) is False
    step = world.step()
    assert (step.loads, world.named) == ((), ["b"])
    world.tiers.finish("b")
    world.assert_idle()


def test_a_shrunk_window_is_refused_and_so_is_a_hit_without_a_plan() -> None:
    shrunk = planned(layout=SLIDING_FIRST, l1_tokens=24)  # the plan for 40 tokens holds blocks 8 and 9; 24 end with blocks 4 and 5
    for world, num in ((shrunk, 24), (World(L1), 8)):
        assert world.take(num) is False
        world.step()
        assert world.named == ["b"]
        world.tiers.finish("b")
        world.assert_idle()


def test_a_block_that_vllm_would_cache_unfilled_fails_before_it_is_sent() -> None:
    world = planned(layout=SLIDING_FIRST)
    blocks = world.allocate(0, 40)
    blocks[0][6] = world.pool.new()  # below the window, yet allocated: vLLM would cache it under its name
    assert world.take(40, blocks=blocks) is False


def test_plans_that_nobody_asks_for_expire_by_time() -> None:
    world = planned(L1, l1_tokens=41)
    world.now += PLAN_TTL_SECONDS
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
        assert world.answer(request_id, tokens) == 20
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
        world.stored(PROMPT)
        world.begin_save("a", other, SNAP)
        assert world.tiers.leak_report()["held_slots"] == 10
        assert world.answer("b") is None
        return world

    world = saving()
    world.step()
    world.work()
    world.tiers.finish("a")
    assert world.answer("b") == 40
    assert world.tiers.stats()["hits_shrunk"] == 1
    world.tiers.finish("b")
    world.assert_idle()

    world = saving()
    world.step()
    assert world.answer("b") is None
    world.step()
    assert world.answer("b") == 24, "not acknowledged: what can be had"
    world.tiers.finish("b")
    world.work()
    world.tiers.finish("a")
    world.assert_idle()


def test_a_ring_without_a_free_slot_is_a_miss_and_a_shrunk_hit_gives_back_what_it_does_not_need() -> None:
    world = World(config(l2=True, staging_slots=8))
    requests = {f"r{number}": [100 * number + token for token in PROMPT] for number in range(9)}
    for tokens in requests.values():
        world.stored(tokens)
    answers = [world.load(request, tokens, SNAP) for request, tokens in requests.items()]
    assert answers == [(40, True)] * 6 + [(0, None)] * 3
    assert world.tiers.leak_report()["reserved_slots"] == 8
    world.step()
    world.work()
    assert [failed for _, failed in world.workers[0].reports] == [False] * 6
    for request in requests:
        world.tiers.finish(request)
    world.assert_idle()
    world = World(config(l2=True, staging_slots=20))
    for request, tokens in requests.items():
        world.stored(tokens)
        assert world.load(request, tokens, SNAP) == (40, True), "the last one gets the only slot that is left"
    assert world.tiers.leak_report()["reserved_slots"] == 20
    world = World(config(l2=True, staging_slots=40))
    world.stored(PROMPT)
    assert world.answer("b") == 40
    assert world.tiers.leak_report()["reserved_slots"] == 10
    assert world.take(8) is True
    assert world.tiers.leak_report()["reserved_slots"] == 2, "two blocks need no ten slots"
    world.step()
    world.work()
    world.tiers.finish("b")
    world.assert_idle()


# -- saves -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cfg", [L1, L2, BOTH], ids=["L1", "L2", "both"])
def test_what_another_request_is_saving_is_not_saved_again(cfg: ConnectorConfig) -> None:
    """Copied is not saved: puts wait in a queue that takes only so many, and requests with one prompt would fill it."""
    world = World(cfg)
    blocks = world.begin_save("a", PROMPT, SNAP)
    for twin in range(2):
        world.collect(f"twin {twin}", blocks, 40)
        assert world.step().saves == ()
        if twin == 0:
            world.tiers.on_acks(world.workers[0].work())


def test_what_requests_save_in_one_step_is_one_job() -> None:
    world, views = World(BOTH), []
    for request_id, tokens in (("a", PROMPT), ("b", PROMPT[:20]), ("c", other := [7, *PROMPT[:8]])):
        blocks, names = [[]], chain(SNAP.root, tokens)
        world.compute(blocks, names, 0, 4 * len(names))
        views.append(ScheduledRequestView(request_id, 4 * len(names), names, blocks))
    assert [(share.request_id, len(share.moves)) for share in world.tiers.saves.collect(views, SNAP)] == [("a", 10), ("c", 2)]
    assert [[move.block for move in job.moves] for job in world.step().saves] == [[*range(10), 0, 1]]
    world.work()
    assert (world.answer("d"), world.answer("e", other), world.tiers.stats()["blocks_stored"]) == (40, 8, 12)


def test_what_l1_holds_and_l2_lacks_is_put_without_copying() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT, snap_of(1, shared=False)))
    shared = snap_of(1)
    # The same names, now allowed to leave the engine.
    same_root = replace(shared, root=snap_of(1, shared=False).root)
    blocks = world.save("b", PROMPT, same_root)
    assert world.tiers.stats()["blocks_saved"] == 10
    assert world.tiers.stats()["blocks_stored"] == 10
    world.free(blocks)
    assert all(world.store.holds(shared.namespace or "", 0, name) for name in chain(same_root.root, PROMPT))


def test_what_l2_is_known_to_hold_is_not_put_again() -> None:
    world = World(config(l1_slots=10, l2=True))
    world.free(world.save("a", PROMPT, SNAP))
    world.free(world.save("b", [1000 + token for token in range(41)], SNAP))  # evicts a's blocks from L1
    hashes, blocks = chain(SNAP.root, PROMPT), [[]]
    world.compute(blocks, hashes, 0, 40)
    world.collect("c", blocks, 40)
    (job,) = world.step().saves
    assert {(move.copy, move.put) for move in job.moves} == {(True, False)}


def test_saves_without_slots_are_tried_again() -> None:
    world = World(config(l2=True, staging_slots=4))
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    saved = []
    for _ in range(4):
        world.collect("a", blocks, 40)
        saved.append([move.block for job in world.step().saves for move in job.moves])
        world.work()
    assert saved == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert world.tiers.stats()["saves_deferred"] == 2


# -- failed and late loads -------------------------------------------------------------------------------------------
def test_a_block_that_was_gone_is_not_believed_any_more() -> None:
    world = planned()
    world.store.objects.clear()
    assert world.take(40) is True
    world.step()
    world.work()
    assert world.workers[0].reports == [("b", True)]
    world.tiers.finish("b")
    assert world.answer("c") == 20, "L1's own blocks are sound"
    world.tiers.finish("c")
    world.assert_idle()


# -- new names -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", ["adopt", "reset"])
def test_after_a_change_nothing_old_is_found_and_loads_are_named(change: str) -> None:
    world = planned()
    assert world.take(40) is True
    world.answer("c")
    now = snap_of(2) if change == "adopt" else SNAP
    assert world.rename(now if change == "adopt" else None) == 1
    report = world.tiers.leak_report()
    assert (report["plans"], report["queries"]) == (0, 0)
    world.step()
    world.work()
    world.requests.report("b", failed=False)
    world.step()
    assert world.named == ["b"]
    assert world.tiers.stats()["slots_indexed"] == (5 if change == "adopt" else 0), "the load was not indexed"
    world.store.objects.clear()
    assert world.tiers.hits.answer(view("d", PROMPT, now.root), 0, now) == 0
    for request_id in ("b", "c", "d"):
        world.tiers.finish(request_id)
    world.assert_idle()


def test_adopting_the_same_root_keeps_l1_and_drops_plans() -> None:
    world = World(L1)
    world.tiers.adopt(SNAP)
    world.free(world.save("a", PROMPT, SNAP))
    world.answer("b")
    world.tiers.adopt(SNAP)
    assert world.tiers.leak_report()["held_slots"] == 0
    assert world.answer("b") == 40


@pytest.mark.parametrize("trouble", ["L2 is slow", "L2 fails", "loads are paused"])
def test_who_waits_until_l2_holds_a_prompt_hears_from_l2_alone(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, answered = World(BOTH), list[None]()
    world.free(world.save("a", PROMPT, SNAP))
    asking = replace(view("b", PROMPT, SNAP.root), hear_of_l2=lambda: answered.append(None))
    if trouble == "loads are paused":
        monkeypatch.setattr(world.tiers.hits.pause, "allows", lambda: False)
    elif trouble == "L2 fails":
        world.store.failing = True
        assert world.tiers.hits.answer(asking, 40, SNAP) == 0
        assert (answered, world.tiers.stored(asking.block_hashes)) == ([], (40, 40))
        world.store.failing, world.now = False, world.now + 10.0
    else:
        world.store.answering = False
        assert world.tiers.hits.answer(asking, 40, SNAP) is None
        world.now += 1.0
        assert world.tiers.hits.answer(asking, 40, SNAP) is None
        world.store.answer()
    assert world.tiers.hits.answer(asking, 40, SNAP) == 0
    assert answered == [None]
    assert world.tiers.stored(asking.block_hashes) == (40, 40)


def test_as_many_are_asked_for_as_there_are_slots_and_the_oldest_first() -> None:
    state = TierState(config(l1_slots=2), FULL, 1, 2, itertools.count(), time.monotonic)
    state.hash_block_size, state.scales = 4, [1]
    planner = SavePlanner(state)

    def draft(name: str) -> SaveJob | None:
        pool: Any = World(L1).pool
        return planner.draft(ScheduledRequestView(name, 4, [name.encode()], [[1]]), None, pool)

    def end(job: SaveJob | None) -> None:
        """It was copied, and nothing of it is kept."""
        assert job is not None
        planner.over(job.moves)
        state.index.unpin([move.slot for move in job.moves])

    done = [draft("a"), draft("b")]
    everybody = ["c", "d", "e"]
    assert [draft(name) for name in everybody] == [None] * 3
    assert planner.continuable(everybody) == []
    end(done[0])
    assert planner.continuable(everybody) == ["c"]
    assert planner.continuable(["e", "d"]) == ["d"], "who is not scheduled keeps nobody waiting"
    end(done[1])
    assert planner.continuable(everybody) == ["c", "d"]
    assert draft("c") is not None
    assert planner.continuable(everybody) == ["d"]


@pytest.mark.parametrize(("extra", "blocks"), [(0, 10), (2, 20)])
def test_blocks_that_vllm_does_not_keep_are_saved_where_hits_need_more_than_it_keeps(extra: int, blocks: int) -> None:
    """vLLM keeps the last blocks of a window; with drafts of several tokens a hit needs one more (MTP with three)."""
    window = GroupLayout(GroupKind.SLIDING, 4, window_tokens=18, extra_retained_tokens=extra)
    world = World(L1, CacheLayout((window, GroupLayout(GroupKind.FULL, 4)), 4))
    world.keeps = lambda: False
    world.save("a", PROMPT, SNAP)
    assert world.tiers.stats()["blocks_saved"] == blocks


@pytest.mark.parametrize("layout", [FULL, SLIDING_FIRST], ids=["full", "window"])
def test_blocks_of_a_hit_that_every_tier_holds_are_not_looked_at_one_by_one(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(BOTH, layout)
    world.save("a", PROMPT, SNAP)
    hit = world.allocate(0, 40)
    worth = Mock(wraps=world.tiers.saves.planner._worth)
    monkeypatch.setattr(world.tiers.saves.planner, "_worth", worth)
    world.collect("b", hit, 40)
    assert not worth.called
    last = {(group, chain(SNAP.root, PROMPT)[-1]) for group in range(len(layout.groups))}
    world.tiers.state.known.discard(last)
    world.collect("c", hit, 40)
    assert {(move.group, move.block_hash) for job in world.step().saves for move in job.moves} == last
    assert {call.args[2] for call in worth.call_args_list} == {9}
