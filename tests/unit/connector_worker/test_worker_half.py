"""The worker role answers every job exactly once, whatever the store does, and never touches what is not its own.

The store here is a double that obeys the test: real stores fail at moments nobody can choose (`tests/store` has those).
"""

import gc
import time
from collections import Counter
from functools import partial

import msgspec
import pytest
import torch

from epochkv_connector.naming.identity import object_key
from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.wire import BlockMove, Phase, Tier
from tests.unit.connector_worker.worker_rig import LAYERS, NAMESPACE, NUM_SLOTS, ObedientStore, Rig, load, move, name_of, save


@pytest.fixture
def store() -> ObedientStore:
    return ObedientStore()


def test_a_save_waits_for_the_forward_of_its_step() -> None:
    rig = Rig()
    rig.step(finish=False, saves=[save(1, [move(3, 0, 30)])])
    time.sleep(0.05)
    rig.collect()
    assert rig.acks == {}
    rig.kv[:, 3] = 77  # the forward pass writes the block
    rig.worker.finish_step()
    rig.until_acked(1, Phase.COPIED)
    rig.step(loads=[load(2, [move(4, 0, 30)])])
    rig.until_acked(2, Phase.LOADED)
    assert set(rig.block(4)) == {77}


@pytest.mark.parametrize("outcome", [o for o in StoreOutcome if o is not StoreOutcome.OK])
def test_a_load_that_misses_a_byte_fails_and_writes_no_block(store: ObedientStore, outcome: StoreOutcome) -> None:
    rig = Rig(store)
    before = rig.kv.clone()
    store.policy = lambda kind, transfers: outcome
    rig.step(loads=[load(1, [move(8, 5, 30, Tier.STORE)], NAMESPACE)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.filled_slots) == (True, ())
    assert (rig.finished, rig.failed) == ({"r1": 1}, {"r1": 1})
    assert torch.equal(rig.kv, before)
    assert rig.worker.stats()[f"load_failed_store_{outcome}"] == 1


def test_a_deadline_fails_the_load_at_once_and_names_the_slots_that_are_still_written(store: ObedientStore) -> None:
    rig = Rig(store)
    store.policy = lambda kind, transfers: None
    before = rig.kv.clone()
    rig.step(loads=[load(1, [move(8, 5, 30, Tier.STORE)], NAMESPACE, deadline=0.05)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.busy_slots) == (True, (5,))
    assert (rig.finished, rig.failed) == ({"r1": 1}, {"r1": 1})
    (request,) = store.open
    assert request.ticket.cancelled
    for _ in range(5):
        rig.collect()
    assert (1, Phase.RELEASED) not in rig.acks

    # The slot is refused to others meanwhile, whoever asks.
    store.policy = lambda kind, transfers: StoreOutcome.OK
    rig.step(saves=[save(2, [move(3, 5, 31)])], loads=[load(3, [move(9, 5, 31, Tier.STORE)], NAMESPACE)])
    assert rig.until_acked(2, Phase.COPIED).failed
    assert rig.until_acked(3, Phase.LOADED).failed

    store.objects[request.transfers[0].key] = b"late" * (LAYERS * 16)
    store.answer(request, StoreOutcome.OK)  # too late
    store.release(request)
    rig.until_acked(1, Phase.RELEASED)
    assert torch.equal(rig.kv, before), "a late answer must not reach the blocks"
    assert rig.finished["r1"] == 1
    rig.step(saves=[save(4, [move(3, 5, 31)])])
    assert not rig.until_acked(4, Phase.COPIED).failed


def test_a_put_that_outlives_its_deadline_is_dropped_and_released_later(store: ObedientStore) -> None:
    rig = Rig(store)
    store.policy = lambda kind, transfers: None
    rig.step(saves=[save(1, [move(3, 0, 30), move(4, 1, 40)], NAMESPACE)])
    assert not rig.until_acked(1, Phase.COPIED).failed, "GPU blocks are free although the put has not ended"
    (request,) = store.open
    store.answer(request, StoreOutcome.TIMEOUT)
    stored = rig.until_acked(1, Phase.STORED)
    assert (stored.failed, stored.busy_slots) == (True, (0, 1))
    assert (1, Phase.RELEASED) not in rig.acks
    store.release(request)
    rig.until_acked(1, Phase.RELEASED)
    assert rig.worker.stats()["held_slots"] == 0


def test_the_store_gets_what_is_left_of_the_deadline(store: ObedientStore) -> None:
    rig = Rig(store)
    brought = load(2, [move(8, 5, 30, Tier.STORE)], NAMESPACE, deadline=3.0)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE, deadline=7.0)], loads=[brought])
    rig.until_acked(1, Phase.STORED)
    assert [request.kind for request in store.seen] == ["get", "put"]
    assert all(0 < request.timeout <= limit for request, limit in zip(store.seen, (3.0, 7.0), strict=True))


def test_a_save_of_an_older_epoch_is_copied_but_not_put(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)], newest_epoch=8)
    assert not rig.until_acked(1, Phase.COPIED).failed
    assert rig.until_acked(1, Phase.STORED).failed
    assert store.seen == []
    assert rig.worker.stats()["save_put_dropped_stale"] == 1


def test_blocks_that_are_in_their_slot_are_put_without_a_copy(store: ObedientStore) -> None:
    rig = Rig(store)
    wanted = rig.block(3)
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    rig.kv[:, 3] = 0  # the GPU block belongs to somebody else by now
    rig.step(saves=[save(2, [move(3, 0, 30, copy=False)], NAMESPACE)])
    assert not rig.until_acked(2, Phase.STORED).failed
    assert store.objects[object_key(NAMESPACE, 0, 0, name_of(30))] == wanted


def test_blocks_that_the_store_has_are_copied_and_not_put(store: ObedientStore) -> None:
    rig = Rig(store)
    wanted = rig.block(3)
    there = BlockMove(0, 3, 3, 0, name_of(30), put=False)
    rig.step(saves=[save(1, [there, move(4, 1, 40)], NAMESPACE), save(2, [BlockMove(0, 5, 5, 2, name_of(50), put=False)], NAMESPACE)])
    assert not rig.until_acked(1, Phase.STORED).failed
    assert not rig.until_acked(2, Phase.STORED).failed, "nothing to put is nothing missing"
    assert set(store.objects) == {object_key(NAMESPACE, 0, 0, name_of(40))}
    rig.step(loads=[load(3, [move(8, 0, 30)])])
    assert not rig.until_acked(3, Phase.LOADED).failed
    assert rig.block(8) == wanted


def test_a_slot_that_holds_another_block_is_refused(store: ObedientStore) -> None:
    rig = Rig(store)
    before = rig.kv.clone()
    rig.step(saves=[save(1, [move(3, 0, 30)])])
    rig.until_acked(1, Phase.COPIED)
    rig.step(loads=[load(2, [move(8, 0, 31)]), load(3, [move(8, 4, 30)])], saves=[save(4, [move(3, 0, 31, copy=False)], NAMESPACE)])
    assert rig.until_acked(2, Phase.LOADED).failed
    assert rig.until_acked(3, Phase.LOADED).failed
    assert rig.until_acked(4, Phase.COPIED).failed
    assert rig.until_acked(4, Phase.STORED).failed
    assert torch.equal(rig.kv, before)
    assert store.seen == []


def test_replicas_of_a_shard_put_each_block_once(store: ObedientStore) -> None:
    ranks = [Rig(store, rank=rank, world_size=4, replicas=(2,)) for rank in range(4)]
    moves = [move(block, block, 100 + block) for block in range(NUM_SLOTS)]
    for rig in ranks:
        rig.step(saves=[save(1, moves, NAMESPACE)])
        assert not rig.until_acked(1, Phase.COPIED).failed
    assert not store.seen, "a shard was stored before every rank had its own"
    for rig in ranks:
        rig.step(agreed=[1])
        assert not rig.until_acked(1, Phase.STORED).failed
    put = Counter(transfer.key for request in store.seen for transfer in request.transfers)
    assert put == {object_key(NAMESPACE, 0, shard, m.block_hash): 1 for shard in range(2) for m in moves}
    assert len(store.seen) == 4, "the work is shared"


@pytest.mark.parametrize("settled", [True, False])
def test_no_shard_is_stored_before_its_step_is_settled_on_every_rank(store: ObedientStore, settled: bool) -> None:
    """In a domain each rank sees its own column of a pass alone."""
    says: list[bool | None] = [None, None]
    ranks = [Rig(store, rank=rank, world_size=2) for rank in range(2)]
    for number, rig in enumerate(ranks):
        rig.step(False, saves=[msgspec.structs.replace(save(1, [move(3, 0, 30)], NAMESPACE), settles=True)])
        rig.worker.finish_step(settled=partial(says.__getitem__, number))
        assert not rig.until_acked(1, Phase.COPIED).failed
    for number, (rig, outcome) in enumerate(zip(ranks, (True, settled), strict=True)):
        assert (1, Phase.SETTLED) not in rig.acks
        says[number] = outcome
        for one in ranks:
            one.worker.put_settled()
        assert rig.until_acked(1, Phase.SETTLED).failed is not outcome
    assert not store.seen
    for rig in ranks:
        rig.step(agreed=[1] if settled else [], refused=[] if settled else [1])
        assert rig.until_acked(1, Phase.STORED).failed is not settled
    assert len(store.seen) == 2 * settled


def test_invalidated_ids_are_reported_once_more_and_only_once(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(invalidated=["a", "b"])
    report = rig.collect()
    assert report.finished_recving == report.failed_recving == {"a", "b"}
    assert rig.collect() == (set(), set(), [])


def test_jobs_without_a_store_or_a_registration_fail(store: ObedientStore) -> None:
    rig = Rig()
    rig.step(
        loads=[load(1, [move(8, 5, 30, Tier.STORE)], NAMESPACE), load(2, [move(8, 99, 30)]), load(3, [move(8, 5, 30, Tier.STORE)])],
        saves=[save(4, [move(3, 0, 30)], NAMESPACE), save(5, [move(99, 1, 30)]), save(6, [BlockMove(7, 0, 0, 0, b"x")])],
    )
    assert all(rig.until_acked(job, Phase.LOADED).failed for job in (1, 2, 3))
    assert not rig.until_acked(4, Phase.COPIED).failed
    assert rig.until_acked(4, Phase.STORED).failed
    assert rig.until_acked(5, Phase.COPIED).failed
    assert rig.until_acked(6, Phase.COPIED).failed


def test_waiting_for_copies_releases_the_blocks_of_an_idle_engine() -> None:
    rig = Rig()
    rig.step(finish=False, saves=[save(1, [move(3, 0, 30)])])
    assert rig.worker.wait_copied(5.0)
    rig.collect()
    assert (1, Phase.COPIED) in rig.acks


def test_shutdown_answers_everything_and_later_jobs_fail(store: ObedientStore) -> None:
    rig = Rig(store)
    store.policy = lambda kind, transfers: None
    rig.step(finish=False, loads=[load(1, [move(8, 5, 30, Tier.STORE)], NAMESPACE)], saves=[save(2, [move(3, 0, 30)], NAMESPACE)])
    assert not rig.worker.shutdown(1.0), "a call is still in flight"
    assert store.closed
    rig.step(loads=[load(3, [move(8, 6, 30)])], saves=[save(4, [move(3, 1, 30)], NAMESPACE)])
    rig.collect()
    assert rig.failed == {"r1": 1, "r3": 1}
    saves = {(job, phase) for job in (2, 4) for phase in (Phase.COPIED, Phase.STORED)}
    assert {key for key in rig.acks if key[1] is not Phase.RELEASED} == {(1, Phase.LOADED), (3, Phase.LOADED), *saves}
    assert all(ack.failed for ack in rig.acks.values())
    assert rig.worker.shutdown()
    gc.collect()
    memory = store.open[0].transfers[0].view
    memory[:] = bytes(len(memory))  # the region is still mapped: the call in flight may write


def test_a_load_that_misses_a_block_fails_and_names_what_was_fetched(store: ObedientStore) -> None:
    rig = Rig(store)
    rig.step(saves=[save(1, [move(3, 0, 30), move(4, 1, 40)], NAMESPACE)])
    rig.until_acked(1, Phase.STORED)
    rig.step(loads=[load(2, [move(8, 0, 30), move(9, 1, 41)])])  # slot 1 holds another block than the scheduler role believes
    assert rig.until_acked(2, Phase.LOADED).failed
    rig.step(loads=[load(3, [move(8, 5, 30, Tier.STORE), move(9, 6, 99, Tier.STORE), move(10, 0, 30)], NAMESPACE)])
    ack = rig.until_acked(3, Phase.LOADED)  # nobody ever stored 99
    assert (ack.failed, ack.filled_slots) == (True, (5,))
    rig.step(loads=[load(4, [move(8, 0, 30)])])
    assert not rig.until_acked(4, Phase.LOADED).failed
