"""A bounded memory of blocks, used twice: what L2 is known to hold (a hint that saves a put), and the tracker.

The tracker holds what all ranks have confirmed to be saved, for pools without an L2. With an L1 alone nobody else can have saved a
block, so what is not in it is a miss and no tier needs asking. With an L2 another engine may have saved the block, and the tracker
must not answer; `ConnectorConfig.check` refuses that combination. A block enters when the last rank has acknowledged its copy
(ranges of ranks are intersected in `ledger`). It leaves when L1 evicts it, when it lies in the hull of a failed load, or when
the bound is reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from epochkv_connector.scheduler.tiers.index import Key


class RecentBlocks:
    """LRU set of (group, block hash), at most `capacity` entries. Give keys in chain order: the head is forgotten last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[Key]) -> None:
        for key in reversed(list(keys)):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def use(self, keys: Iterable[Key]) -> None:
        """Blocks of a hit: as `add`, for those that are in it."""
        for key in reversed(list(keys)):
            if key in self._keys:
                self._keys.move_to_end(key)

    def discard(self, keys: Iterable[Key]) -> None:
        """These are not, or no longer, where they were."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
