"""Engines: the production `Agent`, what its driver does around it, and a small model of the data path.

A block of KV is named by epoch and weights. An engine that may share computes blocks under the names of its epoch and of the
weights it holds, keeps them (L1), saves them to the store (L2), and uses what it finds under these names in either. How names
follow the weights is tested elsewhere: here they always do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import Heartbeat, Message, Reclaimed
from tests.model.parts import STAYS, STORE_LEASE, WANTS_TO_LEAVE, Engine, Load, Lookup, Violation, digest

if TYPE_CHECKING:
    from tests.model.world import World

BLOCKS = 3
AT_ONCE = (1, 2, None)
"""Keys that an engine removes before it answers."""


class Bound(NamedTuple):
    """The new root is bound; the agent does not know yet."""

    epoch: int


class Repropose(NamedTuple):
    """Its caches were reset before it knew this epoch."""

    epoch: int


class Removal(NamedTuple):
    """Of keys, by an engine that was asked for it."""

    ends: float
    index: int
    boot: bytes
    below: int
    keep: tuple[bytes, ...]
    number: int


class EngineSide:
    """All engines' drivers and schedulers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.boots = 0
        self.removals: list[Removal] = []

    def make(self, index: int) -> Engine:
        """A new boot, with the weights that it finds: the first ones, or the newest."""
        world = self.world
        self.boots += 1
        agent = world.rules.agent(self.boots.to_bytes(16, "big"))
        engine = Engine(index, world.clock(), agent, world.now, fingerprint=f"f{index % world.profile.fingerprints}")
        engine.weights = world.rng.choice([1, world.newest_weights])
        engine.queue += agent.step(ag.Started(), engine.clock.read(world.now))
        return engine

    def restart(self) -> None:
        """A process dies; another boot takes its place."""
        self.restart_one(self.world.rng.randrange(len(self.world.engines)))

    def shut_down(self) -> None:
        """A process is told to end: it tells the hub, serves for a while what it has begun, and another boot takes its place."""
        engine = self.world.rng.choice(self.world.engines)
        if engine.leaving == STAYS:
            self.world.note(f"e{engine.index} is told to end")
            self.world.count("engine shutdowns")
            engine.leaving = WANTS_TO_LEAVE

    def _ends(self, engine: Engine) -> bool:
        if engine.leaving == WANTS_TO_LEAVE:
            return engine.lookup is None or self.world.rules.leaves_inside_schedule
        return self.world.now >= engine.leaving

    def _end(self, engine: Engine) -> None:
        if engine.leaving == WANTS_TO_LEAVE:
            engine.leaving = self.world.now + self.world.rng.choice([0.0, 1.0, 3.0])
            self.step(engine, ag.Left())
        else:
            self.restart_one(engine.index)

    def restart_one(self, index: int) -> None:
        """The process in this slot dies; another boot takes its place."""
        world = self.world
        world.note(f"e{index} restarts")
        world.count("engine restarts")
        world.engines[index] = self.make(index)

    # ------------------------------------------------------------------ weights

    def hold(self, engine: Engine, weights: int, note: str = "") -> None:
        """Its ranks hold these now, and it can say so unless there is a note; outside `schedule()`."""
        if (engine.weights, engine.note) == (weights, note):
            return
        world = self.world
        world.note(f"e{engine.index} holds weights {weights} {note}")
        engine.weights, engine.note = weights, note
        for load in engine.loads:
            load.poisoned = True
        self.step(engine, ag.Poked())

    # ------------------------------------------------------------------ agent and driver

    def step(self, engine: Engine, event: ag.Event) -> None:
        """One event for the agent; what it wants done is done later, one action at a time."""
        engine.queue += engine.agent.step(event, engine.clock.read(self.world.now))

    def receive(self, engine: Engine, message: Message) -> None:
        """A message for its agent."""
        self.step(engine, ag.Received(message))
        if engine.bound is not None and engine.bound == engine.agent.epoch:
            self._resolve_floor(engine, engine.bound)

    def turn(self) -> bool:
        """One engine's agent thread goes on; False: none has anything to do."""
        now = self.world.now
        able = [engine for engine in self.world.engines if now >= engine.frozen_until and self.due(engine)]
        if able:
            self.drive(self.world.rng.choice(able))
        return bool(able)

    def due(self, engine: Engine) -> bool:
        """Whether its agent thread has something to do."""
        if engine.queue or (engine.settling and self._outside(engine)) or self._ends(engine):
            return True
        return engine.clock.read(self.world.now) >= engine.agent.deadline()

    def drive(self, engine: Engine) -> None:
        """One action or event."""
        if engine.queue:
            self._act(engine, engine.queue.pop(0))
        elif engine.settling and self._outside(engine):
            engine.settling = False
            self.step(engine, ag.Settled())
        elif self._ends(engine):
            self._end(engine)
        elif engine.clock.read(self.world.now) >= engine.agent.deadline():
            self.world.count("agent ticks")
            self.step(engine, ag.Tick())

    def _outside(self, engine: Engine) -> bool:
        return engine.lookup is None or self.world.rules.settled_at_once

    def _act(self, engine: Engine, action: ag.Action | Bound | Repropose) -> None:
        world = self.world
        match action:
            case ag.Beat():
                self._beat(engine, action)
            case ag.Adopt(epoch):
                self._adopt(engine, action, epoch)
            case Bound(epoch):
                engine.queue[:0] = engine.agent.step(ag.Adopted(epoch), engine.clock.read(world.now))
                self._resolve_floor(engine, epoch)
            case Repropose(epoch):
                engine.queue[:0] = engine.agent.step(ag.Proposed(epoch), engine.clock.read(world.now))
            case ag.Settle():
                engine.settling = True
            case ag.Send(message):
                world.count("proposals")
                self._tell(engine, message)
            case ag.RemoveOld():
                self._begin_removal(engine, action)
            case ag.HubRefused(error):
                raise Violation(f"a hub refused a message: {error}")

    def _tell(self, engine: Engine, message: Message) -> None:
        """Both hubs hear it: which of them leads is theirs to find out."""
        for hub in (0, 1):
            self.world.network.post(f"e{engine.index}", f"h{hub}", message)

    def _beat(self, engine: Engine, beat: ag.Beat) -> None:
        engine.beats += 1
        weights = None if engine.note else digest(engine.weights)
        if weights != engine.reported[0]:
            engine.reported = weights, self.world.now
        message = Heartbeat(
            engine.agent.boot,
            beat.seq,
            beat.epoch,
            boot_age_seconds=(self.world.now - engine.born) * engine.clock.rate,
            fingerprint=engine.fingerprint,
            private=engine.private_at is not None and engine.private_at == engine.bound,
            weights=weights,
            weights_note=engine.note,
            weights_age_seconds=(self.world.now - engine.reported[1]) * engine.clock.rate,
        )
        self._tell(engine, message)

    def _adopt(self, engine: Engine, action: ag.Adopt, epoch: int) -> None:
        world, rng = self.world, self.world.rng
        luck = rng.random()
        if luck < 0.25 and not world.calm:
            engine.queue.insert(0, action)  # the scheduler thread holds the adoption lock
            engine.frozen_until = world.now + rng.choice([0.0, 1.0, 3.0])
        elif luck < 0.3 and not world.calm:
            engine.queue[:0] = engine.agent.step(ag.AdoptFailed(), engine.clock.read(world.now))
        else:
            world.note(f"e{engine.index} adopts {epoch}")
            engine.bound = epoch
            if not world.rules.loads_never_poisoned:
                for load in engine.loads:
                    load.poisoned = True
            engine.queue.insert(0, Bound(epoch))  # type: ignore[arg-type]

    def _resolve_floor(self, engine: Engine, epoch: int) -> None:
        """With a lease of `epoch` it is known that no later one was published when its caches were reset."""
        if engine.floor_unknown and self.live(engine):
            engine.private_at, engine.floor_unknown = epoch, False
            engine.queue.insert(0, Repropose(epoch + 1))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ keys that are removed

    def _begin_removal(self, engine: Engine, asked: ag.RemoveOld) -> None:
        world, below = self.world, asked.below
        if below > world.checks.published:
            raise Violation(f"R: e{engine.index} is to remove keys below {below}; published is {world.checks.published}")
        world.count("sweeps" if asked.keep else "removals")
        ends = world.now + world.rng.choice([0.0, 0.5, 3.0])
        self.removals.append(Removal(ends, engine.index, engine.agent.boot, below, asked.keep, asked.number))

    def reclaim(self) -> None:
        """Removals that engines were asked for end, and are reported."""
        world = self.world
        due = [removal for removal in self.removals if removal.ends <= world.now]
        for removal in due:
            self.removals.remove(removal)
            engine = world.engines[removal.index]
            if engine.agent.boot == removal.boot:
                removed = world.store.delete(removal.below, removal.keep, world.rng.choice(AT_ONCE))
                self._tell(engine, Reclaimed(removal.boot, removal.below, removed, removed * 100, removal.number))

    # ------------------------------------------------------------------ sharing

    def live(self, engine: Engine) -> bool:
        """Whether it has adopted something and its lease holds by its own clock."""
        return engine.bound is not None and engine.clock.read(self.world.now) < engine.agent.view.lease_until

    def shares(self, engine: Engine) -> bool:
        """Whether it uses the pool's caches."""
        if engine.bound is None or engine.note or engine.floor_unknown:
            return False
        if not self.live(engine) and not self.world.rules.serves_without_lease:
            return False
        return engine.private_at is None or engine.bound > engine.private_at

    def local_reset(self, engine: Engine) -> None:
        """Somebody called vLLM's own reset on this engine alone: it leaves its names and asks for others."""
        world = self.world
        world.note(f"e{engine.index}: its caches are reset")
        engine.cleared = max(engine.cleared, engine.bound or 0, world.authority.record.published)
        if not self.live(engine):
            engine.floor_unknown = not world.rules.local_reset_without_floor
        if engine.bound is not None and not world.rules.local_reset_keeps_root:
            engine.private_at = engine.bound
        engine.blocks.clear()
        for load in engine.loads:
            load.poisoned = True
        if engine.agent.epoch is not None:
            self.step(engine, ag.Proposed(engine.agent.epoch + 1))

    # ------------------------------------------------------------------ scheduler

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
            if load.poisoned:
                world.count("poisoned loads")
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
