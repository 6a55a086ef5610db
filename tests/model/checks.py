"""The invariants of the design page "fence", against the *authority's* record and each engine's own clock.

Never against what a hub believes. I1 and I2 are also checked where KV is used (`engines`), W and R where the store is
emptied (`store`, `hubs`, `engines`), I4 and I5 when the faults are over (`calm`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.parts import Violation

if TYPE_CHECKING:
    from tests.model.world import World


class Checks:
    """What was seen so far, and whether it may be."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.record_target = self.record_published = 0
        self.epoch_weights: dict[int, int] = {}
        self.cascade: int | None = None
        self.published = 0  # highest ever, also before a restore
        self.recorded = 0
        self.base_is_void = False  # the record went back to epoch 0, in which every engine counts as having base weights

    def step(self) -> None:
        """I1, I2, I3 as they stand now."""
        world = self.world
        record, now = world.authority.record, world.now
        published, target = record.published, record.target
        self.recorded = max(self.recorded, target)
        for engine in world.engines:
            agent = engine.agent
            epoch = agent.epoch
            if epoch is not None:
                if epoch < engine.highest:
                    raise Violation(f"I3: the epoch of e{engine.index} fell from {engine.highest} to {epoch}")
                engine.highest = epoch
                if epoch > self.recorded:
                    raise Violation(f"I3: e{engine.index} is at epoch {epoch}, which was never recorded")
            bound, clock = engine.bound, engine.clock
            if bound is None or clock.offset + now * clock.rate >= agent.lease_until:
                continue
            if bound < published:
                raise Violation(f"I2: published {published}, e{engine.index} may use epoch {bound}")
            if not engine.paused and world.engine_side.shares(engine):
                self._weights(engine.index, bound, engine.weights)
        if target < self.record_target or published < self.record_published or published > target:
            before = f"target {self.record_target}, published {self.record_published}"
            raise Violation(f"I3: the record went from {before} to target {target}, published {published}")
        self.record_target, self.record_published = target, published
        self.published = max(self.published, published)
        for process in world.hubs:
            hub = process.hub
            if hub.target < process.target or hub.published < process.published:
                raise Violation(f"I3: h{process.index} fell from {process.target}, {process.published} to {hub.target}, {hub.published}")
            process.target, process.published = hub.target, hub.published
        if self.cascade is not None and target > self.cascade + 1:
            raise Violation(f"I3: engines that reset together at epoch {self.cascade} raised the target to {target}")

    def _weights(self, index: int, epoch: int, weights: int) -> None:
        if epoch == 0 and self.base_is_void:
            return
        first = self.epoch_weights.setdefault(epoch, weights)
        if weights != first:
            raise Violation(f"I1: e{index} has weights {weights} and shares epoch {epoch}, which was first used with weights {first}")

    def restored(self) -> None:
        """An older record came back from a backup: what it says counts from here. Epoch 0 is the one that it cannot protect:
        nothing tells a hub that weights were pushed since, until somebody reports or asks for a later epoch."""
        self.record_target = self.record_published = 0
        self.base_is_void = self.base_is_void or self.world.authority.record.target == 0

    def cascade_began(self, target: int) -> None:
        """Every engine was reset alone at this epoch, all at once: one raise is enough for all of them."""
        self.cascade = target

    def cascade_ended(self) -> None:
        """Other reasons to raise may follow."""
        self.cascade = None
