"""What all ranks have confirmed to be saved: a view of the job ledger for pools without an L2.

With an L1 alone nobody else can have saved a block, so what is not here is a miss and no tier needs asking. With an L2
another engine may have saved it, and the tracker must not answer; `ConnectorConfig.check` refuses that combination.

A block enters when the last rank has acknowledged its copy (ranges of ranks are intersected in `jobs.py`), and leaves
when L1 evicts it, when it lies in the hull of a failed load, or when the LRU bound is reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from epochkv_connector.scheduler.tiers.index import Key


class Tracker:
    """LRU set of (group, block hash), at most `capacity` entries."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def confirm(self, keys: Iterable[Key]) -> None:
        """Blocks that the last rank has just confirmed, in chain order: the head of a chain is forgotten last."""
        for key in reversed(list(keys)):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def covers(self, key: Key) -> bool:
        """Whether every rank has saved the block. False is an answer: a miss."""
        return key in self._keys

    def use(self, keys: Iterable[Key]) -> None:
        """Blocks of a hit were used, in chain order."""
        for key in reversed(list(keys)):
            if key in self._keys:
                self._keys.move_to_end(key)

    def forget(self, key: Key) -> None:
        """The block left L1 or is doubted."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """New root or reset."""
        self._keys.clear()
