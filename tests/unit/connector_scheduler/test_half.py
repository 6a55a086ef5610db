"""The scheduler role as the facade sees it: lookups, plans, saves, loads, and changes of names."""

from __future__ import annotations

import pytest

from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout
from epochkv_connector.tiers.lookup import READ_LEASE_SECONDS
from epochkv_connector.wire import Tier
from tests.unit.connector_scheduler.rig import (
    BOTH,
    FULL,
    L1,
    L2,
    LAYOUTS,
    PROMPT,
    SNAP,
    World,
    chain,
    config,
    snap_of,
    stored,
    view,
)

# -- the three modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cfg", [L1, BOTH], ids=["L1", "L1+L2"])
def test_what_was_saved_is_found_in_l1(cfg, layout) -> None:
    world = World(cfg, layout)
    world.free(world.save("a", PROMPT, SNAP))
    world.tiers.finish("a")
    assert world.load("b", PROMPT, SNAP) == (40, True)
    (job,) = world.step().loads
    assert {move.source for move in job.moves} == {Tier.HOST}
    assert world.tiers.loads.sources("b") == {}
    world.work()
    assert world.workers[0].reports == [("b", False)]
    world.tiers.finish("b")
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cfg", [L2, BOTH], ids=["L2", "L1+L2"])
def test_what_another_engine_saved_is_found_in_l2(cfg, layout) -> None:
    world = World(cfg, layout)
    stored(world, PROMPT, layout)
    world.tiers.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    assert world.load("b", PROMPT, SNAP) == (40, True)
    assert world.tiers.loads.sources("b") == {Tier.STORE: 40}
    (job,) = world.step().loads
    assert {move.source for move in job.moves} == {Tier.STORE}
    num_slots = len({move.slot for move in job.moves})
    assert num_slots == len(job.moves) if cfg.local else num_slots == 8, "an eighth of a ring of 64"
    world.work()
    assert world.workers[0].reports == [("b", False)]
    world.tiers.finish("b")
    queries = len(world.store.queries)
    hit = world.tiers.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP)
    assert hit == 40
    if cfg is BOTH and layout is FULL:
        assert len(world.store.queries) == queries, "L1 holds everything: nothing to ask"
    world.tiers.finish("c")
    world.assert_idle()


def test_a_prefix_in_l1_and_the_rest_in_l2() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT[:20], SNAP))
    stored(world, PROMPT)
    hit = world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 4, SNAP)
    assert hit == 36
    assert world.commit(view("b", PROMPT, SNAP.root), world.allocate(4, 40), 36, SNAP) is True
    assert world.tiers.loads.sources("b") == {Tier.HOST: 16, Tier.STORE: 20}


def test_without_any_tier_nothing_is_answered_or_saved() -> None:
    world = World(config())
    world.save("a", PROMPT, SNAP)
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 0
    assert world.tiers.stats()["saves_emitted"] == 0


def test_a_private_root_uses_l1_and_never_l2() -> None:
    private = snap_of(1, shared=False)
    world = World(BOTH)
    world.free(world.save("a", PROMPT, private))
    assert world.store.objects == {}
    assert world.tiers.hits.answer(view("b", PROMPT, private.root), 0, private) == 40
    assert world.store.queries == []


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "local", "expected"), [(41, 0, 40), (40, 0, 36), (41, 40, 0), (40, 36, 0), (3, 0, 0), (42, 8, 32)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, local: int, expected: int) -> None:
    world = World(L1)
    world.save("a", list(range(48)), SNAP)
    hit = world.tiers.hits.answer(view("b", list(range(num_tokens)), SNAP.root), local, SNAP)
    assert hit == expected


def test_a_block_that_one_shard_misses_is_not_there() -> None:
    world = World(L2)
    assert SNAP.namespace
    stored(world, PROMPT)
    name = chain(SNAP.root, PROMPT)[5]
    del world.store.objects[f"{SNAP.namespace}/g0/r1/{name.hex()}"]
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 20


def test_an_unsupported_layout_answers_nothing() -> None:
    mamba = CacheLayout((GroupLayout(GroupKind.UNSUPPORTED, 4, name="MambaSpec"),), 4)
    world = World(BOTH, mamba)
    for number in range(3):
        world.tiers.hits.begin(view(f"r{number}", PROMPT, SNAP.root), SNAP)
        assert world.tiers.hits.answer(view(f"r{number}", PROMPT, SNAP.root), 0, SNAP) == 0


def test_asking_again_pins_nothing_and_looks_nothing_up() -> None:
    world = World(BOTH)
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.tiers.finish("a")
    stored(world, PROMPT)
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40
    before, queries = world.tiers.leak_report(), len(world.store.queries)
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40
    assert world.tiers.leak_report() == before
    assert len(world.store.queries) == queries
    assert before["held_slots"] == before["reserved_slots"] == 5


def test_other_local_tokens_make_another_plan() -> None:
    world = World(L1)
    world.free(world.save("a", PROMPT, SNAP))
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 32, SNAP) == 8
    assert world.tiers.leak_report()["held_slots"] == 2


# -- a slow or dead store --------------------------------------------------------------------------------------------


def test_a_slow_store_defers_until_the_deadline_then_l1_answers() -> None:
    world = World(config(l1_slots=200, l2=True, lookup_deadline_ms=20.0))
    world.free(world.save("a", PROMPT[:20], SNAP))
    world.store.answering = False
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) is None
    assert world.tiers.leak_report()["plans"] == 0
    world.clock.now += 0.0201
    hit = world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP)
    assert hit == 20
    assert world.tiers.stats()["queries_late"] == 1
    assert len(world.store.queries) == 1


@pytest.mark.parametrize("milliseconds", [20.0, 5000.0])
def test_the_store_may_take_as_long_as_the_deadline_says(milliseconds: float) -> None:
    """The client has no limit of its own: one of a second made misses of lookups that were given five."""
    world = World(config(l2=True, lookup_deadline_ms=milliseconds))
    world.tiers.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    assert world.store.timeouts == [milliseconds / 1e3]


def test_an_answer_that_arrives_in_time_is_used() -> None:
    world = World(L2)
    stored(world, PROMPT)
    world.store.answering = False
    world.tiers.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) is None
    world.step()
    world.store.answer()
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40


def test_all_lookups_of_a_step_share_one_wait(monkeypatch) -> None:
    waits: list[float] = []

    def wait(futures, timeout):
        waits.append(timeout)
        world.clock.now += timeout
        return type("Done", (), {"not_done": set(futures)})()

    monkeypatch.setattr("epochkv_connector.tiers.lookup.wait", wait)
    world = World(config(l2=True, lookup_wait_ms=2.0))
    world.store.answering = False
    for number in range(5):
        world.tiers.hits.answer(view(f"r{number}", PROMPT, SNAP.root), 0, SNAP)
    assert waits == [0.002]
    world.step()
    world.tiers.hits.answer(view("r0", PROMPT, SNAP.root), 0, SNAP)
    assert waits == [0.002, 0.002]


def test_an_error_of_the_store_is_a_miss() -> None:
    world = World(L2)
    world.store.failing = True
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 0
    assert world.tiers.stats()["queries_failed"] == 1


def test_an_answer_older_than_the_read_lease_is_not_believed() -> None:
    world = World(L2)
    stored(world, PROMPT)
    world.tiers.hits.begin(view("b", PROMPT, SNAP.root), SNAP)
    world.clock.now += READ_LEASE_SECONDS
    world.store.objects.clear()
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 0
