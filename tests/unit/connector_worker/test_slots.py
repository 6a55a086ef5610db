"""How many slots a rank lays out, what it says of them, and a job that names one that it does not have."""

from __future__ import annotations

import pickle

import pytest
import torch

from epochkv_connector.config import ConfigError
from epochkv_connector.wire import BlockMove, Phase, RankLayout, Tier, common_slots
from epochkv_connector.worker.runner import slot_count
from tests.unit.connector_scheduler.rig import config
from tests.unit.connector_worker.worker_rig import LAYERS, NAMESPACE, NUM_SLOTS, ObedientStore, Rig, load, move, save


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


@pytest.mark.parametrize("slot", [NUM_SLOTS, NUM_SLOTS + 5, -1])
@pytest.mark.parametrize("source", [Tier.HOST, Tier.STORE])
def test_a_job_that_names_a_slot_beyond_the_region_fails_and_touches_nothing(slot: int, source: Tier) -> None:
    store = ObedientStore()
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)])
    assert not rig.until_acked(1, Phase.STORED).failed
    blocks, slots, objects = rig.kv.clone(), rig.staging.region.tensor.clone(), dict(store.objects)
    moves: list[BlockMove] = [move(4, 1, 40), move(5, slot, 50)]
    rig.step(saves=[save(2, moves, NAMESPACE)], loads=[load(3, [move(6, 0, 30), move(7, slot, 30, source)], NAMESPACE)])
    for job_id, phase in ((2, Phase.COPIED), (2, Phase.STORED), (3, Phase.LOADED)):
        ack = rig.until_acked(job_id, phase)
        assert (ack.failed, ack.num_blocks, ack.filled_slots, ack.busy_slots) == (True, 0, (), ())
    assert (rig.finished, rig.failed) == ({"r3": 1}, {"r3": 1})
    assert torch.equal(rig.kv, blocks)
    assert torch.equal(rig.staging.region.tensor, slots)
    assert store.objects == objects
    assert rig.worker.stats()["save_failed_bad_move"] == rig.worker.stats()["load_failed_bad_move"] == 1
    rig.step(loads=[load(4, [move(8, 0, 30)])])  # the others are as they were
    assert not rig.until_acked(4, Phase.LOADED).failed
