"""Engines: the production `Agent`, what its driver does around it, and a small model of the data path.

A block of KV is (epoch, block) made with some weights. An engine that may share computes blocks under its epoch's name,
keeps them (L1), saves them to the store (L2), and reuses what it finds under that name in either; what it finds must have
been made with the weights it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from epochkv_fence import agent as ag
from epochkv_fence.messages import Grant, Heartbeat, Message, Mode, Reclaimed
from tests.model.parts import START, STAYS, STORE_LEASE, WANTS_TO_LEAVE, Engine, Load, Lookup, Violation

if TYPE_CHECKING:
    from tests.model.world import World

BLOCKS = 3
ALONE = -1
"""The name of blocks that no epoch names; only a mutant finds them again."""


class Bound(NamedTuple):
    """The new root is bound; the agent does not know yet."""

    epoch: int
    mode: Mode


class Repropose(NamedTuple):
    """Its caches were reset before it knew this epoch."""

    epoch: int


class EngineSide:
    """All engines' drivers and schedulers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.boots = 0
        self.reclaims: list[tuple[float, int, bytes, int]] = []

    def make(self, index: int) -> Engine:
        """A new boot, with base weights."""
        world = self.world
        self.boots += 1
        agent = world.rules.agent(self.boots.to_bytes(16, "big"))
        engine = Engine(index, world.clock(), agent, world.now, knows_loading=not (world.profile.blind_loads and world.rng.random() < 0.5))
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

    # ------------------------------------------------------------------ agent and driver

    def step(self, engine: Engine, event: ag.Event) -> None:
        """One event for the agent; what it wants done is done later, one action at a time."""
        engine.queue += engine.agent.step(event, engine.clock.read(self.world.now))

    def receive(self, engine: Engine, message: Message) -> None:
        """A message for its agent."""
        before = engine.bound
        engine.queue += engine.agent.step(ag.Received(message), engine.clock.read(self.world.now))
        if isinstance(message, Grant) and any(isinstance(action, ag.Adopt) for action in engine.queue):
            if message.epoch == before and message.seq < engine.mode_seq:
                raise Violation(f"I3: e{engine.index} takes its mode from a grant for an older heartbeat")
            engine.adopting_seq = message.seq

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
            case ag.Adopt(epoch, mode):
                self._adopt(engine, action, epoch, mode)
            case Bound(epoch, mode):
                engine.queue[:0] = engine.agent.step(ag.Adopted(epoch, mode), engine.clock.read(world.now))
            case Repropose(epoch):
                engine.queue[:0] = engine.agent.step(ag.Proposed(epoch, engine.reset_moment), engine.clock.read(world.now))
            case ag.Settle():
                engine.settling = True
            case ag.Send(message):
                world.count("proposals")
                for hub in (0, 1):
                    world.network.post(f"e{engine.index}", f"h{hub}", message)
            case ag.RemoveOld(below):
                if below > world.checks.published:
                    raise Violation(f"R: e{engine.index} is to remove keys below {below}; published is {world.checks.published}")
                self.reclaims.append((world.now + world.rng.choice([0.0, 0.5, 3.0]), engine.index, engine.agent.boot, below))
            case ag.HubRefused(error):
                raise Violation(f"a hub refused a message: {error}")

    def _beat(self, engine: Engine, beat: ag.Beat) -> None:
        world = self.world
        engine.beats += 1
        engine.said[beat.seq] = (beat.epoch, beat.mode)
        engine.sent[beat.seq] = engine.clock.read(world.now)
        loading = len(engine.open_loads(world.now)) if engine.knows_loading else None
        age = (world.now - engine.born) * engine.clock.rate
        message = Heartbeat(engine.agent.boot, beat.seq, beat.epoch, beat.mode, boot_age_seconds=age, loading=loading)
        for hub in (0, 1):  # both hear it: which of them leads is theirs to find out
            world.network.post(f"e{engine.index}", f"h{hub}", message)

    def _adopt(self, engine: Engine, action: ag.Adopt, epoch: int, mode: Mode) -> None:
        world, rng = self.world, self.world.rng
        luck = rng.random()
        if luck < 0.25 and not world.calm:
            engine.queue.insert(0, action)  # the scheduler thread holds the adoption lock
            engine.frozen_until = world.now + rng.choice([0.0, 1.0, 3.0])
        elif luck < 0.3 and not world.calm:
            engine.queue[:0] = engine.agent.step(ag.AdoptFailed(), engine.clock.read(world.now))
        else:
            world.note(f"e{engine.index} adopts {epoch} {mode.value}")
            engine.bound, engine.bound_mode, engine.mode_seq = epoch, mode, engine.adopting_seq
            if engine.floor_unknown:
                engine.private_at, engine.floor_unknown = epoch, False
                if world.profile.local == "propose":
                    engine.queue.insert(0, Repropose(epoch + 1))  # type: ignore[arg-type]
            if not world.rules.loads_never_poisoned:
                for load in engine.loads:
                    load.poisoned = True
            engine.queue.insert(0, Bound(epoch, mode))  # type: ignore[arg-type]

    def reclaim(self) -> None:
        """Removals that engines were asked for end, and are reported."""
        world = self.world
        due = [entry for entry in self.reclaims if entry[0] <= world.now]
        for entry in due:
            self.reclaims.remove(entry)
            _, index, boot, below = entry
            if world.engines[index].agent.boot == boot:
                removed = world.store.delete(below)
                for hub in (0, 1):
                    world.network.post(f"e{index}", f"h{hub}", Reclaimed(boot, below, removed, removed * 100))

    # ------------------------------------------------------------------ sharing

    def live(self, engine: Engine) -> bool:
        """Whether it has adopted something and its lease holds by its own clock."""
        return engine.bound is not None and engine.clock.read(self.world.now) < engine.agent.view.lease_until

    def shares(self, engine: Engine) -> bool:
        """Whether it uses the pool's caches."""
        if engine.bound is None or engine.bound_mode is not Mode.USE or engine.floor_unknown or not self.live(engine):
            return False
        return engine.private_at is None or engine.bound > engine.private_at

    def local_reset(self, engine: Engine) -> None:
        """Somebody called vLLM's own reset on this engine alone."""
        world = self.world
        if engine.bound is None or not self.live(engine):
            engine.floor_unknown = not world.rules.local_reset_without_floor
            engine.reset_moment = engine.agent.moment
        used = engine.bound is not None and engine.bound in engine.used
        if engine.bound is not None and (used or not world.rules.local_reset_keeps_unused):
            engine.private_at = engine.bound
        engine.blocks.clear()
        for load in engine.loads:
            load.poisoned = True
        if world.profile.local == "propose" and engine.agent.epoch is not None:
            self.step(engine, ag.Proposed(engine.agent.epoch + 1, engine.agent.moment))

    # ------------------------------------------------------------------ scheduler

    def serve(self) -> bool:
        """One engine's scheduler makes a step; False: none runs."""
        world = self.world
        able = [engine for engine in world.engines if world.now >= engine.frozen_until and not engine.paused]
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
            self._serve_alone(engine)
            return
        assert engine.bound is not None
        epoch, block = engine.bound, rng.randrange(BLOCKS)
        engine.used.add(epoch)
        found = engine.blocks.get((epoch, block))
        kind = rng.random()
        if kind < 0.2:
            engine.lookup = Lookup(epoch, engine.agent.view.lease_until)
        elif found is not None and kind < 0.6:
            self._reuse(engine, epoch, found, "its own cache")
        elif (epoch, block) in world.store.keys:
            ends = world.now + rng.choice([0.0, 0.3, 2.0, 7.0] if world.profile.busy_store else [0.0, 0.1])
            engine.loads.append(Load(epoch, block, world.store.keys[epoch, block], ends, min(ends, world.now + STORE_LEASE)))
        else:
            engine.blocks[epoch, block] = engine.weights
            world.store.put(epoch, block, engine.weights)
            world.count("blocks computed")

    def _serve_alone(self, engine: Engine) -> None:
        """In bypass a request computes for itself, and nobody finds what it computed."""
        world = self.world
        if world.rules.bypass_shares:
            found = engine.blocks.setdefault((ALONE, 0), engine.weights)
            self._reuse(engine, ALONE, found, "its own cache, in bypass")
        if world.rules.saves_under_old_pins and engine.bound is not None:
            world.store.put(engine.bound, 0, engine.weights)

    def _finish_loads(self, engine: Engine) -> None:
        world = self.world
        for load in [load for load in engine.loads if load.ends <= world.now]:
            engine.loads.remove(load)
            if load.poisoned:
                world.count("poisoned loads")
                continue
            if not self.shares(engine) and not world.rules.lease_unchecked_after_load:
                continue
            if load.foreign:
                raise Violation(f"W: e{engine.index} uses what it read from the store while that was wiped")
            self._reuse(engine, load.epoch, load.weights, "the store")
            engine.blocks[load.epoch, load.block] = load.weights

    def _admit(self, engine: Engine, lookup: Lookup) -> None:
        engine.lookup = None
        published = self.world.authority.record.published
        if lookup.epoch < published and engine.clock.read(self.world.now) < lookup.lease_until:
            raise Violation(f"I2: published {published}, and e{engine.index} admits a request that found epoch {lookup.epoch}")

    def _reuse(self, engine: Engine, epoch: int, weights: int, where: str) -> None:
        world = self.world
        world.count("blocks reused")
        if epoch != ALONE and epoch < world.authority.record.published:
            raise Violation(f"I2: published {world.authority.record.published}, and e{engine.index} reuses a block of epoch {epoch}")
        if weights != engine.weights and not (epoch == 0 and world.checks.base_is_void):
            raise Violation(
                f"I1: e{engine.index} has weights {engine.weights} and reuses a block of epoch {epoch} "
                f"made with weights {weights}, from {where} ({world.now - START:.2f})"
            )
