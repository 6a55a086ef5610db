"""Loads from L2 that fail again and again are paused: a hit that cannot be loaded costs its request up to a deadline."""

import logging

import pytest

from epochkv_connector.tiers.lookup import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, MAX_FAILURES
from epochkv_connector.wire import LoadJob
from tests.unit.connector_scheduler.rig import World, chain, config, snap_of, view

SNAP = snap_of(1)
L2 = config(l2=True, staging_slots=400)
BOTH = config(l1_slots=200, l2=True)


def prompt(number: int) -> list[int]:
    """41 tokens that no other number's prompt begins with: 10 blocks and one token."""
    return [1000 * number + token for token in range(41)]


def stored(world: World, number: int) -> None:
    """Another engine has put this prompt to L2."""
    assert SNAP.namespace
    for name in chain(SNAP.root, prompt(number)):
        world.store.put(SNAP.namespace, 0, name)


def hit(world: World, number: int) -> int:
    """What a new request with this prompt is promised; nothing is accepted."""
    tokens = world.tiers.hits.answer(view(f"asks {number}", prompt(number), SNAP.root), 0, SNAP)
    assert tokens is not None
    world.tiers.finish(f"asks {number}")
    return tokens


def begin(world: World, number: int) -> LoadJob:
    """A request accepts its hit of 40 tokens."""
    stored(world, number)
    assert world.load(f"r{number}", prompt(number), SNAP) == (40, True)
    (job,) = world.step().loads
    return job


def load(world: World, number: int, how: str = "ok") -> None:
    begin(world, number)
    world.work(how)
    world.tiers.finish(f"r{number}")


def fail_until_paused(world: World) -> None:
    for number in range(MAX_FAILURES):
        assert not world.tiers.stats()["loads_paused"]
        load(world, number, "drop")
    assert world.tiers.stats()["loads_paused"]


@pytest.fixture
def world() -> World:
    made = World(L2)
    stored(made, 99)
    return made


def test_after_failures_in_a_row_l2_is_not_asked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fail_until_paused(world)
    assert len([r for r in caplog.records if "failed in a row" in r.message]) == 1
    queries = len(world.store.queries)
    world.tiers.hits.begin(view("asks 99", prompt(99), SNAP.root), SNAP)
    assert hit(world, 99) == 0
    assert len(world.store.queries) == queries
    assert world.tiers.stats()["load_pauses"] == 1
    world.assert_idle()


def test_a_success_in_between_starts_the_count_anew(world: World) -> None:
    for number in range(4 * MAX_FAILURES):
        load(world, number, "ok" if number % MAX_FAILURES == MAX_FAILURES - 1 else "drop")
    assert not world.tiers.stats()["loads_paused"]
    assert hit(world, 99) == 40


def test_after_the_pause_one_load_is_tried_and_its_success_opens_the_path(world: World, caplog: pytest.LogCaptureFixture) -> None:
    fail_until_paused(world)
    world.clock.now += FIRST_PAUSE_SECONDS - 0.01
    assert hit(world, 99) == 0
    world.clock.now += 0.02
    assert hit(world, 99) == 40, "a lookup that nobody accepts is no trial"
    begin(world, 50)
    assert hit(world, 99) == 0, "a second load before the trial has ended"
    with caplog.at_level(logging.INFO):
        world.work("ok")
    assert "succeed again" in caplog.text
    assert not world.tiers.stats()["loads_paused"]
    assert hit(world, 99) == 40
    load(world, 51, "drop")
    assert hit(world, 99) == 40, "one failure after the recovery paused loads"


def test_pauses_double_up_to_a_bound_while_trials_fail(world: World) -> None:
    fail_until_paused(world)
    pause, number = FIRST_PAUSE_SECONDS, 100
    for _ in range(8):
        world.clock.now += pause - 0.01
        assert hit(world, 99) == 0
        world.clock.now += 0.02
        load(world, number, "drop")
        number += 1
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
    assert pause == LAST_PAUSE_SECONDS
    assert world.tiers.stats()["load_pauses"] == 9


def test_loads_that_were_under_way_lengthen_no_pause(world: World) -> None:
    numbers = range(MAX_FAILURES + 5)
    for number in numbers:
        begin(world, number)
    world.work("drop")
    assert world.tiers.stats()["load_pauses"] == 1
    world.clock.now += FIRST_PAUSE_SECONDS + 0.01
    assert hit(world, 99) == 40


def test_a_late_success_of_an_older_load_ends_the_pause(world: World) -> None:
    begin(world, 50)
    for worker in world.workers:
        early = worker.todo.popleft()
        fail_until_paused(world)
        worker.todo.append(early)
    world.work("ok")
    assert hit(world, 99) == 40


def test_a_trial_that_was_invalidated_is_no_trial(world: World) -> None:
    fail_until_paused(world)
    world.clock.now += FIRST_PAUSE_SECONDS + 0.01
    begin(world, 50)
    world.tiers.reset()
    world.work("drop")
    world.tiers.finish("r50")
    assert world.tiers.stats()["load_pauses"] == 1
    assert hit(world, 99) == 40


def test_a_trial_that_is_never_heard_of_blocks_nobody_for_ever(world: World) -> None:
    fail_until_paused(world)
    world.clock.now += FIRST_PAUSE_SECONDS + 0.01
    begin(world, 50)
    world.clock.now += 2 * L2.job_deadline_seconds + 0.01
    assert hit(world, 99) == 40


def test_l1_answers_and_saves_go_on_while_l2_is_paused() -> None:
    world = World(BOTH)
    fail_until_paused(world)
    stored(world, 99)
    assert hit(world, 99) == 0
    world.free(world.save("a", prompt(60), SNAP))
    world.tiers.finish("a")
    assert hit(world, 60) == 40
    for name in chain(SNAP.root, prompt(60)):
        assert world.store.holds(str(SNAP.namespace), 0, name)
