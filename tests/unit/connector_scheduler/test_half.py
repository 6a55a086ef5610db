"""The scheduler role as the facade sees it: lookups, plans, saves, loads, and changes of names."""

from __future__ import annotations

import pytest

from epochkv_connector.scheduler.planning.lookup import MAX_KEYS_PER_QUERY, READ_LEASE_SECONDS
from epochkv_connector.scheduler.planning.plans import PLAN_TTL_SECONDS, PLAN_TTL_STEPS
from epochkv_connector.scheduler.tiers.views import CacheLayout, GroupKind, GroupLayout
from epochkv_connector.wire.jobs import Source
from tests.unit.connector_scheduler.rig import (
    FULL,
    HASH_BLOCK,
    LAYOUTS,
    SLIDING_FIRST,
    World,
    chain,
    config,
    snap_of,
    view,
)

SNAP = snap_of(1)
PROMPT = list(range(41))  # 10 full hash blocks and one token more
L1 = config(l1_slots=200)
L2 = config(l2=True)
BOTH = config(l1_slots=200, l2=True)


def stored(world: World, tokens: list[int], layout: CacheLayout = FULL) -> None:
    """Another engine has put this prompt to L2."""
    assert SNAP.namespace
    hashes = chain(SNAP.root, tokens)
    for group, spec in enumerate(layout.groups):
        scale = spec.block_size // HASH_BLOCK
        for block in range(len(hashes) // scale):
            world.store.put(SNAP.namespace, group, hashes[(block + 1) * scale - 1])


# -- the three modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cfg", [L1, BOTH], ids=["L1", "L1+L2"])
def test_what_was_saved_is_found_in_l1(cfg, layout) -> None:
    world = World(cfg, layout)
    world.free(world.save("a", PROMPT, SNAP))
    world.books.finish("a")
    assert world.load("b", PROMPT, SNAP) == (40, True)
    (job,) = world.step().loads
    assert {move.source for move in job.moves} == {Source.HOST}
    assert world.books.loads.sources("b") == {}
    world.work()
    assert world.workers[0].reports == [("b", False)]
    world.books.finish("b")
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cfg", [L2, BOTH], ids=["L2", "L1+L2"])
def test_what_another_engine_saved_is_found_in_l2(cfg, layout) -> None:
    world = World(cfg, layout)
    stored(world, PROMPT, layout)
    world.books.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    assert world.load("b", PROMPT, SNAP) == (40, True)
    assert world.books.loads.sources("b") == {Source.STORE: 40}
    (job,) = world.step().loads
    assert {move.source for move in job.moves} == {Source.STORE}
    num_slots = len({move.slot for move in job.moves})
    assert num_slots == len(job.moves) if cfg.local else num_slots == 8, "an eighth of a ring of 64"
    world.work()
    assert world.workers[0].reports == [("b", False)]
    world.books.finish("b")
    queries = len(world.store.queries)
    hit = world.books.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP)
    assert hit.num_tokens == 40
    if cfg is BOTH and layout is FULL:
        assert hit.sources == {Source.HOST: 40}
        assert len(world.store.queries) == queries, "L1 holds everything: nothing to ask"
    world.books.finish("c")
    world.assert_idle()


def test_l2_alone_keeps_no_index_and_saves_by_name() -> None:
    world = World(L2)
    world.free(world.save("a", PROMPT, SNAP))
    assert SNAP.namespace
    assert all(world.store.holds(SNAP.namespace, 0, name) for name in chain(SNAP.root, PROMPT))
    world.books.finish("a")
    world.assert_idle()
    assert world.books.stats()["slots_indexed"] == 0


def test_a_prefix_in_l1_and_the_rest_in_l2() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT[:20], SNAP))
    stored(world, PROMPT)
    hit = world.books.hits.answer(view("b", PROMPT, SNAP.root), 4, SNAP)
    assert hit.num_tokens == 36
    assert hit.sources == {Source.HOST: 16, Source.STORE: 20}


def test_without_any_tier_nothing_is_answered_or_saved() -> None:
    world = World(config())
    world.save("a", PROMPT, SNAP)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    assert world.books.stats()["saves_emitted"] == 0


def test_a_private_root_uses_l1_and_never_l2() -> None:
    private = snap_of(1, shared=False)
    world = World(BOTH)
    world.free(world.save("a", PROMPT, private))
    assert world.store.objects == {}
    assert world.books.hits.answer(view("b", PROMPT, private.root), 0, private).num_tokens == 40
    assert world.store.queries == []


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "local", "expected"), [(41, 0, 40), (40, 0, 36), (41, 40, 0), (40, 36, 0), (3, 0, 0), (42, 8, 32)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, local: int, expected: int) -> None:
    world = World(L1)
    world.save("a", list(range(48)), SNAP)
    hit = world.books.hits.answer(view("b", list(range(num_tokens)), SNAP.root), local, SNAP)
    assert hit.num_tokens == expected


def test_a_block_that_one_shard_misses_is_not_there() -> None:
    world = World(L2)
    assert SNAP.namespace
    stored(world, PROMPT)
    name = chain(SNAP.root, PROMPT)[5]
    del world.store.objects[f"{SNAP.namespace}/g0/r1/{name.hex()}"]
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 20


def test_too_small_a_hit_is_not_worth_a_load() -> None:
    world = World(config(l1_slots=50, min_load_tokens=24))
    world.save("a", PROMPT[:21], SNAP)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    world.save("c", list(range(100, 125)), SNAP)
    assert world.books.hits.answer(view("d", list(range(100, 141)), SNAP.root), 0, SNAP).num_tokens == 24


def test_an_unsupported_layout_is_said_once_and_answers_nothing(caplog) -> None:
    mamba = CacheLayout((GroupLayout(GroupKind.UNSUPPORTED, 4, name="MambaSpec"),), 4, 100)
    world = World(BOTH, mamba)
    for number in range(3):
        world.books.hits.begin(view(f"r{number}", PROMPT, SNAP.root), SNAP)
        assert world.books.hits.answer(view(f"r{number}", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    assert len([record for record in caplog.records if "MambaSpec" in record.getMessage()]) == 1


def test_asking_again_pins_nothing_and_looks_nothing_up() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.books.finish("a")
    stored(world, PROMPT)
    first = world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP)
    before, queries = world.books.leak_report(), len(world.store.queries)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) is first
    assert world.books.leak_report() == before
    assert len(world.store.queries) == queries
    assert before["held_slots"] == before["reserved_slots"] == 5


def test_other_local_tokens_make_another_plan() -> None:
    world = World(L1)
    world.free(world.save("a", PROMPT, SNAP))
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 32, SNAP).num_tokens == 8
    assert world.books.leak_report()["held_slots"] == 2


def test_a_request_of_another_root_gets_nothing() -> None:
    world = World(BOTH)
    world.save("a", PROMPT, SNAP)
    assert world.books.hits.answer(view("b", PROMPT, b"other"), 0, SNAP).num_tokens == 0


# -- a slow or dead store --------------------------------------------------------------------------------------------


def test_a_slow_store_defers_until_the_deadline_then_l1_answers() -> None:
    world = World(config(l1_slots=200, l2=True, lookup_deadline_ms=20.0))
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.store.answering = False
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens is None
    assert world.books.leak_report()["plans"] == 0
    world.clock.now += 0.0201
    hit = world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP)
    assert (hit.num_tokens, hit.sources) == (20, {Source.HOST: 20})
    assert world.books.stats()["queries_late"] == 1
    assert len(world.store.queries) == 1


@pytest.mark.parametrize("milliseconds", [20.0, 5000.0])
def test_the_store_may_take_as_long_as_the_deadline_says(milliseconds: float) -> None:
    """The client has no limit of its own: one of a second made misses of lookups that were given five."""
    world = World(config(l2=True, lookup_deadline_ms=milliseconds))
    world.books.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    assert world.store.timeouts == [milliseconds / 1e3]


def test_an_answer_that_arrives_in_time_is_used() -> None:
    world = World(L2)
    stored(world, PROMPT)
    world.store.answering = False
    world.books.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens is None
    world.step()
    world.store.answer()
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40


def test_all_lookups_of_a_step_share_one_wait(monkeypatch) -> None:
    waits: list[float] = []

    def wait(futures, timeout):
        waits.append(timeout)
        world.clock.now += timeout
        return type("Done", (), {"not_done": set(futures)})()

    monkeypatch.setattr("epochkv_connector.scheduler.planning.lookup.wait", wait)
    world = World(config(l2=True, lookup_wait_ms=2.0))
    world.store.answering = False
    for number in range(5):
        world.books.hits.answer(view(f"r{number}", PROMPT, SNAP.root), 0, SNAP)
    assert waits == [0.002]
    world.step()
    world.books.hits.answer(view("r0", PROMPT, SNAP.root), 0, SNAP)
    assert waits == [0.002, 0.002]


def test_an_error_of_the_store_is_a_miss() -> None:
    world = World(L2)
    world.store.failing = True
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    assert world.books.stats()["queries_failed"] == 1


def test_large_queries_are_split() -> None:
    world = World(L2)
    tokens = list(range(HASH_BLOCK * 1200 + 1))
    world.books.hits.begin(view("b", tokens, SNAP.root), SNAP)
    assert [len(query) for query in world.store.queries] == [MAX_KEYS_PER_QUERY, MAX_KEYS_PER_QUERY, 352]


def test_an_answer_older_than_the_read_lease_is_not_believed() -> None:
    world = World(L2)
    stored(world, PROMPT)
    world.books.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    world.clock.now += READ_LEASE_SECONDS
    world.store.objects.clear()
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0


# -- commit, shrink, abort -------------------------------------------------------------------------------------------


def planned(cfg=BOTH, layout: CacheLayout = FULL, l1_tokens: int = 20) -> World:
    """A world in which request b has a plan of 40 tokens: some in L1, the rest in L2."""
    world = World(cfg, layout)
    if cfg.local:
        world.free(world.save("a", PROMPT[:l1_tokens], SNAP))
        world.books.finish("a")
    stored(world, PROMPT, layout)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    return world


def commit(world: World, num: int, snap=SNAP, blocks=None) -> bool | None:
    blocks = world.allocate(0, max(num, 0)) if blocks is None else blocks
    return world.commit(view("b", PROMPT, SNAP.root), blocks, num, snap)


@pytest.mark.parametrize("num", [4, 16, 20, 24, 40])
def test_a_shrunk_hit_loads_what_was_accepted_and_frees_the_rest(num: int) -> None:
    world = planned()
    assert commit(world, num) is True
    host = min(num, 20)
    assert world.books.loads.sources("b") == {s: n for s, n in {Source.HOST: host, Source.STORE: num - host}.items() if n}
    report = world.books.leak_report()
    assert (report["held_slots"], report["reserved_slots"]) == (host // 4, (num - host) // 4)
    (job,) = world.step().loads
    assert [move.block for move in job.moves] == list(range(num // 4))
    world.work()
    world.books.finish("b")
    world.assert_idle()


def test_a_second_commit_changes_nothing() -> None:
    world = planned()
    assert commit(world, 40) is True
    before = world.books.leak_report()
    assert commit(world, 40) is True
    assert world.books.leak_report() == before
    assert len(world.step().loads) == 1
    assert commit(world, 40) is True
    assert world.step().loads == ()
    assert commit(world, 0) is None
    assert world.books.loads.is_open("b")
    world.work()
    world.assert_idle()


def test_zero_tokens_abort_also_with_real_blocks() -> None:
    world = planned()
    assert commit(world, 0, blocks=[[1, 2, 3]]) is None
    assert world.books.stats()["plans_aborted"] == 1
    assert world.step().loads == ()
    world.books.finish("b")
    world.assert_idle()


@pytest.mark.parametrize(
    ("num", "snap", "blocks", "why"),
    [
        (44, SNAP, None, "more than planned"),
        (40, snap_of(2), None, "another root"),
        (40, SNAP, [[1, 2]], "blocks missing"),
        (40, SNAP, [[0, *range(1, 10)]], "null block in full attention"),
    ],
)
def test_a_promise_that_cannot_be_kept_dooms_the_request(num: int, snap, blocks, why: str) -> None:
    world = planned()
    assert commit(world, num, snap, blocks) is False, why
    assert commit(world, num, snap, blocks) is False
    step = world.step()
    assert (step.loads, world.named) == ((), ["b"])
    world.books.finish("b")
    world.assert_idle()


def test_a_hit_without_a_plan_is_doomed() -> None:
    world = World(L1)
    assert commit(world, 8) is False
    world.step()
    assert world.named == ["b"]


def test_a_shrunk_window_is_taken_from_l1_or_doomed() -> None:
    # 24 tokens end with the window of blocks 4 and 5 (5 tokens before the next); the plan for 40 holds blocks 8 and 9.
    world = planned(layout=SLIDING_FIRST, l1_tokens=24)
    assert commit(world, 24) is True
    (job,) = world.step().loads
    assert [move.block for move in job.moves if move.group == 0] == [4, 5]
    world.work()
    world.books.finish("b")
    world.assert_idle()
    world = planned(layout=SLIDING_FIRST, l1_tokens=24)
    assert commit(world, 32) is False
    world.step()
    world.books.finish("b")
    world.assert_idle()


def test_a_block_that_vllm_would_cache_unfilled_dooms_the_request() -> None:
    world = planned(layout=SLIDING_FIRST)
    blocks = world.allocate(0, 40)
    blocks[0][6] = world.pool.new()  # below the window, yet allocated: vLLM would cache it under its name
    assert commit(world, 40, blocks=blocks) is False


def test_a_finished_request_gives_its_plan_back() -> None:
    world = planned()
    world.books.finish("b")
    world.assert_idle()


def test_plans_that_nobody_asks_for_expire_by_steps_and_by_time() -> None:
    world = planned()
    for _ in range(PLAN_TTL_STEPS - 1):
        world.step()
    assert world.books.leak_report()["plans"] == 1
    world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP)
    for _ in range(PLAN_TTL_STEPS):
        world.step()
    assert world.books.leak_report()["held_slots"] == 0
    world = planned()
    world.clock.now += PLAN_TTL_SECONDS
    world.step()
    assert world.books.leak_report()["held_slots"] == 0
    assert world.books.stats()["plans_expired"] == 1


def test_the_oldest_plan_goes_when_plans_hold_too_much() -> None:
    world = World(config(l1_slots=20))
    prompts = {f"r{n}": [100 * n + token for token in range(21)] for n in range(3)}
    for request_id, tokens in prompts.items():
        world.free(world.save(f"save {request_id}", tokens, SNAP))
        world.books.finish(f"save {request_id}")
    for request_id, tokens in prompts.items():
        assert world.books.hits.answer(view(request_id, tokens, SNAP.root), 0, SNAP).num_tokens == 20
    assert world.books.leak_report()["plan_slots"] == 10
    assert world.books.stats()["plans_over_cap"] == 1
    for request_id, tokens in list(prompts.items())[1:]:
        blocks = world.allocate(0, 20)
        assert world.commit(view(request_id, tokens, SNAP.root), blocks, 20, SNAP) is True


def test_a_hit_is_cut_to_the_slots_that_can_be_had() -> None:
    world = World(config(l1_slots=8, l2=True))
    stored(world, PROMPT)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 32
    assert world.books.stats()["hits_shrunk"] >= 1
    assert commit(world, 20) is True
    assert world.books.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP).num_tokens == 12
    assert world.books.hits.answer(view("d", PROMPT, SNAP.root), 0, SNAP).num_tokens == 12, "c's older plan made room"
    assert commit(world, 20) is True
    world.step()
    world.work()
    for request_id in "bcd":
        world.books.finish(request_id)
    world.assert_idle()


def test_a_hit_that_lacks_slots_waits_two_steps_for_saves_that_give_theirs_back() -> None:
    other = [1000 + token for token in range(41)]

    def saving() -> World:
        """Ten of sixteen slots are held by a save that nobody has acknowledged; another prompt of ten blocks is in L2."""
        world = World(config(l1_slots=16, l2=True))
        stored(world, PROMPT)
        world.begin_save("a", other, SNAP)
        assert world.books.leak_report()["held_slots"] == 10
        assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens is None
        return world

    world = saving()
    world.step()
    world.work()
    world.books.finish("a")
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    assert world.books.stats()["hits_shrunk"] == 1
    world.books.finish("b")
    world.assert_idle()

    world = saving()
    world.step()
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens is None
    world.step()
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 24, "not acknowledged: what can be had"
    world.books.finish("b")
    world.work()
    world.books.finish("a")
    world.assert_idle()


def test_a_load_longer_than_the_ring_uses_its_slots_in_turns() -> None:
    world = World(config(l2=True, staging_slots=16))
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, True)
    (job,) = world.step().loads
    assert [move.block for move in job.moves] == list(range(10))
    assert [move.slot == job.moves[turn % 2].slot for turn, move in enumerate(job.moves)] == [True] * 10
    assert job.moves[0].slot != job.moves[1].slot
    assert world.books.leak_report()["held_slots"] == 2
    world.work()
    assert world.workers[0].reports == [("b", False)]
    assert [world.workers[0].gpu[move.gpu_block] for move in job.moves] == [(0, move.block_hash) for move in job.moves]
    world.books.finish("b")
    world.assert_idle()


def test_a_ring_without_a_free_slot_is_a_miss_and_a_shrunk_hit_gives_back_what_it_does_not_need() -> None:
    world = World(config(l2=True, staging_slots=8))
    stored(world, PROMPT)
    requests = [f"r{number}" for number in range(9)]
    answers = [world.load(request, PROMPT, SNAP) for request in requests]
    assert answers == [(40, True)] * 8 + [(0, None)]
    assert world.books.leak_report()["reserved_slots"] == 8
    world.step()
    world.work()
    assert [failed for _, failed in world.workers[0].reports] == [False] * 8
    for request in requests:
        world.books.finish(request)
    world.assert_idle()
    world = World(config(l2=True, staging_slots=17))
    stored(world, PROMPT)
    for request in requests:
        assert world.load(request, PROMPT, SNAP) == (40, True), "the last one gets the only slot that is left"
    assert world.books.leak_report()["reserved_slots"] == 17
    world = World(config(l2=True, staging_slots=40))
    stored(world, PROMPT)
    assert world.books.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    assert world.books.leak_report()["reserved_slots"] == 5
    assert world.commit(view("b", PROMPT, SNAP.root), world.allocate(0, 8), 8, SNAP) is True
    assert world.books.leak_report()["reserved_slots"] == 2, "two blocks need no five slots"
    world.step()
    world.work()
    world.books.finish("b")
    world.assert_idle()


def test_a_load_in_turns_that_loses_a_block_is_not_believed_at_all() -> None:
    world = World(config(l2=True, staging_slots=16))
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, True)
    world.step()
    world.work("partial")  # the last block; its slot was filled for four others before
    assert world.books.stats()["known_in_store"] == 0
    assert world.books.stats()["loads_failed"] == 1
    world.books.finish("b")
    world.assert_idle()


def test_allocation_for_one_hit_never_takes_blocks_of_another_hit_of_the_step() -> None:
    # L1 holds request x's prompt as its oldest blocks; y needs fetching. Both are accepted in one step, y first.
    world = World(config(l1_slots=10, l2=True))
    x, y = [1000 + token for token in range(21)], PROMPT[:21]
    world.free(world.save("sx", x, SNAP))
    world.books.finish("sx")
    world.free(world.save("other", [2000 + token for token in range(21)], SNAP))
    world.books.finish("other")
    stored(world, y)
    assert world.load("y", y, SNAP) == (20, True)
    assert world.load("x", x, SNAP) == (20, True)
    job_y, job_x = world.step().loads
    assert not {move.slot for move in job_y.moves} & {move.slot for move in job_x.moves}
    world.work()
    assert world.workers[0].reports == [("y", False), ("x", False)]
