"""What hits, loads and saves share: blocks by where they are, and jobs under way.

What L1 holds, what L2 is known to hold and what the tracker confirms change together, here, or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.planning.pause import LoadPause
from epochkv_connector.scheduler.tiers.index import HostIndex, Key
from epochkv_connector.scheduler.tiers.ledger import Copied, Ledger, Loaded, Stored
from epochkv_connector.scheduler.tiers.recent import RecentBlocks
from epochkv_connector.scheduler.tiers.views import CacheLayout
from epochkv_connector.wire.jobs import BlockMove, Tier

if TYPE_CHECKING:
    from epochkv_connector.engine.events import HostEvents

KNOWN_IN_STORE_CAPACITY = 100_000


class TierState:
    """See the module's docstring, and `Bookkeeping` for the arguments.

    Attributes:
        is_usable: blocks of this layout can be saved and loaded, and there are slots for them.
        known: what L2 is known to hold.
        tracker: what all ranks have confirmed; None: L1's index answers alone.
        pause: whether L2 may be asked for hits.
        listener: told which blocks L1 holds; None: nobody listens.
    """

    def __init__(
        self, config: ConnectorConfig, layout: CacheLayout, num_ranks: int, num_slots: int, ids: Iterator[int], clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.layout = layout
        self.ids = ids
        self.clock = clock
        self.is_usable = layout.problem() is None and num_slots > 0
        self.counts: Counter[str] = Counter()
        self.index = HostIndex(num_slots, max(1, len(layout.groups)), config.local is not None, self._left)
        self.known = RecentBlocks(KNOWN_IN_STORE_CAPACITY)
        self.tracker = RecentBlocks(config.tracker_capacity) if config.tracker and config.local else None
        self.ledger = Ledger(num_ranks)
        self.pause = LoadPause(2 * config.job_deadline_seconds, clock)
        self.listener: HostEvents | None = None
        self._root: bytes | None = None

    def namespace(self, snap: Snapshot) -> str | None:
        """Prefix of the L2 keys of what holds now; None: nothing is looked for in L2, nor put there."""
        return snap.namespace if snap.shared and self.config.distributed is not None else None

    def copied(self, done: Copied) -> None:
        keys = self._insert(done.saved)
        if self.tracker is not None:
            self.tracker.add(keys)

    def stored(self, done: Stored) -> None:
        self.known.add(_keys(done.stored))

    def loaded(self, done: Loaded) -> None:
        """Verified L2 bytes in a slot are good on every rank, even when the copy to the GPU came too late."""
        self._insert(done.filled)
        self.known.add(_keys(done.filled))
        filled = {move.slot for move in done.filled}
        for move in done.doubted:
            if move.source is Tier.HOST:
                self.index.forget(move.group, move.block_hash)
            elif move.slot not in filled:
                self.known.discard(_keys((move,)))
        if self.tracker is not None:
            self.tracker.discard(_keys(done.hull))

    def _insert(self, moves: Iterable[BlockMove]) -> list[Key]:
        keys = _keys(move for move in moves if self.index.insert(move.slot, move.group, move.block_hash))
        if self.listener is not None:
            self.listener.arrived(keys)
        return keys

    def _left(self, key: Key) -> None:
        if self.tracker is not None:
            self.tracker.discard((key,))
        if self.listener is not None:
            self.listener.left(key)

    def rename(self, root: bytes) -> bool:
        """Names are made of this root from now on. Returns whether it is another one: then only L1's blocks of this very root, which
        may have been current before, count."""
        if root == self._root:
            return False
        self._root = root
        self._forget_names()
        found_again = self.index.renew(root)
        if self.tracker is not None:
            self.tracker.add(found_again)
        if self.listener is not None:
            self.listener.found_again(found_again)
        return True

    def clear(self) -> None:
        """Clear means clear: L1 is empty at once."""
        self._forget_names()
        self.index.clear()

    def _forget_names(self) -> None:
        self.ledger.abandon_all()
        self.known.clear()
        if self.tracker is not None:
            self.tracker.clear()


def _keys(moves: Iterable[BlockMove]) -> list[Key]:
    return [(move.group, move.block_hash) for move in moves]
