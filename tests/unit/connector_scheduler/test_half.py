"""The scheduler role as the facade sees it: lookups, and a store that is slow."""

import pytest

from epochkv_connector.tiers.lookup import READ_LEASE_SECONDS
from tests.unit.connector_scheduler.rig import L1, L2, PROMPT, SNAP, World, chain, config, stored, view


# -- the answer ------------------------------------------------------------------------------------------------------
def test_a_block_that_one_shard_misses_is_not_there() -> None:
    world = World(L2)
    assert SNAP.namespace
    stored(world, PROMPT)
    name = chain(SNAP.root, PROMPT)[5]
    del world.store.objects[f"{SNAP.namespace}/g0/r1/{name.hex()}"]
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 20


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
