"""Where the blocks of one prompt are: asked lazily, answered from both tiers, in columns.

A hit of thousands of tokens is hundreds of blocks, and all of this runs on the scheduler thread: what is asked of every
block is done by built-ins over slices of the prompt's hashes, some hundred at a time, and what was found is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

from epochkv_connector.scheduler.tiers.index import HostIndex, Key
from epochkv_connector.scheduler.tiers.recent import RecentBlocks

ABSENT: Final = -1
"""In a column of slots: not in L1."""

FIRST_STRETCH: Final = 64
LONGEST_STRETCH: Final = 1024
"""Blocks that are looked up at a time, twice as many each time: most prompts end, or miss, early."""


@dataclass(slots=True)
class Span:
    """Neighbouring blocks of one group, in chain order: `names[i]` and `slots[i]` belong to block `first + i`."""

    group: int
    first: int
    names: list[bytes]
    slots: list[int]  # or ABSENT
    num_absent: int  # in `slots`

    def held(self) -> list[int]:
        return [slot for slot in self.slots if slot != ABSENT] if self.num_absent else self.slots

    def part(self, blocks: range) -> Span | None:
        """These blocks alone; None if they are not all in it."""
        if blocks.start < self.first or blocks.stop > self.first + len(self.slots):
            return None
        inside = slice(blocks.start - self.first, blocks.stop - self.first)
        slots = self.slots[inside]
        return Span(self.group, blocks.start, self.names[inside], slots, slots.count(ABSENT) if self.num_absent else 0)


@dataclass(slots=True)
class PromptBlocks:
    """See the module's docstring.

    Attributes:
        hashes: the prompt's, in units of the hash block size.
        scales: hash blocks per block, by group.
        remote: what L2 is known to hold; to be set before a hit is looked for.
    """

    index: HostIndex
    tracker: RecentBlocks | None
    hashes: Sequence[bytes]
    scales: Sequence[int]
    remote: frozenset[Key] = frozenset()
    _runs: dict[int, Span] = field(default_factory=dict)  # of the last `first_absent` of each group

    def blocks(self, group: int, first: int, end: int) -> Span:
        """Blocks `first` to `end`, as far as they are whole and so have names."""
        scale = self.scales[group]
        names = list(self.hashes[(first + 1) * scale - 1 : end * scale : scale])
        slots = list(map(self.index.finder(group), names, repeat(ABSENT)))
        if self.tracker is not None:
            confirmed = self.tracker
            slots = [slot if (group, name) in confirmed else ABSENT for name, slot in zip(names, slots, strict=True)]
        return Span(group, first, names, slots, slots.count(ABSENT))

    def present(self, group: int, block: int) -> bool:
        position = (block + 1) * self.scales[group] - 1
        if position >= len(self.hashes):
            return False
        name = self.hashes[position]
        if self.index.get(group, name) is not None and (self.tracker is None or (group, name) in self.tracker):
            return True
        return (group, name) in self.remote

    def first_absent(self, group: int, first: int, end: int) -> int:
        """The first of the blocks `first` to `end` that no tier holds; `end` if there is none."""
        run: Span | None = None
        block, stretch = first, FIRST_STRETCH
        while block < end:
            stop = min(end, block + stretch)
            part = self.blocks(group, block, stop)
            if part.num_absent:
                part = self._up_to_absent(part)
            if run is None:
                run = self._runs[group] = part
            else:
                run.names += part.names
                run.slots += part.slots
                run.num_absent += part.num_absent
            if block + len(part.slots) < stop:
                return block + len(part.slots)
            block, stretch = stop, min(2 * stretch, LONGEST_STRETCH)
        return block

    def _up_to_absent(self, span: Span) -> Span:
        """Its first blocks, without those from the first one on that L2 does not hold either."""
        for index, slot in enumerate(span.slots):
            if slot == ABSENT and (span.group, span.names[index]) not in self.remote:
                slots = span.slots[:index]
                return Span(span.group, span.first, span.names[:index], slots, slots.count(ABSENT))
        return span

    def locate(self, group: int, blocks: range) -> Span:
        """These blocks, all of which some tier holds."""
        run = self._runs.get(group)
        return (run and run.part(blocks)) or self.blocks(group, blocks.start, blocks.stop)
