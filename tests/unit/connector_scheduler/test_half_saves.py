"""The scheduler role as the facade sees it: saves, loads that fail or are late, and changes of names."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest

from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, ScheduledRequestView
from epochkv_connector.tiers.saves import SavePlanner
from epochkv_connector.tiers.state import TierState
from epochkv_connector.wire import SaveJob
from tests.unit.connector_scheduler.machines import Pool
from tests.unit.connector_scheduler.rig import (
    BOTH,
    L1,
    PROMPT,
    SNAP,
    World,
    chain,
    commit,
    config,
    planned,
    scheduled,
    snap_of,
    stored,
    view,
)

# -- saves -----------------------------------------------------------------------------------------------------------


def test_only_complete_confirmed_blocks_are_saved_and_only_once() -> None:
    world = World(L1)
    hashes, blocks = chain(SNAP.root, PROMPT), [[]]
    world.compute(blocks, hashes, 0, 40)
    for confirmed, expected in ((3, []), (11, [0, 1]), (11, []), (24, [2, 3, 4, 5])):
        world.tiers.saves.collect([scheduled("a", PROMPT, SNAP.root, blocks, confirmed)], SNAP)
        assert [move.block for job in world.step().saves for move in job.moves] == expected
    world.tiers.saves.collect([scheduled("twin", PROMPT, SNAP.root, blocks, 24)], SNAP)
    assert world.step().saves == (), "another request's save of the same names is under way"


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
    world.tiers.saves.collect([scheduled("c", PROMPT, SNAP.root, blocks, 40)], SNAP)
    (job,) = world.step().saves
    assert {(move.copy, move.put) for move in job.moves} == {(True, False)}


def test_saves_without_slots_are_tried_again() -> None:
    world = World(config(l2=True, staging_slots=4))
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    saved = []
    for _ in range(4):
        world.tiers.saves.collect([scheduled("a", PROMPT, SNAP.root, blocks, 40)], SNAP)
        saved.append([move.block for job in world.step().saves for move in job.moves])
        world.work()
    assert saved == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert world.tiers.stats()["saves_deferred"] == 2


# -- failed and late loads -------------------------------------------------------------------------------------------


def test_a_block_that_was_gone_is_not_believed_any_more() -> None:
    world = planned()
    world.store.objects.clear()
    assert commit(world, 40) is True
    world.step()
    world.work()
    assert world.workers[0].reports == [("b", True)]
    world.tiers.finish("b")
    assert world.tiers.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP) == 20, "L1's own blocks are sound"
    world.tiers.finish("c")
    world.assert_idle()


def test_slots_of_a_timed_out_load_are_nobodys_until_the_rank_says_so() -> None:
    world = World(config(l2=True, staging_slots=20))
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, True)
    (job,) = world.step().loads
    world.work("late")
    world.tiers.finish("b")
    assert not world.tiers.loads.is_open("b")
    assert world.tiers.leak_report()["busy_slots"] == 2, "an eighth of the ring"
    stored(world, [1000 + token for token in range(41)])
    assert world.load("c", [1000 + token for token in range(41)], SNAP) == (40, True)
    (other,) = world.step().loads
    assert not {move.slot for move in other.moves} & {move.slot for move in job.moves}
    world.tiers.on_acks(world.workers[0].release())
    world.work()
    world.tiers.finish("c")
    world.assert_idle()


def test_a_load_that_some_rank_lacks_is_not_indexed() -> None:
    world = World(config(l1_slots=100, l2=True, ranks=2), ranks=2)
    stored(world, PROMPT)
    assert world.load("b", PROMPT, SNAP) == (40, True)
    world.step()
    world.tiers.on_acks(world.workers[0].work("ok"))
    assert world.tiers.loads.is_open("b")
    world.tiers.on_acks(world.workers[1].work("partial"))
    assert not world.tiers.loads.is_open("b")
    world.tiers.finish("b")
    world.store.objects.clear()
    assert world.tiers.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP) == 36


# -- new names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["adopt", "reset"])
def test_after_a_change_nothing_old_is_found_and_loads_are_named(change: str) -> None:
    world = planned()
    assert commit(world, 40) is True
    world.tiers.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP)
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


def test_a_save_under_way_when_names_change_is_not_indexed() -> None:
    world = World(L1)
    blocks = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 40)
    world.tiers.saves.collect([scheduled("a", PROMPT, SNAP.root, blocks, 40)], SNAP)
    world.step()
    world.tiers.adopt(snap_of(2))
    world.work()
    world.tiers.finish("a")
    assert world.tiers.stats()["slots_indexed"] == 0
    world.assert_idle()


def test_returning_to_a_root_finds_its_l1_again() -> None:
    world = World(config(l1_slots=50))
    world.tiers.adopt(SNAP)
    world.free(world.save("a", PROMPT, SNAP))
    world.tiers.adopt(snap_of(1, shared=False))
    assert world.tiers.hits.answer(view("b", PROMPT, snap_of(1, shared=False).root), 0, snap_of(1, shared=False)) == 0
    world.tiers.adopt(SNAP)
    assert world.tiers.hits.answer(view("c", PROMPT, SNAP.root), 0, SNAP) == 40


def test_adopting_the_same_root_keeps_l1_and_drops_plans() -> None:
    world = World(L1)
    world.tiers.adopt(SNAP)
    world.free(world.save("a", PROMPT, SNAP))
    world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP)
    world.tiers.adopt(SNAP)
    assert world.tiers.leak_report()["held_slots"] == 0
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40


class Saves:
    """A planner over few slots."""

    def __init__(self, num_slots: int, num_groups: int = 1) -> None:
        layout = CacheLayout(tuple(GroupLayout(GroupKind.FULL, 4) for _ in range(num_groups)), 4)
        self.num_groups = num_groups
        self.pool: Any = Pool()
        state = TierState(config(l1_slots=num_slots), layout, 1, num_slots, itertools.count(), time.monotonic)
        state.hash_block_size, state.scales = 4, [1] * num_groups
        self.index, self.planner = state.index, SavePlanner(state)

    def draft(self, request_id: str, num_blocks: int = 1) -> SaveJob | None:
        """Offer this many blocks of the request."""
        hashes = [f"{request_id} {index}".encode() for index in range(num_blocks)]
        blocks = [list(range(1, num_blocks + 1)) for _ in range(self.num_groups)]
        return self.planner.draft(ScheduledRequestView(request_id, 4 * num_blocks, hashes, blocks), None, self.pool)

    def end(self, draft: SaveJob | None) -> None:
        """The save was copied and nothing of it is kept."""
        assert draft is not None
        self.planner.over(draft.moves)
        self.index.unpin([move.slot for move in draft.moves])


def test_as_many_are_asked_for_as_there_are_slots_and_the_oldest_first() -> None:
    saves = Saves(2)
    done = [saves.draft("a"), saves.draft("b")]
    everybody = ["c", "d", "e"]
    assert [saves.draft(name) for name in everybody] == [None] * 3
    assert saves.planner.continuable(everybody) == []
    saves.end(done[0])
    assert saves.planner.continuable(everybody) == ["c"]
    assert saves.planner.continuable(["e", "d"]) == ["d"], "who is not scheduled keeps nobody waiting"
    saves.end(done[1])
    assert saves.planner.continuable(everybody) == ["c", "d"]
    assert saves.draft("c") is not None
    assert saves.planner.continuable(everybody) == ["d"]


def test_one_that_needs_more_slots_than_there_are_waits_behind_those_that_need_fewer() -> None:
    saves = Saves(2, num_groups=2)
    first = saves.draft("a")
    assert saves.draft("b") is None
    assert saves.planner.leak_report()["saves_lacking_slots"] == 1
    assert first is not None
    saves.planner.over(first.moves)
    saves.index.unpin([first.moves[0].slot])
    assert saves.index.num_available == 1
    assert saves.planner.continuable(["b"]) == []
    saves.index.unpin([first.moves[1].slot])
    assert saves.planner.continuable(["b"]) == ["b"]


def test_who_gave_up_or_ended_is_not_asked_for() -> None:
    saves = Saves(1)
    first = saves.draft("a")
    for name in "bcd":
        saves.draft(name)
    saves.end(first)
    saves.planner.give_up("b")
    saves.planner.forget_request("c")
    assert saves.planner.continuable(["b", "c", "d"]) == ["d"]
    assert saves.planner.leak_report()["saves_lacking_slots"] == 1
    saves.planner.clear()
    assert saves.planner.continuable(["d"]) == []
    assert saves.planner.leak_report()["saves_lacking_slots"] == 0
