"""Saves that found no slot: asked for again when there are slots, no more of them than there are slots for, the oldest first."""

from __future__ import annotations

import itertools
import time
from typing import Any

from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, ScheduledRequestView
from epochkv_connector.tiers.saves import SavePlanner
from epochkv_connector.tiers.state import TierState
from epochkv_connector.wire import SaveJob
from tests.unit.connector_scheduler.machines import Pool
from tests.unit.connector_scheduler.rig import config

ROOT = b"root"


class Saves:
    """A planner over few slots."""

    def __init__(self, num_slots: int, num_groups: int = 1) -> None:
        layout = CacheLayout(tuple(GroupLayout(GroupKind.FULL, 4) for _ in range(num_groups)), 4)
        self.num_groups = num_groups
        self.pool: Any = Pool()
        state = TierState(config(l1_slots=num_slots), layout, 1, num_slots, itertools.count(), time.monotonic)
        self.index, self.planner = state.index, SavePlanner(state)

    def draft(self, request_id: str, num_blocks: int = 1) -> SaveJob | None:
        """Offer this many blocks of the request."""
        hashes = [f"{request_id} {index}".encode() for index in range(num_blocks)]
        blocks = [list(range(1, num_blocks + 1)) for _ in range(self.num_groups)]
        return self.planner.draft(ScheduledRequestView(request_id, 4 * num_blocks, hashes, 4, ROOT, blocks), None, self.pool)

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
