"""Who has which host slot, and which block is in it.

The only owner of these facts: workers copy and acknowledge, so eviction never needs reporting and rank skew cannot make
indices differ. A slot is free, *anonymous* (held by a job that fills it), or *indexed* under (group, block hash);
indexed slots without references wait in an LRU. Block hashes of another root can never be asked for, so its slots go
first; they keep their names until then, because an engine that lost its lease for a moment returns to the same root.

Taking happens in two phases, as in vLLM's own coordinator (vllm#33775): hits are referenced when they are planned, and
what a hit still has to fetch is only *reserved*; slots are allocated, and others' blocks evicted for them, when the
whole step is known. A reservation is a promise that the later allocation succeeds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

Key = tuple[int, bytes]
"""(KV cache group, block hash)"""


class SlotError(RuntimeError):
    """The bookkeeping contradicts itself; names the slot."""


class HostIndex:
    """Slots, their references and their names. All operations are O(number of slots named in the call).

    Args:
        num_slots: those that every rank's host region has.
        num_groups: KV cache groups.
        indexed: False: a staging ring; nothing is ever found in it.
        on_evict: told the name of every block that leaves the index.

    Attributes:
        num_reserved: slots promised and not yet allocated.
        num_held: slots with at least one reference.
    """

    def __init__(self, num_slots: int, num_groups: int, indexed: bool = True, on_evict: Callable[[Key], None] | None = None) -> None:
        self.num_slots = num_slots
        self.indexed = indexed
        self.evictions = 0
        self._on_evict = on_evict
        self._maps: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # current root, no references, oldest first
        self._dead: OrderedDict[int, None] = OrderedDict()  # other roots, no references, oldest first
        self._refs = [0] * num_slots
        self._names: list[Key | None] = [None] * num_slots
        self._roots: list[bytes | None] = [None] * num_slots  # the root a name was made with
        self._root: bytes | None = None
        self.num_reserved = 0
        self.num_held = 0

    def get(self, group: int, block_hash: bytes) -> int | None:
        return self._maps[group].get(block_hash)

    def num_idle(self, slots: Iterable[int]) -> int:
        """How many slots fewer would be available if these different ones were referenced."""
        return list(map(self._refs.__getitem__, slots)).count(0)

    def finder(self, group: int) -> Callable[[bytes, int], int]:
        """Slot of a block of one group, or the second argument: `get` for many blocks in a row."""
        return self._maps[group].get

    def is_idle(self, slot: int) -> bool:
        """Whether taking a reference on the slot makes one slot less available."""
        return self._refs[slot] == 0

    @property
    def num_available(self) -> int:
        """Slots that can still be promised: free, or evictable, and not reserved."""
        return len(self._free) + len(self._idle) + len(self._dead) - self.num_reserved

    @property
    def num_indexed(self) -> int:
        """Blocks with a name, those of other roots included."""
        return sum(len(names) for names in self._maps)

    @property
    def num_dead(self) -> int:
        """Blocks of other roots, to be evicted first."""
        return len(self._dead)

    def reserve(self, count: int) -> bool:
        """Promise `count` slots for a later `allocate(..., reserved=True)`; all or none."""
        if count > self.num_available:
            return False
        self.num_reserved += count
        return True

    def unreserve(self, count: int) -> None:
        if count > self.num_reserved:
            raise SlotError(f"{count} reservations given back, {self.num_reserved} exist")
        self.num_reserved -= count

    def pin(self, slots: Iterable[int]) -> None:
        """Reference indexed slots, so that they stay. The caller has checked `num_available` for the idle ones."""
        refs, names, idle = self._refs, self._names, self._idle
        for slot in slots:
            count = refs[slot]
            if not count:
                if names[slot] is None:
                    raise SlotError(f"slot {slot} holds nothing that a hit can refer to")
                del (idle if slot in idle else self._dead)[slot]
                self.num_held += 1
            refs[slot] = count + 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Drop one reference each. Give slots in reverse chain order: what is dropped first is evicted first."""
        for slot in slots:
            refs = self._refs[slot]
            if refs < 1:
                raise SlotError(f"slot {slot} is released once too often")
            self._refs[slot] = refs - 1
            if refs == 1:
                self.num_held -= 1
                if self._names[slot] is None:
                    self._free.append(slot)
                elif self._roots[slot] == self._root:
                    self._idle[slot] = None
                else:
                    self._dead[slot] = None

    def allocate(self, count: int, reserved: bool = False) -> list[int]:
        """Anonymous slots with one reference each. Raises SlotError, and takes nothing, when not that many can be had.

        `reserved`: use up a promise made before; otherwise the caller has checked `num_available`.
        """
        if reserved:
            self.unreserve(count)
        if count > self.num_available:
            if reserved:
                self.num_reserved += count
            raise SlotError(f"{count} slots wanted, {self.num_available} available of {self.num_slots}")
        slots = []
        for _ in range(count):
            if self._free:
                slot = self._free.pop()
            else:
                slot, _ = (self._dead or self._idle).popitem(last=False)
                self._unname(slot)
                self.evictions += 1
            self._refs[slot] = 1
            slots.append(slot)
        self.num_held += count
        return slots

    def insert(self, slot: int, group: int, block_hash: bytes) -> bool:
        """Name an anonymous slot. False if the block is in another slot already, or this is a staging ring."""
        if self._refs[slot] < 1 or self._names[slot] is not None:
            raise SlotError(f"slot {slot} is not an anonymous slot of a job")
        names = self._maps[group]
        if not self.indexed or block_hash in names:
            return False
        names[block_hash] = slot
        self._names[slot] = (group, block_hash)
        self._roots[slot] = self._root
        return True

    def forget(self, group: int, block_hash: bytes) -> None:
        """Make a block unfindable (its bytes are doubted); the slot is freed when nobody refers to it."""
        slot = self._maps[group].get(block_hash)
        if slot is None:
            return
        self._unname(slot)
        if self._refs[slot] == 0:
            self._idle.pop(slot, None)
            self._dead.pop(slot, None)
            self._free.append(slot)

    def _unname(self, slot: int) -> None:
        name = self._names[slot]
        if name is None:
            raise SlotError(f"slot {slot} has no name to lose")
        self._names[slot] = None
        del self._maps[name[0]][name[1]]
        if self._on_evict is not None:
            self._on_evict(name)

    def renew(self, root: bytes) -> list[Key]:
        """Another root holds. Returns the blocks that were saved under this very root before and are findable again."""
        if root == self._root:
            return []
        self._root = root
        back = [slot for slot in self._dead if self._roots[slot] == root]
        self._dead.update(self._idle)
        for slot in back:
            del self._dead[slot]
        self._idle = OrderedDict.fromkeys(back)
        return [name for slot in back if (name := self._names[slot]) is not None]

    def clear(self) -> None:
        """A reset: no block is findable any more, and what nobody refers to is free at once."""
        for slot, name in enumerate(self._names):
            if name is not None:
                self._unname(slot)
        self._free.extend([*self._dead, *self._idle])
        self._dead.clear()
        self._idle.clear()
