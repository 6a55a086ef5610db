"""Who has which host slot, and which block is in it.

The only owner of these facts: workers copy and acknowledge, so eviction never needs reporting and rank skew cannot make
indices differ. A slot is free, *anonymous* (held by a job that fills it), or *indexed* under (group, block hash);
indexed slots without references wait in an LRU. Names of an older root are unreachable, so their slots go first.

Taking happens in two phases, as in vLLM's own coordinator (vllm#33775): hits are referenced when they are planned, and
what a hit still has to fetch is only *reserved*; slots are allocated, and others' blocks evicted for them, when the
whole step is known. A reservation is a promise that the later allocation succeeds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from epochkv_connector.config import ConfigError, ConnectorConfig

Key = tuple[int, bytes]
"""(KV cache group, block hash)"""


def slot_count(config: ConnectorConfig, slot_bytes: int, num_ranks: int) -> int:
    """Slots of the host region, the same on every rank: L1's capacity, or the staging ring when there is no L1.

    Raises:
        ConfigError: the L1 capacity does not hold one block.
    """
    if config.local is None:
        return config.staging_slots
    count = config.local.capacity_bytes // (slot_bytes * num_ranks)
    if count < 1:
        raise ConfigError(
            f"local.capacity_bytes is {config.local.capacity_bytes}; one block takes {slot_bytes} bytes on each of "
            f"{num_ranks} ranks, so give at least {slot_bytes * num_ranks} (or leave local out for no L1)"
        )
    return count


class SlotError(RuntimeError):
    """The bookkeeping contradicts itself; names the slot."""


class HostIndex:
    """Slots, their references and their names. All operations are O(number of slots named in the call).

    Args:
        num_slots: size of the host region.
        num_groups: KV cache groups.
        indexed: False: a staging ring; nothing is ever found in it.
        on_evict: told the name of every block that leaves the index while its root is current.
    """

    def __init__(self, num_slots: int, num_groups: int, indexed: bool = True, on_evict: Callable[[Key], None] | None = None) -> None:
        self.num_slots = num_slots
        self.indexed = indexed
        self.evictions = 0
        self._on_evict = on_evict
        self._num_groups = num_groups
        self._maps: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # current root, no references, oldest first
        self._dead: deque[int] = deque()  # older roots, no references
        self._refs = [0] * num_slots
        self._names: list[Key | None] = [None] * num_slots
        self._generations = [0] * num_slots
        self._generation = 0
        self._reserved = 0
        self._held = 0

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, group: int, block_hash: bytes) -> int | None:
        """Slot of a block of the current root, or None."""
        return self._maps[group].get(block_hash)

    def is_idle(self, slot: int) -> bool:
        """Whether taking a reference on the slot makes one slot less available."""
        return self._refs[slot] == 0

    @property
    def num_available(self) -> int:
        """Slots that can still be promised: free, or evictable, and not reserved."""
        return len(self._free) + len(self._idle) + len(self._dead) - self._reserved

    @property
    def num_reserved(self) -> int:
        """Slots promised and not yet allocated."""
        return self._reserved

    @property
    def num_held(self) -> int:
        """Slots with at least one reference."""
        return self._held

    @property
    def num_indexed(self) -> int:
        """Blocks that a lookup can find."""
        return sum(len(names) for names in self._maps)

    # -- promises and references ---------------------------------------------------------------------------------

    def reserve(self, count: int) -> bool:
        """Promise `count` slots for a later `allocate(..., reserved=True)`; all or none."""
        if count > self.num_available:
            return False
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Take a promise back."""
        if count > self._reserved:
            raise SlotError(f"{count} reservations given back, {self._reserved} exist")
        self._reserved -= count

    def pin(self, slots: Iterable[int]) -> None:
        """Reference indexed slots, so that they stay. The caller has checked `num_available` for the idle ones."""
        for slot in slots:
            if self._refs[slot] == 0:
                if slot not in self._idle:
                    raise SlotError(f"slot {slot} holds nothing that a hit can refer to")
                del self._idle[slot]
                self._held += 1
            self._refs[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Drop one reference each. Give slots in reverse chain order: what is dropped first is evicted first."""
        for slot in slots:
            refs = self._refs[slot]
            if refs < 1:
                raise SlotError(f"slot {slot} is released once too often")
            self._refs[slot] = refs - 1
            if refs == 1:
                self._held -= 1
                if self._names[slot] is not None and self._generations[slot] == self._generation:
                    self._idle[slot] = None
                else:
                    self._names[slot] = None
                    self._free.append(slot)

    def allocate(self, count: int, reserved: bool = False) -> list[int]:
        """Anonymous slots with one reference each.

        Args:
            reserved: use up a promise made before; otherwise the caller has checked `num_available`.

        Raises:
            SlotError: not that many can be had; nothing was taken.
        """
        if reserved:
            self.unreserve(count)
        if count > self.num_available:
            if reserved:
                self._reserved += count
            raise SlotError(f"{count} slots wanted, {self.num_available} available of {self.num_slots}")
        slots = [self._take() for _ in range(count)]
        self._held += count
        return slots

    def _take(self) -> int:
        if self._free:
            slot = self._free.pop()
        elif self._dead:
            slot = self._dead.popleft()
            self._names[slot] = None
        else:
            slot, _ = self._idle.popitem(last=False)
            self._unname(slot)
            self.evictions += 1
        self._refs[slot] = 1
        return slot

    # -- names ---------------------------------------------------------------------------------------------------

    def insert(self, slot: int, group: int, block_hash: bytes) -> bool:
        """Name an anonymous slot. False if the block is in another slot already, or this is a staging ring."""
        if self._refs[slot] < 1 or self._names[slot] is not None:
            raise SlotError(f"slot {slot} is not an anonymous slot of a job")
        names = self._maps[group]
        if not self.indexed or block_hash in names:
            return False
        names[block_hash] = slot
        self._names[slot] = (group, block_hash)
        self._generations[slot] = self._generation
        return True

    def forget(self, group: int, block_hash: bytes) -> None:
        """Make a block unfindable (its bytes are doubted); the slot is freed when nobody refers to it."""
        slot = self._maps[group].get(block_hash)
        if slot is None:
            return
        self._unname(slot)
        if self._refs[slot] == 0:
            del self._idle[slot]
            self._free.append(slot)

    def touch(self, slot: int) -> None:
        """Mark an idle block as just used."""
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def _unname(self, slot: int) -> None:
        name = self._names[slot]
        if name is None:
            raise SlotError(f"slot {slot} has no name to lose")
        self._names[slot] = None
        del self._maps[name[0]][name[1]]
        if self._on_evict is not None:
            self._on_evict(name)

    def renew(self) -> None:
        """The root changed: nothing is findable any more; slots of the old root are handed out first."""
        self._generation += 1
        self._maps = [{} for _ in range(self._num_groups)]
        self._dead.extend(self._idle)
        self._idle = OrderedDict()

    def clear(self) -> None:
        """A reset: as `renew`, and the memory counts as free at once."""
        self.renew()
        for slot in self._dead:
            self._names[slot] = None
        self._free.extend(self._dead)
        self._dead.clear()

    def check(self) -> None:
        """Raise `SlotError` if any slot has two owners or none (for tests; O(slots))."""
        seen = [*self._free, *self._dead, *self._idle, *(s for s in range(self.num_slots) if self._refs[s] > 0)]
        if sorted(seen) != list(range(self.num_slots)):
            raise SlotError("a slot has two owners, or none")
        if self.num_available < 0:
            raise SlotError(f"{-self.num_available} slots more are promised than exist")
        for group, names in enumerate(self._maps):
            for block_hash, slot in names.items():
                if self._names[slot] != (group, block_hash) or self._generations[slot] != self._generation:
                    raise SlotError(f"slot {slot} is found under a name that it does not have")
                if slot in self._free or (self._refs[slot] == 0 and slot not in self._idle):
                    raise SlotError(f"slot {slot} is found but not kept")
        if self._held != sum(1 for refs in self._refs if refs):
            raise SlotError("the count of held slots is wrong")
