"""The scheduler role as the facade sees it: saves, loads that fail or are late, and changes of names."""

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest

from epochkv_connector.tiers.layout import ScheduledRequestView
from epochkv_connector.tiers.saves import SavePlanner
from epochkv_connector.tiers.state import TierState
from epochkv_connector.wire import SaveJob
from tests.unit.connector_scheduler.machines import Pool
from tests.unit.connector_scheduler.rig import BOTH, FULL, L1, PROMPT, SNAP, World, chain, commit, config, planned, scheduled, snap_of, view


# -- saves -----------------------------------------------------------------------------------------------------------
def test_what_another_request_is_saving_is_not_saved_again() -> None:
    world = World(L1)
    blocks = world.begin_save("a", PROMPT, SNAP)
    world.tiers.saves.collect([scheduled("twin", PROMPT, SNAP.root, blocks, 40)], SNAP)
    assert world.step().saves == ()


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


def test_adopting_the_same_root_keeps_l1_and_drops_plans() -> None:
    world = World(L1)
    world.tiers.adopt(SNAP)
    world.free(world.save("a", PROMPT, SNAP))
    world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP)
    world.tiers.adopt(SNAP)
    assert world.tiers.leak_report()["held_slots"] == 0
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP) == 40


def test_as_many_are_asked_for_as_there_are_slots_and_the_oldest_first() -> None:
    state = TierState(config(l1_slots=2), FULL, 1, 2, itertools.count(), time.monotonic)
    state.hash_block_size, state.scales = 4, [1]
    planner = SavePlanner(state)

    def draft(name: str) -> SaveJob | None:
        pool: Any = Pool()
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
