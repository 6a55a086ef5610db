"""How many slots a rank lays out, what it says of them, and a job that names one that it does not have."""

from __future__ import annotations

import pickle

import pytest

from epochkv_connector.config import ConfigError
from epochkv_connector.wire import RankLayout, common_slots
from epochkv_connector.worker.runner import slot_count
from tests.unit.connector_scheduler.rig import config
from tests.unit.connector_worker.worker_rig import LAYERS, NUM_SLOTS, Rig


def test_capacity_is_split_over_ranks() -> None:
    assert slot_count(config(l1_slots=10, ranks=4), 100, 4) == 10
    assert slot_count(config(l1_slots=10), 100, 4) == 2
    assert slot_count(config(l1_slots=10), 101, 4) == 2
    assert slot_count(config(l1_slots=10), 126, 4) == 1
    assert slot_count(config(staging_slots=7), 100, 4) == 7


def test_an_l1_smaller_than_a_block_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"local.capacity_bytes is 100.*at least 400"):
        slot_count(config(l1_slots=1), 100, 4)


def test_the_slots_of_an_engine_are_those_that_every_rank_has() -> None:
    one, other = RankLayout(b"1", 7, {0: 100, 1: 300}), RankLayout(b"2", 5, {0: 100, 1: 500})
    assert common_slots([one, other], 2) == 5
    assert common_slots([other, one], 2) == 5
    assert common_slots([one, RankLayout(), other], 3) == 0, "one rank has none"
    assert common_slots([one], 2) == 0, "a rank has not answered"
    assert common_slots([], 0) == 0


def test_a_rank_says_what_it_laid_out() -> None:
    rig = Rig(digest=b"how its tensors lie")
    layout = pickle.loads(pickle.dumps(rig.worker.layout))  # it travels to another process
    assert layout == RankLayout(b"how its tensors lie", NUM_SLOTS, {0: LAYERS * 64})
