"""What prefetches may take, and what they say of the path."""

from epochkv_connector.tiers.prefetch import MOST_BLOCKS
from epochkv_connector.wire import JobAck, Phase
from tests.unit.connector_scheduler.rig import PROMPT, SNAP, World, config, stored, view


def world_with(l1_slots: int) -> World:
    world = World(config(l1_slots=l1_slots, l2=True))
    world.tiers.adopt(SNAP)
    return world


def begin(world: World, request_id: str, tokens: list[int]) -> None:
    world.tiers.hits.begin(view(request_id, tokens, SNAP.root), SNAP)


def answer(world: World, request_id: str, tokens: list[int]) -> int | None:
    return world.tiers.hits.answer(view(request_id, tokens, SNAP.root), 0, SNAP)


def test_a_prefetch_evicts_nothing_of_its_own_hit() -> None:
    world = world_with(40)
    for number, tokens in enumerate([PROMPT[:20], *([1000 * number + index for index in range(20)] for number in range(1, 8))]):
        world.free(world.save(f"s{number}", tokens, SNAP))  # the first half of the prompt is the oldest in a full L1
        world.tiers.finish(f"s{number}")
    stored(world, PROMPT)
    begin(world, "b", PROMPT)
    assert [move.block for move in world.step().loads[0].moves] == [5, 6, 7, 8, 9]
    world.work()
    assert answer(world, "b", PROMPT) == 40


def test_requests_of_one_prompt_fetch_it_once_and_one_at_a_time() -> None:
    world = world_with(400)
    stored(world, PROMPT)
    for number in range(10):
        begin(world, f"s{number}", PROMPT)
    assert [len(job.moves) for job in world.step().loads] == [10]
    assert not world.step().loads, "one is under way"
    world.work()
    assert not world.step().loads, "all of it is there"
    assert [answer(world, f"s{number}", PROMPT) for number in range(10)] == [40] * 10


def test_a_long_prompt_comes_in_parts() -> None:
    world = world_with(8 * MOST_BLOCKS)
    tokens = list(range(4 * (MOST_BLOCKS + 10) + 1))
    stored(world, tokens)
    begin(world, "b", tokens)
    assert len(world.step().loads[0].moves) == MOST_BLOCKS
    world.work()
    assert len(world.step().loads[0].moves) == 10


def test_a_success_whose_slots_the_store_still_holds_is_a_success() -> None:
    world = world_with(400)
    stored(world, PROMPT)
    begin(world, "b", PROMPT)
    (job,) = world.step().loads
    slots = tuple(move.slot for move in job.moves)
    world.tiers.on_acks([JobAck(job.job_id, 0, Phase.LOADED, filled_slots=slots, busy_slots=slots)])
    world.tiers.on_acks([JobAck(job.job_id, 0, Phase.RELEASED)])
    assert world.tiers.state.index.num_indexed == 10
    assert answer(world, "b", PROMPT) == 40


def test_prefetches_that_fail_pause_nothing() -> None:
    world = world_with(400)
    stored(world, PROMPT)
    for number in range(4):
        begin(world, f"s{number}", PROMPT)
        world.step()
        world.work("drop")
        assert answer(world, f"s{number}", PROMPT) == 0, "and no second wait"
        world.tiers.finish(f"s{number}")
    assert not world.tiers.hits.pause.paused


def test_nothing_is_kept_of_requests_while_l2_is_paused() -> None:
    world = world_with(400)
    hits = world.tiers.hits
    for number in range(3):
        hits.pause.end(f"x{number}", False)
    world.clock.now += 60
    for number in range(20):
        begin(world, f"r{number}", PROMPT)
        world.tiers.finish(f"r{number}")
        world.step()
    assert hits.prefetches is not None
    assert not hits.prefetches._answered
