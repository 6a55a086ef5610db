"""Loads with more blocks than slots go through in pieces, and whatever happens between two pieces is answered once."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from epochkv_connector.naming.identity import object_key
from epochkv_connector.store.client import Transfer
from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.wire import LoadJob, Phase, Tier
from hack.waiting import eventually
from tests.unit.connector_worker.worker_rig import LAYERS, NAMESPACE, HeldCopies, ObedientStore, Rig, load, move, name_of, save

BLOCKS = 7


def content(number: int) -> bytes:
    return bytes([number]) * (LAYERS * 64)


def filled(store: ObedientStore) -> Rig:
    """The store has blocks 100 to 106; GPU blocks 4 to 10 are theirs."""
    for number in range(BLOCKS):
        store.objects[object_key(NAMESPACE, 0, 0, name_of(100 + number))] = content(number + 1)
    return Rig(store)


def long_load(num_slots: int = 3, deadline: float = 20.0) -> LoadJob:
    moves = [move(4 + number, number % num_slots, 100 + number, Tier.STORE) for number in range(BLOCKS)]
    return load(1, moves, NAMESPACE, deadline)


@pytest.fixture
def store() -> ObedientStore:
    return ObedientStore()


@pytest.mark.parametrize("num_slots", [1, 2, 3, 6, 7])
def test_every_block_arrives_and_no_slot_is_used_before_its_copy_is_over(store: ObedientStore, num_slots: int) -> None:
    rig = filled(store)
    arrived: list[int] = []

    def policy(kind: str, transfers: Sequence[Transfer]) -> StoreOutcome:
        arrived.append(sum(rig.block(4 + number) == content(number + 1) for number in range(BLOCKS)))
        return StoreOutcome.OK

    store.policy = policy
    before = rig.kv.clone()
    rig.step(loads=[long_load(num_slots=num_slots)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.filled_slots, ack.busy_slots) == (False, tuple(range(num_slots)), ())
    assert [rig.block(4 + number) for number in range(BLOCKS)] == [content(number + 1) for number in range(BLOCKS)]
    assert arrived == list(range(0, BLOCKS, num_slots)), "a piece is fetched when all before it are in their GPU blocks"
    assert [len(request.transfers) for request in store.seen] == [min(num_slots, BLOCKS - begun) for begun in range(0, BLOCKS, num_slots)]
    assert torch.equal(rig.kv[:, :4], before[:, :4])
    assert torch.equal(rig.kv[:, 11:], before[:, 11:])
    for _ in range(3):
        rig.collect()
    assert (rig.finished, rig.failed) == ({"r1": 1}, {})
    assert rig.worker.stats()["held_slots"] == 0


def test_the_next_piece_waits_until_the_store_lets_go_of_the_slots(store: ObedientStore) -> None:
    rig = filled(store)
    store.policy = lambda kind, transfers: None
    rig.step(loads=[long_load()])
    (first,) = store.open
    store.answer(first, StoreOutcome.OK)
    rig.until(lambda: rig.block(6) == content(3), "the first piece is copied")
    for _ in range(20):
        rig.collect(0.001)
    assert store.open == [first], "its buffers are still the store's"
    store.policy = lambda kind, transfers: StoreOutcome.OK
    store.release(first)
    assert not rig.until_acked(1, Phase.LOADED).failed


def test_what_has_arrived_is_copied_while_the_rest_is_fetched(store: ObedientStore) -> None:
    rig = filled(store)
    store.policy = lambda kind, transfers: None
    host = move(3, 9, 99)
    rig.step(saves=[save(2, [move(2, 9, 99)])])
    rig.until_acked(2, Phase.COPIED)
    held = rig.block(2)
    moves = [move(4 + number, number, 100 + number, Tier.STORE) for number in range(BLOCKS)]
    rig.step(loads=[load(1, [host, *moves], NAMESPACE)])
    rig.until(lambda: rig.block(3) == held, "what L1 holds is copied at once")
    (request,) = store.open
    for count in (2, 5):
        store.bring(request, count)
        rig.until(lambda count=count: rig.block(3 + count) == content(count), f"{count} blocks are copied")
        assert rig.finished == {}
    store.answer(request, StoreOutcome.OK)
    assert not rig.until_acked(1, Phase.LOADED).failed
    assert [rig.block(4 + number) for number in range(BLOCKS)] == [content(number + 1) for number in range(BLOCKS)]
    store.release(request)


@pytest.mark.parametrize("num_slots", [2, BLOCKS])
@pytest.mark.parametrize("end", ["fetch", "sleep", "deadline", "shutdown"])
def test_a_load_that_fails_while_a_part_is_copied_ends_with_it(
    store: ObedientStore, monkeypatch: pytest.MonkeyPatch, end: str, num_slots: int
) -> None:
    """The copy may be that of a piece, or of what has arrived of the only one."""
    rig = filled(store)
    store.policy = lambda kind, transfers: None
    copies = HeldCopies(monkeypatch, "scatter")
    rig.step(loads=[long_load(num_slots=num_slots, deadline=0.2 if end == "deadline" else 20.0)])
    (request,) = store.open
    store.bring(request, min(3, num_slots))
    assert copies.began.wait(10)
    match end:
        case "fetch":
            store.answer(request, StoreOutcome.TRANSFER)
        case "sleep":
            assert rig.worker.settle_for_sleep(0.1) == 1
        case "shutdown":
            assert not rig.worker.shutdown(0.1), "a copy is under way"
        case _:
            eventually(lambda: rig.worker._loads.open()[0].deadline < time.monotonic(), "past the deadline", 5)
    rig.collect()
    assert rig.finished == {}, "its blocks are being written"
    copies.go_on.set()
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.filled_slots) == (True, (0, 1, 2) if num_slots == BLOCKS else ())
    before = rig.kv.clone()
    store.bring(request, min(5, num_slots))  # too late
    store.release(request)
    for _ in range(3):
        rig.collect(0.001)
    assert torch.equal(rig.kv, before)
    assert (rig.finished, rig.failed) == ({"r1": 1}, {"r1": 1})
    assert len(store.seen) == 1, "no second piece was begun"


def test_a_prefetch_fills_slots_and_is_reported_to_nobody(store: ObedientStore) -> None:
    rig = filled(store)
    before = rig.kv.clone()
    rig.step(loads=[replace(long_load(num_slots=BLOCKS), prefetch=True)])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.filled_slots) == (False, tuple(range(BLOCKS)))
    rig.step(loads=[load(2, [move(4 + number, number, 100 + number) for number in range(BLOCKS)])])
    assert not rig.until_acked(2, Phase.LOADED).failed
    assert [rig.block(4 + number) for number in range(BLOCKS)] == [content(number + 1) for number in range(BLOCKS)]
    assert torch.equal(rig.kv[:, :4], before[:, :4])
    assert rig.finished == {"r2": 1}


def test_a_cancelled_prefetch_ends_with_the_call_under_way(store: ObedientStore) -> None:
    rig = filled(store)
    store.policy = lambda kind, transfers: None
    rig.step(loads=[replace(long_load(num_slots=BLOCKS), prefetch=True)])
    (request,) = store.open
    rig.step(cancelled=(1, 99))
    assert request.ticket.cancelled
    store.answer(request, StoreOutcome.CANCELLED)
    store.release(request)
    assert rig.until_acked(1, Phase.LOADED).failed
    assert rig.finished == {}
    assert not [name for name in rig.worker.stats() if name.startswith("load_failed")], "nobody lacks it"


@pytest.mark.parametrize("outcome", [StoreOutcome.ABSENT, StoreOutcome.FOREIGN, StoreOutcome.CLOSED])
def test_a_block_that_is_missing_in_a_later_piece_fails_the_load_and_blames_no_slot(store: ObedientStore, outcome: StoreOutcome) -> None:
    rig = filled(store)
    store.policy = lambda kind, transfers: StoreOutcome.OK if len(store.seen) < 3 else outcome
    rig.step(loads=[long_load()])
    ack = rig.until_acked(1, Phase.LOADED)
    assert (ack.failed, ack.filled_slots) == (True, ())
    assert len(store.seen) == 3
    assert (rig.finished, rig.failed) == ({"r1": 1}, {"r1": 1})
