"""Weights change under running engines, in any order and without telling anybody: names carry them, so every order is right.

Pushes reach one engine after the other, all of them or some; what was pushed before may come back; and for a while an engine
may not be able to say what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.parts import Engine
    from tests.model.world import World

NOTES = ("asleep", "rank 1: no answer")


class Pushes:
    """At most one push is under way, as far as whoever pushes is concerned."""

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
