"""What is saved of groups that are not plain attention: recurrent states, windows that vLLM keeps in part, private groups."""

from dataclasses import replace

from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout
from epochkv_connector.wire import SaveJob
from tests.unit.connector_scheduler.rig import L1, MIXED, PROMPT, SLIDING_FIRST, SNAP, STATES, World, chain, config, view

FULL_AND_STATE = CacheLayout((GroupLayout(GroupKind.FULL, 8), GroupLayout(GroupKind.STATE, 8)), 8)
PROMPT_BLOCKS = chain(SNAP.root, PROMPT)


def compute(world: World, end: int) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """A request's blocks after so many tokens of the prompt, block by block of states, and what the last step offers."""
    blocks: list[list[int]] = [[] for _ in world.layout.groups]
    states: list[tuple[int, int, int]] = []
    for start in range(0, end, world.layout.alignment_tokens):
        states = world.compute(blocks, PROMPT_BLOCKS, start, min(end, start + world.layout.alignment_tokens))
    return blocks, states


def moves(jobs: tuple[SaveJob, ...]) -> set[tuple[int, int]]:
    return {(move.group, move.block) for job in jobs for move in job.moves}


def not_held(world: World, blocks: list[list[int]]) -> list[list[int]]:
    """The request's blocks, as if it held no state: what it holds at the first look is saved without an offer, too."""
    return [[] if group.kind is GroupKind.STATE else held for group, held in zip(world.layout.groups, blocks, strict=True)]


def test_a_state_that_is_offered_twice_is_saved_once() -> None:
    world = World(L1, FULL_AND_STATE)
    blocks, states = compute(world, 16)
    world.collect("a", blocks, 16, states * 2)
    (job,) = world.step().saves
    assert len(job.moves) == len(moves((job,))) == 3


def test_an_offer_alone_is_a_reason_to_save() -> None:
    world = World(L1, FULL_AND_STATE)
    blocks, states = compute(world, 16)
    world.collect("a", not_held(world, blocks), 16)
    assert moves(world.step().saves) == {(0, 0), (0, 1)}
    world.collect("a", not_held(world, blocks), 16, states)
    (job,) = world.step().saves
    assert moves((job,)) == {(1, 1)}
    world.work()
    assert world.answer("b") == 16


def test_a_state_without_a_slot_is_lost_and_blocks_are_tried_again() -> None:
    world = World(config(l1_slots=4), FULL_AND_STATE)
    blocks, states = compute(world, 32)
    world.collect("a", blocks, 32, states)
    assert moves(world.step().saves) == {(0, block) for block in range(4)}
    assert world.tiers.stats()["states_lost"] == 1
    assert world.tiers.saves.planner.leak_report()["saves_lacking_slots"] == 0, "nobody waits for a state that may be gone"


def test_of_one_boundary_all_states_are_saved_or_none() -> None:
    world = World(config(l1_slots=5), STATES)
    blocks, states = compute(world, 16)
    world.collect("a", blocks, 16, states)
    assert moves(world.step().saves) == {(0, block) for block in range(4)}, "one slot is left, and two states are offered"
    assert world.tiers.stats()["states_lost"] == 2


def test_a_state_whose_slot_went_to_the_boundary_before_it_is_not_saved_from_there() -> None:
    """L1 is full, and one step offers a new state and finds the one that the request resumed at, which L2 lacks and L1 holds."""
    world = World(config(l1_slots=4, l2=True), FULL_AND_STATE)
    blocks, states = compute(world, 16)
    world.collect("a", blocks, 16, states)
    world.step()
    world.work()
    world.tiers.state.known.clear()
    grown = [list(blocks[0]), [0]]
    offered = world.compute(grown, PROMPT_BLOCKS, 16, 24)
    grown[1][1] = blocks[1][1]
    world.collect("b", grown, 24, offered)
    (job,) = world.step().saves
    assert len({move.slot for move in job.moves}) == len(job.moves), "a slot of two blocks"
    world.work()
    assert world.tiers.stats()["states_lost"] == 1
    assert world.tiers.leak_report()["held_slots"] == 0


def test_only_the_very_block_under_the_very_name_is_a_state() -> None:
    world = World(L1, STATES)
    blocks, states = compute(world, 24)
    null = [(group, 0, tokens) for group, _, tokens in states]
    inside = [(group, block, tokens - 2) for group, block, tokens in states]
    earlier = [(group, block, tokens - 8) for group, block, tokens in states]
    beyond = [(group, block, 8000) for group, block, _ in states]
    swapped = [(states[0][0], states[1][1], 24), (states[1][0], states[0][1], 24)]
    wrong = null + inside + earlier + beyond + swapped
    world.collect("a", not_held(world, blocks), 24, wrong)
    assert moves(world.step().saves) == {(0, block) for block in range(6)}


def test_of_a_window_what_vllm_keeps_is_saved_and_all_of_it_where_drafts_are_made() -> None:
    for eagle in (False, True):
        groups = tuple(replace(group, eagle=eagle) for group in SLIDING_FIRST.groups)
        world = World(L1, CacheLayout(groups, 4))
        keep = iter([False, False, True, True])
        world.keeps = lambda keep=keep: next(keep)
        blocks, _ = compute(world, 16)
        world.collect("a", blocks, 16)
        windows = range(4) if eagle else (2, 3)
        assert moves(world.step().saves) == {(0, block) for block in windows} | {(1, block) for block in range(4)}


def test_private_groups_are_in_no_move() -> None:
    world = World(config(l1_slots=50, l2=True), MIXED)
    blocks, states = compute(world, 40)
    blocks[1].append(world.pool.new())
    world.collect("a", blocks, 40, states)
    assert {group for group, _ in moves(world.step().saves)} == {0, 2, 3}
    world.work()
    hit = world.answer("b")
    assert hit == 40
    assert world.tiers.loads.commit(view("b", PROMPT, SNAP.root), world.allocate(0, 40), 40, SNAP)
    assert {move.group for job in world.step().loads for move in job.moves} == {0, 2, 3}
