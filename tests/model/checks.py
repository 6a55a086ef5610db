"""The invariants of the design page "fence", against the *authority's* record and each engine's own clock.

Never against what a hub believes. I1 and I2 are also checked where KV is used (`engines`, `store`), R and V where a hub acts or
shows something (`hubs`), I4 and I5 when the faults are over (`calm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Reclaim, Status
from tests.model.parts import Engine, HubProcess, Violation

if TYPE_CHECKING:
    from tests.model.world import World

SNAPSHOT_EVERY = 8
"""Steps of a hub from one snapshot that is checked to the next."""
CERTAIN_LABELS = 8
"""Of the newest labels that were answered; older ones may have had to go, as repetitions of others came late."""


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.record_target = self.record_published = 0
        self.cascade: int | None = None
        self.published = 0  # highest ever, also before a restore
        self.recorded = 0
        self.promised = 0  # a trainer was told that nobody uses a lower epoch
        self.forgotten = float("-inf")  # and that nothing made before is used
        self.asked_labels: dict[bytes, set[str]] = {}
        self.labels: dict[bytes, None] = {}  # answered, the newest last

    def step(self) -> None:
        """I1, I2, I3 as they stand now."""
        world = self.world
        record, now = world.authority.record, world.now
        published, target = record.published, record.target
        self.recorded = max(self.recorded, target)
        lowest = max(published, self.promised)
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
            if bound < lowest:
                raise Violation(f"I2: {self.why(bound)}, e{engine.index} may use epoch {bound}")
        if target < self.record_target or published < self.record_published or published > target:
            before = f"target {self.record_target}, published {self.record_published}"
            raise Violation(f"I3: the record went from {before} to target {target}, published {published}")
        self.record_target, self.record_published = target, published
        self.published = max(self.published, published)
        for process in world.hubs:
            known, held = process.hub.state.record, (process.target, process.published)
            if known.target < process.target or known.published < process.published:
                raise Violation(f"I3: h{process.index} fell from {held} to {known.target}, {known.published}")
            process.target, process.published = known.target, known.published
        if self.cascade is not None and target > self.cascade + 1:
            raise Violation(f"I3: engines that reset together at epoch {self.cascade} raised the target to {target}")

    def why(self, epoch: int) -> str:
        """Who says that nobody uses this epoch any more."""
        published = self.world.authority.record.published
        return f"published {published}" if epoch < published else f"a trainer counts on {self.promised}"

    def use(self, engine: Engine, epoch: int, made_at: float, where: str) -> None:
        if epoch < max(self.world.authority.record.published, self.promised):
            raise Violation(f"I2: {self.why(epoch)}, and e{engine.index} uses a block of epoch {epoch} from {where}")
        if made_at < self.forgotten:
            raise Violation(f"I1: e{engine.index} uses a block of epoch {epoch} from {where}, made before a reset that is done")
        if epoch <= engine.cleared:
            raise Violation(f"I1: e{engine.index} uses a block of epoch {epoch} from {where}; its caches were reset at {engine.cleared}")

    # ------------------------------------------------------------------ what hubs ask for and show

    def shown(self, process: HubProcess, actions: list[ev.Action], now: float, *, new_weights: bool) -> None:
        """V, R and L of what a hub shows and asks for, compared with what it was told."""
        hub, told, who = process.hub, process.history, f"h{process.index}"
        told.compare(hub)
        if new_weights and not any(isinstance(action, ev.Changed) for action in actions):
            raise Violation(f"V: {who} hears of other weights and does not say that something has changed")
        for action in actions:
            if isinstance(action, ev.RemoveAll) and not told.found < action.epoch <= self.published:
                raise Violation(f"R: {who} empties the store for {action.epoch}; it found {told.found}, and {self.published} is published")
            if not isinstance(action, ev.Send):
                continue
            if isinstance(action.message, Reclaim) and (wrong := told.wrong_sweep(hub, action.message, now)):
                raise Violation(f"R: {who} has keys removed, and {wrong}")
            if isinstance(action.message, Status) and (
                wrong := told.wrong_status(hub, action.message, now) or self._missed(process, action.message)
            ):
                raise Violation(f"V: {who} answers a trainer, and {wrong}")
        process.steps += 1
        if hub.state.leading and (new_weights or process.steps % SNAPSHOT_EVERY == 0):
            wrong = told.wrong_view(hub, hub.snapshot(now), now)
            if wrong:
                raise Violation(f"V: {who}: {wrong}")

    def _missed(self, process: HubProcess, page: Status) -> str:
        """Which engine with a lease the one that leads does not know, and does not say that there may be some."""
        world = self.world
        if page.settling_seconds > 0 or process.term != world.authority.leader:
            return ""
        known = process.hub.state.instances.known
        missed = [engine for engine in world.engines if engine.live(world.now) and engine.agent.instance not in known]
        return f"does not know e{missed[0].index}, which has a lease" if missed else ""

    # ------------------------------------------------------------------ what somebody was told

    def reset_is_done(self, epoch: int, called_at: float) -> None:
        """A reset has returned: nobody uses older epochs, nor what was made before it was called for."""
        self.promised = max(self.promised, epoch)
        if not self.world.counts.get("restores"):
            self.forgotten = max(self.forgotten, called_at)

    def label_asked(self, weights: bytes, label: str) -> None:
        self.asked_labels.setdefault(weights, set()).add(label)

    def label_answered(self, weights: bytes) -> None:
        """L: what is answered is on record."""
        self.labels.pop(weights, None)
        self.labels[weights] = None
        self.labelled("the record", self.world.authority.record.labels)

    def labelled(self, who: str, labels: Mapping[bytes, str]) -> None:
        """L: whoever has to know what weights are called does."""
        for weights in list(self.labels)[-CERTAIN_LABELS:]:
            asked = self.asked_labels[weights]
            if labels.get(weights) not in asked:
                raise Violation(f"L: {who} has {labels.get(weights)!r} for weights {weights.hex()[-4:]}, called {asked}")

    # ------------------------------------------------------------------ restores, and engines that reset together

    def restored(self) -> None:
        """An older record came back from a backup: what it says counts from here, and what was promised before is void."""
        self.record_target = self.record_published = self.promised = 0
        self.forgotten = float("-inf")
        self.labels.clear()
        for engine in self.world.engines:  # of an epoch that was published and lost it knows nothing, and it comes a second time
            engine.cleared = min(engine.cleared, max(engine.bound or 0, self.world.authority.record.published))

    def cascade_began(self, target: int) -> None:
        """Every engine was reset alone at this epoch, all at once: one raise is enough for all of them."""
        self.cascade = target

    def cascade_ended(self) -> None:
        self.cascade = None
