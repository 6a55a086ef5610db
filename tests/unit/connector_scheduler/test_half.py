"""The scheduler half as the facade sees it: lookups, plans, saves, loads, and changes of names."""

from __future__ import annotations

import pytest

from epochkv_connector.records import JobAck, Phase, Source
from epochkv_connector.scheduler.lookup import MAX_KEYS_PER_QUERY, READ_LEASE_SECONDS
from epochkv_connector.scheduler.plans import PLAN_TTL_SECONDS, PLAN_TTL_STEPS
from epochkv_connector.scheduler.views import CacheLayout, Commit, GroupKind, GroupLayout
from tests.unit.connector_scheduler.rig import (
    FULL,
    HASH_BLOCK,
    LAYOUTS,
    SLIDING_FIRST,
    World,
    chain,
    config,
    scheduled,
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
    world.half.finish("a")
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    (job,) = world.step().loads
    assert {move.source for move in job.moves} == {Source.HOST}
    assert world.half.hit_sources("b") == {}
    world.work()
    assert world.workers[0].reports == [("b", False)]
    world.half.finish("b")
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cfg", [L2, BOTH], ids=["L2", "L1+L2"])
def test_what_another_engine_saved_is_found_in_l2(cfg, layout) -> None:
    world = World(cfg, layout)
    stored(world, PROMPT, layout)
    world.half.begin_lookup(view("b", PROMPT, SNAP.root), SNAP)
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    assert world.half.hit_sources("b") == {Source.STORE: 40}
    (job,) = world.step().loads
    assert {move.source for move in job.moves} == {Source.STORE}
    num_slots = len({move.slot for move in job.moves})
    assert num_slots == len(job.moves) if cfg.local else num_slots == 8, "an eighth of a ring of 64"
    world.work()
    assert world.workers[0].reports == [("b", False)]
    world.half.finish("b")
    queries = len(world.store.queries)
    hit = world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP)
    assert hit.num_tokens == 40
    if cfg is BOTH and layout is FULL:
        assert hit.sources == {Source.HOST: 40}
        assert len(world.store.queries) == queries, "L1 holds everything: nothing to ask"
    world.half.finish("c")
    world.assert_idle()


def test_l2_alone_keeps_no_index_and_saves_by_name() -> None:
    world = World(L2)
    world.free(world.save("a", PROMPT, SNAP))
    assert SNAP.namespace
    assert all(world.store.holds(SNAP.namespace, 0, name) for name in chain(SNAP.root, PROMPT))
    world.half.finish("a")
    world.assert_idle()
    assert world.half.stats()["slots_indexed"] == 0


def test_a_prefix_in_l1_and_the_rest_in_l2() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT[:20], SNAP))
    stored(world, PROMPT)
    hit = world.half.lookup(view("b", PROMPT, SNAP.root), 4, SNAP)
    assert hit.num_tokens == 36
    assert hit.sources == {Source.HOST: 16, Source.STORE: 20}


def test_without_any_tier_nothing_is_answered_or_saved() -> None:
    world = World(config())
    world.save("a", PROMPT, SNAP)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    assert world.half.stats()["saves_emitted"] == 0


def test_a_private_root_uses_l1_and_never_l2() -> None:
    private = snap_of(1, shared=False)
    world = World(BOTH)
    world.free(world.save("a", PROMPT, private))
    assert world.store.objects == {}
    assert world.half.lookup(view("b", PROMPT, private.root), 0, private).num_tokens == 40
    assert world.store.queries == []


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "local", "expected"), [(41, 0, 40), (40, 0, 36), (41, 40, 0), (40, 36, 0), (3, 0, 0), (42, 8, 32)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, local: int, expected: int) -> None:
    world = World(L1)
    world.save("a", list(range(48)), SNAP)
    hit = world.half.lookup(view("b", list(range(num_tokens)), SNAP.root), local, SNAP)
    assert hit.num_tokens == expected


def test_a_block_that_one_shard_misses_is_not_there() -> None:
    world = World(L2)
    assert SNAP.namespace
    stored(world, PROMPT)
    name = chain(SNAP.root, PROMPT)[5]
    del world.store.objects[f"{SNAP.namespace}/g0/r1/{name.hex()}"]
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 20


def test_too_small_a_hit_is_not_worth_a_load() -> None:
    world = World(config(l1_slots=50, min_load_tokens=24))
    world.save("a", PROMPT[:21], SNAP)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    world.save("c", list(range(100, 125)), SNAP)
    assert world.half.lookup(view("d", list(range(100, 141)), SNAP.root), 0, SNAP).num_tokens == 24


def test_an_unsupported_layout_is_said_once_and_answers_nothing(caplog) -> None:
    mamba = CacheLayout((GroupLayout(GroupKind.UNSUPPORTED, 4, name="MambaSpec"),), 4, 100)
    world = World(BOTH, mamba)
    for number in range(3):
        world.half.begin_lookup(view(f"r{number}", PROMPT, SNAP.root), SNAP)
        assert world.half.lookup(view(f"r{number}", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    assert len([record for record in caplog.records if "MambaSpec" in record.getMessage()]) == 1


def test_asking_again_pins_nothing_and_looks_nothing_up() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.half.finish("a")
    stored(world, PROMPT)
    first = world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP)
    before, queries = world.half.leak_report(), len(world.store.queries)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP) is first
    assert world.half.leak_report() == before
    assert len(world.store.queries) == queries
    assert before["held_slots"] == before["reserved_slots"] == 5


def test_other_local_tokens_make_another_plan() -> None:
    world = World(L1)
    world.free(world.save("a", PROMPT, SNAP))
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 32, SNAP).num_tokens == 8
    assert world.half.leak_report()["held_slots"] == 2


def test_a_request_of_another_root_gets_nothing() -> None:
    world = World(BOTH)
    world.save("a", PROMPT, SNAP)
    assert world.half.lookup(view("b", PROMPT, b"other"), 0, SNAP).num_tokens == 0


# -- a slow or dead store --------------------------------------------------------------------------------------------


def test_a_slow_store_defers_until_the_deadline_then_l1_answers() -> None:
    world = World(config(l1_slots=200, l2=True, lookup_deadline_ms=20.0))
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.store.answering = False
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens is None
    assert world.half.leak_report()["plans"] == 0
    world.clock.now += 0.0201
    hit = world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP)
    assert (hit.num_tokens, hit.sources) == (20, {Source.HOST: 20})
    assert world.half.stats()["queries_late"] == 1
    assert len(world.store.queries) == 1


def test_an_answer_that_arrives_in_time_is_used() -> None:
    world = World(L2)
    stored(world, PROMPT)
    world.store.answering = False
    world.half.begin_lookup(view("b", PROMPT, SNAP.root), SNAP)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens is None
    world.step()
    world.store.answer()
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40


def test_all_lookups_of_a_step_share_one_wait(monkeypatch) -> None:
    waits: list[float] = []

    def wait(futures, timeout):
        waits.append(timeout)
        world.clock.now += timeout
        return type("Done", (), {"not_done": set(futures)})()

    monkeypatch.setattr("epochkv_connector.scheduler.lookup.wait", wait)
    world = World(config(l2=True, lookup_wait_ms=2.0))
    world.store.answering = False
    for number in range(5):
        world.half.lookup(view(f"r{number}", PROMPT, SNAP.root), 0, SNAP)
    assert waits == [0.002]
    world.step()
    world.half.lookup(view("r0", PROMPT, SNAP.root), 0, SNAP)
    assert waits == [0.002, 0.002]


def test_an_error_of_the_store_is_a_miss() -> None:
    world = World(L2)
    world.store.failing = True
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0
    assert world.half.stats()["queries_failed"] == 1


def test_large_queries_are_split() -> None:
    world = World(L2)
    tokens = list(range(HASH_BLOCK * 1200 + 1))
    world.half.begin_lookup(view("b", tokens, SNAP.root), SNAP)
    assert [len(query) for query in world.store.queries] == [MAX_KEYS_PER_QUERY, MAX_KEYS_PER_QUERY, 352]


def test_an_answer_older_than_the_read_lease_is_not_believed() -> None:
    world = World(L2)
    stored(world, PROMPT)
    world.half.begin_lookup(view("b", PROMPT, SNAP.root), SNAP)
    world.clock.now += READ_LEASE_SECONDS
    world.store.objects.clear()
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0


# -- commit, shrink, abort -------------------------------------------------------------------------------------------


def planned(cfg=BOTH, layout: CacheLayout = FULL, l1_tokens: int = 20) -> World:
    """A world in which request b has a plan of 40 tokens: some in L1, the rest in L2."""
    world = World(cfg, layout)
    if cfg.local:
        world.free(world.save("a", PROMPT[:l1_tokens], SNAP))
        world.half.finish("a")
    stored(world, PROMPT, layout)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    return world


def commit(world: World, num: int, snap=SNAP, blocks=None) -> Commit:
    blocks = world.allocate(0, max(num, 0)) if blocks is None else blocks
    return world.half.commit(view("b", PROMPT, SNAP.root), blocks, num, snap)


@pytest.mark.parametrize("num", [4, 16, 20, 24, 40])
def test_a_shrunk_hit_loads_what_was_accepted_and_frees_the_rest(num: int) -> None:
    world = planned()
    assert commit(world, num) is Commit.LOADING
    host = min(num, 20)
    assert world.half.hit_sources("b") == {s: n for s, n in {Source.HOST: host, Source.STORE: num - host}.items() if n}
    report = world.half.leak_report()
    assert (report["held_slots"], report["reserved_slots"]) == (host // 4, (num - host) // 4)
    (job,) = world.step().loads
    assert [move.block for move in job.moves] == list(range(num // 4))
    world.work()
    world.half.finish("b")
    world.assert_idle()


def test_a_second_commit_changes_nothing() -> None:
    world = planned()
    assert commit(world, 40) is Commit.LOADING
    before = world.half.leak_report()
    assert commit(world, 40) is Commit.LOADING
    assert world.half.leak_report() == before
    assert len(world.step().loads) == 1
    assert commit(world, 40) is Commit.LOADING
    assert world.step().loads == ()
    assert commit(world, 0) is Commit.NOTHING
    assert world.half.open_loads() == {"b"}
    world.work()
    world.assert_idle()


def test_zero_tokens_abort_also_with_real_blocks() -> None:
    world = planned()
    assert commit(world, 0, blocks=[[1, 2, 3]]) is Commit.NOTHING
    assert world.half.stats()["plans_aborted"] == 1
    assert world.step().loads == ()
    world.half.finish("b")
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
    assert commit(world, num, snap, blocks) is Commit.DOOMED, why
    assert commit(world, num, snap, blocks) is Commit.DOOMED
    step = world.step()
    assert (step.loads, step.poisoned) == ((), ("b",))
    world.half.finish("b")
    world.assert_idle()


def test_a_hit_without_a_plan_is_doomed() -> None:
    world = World(L1)
    assert commit(world, 8) is Commit.DOOMED
    assert world.step().poisoned == ("b",)


def test_a_shrunk_window_is_taken_from_l1_or_doomed() -> None:
    # 24 tokens end with the window of blocks 4 and 5 (5 tokens before the next); the plan for 40 holds blocks 8 and 9.
    world = planned(layout=SLIDING_FIRST, l1_tokens=24)
    assert commit(world, 24) is Commit.LOADING
    (job,) = world.step().loads
    assert [move.block for move in job.moves if move.group == 0] == [4, 5]
    world.work()
    world.half.finish("b")
    world.assert_idle()
    world = planned(layout=SLIDING_FIRST, l1_tokens=24)
    assert commit(world, 32) is Commit.DOOMED
    world.step()
    world.half.finish("b")
    world.assert_idle()


def test_a_block_that_vllm_would_cache_unfilled_dooms_the_request() -> None:
    world = planned(layout=SLIDING_FIRST)
    blocks = world.allocate(0, 40)
    blocks[0][6] = world.pool.new()  # below the window, yet allocated: vLLM would cache it under its name
    assert commit(world, 40, blocks=blocks) is Commit.DOOMED


def test_a_finished_request_gives_its_plan_back() -> None:
    world = planned()
    world.half.finish("b")
    world.assert_idle()


def test_plans_that_nobody_asks_for_expire_by_steps_and_by_time() -> None:
    world = planned()
    for _ in range(PLAN_TTL_STEPS - 1):
        world.step()
    assert world.half.leak_report()["plans"] == 1
    world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP)
    for _ in range(PLAN_TTL_STEPS):
        world.step()
    assert world.half.leak_report()["held_slots"] == 0
    world = planned()
    world.clock.now += PLAN_TTL_SECONDS
    world.step()
    assert world.half.leak_report()["held_slots"] == 0
    assert world.half.stats()["plans_expired"] == 1


def test_the_oldest_plan_goes_when_plans_hold_too_much() -> None:
    world = World(config(l1_slots=20))
    prompts = {f"r{n}": [100 * n + token for token in range(21)] for n in range(3)}
    for request_id, tokens in prompts.items():
        world.free(world.save(f"save {request_id}", tokens, SNAP))
        world.half.finish(f"save {request_id}")
    for request_id, tokens in prompts.items():
        assert world.half.lookup(view(request_id, tokens, SNAP.root), 0, SNAP).num_tokens == 20
    assert world.half.leak_report()["plan_slots"] == 10
    assert world.half.stats()["plans_over_cap"] == 1
    for request_id, tokens in list(prompts.items())[1:]:
        blocks = world.allocate(0, 20)
        assert world.half.commit(view(request_id, tokens, SNAP.root), blocks, 20, SNAP) is Commit.LOADING


def test_a_hit_is_cut_to_the_slots_that_can_be_had() -> None:
    world = World(config(l1_slots=8, l2=True))
    stored(world, PROMPT)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 32
    assert world.half.stats()["hits_shrunk"] >= 1
    assert commit(world, 20) is Commit.LOADING
    assert world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP).num_tokens == 12
    assert world.half.lookup(view("d", PROMPT, SNAP.root), 0, SNAP).num_tokens == 12, "c's older plan made room"
    assert commit(world, 20) is Commit.LOADING
    world.step()
    world.work()
    for request_id in "bcd":
        world.half.finish(request_id)
    world.assert_idle()


def test_a_load_longer_than_the_ring_uses_its_slots_in_turns() -> None:
    world = World(config(l2=True, staging_slots=16))
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    (job,) = world.step().loads
    assert [move.block for move in job.moves] == list(range(10))
    assert [move.slot == job.moves[turn % 2].slot for turn, move in enumerate(job.moves)] == [True] * 10
    assert job.moves[0].slot != job.moves[1].slot
    assert world.half.leak_report()["held_slots"] == 2
    world.work()
    assert world.workers[0].reports == [("b", False)]
    assert [world.workers[0].gpu[move.gpu_block] for move in job.moves] == [(0, move.block_hash) for move in job.moves]
    world.half.finish("b")
    world.assert_idle()


def test_a_ring_without_a_free_slot_is_a_miss_and_a_shrunk_hit_gives_back_what_it_does_not_need() -> None:
    world = World(config(l2=True, staging_slots=8))
    stored(world, PROMPT)
    requests = [f"r{number}" for number in range(9)]
    answers = [world.load(request, PROMPT, SNAP) for request in requests]
    assert answers == [(40, Commit.LOADING)] * 8 + [(0, Commit.NOTHING)]
    assert world.half.leak_report()["reserved_slots"] == 8
    world.step()
    world.work()
    assert [failed for _, failed in world.workers[0].reports] == [False] * 8
    for request in requests:
        world.half.finish(request)
    world.assert_idle()
    world = World(config(l2=True, staging_slots=40))
    stored(world, PROMPT)
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    assert world.half.leak_report()["reserved_slots"] == 5
    assert world.half.commit(view("b", PROMPT, SNAP.root), world.allocate(0, 8), 8, SNAP) is Commit.LOADING
    assert world.half.leak_report()["reserved_slots"] == 2, "two blocks need no five slots"
    world.step()
    world.work()
    world.half.finish("b")
    world.assert_idle()


def test_a_load_in_turns_that_loses_a_block_is_not_believed_at_all() -> None:
    world = World(config(l2=True, staging_slots=16))
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    world.step()
    world.work("partial")  # the last block; its slot was filled for four others before
    assert world.half.stats()["known_in_store"] == 0
    assert world.half.stats()["loads_failed"] == 1
    world.half.finish("b")
    world.assert_idle()


def test_allocation_for_one_hit_never_takes_blocks_of_another_hit_of_the_step() -> None:
    # L1 holds request x's prompt as its oldest blocks; y needs fetching. Both are accepted in one step, y first.
    world = World(config(l1_slots=10, l2=True))
    x, y = [1000 + token for token in range(21)], PROMPT[:21]
    world.free(world.save("sx", x, SNAP))
    world.half.finish("sx")
    world.free(world.save("other", [2000 + token for token in range(21)], SNAP))
    world.half.finish("other")
    stored(world, y)
    assert world.load("y", y, SNAP) == (20, Commit.LOADING)
    assert world.load("x", x, SNAP) == (20, Commit.LOADING)
    job_y, job_x = world.step().loads
    assert not {move.slot for move in job_y.moves} & {move.slot for move in job_x.moves}
    world.work()
    assert world.workers[0].reports == [("y", False), ("x", False)]


# -- saves -----------------------------------------------------------------------------------------------------------


def test_only_complete_confirmed_blocks_are_saved_and_only_once() -> None:
    world = World(L1)
    hashes, blocks = chain(SNAP.root, PROMPT), [[]]
    world.compute(blocks, hashes, 0, 40)
    for confirmed, expected in ((3, []), (11, [0, 1]), (11, []), (24, [2, 3, 4, 5])):
        world.half.collect_saves([scheduled("a", PROMPT, SNAP.root, blocks, confirmed)], SNAP)
        assert [move.block for job in world.step().saves for move in job.moves] == expected
    world.half.collect_saves([scheduled("twin", PROMPT, SNAP.root, blocks, 24)], SNAP)
    assert world.step().saves == (), "another request's save of the same names is under way"


def test_gpu_blocks_stay_referenced_until_every_rank_has_copied() -> None:
    world = World(config(l1_slots=50, ranks=2), ranks=2)
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    world.half.collect_saves([scheduled("a", PROMPT, SNAP.root, blocks, 40)], SNAP)
    world.step()
    world.free(blocks)
    world.half.finish("a")
    world.half.on_acks(world.workers[0].work())
    assert world.half.holds_gpu_blocks()
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 0, "one rank has not confirmed"
    world.half.finish("b")
    world.half.on_acks(world.workers[1].work())
    assert not world.half.holds_gpu_blocks()
    assert sum(world.pool.refs.values()) == 0
    world.assert_idle()


def test_carried_requests_are_not_saved() -> None:
    world = World(BOTH)
    world.save("a", PROMPT, SNAP)
    world.half.adopt(snap_of(2))
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    world.half.collect_saves([scheduled("a", PROMPT, SNAP.root, blocks, 40)], snap_of(2))
    assert world.step().saves == ()


def test_what_l1_holds_and_l2_lacks_is_put_without_copying() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT, snap_of(1, shared=False)))
    shared = snap_of(1)
    # The same names, now allowed to leave the engine.
    same_root = type(shared)(snap_of(1, shared=False).root, 1, shared.namespace, True)
    blocks = world.save("b", PROMPT, same_root)
    assert world.half.stats()["blocks_saved"] == 10
    assert world.half.stats()["blocks_stored"] == 10
    world.free(blocks)
    assert all(world.store.holds(shared.namespace or "", 0, name) for name in chain(same_root.root, PROMPT))


def test_what_l2_is_known_to_hold_is_not_put_again() -> None:
    world = World(config(l1_slots=10, l2=True))
    world.free(world.save("a", PROMPT, SNAP))
    world.free(world.save("b", [1000 + token for token in range(41)], SNAP))  # evicts a's blocks from L1
    hashes, blocks = chain(SNAP.root, PROMPT), [[]]
    world.compute(blocks, hashes, 0, 40)
    world.half.collect_saves([scheduled("c", PROMPT, SNAP.root, blocks, 40)], SNAP)
    (job,) = world.step().saves
    assert {(move.copy, move.put) for move in job.moves} == {(True, False)}


def test_saves_without_slots_are_tried_again() -> None:
    world = World(config(l2=True, staging_slots=4))
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    saved = []
    for _ in range(4):
        world.half.collect_saves([scheduled("a", PROMPT, SNAP.root, blocks, 40)], SNAP)
        saved.append([move.block for job in world.step().saves for move in job.moves])
        world.work()
    assert saved == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert world.half.stats()["saves_deferred"] == 2


def test_a_partly_failed_save_indexes_what_every_rank_managed() -> None:
    world = World(config(l1_slots=50, ranks=2), ranks=2)
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    world.half.collect_saves([scheduled("a", PROMPT, SNAP.root, blocks, 40)], SNAP)
    world.step()
    world.half.on_acks(world.workers[0].work("ok"))
    world.half.on_acks(world.workers[1].work("partial"))
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 20


# -- failed and late loads -------------------------------------------------------------------------------------------


def test_a_block_that_was_gone_is_not_believed_any_more() -> None:
    world = planned()
    world.store.objects.clear()
    assert commit(world, 40) is Commit.LOADING
    world.step()
    world.work()
    assert world.workers[0].reports == [("b", True)]
    world.half.finish("b")
    assert world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP).num_tokens == 20, "L1's own blocks are sound"
    world.half.finish("c")
    world.assert_idle()


def test_slots_of_a_timed_out_load_are_nobodys_until_the_rank_says_so() -> None:
    world = World(config(l2=True, staging_slots=20))
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    (job,) = world.step().loads
    world.work("late")
    world.half.finish("b")
    assert world.half.open_loads() == set()
    assert world.half.leak_report()["busy_slots"] == 2, "an eighth of the ring"
    stored(world, [1000 + token for token in range(41)])
    assert world.load("c", [1000 + token for token in range(41)], SNAP) == (40, Commit.LOADING)
    (other,) = world.step().loads
    assert not {move.slot for move in other.moves} & {move.slot for move in job.moves}
    world.half.on_acks(world.workers[0].release())
    world.work()
    world.half.finish("c")
    world.assert_idle()


def test_a_load_that_some_rank_lacks_is_not_indexed() -> None:
    world = World(config(l1_slots=100, l2=True, ranks=2), ranks=2)
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    world.step()
    world.half.on_acks(world.workers[0].work("ok"))
    assert world.half.open_loads() == {"b"}
    world.half.on_acks(world.workers[1].work("partial"))
    assert world.half.open_loads() == set()
    world.half.finish("b")
    world.store.objects.clear()
    assert world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP).num_tokens == 36


# -- new names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["adopt", "reset"])
def test_after_a_change_nothing_old_is_found_and_loads_are_named(change: str) -> None:
    world = planned()
    assert commit(world, 40) is Commit.LOADING
    world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP)
    now = snap_of(2) if change == "adopt" else SNAP
    overtaken = world.half.adopt(now) if change == "adopt" else world.half.reset()
    assert overtaken == {"b"}
    report = world.half.leak_report()
    assert (report["plans"], report["queries"]) == (0, 0)
    world.step()
    world.work()
    world.half.poison(["b"])
    assert world.step().poisoned == ("b",)
    assert world.half.stats()["slots_indexed"] == (5 if change == "adopt" else 0), "the load was not indexed"
    world.store.objects.clear()
    assert world.half.lookup(view("d", PROMPT, now.root), 0, now).num_tokens == 0
    for request_id in ("b", "c", "d"):
        world.half.finish(request_id)
    world.assert_idle()


def test_a_save_under_way_when_names_change_is_not_indexed() -> None:
    world = World(L1)
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    world.half.collect_saves([scheduled("a", PROMPT, SNAP.root, blocks, 40)], SNAP)
    world.step()
    world.half.adopt(snap_of(2))
    world.work()
    world.half.finish("a")
    assert world.half.stats()["slots_indexed"] == 0
    world.assert_idle()


def test_returning_to_a_root_finds_its_l1_again() -> None:
    world = World(config(l1_slots=50, tracker=True))
    world.half.adopt(SNAP)
    world.free(world.save("a", PROMPT, SNAP))
    world.half.adopt(snap_of(1, shared=False))
    assert world.half.lookup(view("b", PROMPT, snap_of(1, shared=False).root), 0, snap_of(1, shared=False)).num_tokens == 0
    world.half.adopt(SNAP)
    assert world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40


def test_adopting_the_same_root_keeps_l1_and_drops_plans() -> None:
    world = World(L1)
    world.half.adopt(SNAP)
    world.free(world.save("a", PROMPT, SNAP))
    world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP)
    assert world.half.adopt(SNAP) == set()
    assert world.half.leak_report()["held_slots"] == 0
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40


# -- the tracker -----------------------------------------------------------------------------------------------------


def test_the_tracker_answers_misses_and_never_exceeds_l1() -> None:
    world = World(config(l1_slots=10, tracker=True))
    world.free(world.save("a", PROMPT, SNAP))
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    world.half.finish("b")
    world.free(world.save("c", [1000 + token for token in range(21)], SNAP))
    stats = world.half.stats()
    assert stats["tracker_entries"] == stats["slots_indexed"] == 10
    assert world.half.lookup(view("d", PROMPT, SNAP.root), 0, SNAP).num_tokens == 20


def test_a_small_tracker_is_the_bound() -> None:
    world = World(config(l1_slots=50, tracker=True, tracker_capacity=6))
    world.free(world.save("a", PROMPT, SNAP))
    assert world.half.lookup(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 24


def test_a_failed_load_leaves_the_tracker() -> None:
    world = World(config(l1_slots=50, tracker=True))
    world.free(world.save("a", PROMPT, SNAP))
    assert world.load("b", PROMPT, SNAP) == (40, Commit.LOADING)
    (job,) = world.step().loads
    failed = (job.moves[3].slot, job.moves[5].slot)
    world.half.on_acks([JobAck(job.job_id, 0, Phase.LOADED, 0, 8, True, (), failed)])
    world.half.finish("b")
    assert world.half.lookup(view("c", PROMPT, SNAP.root), 0, SNAP).num_tokens == 12
    assert world.half.stats()["tracker_entries"] == 7, "blocks 3 to 5 are the hull"
