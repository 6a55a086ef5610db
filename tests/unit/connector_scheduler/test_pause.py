"""Loads from L2 that fail again and again are paused: a hit that cannot be loaded costs its request up to a deadline. And what prefetches
may take, and what they say of the path.
"""

import logging

import pytest

from epochkv_connector.tiers.lookup import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, MAX_FAILURES, MOST_PREFETCHED, READ_LEASE_SECONDS
from epochkv_connector.tiers.state import DOUBT_SECONDS
from epochkv_connector.wire import LoadJob
from tests.unit.connector_scheduler.rig import BOTH, PROMPT, SNAP, World, chain, config

L2 = config(l2=True, staging_slots=400)


def prompt(number: int) -> list[int]:
    """41 tokens that no other number's prompt begins with: 10 blocks and one token."""
    return [1000 * number + token for token in range(41)]


def hit(world: World, number: int) -> int:
    """What a new request with this prompt is promised; nothing is accepted."""
    tokens = world.answer(f"asks {number}", prompt(number))
    assert tokens is not None
    world.tiers.finish(f"asks {number}")
    return tokens


def begin(world: World, number: int, tokens: int = 40) -> LoadJob:
    """A request accepts its hit of so many tokens."""
    world.stored(prompt(number))
    assert world.load(f"r{number}", prompt(number), SNAP) == (tokens, True)
    (job,) = world.step().loads
    return job


def load(world: World, number: int, how: str = "ok", tokens: int = 40) -> None:
    begin(world, number, tokens)
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
    made.stored(prompt(99))
    return made


def test_after_failures_in_a_row_l2_is_not_asked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fail_until_paused(world)
    assert len([r for r in caplog.records if "failed in a row" in r.message]) == 1
    queries = len(world.store.queries)
    world.begin("asks 99", prompt(99))
    assert hit(world, 99) == 0
    assert len(world.store.queries) == queries
    assert world.tiers.stats()["load_pauses"] == 1
    world.assert_idle()


def test_a_success_in_between_starts_the_count_anew(world: World) -> None:
    for number in range(4 * MAX_FAILURES):
        load(world, number, "ok" if number % MAX_FAILURES == MAX_FAILURES - 1 else "drop")
    assert not world.tiers.stats()["loads_paused"]
    assert hit(world, 99) == 40


def test_a_block_that_fails_again_counts_as_absent_for_a_while_and_pauses_nothing(world: World) -> None:
    """One bad object, the last of a prompt that everybody sends."""
    load(world, 1, "partial")
    for _ in range(MAX_FAILURES):
        load(world, 1, "partial")
        load(world, 1, tokens=36)
        world.now += DOUBT_SECONDS
    load(world, 1)
    load(world, 1, "partial")
    assert hit(world, 1) == 40, "a failure after a success is the first"
    load(world, 1, "partial")
    world.tiers.reset()
    assert hit(world, 1) == 40
    assert world.tiers.stats()["load_pauses"] == 0


def test_who_computes_a_block_that_did_not_come_puts_it_whoever_asked_for_it_meanwhile() -> None:
    world = World(BOTH)
    load(world, 1, "partial")
    assert hit(world, 1) == 40
    world.begin_save("a", prompt(1), SNAP)
    assert [(move.block, move.put) for _, job in world.workers[0].todo for move in job.moves] == [(9, True)]


def test_after_the_pause_one_load_is_tried_and_its_success_opens_the_path(world: World, caplog: pytest.LogCaptureFixture) -> None:
    fail_until_paused(world)
    world.now += FIRST_PAUSE_SECONDS - 0.01
    assert hit(world, 99) == 0
    world.now += 0.02
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
        world.now += pause - 0.01
        assert hit(world, 99) == 0
        world.now += 0.02
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
    world.now += FIRST_PAUSE_SECONDS + 0.01
    assert hit(world, 99) == 40


def test_a_late_success_of_an_older_load_ends_the_pause(world: World) -> None:
    begin(world, 50)
    for worker in world.workers:
        early = worker.todo.popleft()
        fail_until_paused(world)
        worker.todo.append(early)
    world.work("ok")
    assert hit(world, 99) == 40


@pytest.mark.parametrize("heard_of", [True, False])
def test_a_trial_that_was_invalidated_or_is_never_heard_of_is_no_trial(world: World, heard_of: bool) -> None:
    fail_until_paused(world)
    world.now += FIRST_PAUSE_SECONDS + 0.01
    begin(world, 50)
    if heard_of:
        world.tiers.reset()
        world.work("drop")
        world.tiers.finish("r50")
    else:
        world.now += 2 * L2.job_deadline_seconds + 0.01
    assert world.tiers.stats()["load_pauses"] == 1
    assert hit(world, 99) == 40


def test_l1_answers_and_saves_go_on_while_l2_is_paused() -> None:
    world = World(BOTH)
    fail_until_paused(world)
    world.stored(prompt(99))
    assert hit(world, 99) == 0
    world.free(world.save("a", prompt(60), SNAP))
    world.tiers.finish("a")
    assert hit(world, 60) == 40
    for name in chain(SNAP.root, prompt(60)):
        assert world.store.holds(str(SNAP.namespace), 0, name)


# ---------------------------------------------------------------------------------------------- prefetches
def world_with(l1_slots: int) -> World:
    world = World(config(l1_slots=l1_slots, l2=True))
    world.tiers.adopt(SNAP)
    return world


def test_a_prefetch_evicts_nothing_of_its_own_hit() -> None:
    world = world_with(40)
    for number, tokens in enumerate([PROMPT[:20], *([1000 * number + index for index in range(20)] for number in range(1, 8))]):
        world.free(world.save(f"s{number}", tokens, SNAP))  # the first half of the prompt is the oldest in a full L1
        world.tiers.finish(f"s{number}")
    world.stored(PROMPT)
    world.begin("b")
    assert [move.block for move in world.step().loads[0].moves] == [5, 6, 7, 8, 9]
    world.work()
    assert world.answer("b") == 40


def test_requests_of_one_prompt_fetch_it_once_and_one_at_a_time() -> None:
    world = world_with(400)
    world.stored(PROMPT)
    world.tiers.state.known.capacity = 3
    for number in range(10):
        world.begin(f"s{number}")
    assert [len(job.moves) for job in world.step().loads] == [10]
    assert not world.step().loads, "one is under way"
    world.work()
    assert not world.step().loads, "all of it is there"
    assert [world.answer(f"s{number}") for number in range(10)] == [40] * 10
    assert all((0, name) in world.tiers.state.known for name in chain(SNAP.root, PROMPT)[:3]), "the head of a prompt is forgotten last"


def test_who_waits_longer_than_an_answer_holds_is_asked_for_again() -> None:
    world = world_with(400)
    world.save("a", PROMPT[:20], SNAP)
    world.stored(PROMPT)
    world.begin("b")
    world.begin("c", prompt(1))  # behind whose turn the new answer would be too old again
    world.now += READ_LEASE_SECONDS
    world.tiers.state.index.clear()  # which was not asked of L2 before
    assert [[len(job.moves) for job in world.step().loads] for _ in range(2)] == [[], [10]]


def test_a_long_prompt_comes_in_parts() -> None:
    world = world_with(8 * MOST_PREFETCHED)
    tokens = list(range(4 * (MOST_PREFETCHED + 10) + 1))
    world.stored(tokens)
    world.begin("b", tokens)
    assert len(world.step().loads[0].moves) == MOST_PREFETCHED
    world.work()
    assert len(world.step().loads[0].moves) == 10


def test_who_waits_for_a_prefetch_loses_nothing_when_its_client_goes() -> None:
    world = world_with(400)
    world.stored(PROMPT)
    world.begin("a")
    world.step()
    assert (world.answer("b"), world.answer("c")) == (None, None)
    world.finish("a")
    world.step()
    world.work()
    assert world.tiers.stats()["blocks_prefetched"] == 0, "it was cancelled"
    assert world.load("b", PROMPT, SNAP) == (40, True)
    assert world.answer("c") is None


def test_prefetches_that_fail_pause_l2_but_not_for_one_bad_prompt() -> None:
    world = world_with(400)
    for number, tokens in enumerate([PROMPT] * 4 + [prompt(9)]):
        world.stored(tokens)
        world.begin(f"s{number}", tokens)
        assert bool(world.step().loads) == (number not in (2, 3)), "blocks that failed twice are not tried again soon"
        world.work("drop")
        assert world.answer(f"s{number}", tokens) == 0, "and no second wait"
        world.tiers.finish(f"s{number}")
        assert world.tiers.hits.pause.paused == (number == 4)


def test_a_prefetch_that_is_never_heard_of_holds_up_its_request_and_others_for_a_time() -> None:
    """A rank's acknowledgements can be lost to an error of ours."""
    world = world_with(400)
    for number in (1, 2):
        world.stored(prompt(number))
        world.begin(f"r{number}", prompt(number))
        world.step()
        world.workers[0].work()  # and nobody hears of it
        assert world.answer(f"r{number}", prompt(number)) is None
        world.now += 2 * BOTH.job_deadline_seconds + 0.1
        world.step()
        assert world.answer(f"r{number}", prompt(number)) == 40
        world.tiers.finish(f"r{number}")
    assert world.tiers.leak_report()["prefetches"] == 0


def test_nothing_is_kept_of_requests_while_l2_is_paused() -> None:
    world = world_with(400)
    fail_until_paused(world)
    world.now += 60
    for number in range(20):
        world.begin(f"r{number}")
        world.tiers.finish(f"r{number}")
        world.step()
    assert not world.tiers.hits.prefetches._answered
