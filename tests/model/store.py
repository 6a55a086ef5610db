"""A small model of the data path: what engines compute and reuse, and the store (L2) that they share.

A block of KV is named by epoch and weights. An engine that may share computes blocks under the names of its epoch and of the
weights it holds, keeps them (L1), saves them to the store, and uses what it finds under these names in either. How names
follow the weights is tested elsewhere: here they always do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import Reclaimed
from tests.model.parts import STORE_LEASE, Engine, Load, Lookup, Violation, digest

if TYPE_CHECKING:
    from tests.model.world import World

Key = tuple[int, int, int]
"""Epoch, weights, block."""


BLOCKS = 3
AT_ONCE = (1, 2, None)
"""Keys that an engine removes before it answers."""


class Put(NamedTuple):
    """A write under way; lands whatever became of its engine."""

    key: Key
    made_at: float
    lands: float


class Store:
    """Keys by epoch and weights, and what is on its way to them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: dict[Key, float] = {}
        self.puts: list[Put] = []

    def put(self, index: int, epoch: int, weights: int, block: int) -> None:
        published = self.world.authority.record.published
        if epoch < published:
            raise Violation(f"I2: published {published}, and e{index} saves a block of epoch {epoch}")
        delay = self.world.rng.choice([0.0, 0.2, 0.8, STORE_LEASE])
        self.puts.append(Put((epoch, weights, block), self.world.now, self.world.now + delay))

    def land(self) -> None:
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
        return self.delete(2**53)


class Serving:
    """The engines' schedulers: requests that find, load, compute and save blocks."""

    def __init__(self, world: World) -> None:
        self.world = world

    def shares(self, engine: Engine) -> bool:
        if engine.bound is None or engine.note or engine.floor_unknown:
            return False
        if not engine.live(self.world.now) and not self.world.rules.serves_without_lease:
            return False
        return engine.private_at is None or engine.bound > engine.private_at

    def serve(self) -> bool:
        """One engine's scheduler makes a step; False: none runs."""
        world = self.world
        able = [engine for engine in world.engines if world.now >= engine.frozen_until]
        if able:
            self.serve_one(world.rng.choice(able))
        return bool(able)

    def serve_one(self, engine: Engine) -> None:
        """Loads that ended are taken; a request reuses, loads or computes a block."""
        world, rng = self.world, self.world.rng
        self._finish_loads(engine)
        if engine.lookup is not None:
            if rng.random() < 0.4 or world.calm:
                self._admit(engine, engine.lookup)
            return
        if not self.shares(engine):
            if world.rules.saves_under_old_pins and engine.bound is not None:
                world.store.put(engine.index, engine.bound, engine.weights, 0)
            return
        assert engine.bound is not None
        key = (engine.bound, engine.weights, rng.randrange(BLOCKS))
        found = engine.blocks.get(key)
        kind = rng.random()
        if kind < 0.2:
            engine.lookup = Lookup(engine.bound, engine.agent.view.lease_until)
        elif found is not None and kind < 0.6:
            self._reuse(engine, engine.bound, found, "its own cache")
        elif key in world.store.keys:
            ends = world.now + rng.choice([0.0, 0.3, 2.0, 7.0] if world.profile.busy_store else [0.0, 0.1])
            engine.loads.append(Load(*key, world.store.keys[key], ends, min(ends, world.now + STORE_LEASE)))
        else:
            world.checks.use(engine, engine.bound, world.now, "its own computation")
            engine.blocks[key] = world.now
            world.store.put(engine.index, *key)
            world.count("blocks computed")

    def _finish_loads(self, engine: Engine) -> None:
        world = self.world
        for load in [load for load in engine.loads if load.ends <= world.now]:
            engine.loads.remove(load)
            if load.invalidated:
                world.count("invalidated loads")
                continue
            if not self.shares(engine) and not world.rules.lease_unchecked_after_load:
                continue
            self._reuse(engine, load.epoch, load.made_at, "the store")
            engine.blocks[load.epoch, load.weights, load.block] = load.made_at

    def _admit(self, engine: Engine, lookup: Lookup) -> None:
        engine.lookup = None
        checks = self.world.checks
        published = self.world.authority.record.published
        if lookup.epoch < max(published, checks.promised) and engine.clock.read(self.world.now) < lookup.lease_until:
            raise Violation(f"I2: {checks.why(lookup.epoch)}, and e{engine.index} admits a request that found epoch {lookup.epoch}")

    def _reuse(self, engine: Engine, epoch: int, made_at: float, where: str) -> None:
        self.world.count("blocks reused")
        self.world.checks.use(engine, epoch, made_at, where)


class Removal(NamedTuple):
    """Of keys, by an engine that was asked for it."""

    ends: float
    slot: int
    instance: bytes
    below: int
    keep: tuple[bytes, ...]
    number: int


class Removals:
    def __init__(self, world: World) -> None:
        self.world = world
        self.open: list[Removal] = []

    def begin(self, engine: Engine, asked: ag.RemoveOld) -> None:
        world, below = self.world, asked.below
        if below > world.checks.published:
            raise Violation(f"R: e{engine.index} is to remove keys below {below}; published is {world.checks.published}")
        world.count("sweeps" if asked.keep else "removals")
        ends = world.now + world.rng.choice([0.0, 0.5, 3.0])
        self.open.append(Removal(ends, engine.index, engine.agent.instance, below, asked.keep, asked.number))

    def land(self) -> None:
        """Removals that engines were asked for end, and are reported."""
        world = self.world
        due = [removal for removal in self.open if removal.ends <= world.now]
        for removal in due:
            self.open.remove(removal)
            engine = world.engines[removal.slot]
            if engine.agent.instance == removal.instance:
                removed = world.store.delete(removal.below, removal.keep, world.rng.choice(AT_ONCE))
                world.engine_side.tell(engine, Reclaimed(removal.instance, removal.below, removed, removed * 100, removal.number))
