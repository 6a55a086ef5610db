"""Engines: the production `Agent`, what its driver does around it, and the weights that change under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import Heartbeat, Message
from tests.model.parts import STAYS, WANTS_TO_LEAVE, Engine, Violation, digest

if TYPE_CHECKING:
    from tests.model.world import World

NOTES = ("asleep", "rank 1: no answer")


class Bound(NamedTuple):
    """The new root is bound; the agent does not know yet."""

    epoch: int


class Repropose(NamedTuple):
    """Its caches were reset before it knew this epoch."""

    epoch: int


class EngineSide:
    def __init__(self, world: World) -> None:
        self.world = world
        self.instances = 0

    def make(self, index: int) -> Engine:
        """A new engine instance, with the weights that it finds: the first ones, or the newest."""
        world = self.world
        self.instances += 1
        agent = world.rules.agent(self.instances.to_bytes(16, "big"))
        engine = Engine(index, world.clock(), agent, world.now, fingerprint=f"f{index % world.profile.fingerprints}")
        engine.weights = world.rng.choice([1, world.newest_weights])
        engine.queue += agent.step(ag.Started(), engine.clock.read(world.now))
        return engine

    def restart(self) -> None:
        self.restart_one(self.world.rng.randrange(len(self.world.engines)))

    def shut_down(self) -> None:
        """A process is told to end: it tells the hub, serves for a while what it has begun, and another engine instance takes its place."""
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
            load.invalidated = True
        self.step(engine, ag.Poked())

    # ------------------------------------------------------------------ agent and driver

    def step(self, engine: Engine, event: ag.Event) -> None:
        """One event for the agent; what it wants done is done later, one action at a time."""
        engine.queue += engine.agent.step(event, engine.clock.read(self.world.now))

    def receive(self, engine: Engine, message: Message) -> None:
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
        if engine.queue or (engine.settling and self._outside(engine)) or self._ends(engine):
            return True
        return engine.clock.read(self.world.now) >= engine.agent.deadline()

    def drive(self, engine: Engine) -> None:
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
                self.tell(engine, message)
            case ag.RemoveOld():
                world.removals.begin(engine, action)
            case ag.HubRefused(error):
                raise Violation(f"a hub refused a message: {error}")

    def tell(self, engine: Engine, message: Message) -> None:
        """Both hubs hear it: which of them leads is theirs to find out."""
        for hub in (0, 1):
            self.world.network.post(f"e{engine.index}", f"h{hub}", message)

    def _beat(self, engine: Engine, beat: ag.Beat) -> None:
        engine.beats += 1
        weights = None if engine.note else digest(engine.weights)
        if weights != engine.reported[0]:
            engine.reported = weights, self.world.now
        message = Heartbeat(
            engine.agent.instance,
            beat.seq,
            beat.epoch,
            instance_age_seconds=(self.world.now - engine.born) * engine.clock.rate,
            fingerprint=engine.fingerprint,
            isolated=engine.private_at is not None and engine.private_at == engine.bound,
            weights=weights,
            weights_note=engine.note,
            weights_age_seconds=(self.world.now - engine.reported[1]) * engine.clock.rate,
        )
        self.tell(engine, message)

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
            if not world.rules.loads_never_invalidated:
                for load in engine.loads:
                    load.invalidated = True
            engine.queue.insert(0, Bound(epoch))  # type: ignore[arg-type]

    def _resolve_floor(self, engine: Engine, epoch: int) -> None:
        """With a lease of `epoch` it is known that no later one was published when its caches were reset."""
        if engine.floor_unknown and engine.live(self.world.now):
            engine.private_at, engine.floor_unknown = epoch, False
            engine.queue.insert(0, Repropose(epoch + 1))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ resets of one engine

    def local_reset(self, engine: Engine) -> None:
        """Somebody called vLLM's own reset on this engine alone: it leaves its names and asks for others."""
        world = self.world
        world.note(f"e{engine.index}: its caches are reset")
        engine.cleared = max(engine.cleared, engine.bound or 0, world.authority.record.published)
        if not engine.live(self.world.now):
            engine.floor_unknown = not world.rules.local_reset_without_floor
        if engine.bound is not None and not world.rules.local_reset_keeps_root:
            engine.private_at = engine.bound
        engine.blocks.clear()
        for load in engine.loads:
            load.invalidated = True
        if engine.agent.epoch is not None:
            self.step(engine, ag.Proposed(engine.agent.epoch + 1))


class Pushes:
    """Weights change under running engines, in any order and without telling anybody: names carry them, so every order is right.

    Pushes reach one engine after the other, all of them or some; what was pushed before may come back; and for a while an engine
    may not be able to say what it holds. At most one push is under way, as far as whoever pushes is concerned.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.left: list[int] = []
        self.weights = 1

    def turn(self) -> bool:
        """The next engine of the present push, or something new; False: nothing can be done now."""
        world, rng = self.world, self.world.rng
        if self.left:
            return self._push_one()
        luck = rng.random()
        engine = rng.choice(world.engines)
        if not self.reachable(engine):
            return False
        if engine.note:
            world.engine_side.hold(engine, engine.weights)
        elif luck < 0.5:
            some = rng.random() < 0.3
            self.begin(rng.sample(range(len(world.engines)), rng.randrange(1, len(world.engines) + 1) if some else len(world.engines)))
        elif luck < 0.7:
            world.count("roll-backs")
            world.engine_side.hold(engine, rng.randrange(1, world.newest_weights + 1))
        else:
            world.count("unknown weights")
            world.engine_side.hold(engine, engine.weights, rng.choice(NOTES))
        return True

    def begin(self, slots: list[int]) -> None:
        """New weights go to these engines, one after the other."""
        world = self.world
        world.newest_weights += 1
        world.count("pushes")
        self.weights, self.left = world.newest_weights, slots

    def _push_one(self) -> bool:
        engine = self.world.engines[self.left[0]]
        if not self.reachable(engine):
            return False
        self.left.pop(0)
        self.world.engine_side.hold(engine, self.weights)
        return True

    def reachable(self, engine: Engine) -> bool:
        """Its scheduler thread takes a call: it does not stand still, and is outside `schedule()`."""
        return self.world.now >= engine.frozen_until and engine.lookup is None

    def end(self) -> None:
        """Faults end: no push goes on, and every engine can say what it holds."""
        self.left = []
        for engine in self.world.engines:
            self.world.engine_side.hold(engine, engine.weights)
