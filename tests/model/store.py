"""The store that engines share (L2): keys by epoch and weights, reads and writes that take time, and deletes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from tests.model.parts import STORE_LEASE, Violation, digest

if TYPE_CHECKING:
    from tests.model.world import World

Key = tuple[int, int, int]
"""Epoch, weights, block."""


class Put(NamedTuple):
    """A write under way; lands whatever became of its engine."""

    key: Key
    made_at: float
    lands: float


class Store:
    """Keys, and what is on its way to them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: dict[Key, float] = {}
        self.puts: list[Put] = []

    def put(self, index: int, epoch: int, weights: int, block: int) -> None:
        """An engine saves a block that it has just made; it lands at some time."""
        published = self.world.authority.record.published
        if epoch < published:
            raise Violation(f"I2: published {published}, and e{index} saves a block of epoch {epoch}")
        delay = self.world.rng.choice([0.0, 0.2, 0.8, STORE_LEASE])
        self.puts.append(Put((epoch, weights, block), self.world.now, self.world.now + delay))

    def land(self) -> None:
        """What is due has landed."""
        if self.puts:
            now = self.world.now
            for put in self.puts:
                if put.lands <= now:
                    self.keys[put.key] = put.made_at
            self.puts = [put for put in self.puts if put.lands > now]

    def garbage(self, below: int, keep: Collection[bytes] = ()) -> list[Key]:
        """Keys of epochs below this one, and, unless `keep` is empty, those of other weights."""
        return [key for key in self.keys if key[0] < below or (keep and digest(key[1]) not in keep)]

    def delete(self, below: int, keep: Collection[bytes] = (), most: int | None = None) -> int:
        """Remove `garbage`, what nobody reads of it, and not more keys than `most`."""
        now = self.world.now
        read = {(load.epoch, load.weights, load.block) for engine in self.world.engines for load in engine.loads if load.leased_until > now}
        removed = [key for key in self.garbage(below, keep) if key not in read][:most]
        for key in removed:
            del self.keys[key]
        return len(removed)

    def empty(self) -> int:
        """Remove every key that nobody reads."""
        return self.delete(2**53)
