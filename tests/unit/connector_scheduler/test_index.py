"""Host slots: one owner each, never evicted while referenced, other roots first, promises kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    assert index.reserve(2)
    assert not index.reserve(2)
    with pytest.raises(AssertionError, match="2 slots wanted, 1 available of 3"):
        index.allocate(2)
    assert index.num_available == 1
    assert index.get(0, name(1)) is not None, "a failed allocation evicted something"
    assert len(index.allocate(2, reserved=True)) == 2
    check_index(index)


def test_a_doubted_block_is_free_after_its_last_reader() -> None:
    index = HostIndex(1, 1)
    slot = filled(index, [1])[1]
    index.pin([slot])
    index.forget(0, name(1))
    assert index.get(0, name(1)) is None
    assert index.num_available == 0
    index.unpin([slot])
    assert index.allocate(1) == [slot]


def test_releasing_twice_makes_no_second_owner() -> None:
    index = HostIndex(1, 1)
    slots = index.allocate(1)
    index.unpin(slots)
    with pytest.raises(AssertionError):
        index.unpin(slots)


class IndexMachine(RuleBasedStateMachine):
    """Random use, against a plain model: who refers to what, and what must still be findable."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(6, 2)
        self.held: list[int] = []  # one entry per reference
        self.names: dict[int, tuple[int, bytes]] = {}  # referenced slots that were named
        self.reserved = 0

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        free = 6 - len(set(self.held)) - self.reserved
        if count > free:
            assert self.index.num_available < count
            return
        slots = self.index.allocate(count)
        assert not set(slots) & set(self.held), "a referenced slot got a second owner"
        self.held.extend(slots)

    @rule(count=st.integers(0, 3))
    def reserve(self, count: int) -> None:
        possible = count <= 6 - len(set(self.held)) - self.reserved
        assert self.index.reserve(count) == possible
        self.reserved += count if possible else 0

    @precondition(lambda self: self.reserved)
    @rule(keep=st.booleans())
    def use_reservation(self, keep: bool) -> None:
        if keep:
            self.held.extend(self.index.allocate(self.reserved, reserved=True))
        else:
            self.index.unreserve(self.reserved)
        self.reserved = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), group=st.integers(0, 1), number=st.integers(0, 5))
    def insert(self, data: st.DataObject, group: int, number: int) -> None:
        slot = data.draw(st.sampled_from(self.held))
        if slot not in self.names and self.index.insert(slot, group, name(number)):
            assert (group, name(number)) not in self.names.values()
            self.names[slot] = (group, name(number))

    @rule(group=st.integers(0, 1), number=st.integers(0, 5))
    def hit(self, group: int, number: int) -> None:
        slot = self.index.get(group, name(number))
        if slot is not None and (slot in self.held or len(set(self.held)) + self.reserved < 6):
            self.index.pin([slot])
            self.held.append(slot)
            self.names[slot] = (group, name(number))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.index.unpin([slot])
        self.held.remove(slot)
        if slot not in self.held:
            self.names.pop(slot, None)

    @rule(group=st.integers(0, 1), number=st.integers(0, 5))
    def forget(self, group: int, number: int) -> None:
        self.index.forget(group, name(number))
        assert self.index.get(group, name(number)) is None
        for slot, known in list(self.names.items()):
            if known == (group, name(number)):
                del self.names[slot]

    @rule(root=st.sampled_from([b"a", b"b"]))
    def renew(self, root: bytes) -> None:
        self.index.renew(root)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.names.clear()

    @invariant()
    def holds(self) -> None:
        check_index(self.index)
        assert self.index.num_held == len(set(self.held))
        for slot, (group, block_hash) in self.names.items():
            assert self.index.get(group, block_hash) == slot, "a referenced block was evicted"


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
