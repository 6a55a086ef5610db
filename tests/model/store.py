"""The store that engines share (L2): keys by epoch, reads and writes that take time, deletes, and the forced wipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.parts import STORE_LEASE, Violation

if TYPE_CHECKING:
    from tests.model.world import World


class Put(NamedTuple):
    """A write under way; lands whatever became of its engine."""

    epoch: int
    block: int
    weights: int
    lands: float


class Store:
    """Keys, and what is on its way to them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: dict[tuple[int, int], int] = {}
        self.puts: list[Put] = []
        self.found = 0  # by the last wipe

    def put(self, epoch: int, block: int, weights: int) -> None:
        """An engine saves a block; it lands at some time."""
        delay = self.world.rng.choice([0.0, 0.2, 0.8, STORE_LEASE])
        self.puts.append(Put(epoch, block, weights, self.world.now + delay))

    def land(self) -> None:
        """What is due has landed."""
        if self.puts:
            now = self.world.now
            for put in self.puts:
                if put.lands <= now:
                    self.keys[put.epoch, put.block] = put.weights
            self.puts = [put for put in self.puts if put.lands > now]

    def older(self, below: int) -> list[tuple[int, int]]:
        """Keys of epochs below this one."""
        return [key for key in self.keys if key[0] < below]

    def delete(self, below: int) -> int:
        """Remove keys of older epochs, those that nobody reads."""
        read = {(load.epoch, load.block) for engine in self.world.engines for load in engine.loads if load.leased_until > self.world.now}
        removed = [key for key in self.older(below) if key not in read]
        for key in removed:
            del self.keys[key]
        return len(removed)

    def sweep(self) -> int:
        """Remove every key that nobody reads."""
        return self.delete(2**53)

    def wipe(self) -> int:
        """Remove everything by force: who reads now gets other bytes, with a success code."""
        world = self.world
        world.count("wipes")
        for engine in world.engines:
            for load in engine.open_loads(world.now):
                if not load.poisoned and world.engine_side.live(engine):
                    raise Violation(f"W: the store is wiped while e{engine.index} reads epoch {load.epoch} and may use what it gets")
                load.foreign = True
        self.found = len(self.keys)
        self.keys.clear()
        return self.found

    def readers(self) -> str:
        """Who has a lease and reads: nobody may when a wipe is decided."""
        world = self.world
        reading = [engine for engine in world.engines if engine.open_loads(world.now) and world.engine_side.live(engine)]
        return ", ".join(f"e{engine.index} has a lease and reads" for engine in reading)
