"""Host slots: one owner each, never evicted while referenced, other roots first. And the calendar of blocks: who cannot have a new one
is not looked at (`test_what_is_saved.py` shows that nobody is missed).
"""

import pytest

from epochkv_connector.scheduler.steps import Boundaries
from epochkv_connector.tiers.state import HostIndex
from tests.unit.connector_scheduler.rig import check_index


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


def filled(index: HostIndex, numbers: list[int]) -> dict[int, int]:
    """Insert blocks, oldest first; nobody refers to them. Returns number -> slot."""
    slots = index.allocate(len(numbers))
    for number, slot in zip(numbers, slots, strict=True):
        assert index.insert(slot, 0, name(number))
    index.unpin(slots)
    return dict(zip(numbers, slots, strict=True))


def test_evicts_the_oldest_unreferenced_block() -> None:
    index = HostIndex(3, 1)
    slots = filled(index, [1, 2, 3])
    index.pin([slots[1]])
    assert index.allocate(1) == [slots[2]]
    assert [index.get(0, name(n)) for n in (1, 2, 3)] == [slots[1], None, slots[3]]


def test_a_used_block_is_the_youngest() -> None:
    index = HostIndex(3, 1)
    slots = filled(index, [1, 2, 3])
    index.pin([slots[1]])
    index.unpin([slots[1]])
    assert index.allocate(2) == [slots[2], slots[3]]


def test_blocks_of_another_root_go_first_and_come_back_with_it() -> None:
    index = HostIndex(4, 1)
    index.renew(b"a")
    old = filled(index, [1, 2])
    assert index.renew(b"b") == []
    new = filled(index, [11, 12])
    assert index.allocate(1) == [old[1]]
    assert index.renew(b"a") == [(0, name(2))]
    assert index.get(0, name(2)) == old[2]
    assert index.allocate(2) == [new[11], new[12]]
    assert index.get(0, name(2)) == old[2]


def test_all_or_nothing() -> None:
    index = HostIndex(3, 1)
    filled(index, [1])
    index.reserve(2)
    with pytest.raises(AssertionError, match="2 slots wanted, 1 available of 3"):
        index.allocate(2)
    assert index.num_available == 1
    assert index.get(0, name(1)) is not None, "a failed allocation evicted something"
    assert len(index.allocate(2, reserved=True)) == 2
    check_index(index)


def test_a_block_that_was_fetched_and_read_is_no_saved_block_that_was_read() -> None:
    index = HostIndex(2, 1)
    filled(index, [1])
    index.reserve(1)
    (slot,) = index.allocate(1, reserved=True)
    index.insert(slot, 0, name(2))
    index.read([slot])
    index.unpin([slot])
    index.allocate(2)
    assert (index.evictions, index.dropped_saved, index.dropped_unread, index.dropped_unused) == (2, 1, 1, 0)


SIZE = 16


def test_decoding_requests_are_looked_at_once_a_block() -> None:
    boundaries = Boundaries(1)
    names = [f"r{index}" for index in range(100)]
    known = {name: index for index, name in enumerate(names)}
    for name in names:
        boundaries.start(name)
    assert boundaries.due(names) == names
    for name in names:
        boundaries.later(name, SIZE - known[name] % SIZE)
    for step in range(1, 1 + 4 * SIZE):
        due = boundaries.due(names)
        assert due == sorted((name for name in names if (known[name] + step) % SIZE == 0), key=due.index)
        assert len(due) in (6, 7)
        for name in due:
            boundaries.later(name, SIZE)
