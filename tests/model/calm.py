"""The end of a schedule: faults end, one hub leads, and what has to happen must happen in time (I4) and quietly (I5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.parts import GRACE, RECLAIM_SECONDS, STAYS, Engine, HubProcess, Violation, digest

if TYPE_CHECKING:
    from tests.model.world import World

SLACK = 2.0
"""For retries and the pace of rounds."""
STORE_SECONDS = 80.0
"""A store that fails is wiped again and again for a minute, and then cleaned key by key."""
STEP = 0.05
STEADY_LEASES = 4
TOLD_SECONDS = 0.5
SETTLE_SECONDS = 3.0


class Calm:
    """Runs a world without faults; engines may still be deaf."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.deaf = False
        self.process = world.hubs[0]

    def run(self) -> None:
        """Publication in time; then, if engines answer, sharing again, memory given back, and quiet."""
        world, rng = self.world, self.world.rng
        self.deaf = rng.random() < 0.5
        self.process = rng.choice(world.hubs)
        thorough = not self.deaf and rng.random() < 0.3
        world.calm = True
        everybody: list[Engine | HubProcess] = [*world.engines, *world.hubs]
        for who in everybody:
            who.frozen_until = 0.0
        for engine in world.engines:
            if engine.leaving != STAYS:
                world.engine_side.restart_one(engine.index)
        world.pushes.end()
        for call in world.authority.calls:
            call.not_before = 0.0
        leaders = [process for process in world.hubs if process.hub.state.lead.term == process.term == world.authority.leader]
        if leaders and not world.profile.restores and rng.random() < 0.5:
            self.process = leaders[0]
        else:
            world.authority.elect(self.process)
        self._turn()
        wanted = max(world.authority.record.target, world.spec_epoch, *(engine.agent.epoch or 0 for engine in world.engines))
        world.note(f"faults end; engines {'deaf' if self.deaf else 'answer'}; h{self.process.index} leads, {wanted} is wanted")
        self._until_published(wanted, self.process)
        if thorough:
            self._until_sharing()
            if rng.random() < 0.5:
                self._reset_once_more()
            self._until_told()
            if rng.random() < 0.3:
                self._one_sleeps()
            self._until_reclaimed()
            self._quiet()

    # ------------------------------------------------------------------ what must happen

    def _until_published(self, wanted: int, process: HubProcess) -> None:
        world = self.world
        world.hub_side.configure(process)
        limit = world.config.fence_timeout_seconds / min(world.rates) + SLACK
        start = world.now
        while world.authority.record.published < wanted:
            if world.now > start + limit:
                raise Violation(f"I4: {wanted} is not published {world.now - start:.2f} s after leadership and record")
            world.hub_side.watch(process)
            world.hub_side.ask(process)
            self._turn()

    def _until_sharing(self) -> None:
        """Every engine uses the published epoch soon, unless its own reset waits for another one."""
        world = self.world
        patience = world.config.lease_seconds / min(world.rates) + SETTLE_SECONDS
        limit = world.now + patience
        while True:
            if world.authority.record.target > world.authority.record.published:  # an engine asked for one more
                self._until_published(world.authority.record.target, self.process)
                limit = world.now + patience
            late = [engine for engine in world.engines if not self._settled(engine)]
            if not late:
                return
            if world.now > limit:
                names = ", ".join(f"e{engine.index} ({engine.bound})" for engine in late)
                raise Violation(f"I4: published {world.authority.record.published}, and without faults {names} is not in it")
            self._turn()

    def _reset_once_more(self) -> None:
        """A reset from its beginning to its end, so that what follows it is this hub's to do."""
        world = self.world
        world.checks.cascade_ended()
        wipes = world.counts.get("wipes of the store", 0)
        world.spec_epoch = world.authority.record.target + 1
        self._until_published(world.spec_epoch, self.process)
        self._until_sharing()
        if world.config.reclaim == "RemoveAll":
            self._until_wiped(wipes)

    def _until_wiped(self, before: int) -> None:
        """R: the store is wiped once for a published epoch, or it is given up and said."""
        world, hub = self.world, self.process.hub
        limit = world.now + STORE_SECONDS / min(world.rates)
        while hub.state.wiper.due_at() < float("inf"):
            if world.now > limit:
                raise Violation("R: the store is wiped without end")
            self._turn()
        wiped = world.counts.get("wipes of the store", 0) > before
        if not wiped and not hub.snapshot(self.process.clock.read(world.now)).wipe_failed:
            raise Violation("R: the store was not wiped after publication, and nobody says so")

    def _settled(self, engine: Engine) -> bool:
        """In the published epoch, and in use of it."""
        record = self.world.authority.record
        return engine.bound is not None and engine.bound >= record.published and self.world.serving.shares(engine)

    def _until_told(self) -> None:
        """V: when a push reaches every engine, the hub shows that at once, not with the next heartbeats; and L."""
        world = self.world
        weights = world.newest_weights = world.newest_weights + 1
        for engine in world.engines:
            world.engine_side.hold(engine, weights)
        end = world.now + TOLD_SECONDS
        while world.now < end:
            self._turn()
        world.hub_side.watch(self.process)
        shown = self.process.hub.snapshot(self.process.clock.read(world.now))
        known = {view.instance: view.weights for view in shown.engines}
        late = [engine for engine in world.engines if known.get(engine.agent.instance) != digest(weights)]
        if late:
            raise Violation(f"V: {TOLD_SECONDS} s after a push the leader does not know that it reached e{late[0].index}: {known}")
        world.checks.labelled("the leader", shown.labels)

    def _one_sleeps(self) -> None:
        """While weights become nobody's, an engine cannot say what it holds; then it can, and nothing else changes."""
        world = self.world
        sleeper = world.engines[0]
        weights = world.newest_weights
        for engine in world.engines[1:]:
            world.engine_side.hold(engine, weights)
        world.engine_side.hold(sleeper, weights, "asleep")
        end = world.now + 2 * GRACE / min(world.rates)
        while world.now < end:
            self._turn()
        world.engine_side.hold(sleeper, weights)

    def _until_reclaimed(self) -> None:
        """R: keys of older epochs go away, and those of weights that nobody holds, also those that landed late."""
        world = self.world
        if world.config.reclaim == "Retain":
            return
        held = {digest(engine.weights) for engine in world.engines}
        seconds = 2 * GRACE + 10 * RECLAIM_SECONDS + (STORE_SECONDS if world.profile.store_fails else 0.0)
        limit = world.now + seconds / min(world.rates)
        while world.store.puts or world.store.garbage(world.authority.record.published, held):
            if world.now > limit:
                published = world.authority.record.published
                garbage = world.store.garbage(published, held)
                raise Violation(f"R: published {published}, and keys that nobody finds stay: epoch, weights, block {garbage}")
            self._turn()

    def _quiet(self) -> None:
        """I5: one heartbeat per engine and third of a lease, one grant for it, one read for all; nothing else."""
        world = self.world
        for _ in range(int((GRACE + 2 * world.config.lease_seconds) / min(world.rates) / STEP)):  # what the end of the faults set off
            self._turn()
        self._until_published(world.authority.record.target, self.process)
        for _ in range(int(world.config.lease_seconds / STEP)):
            self._turn()
        before = dict(world.counts)
        beats = [engine.beats for engine in world.engines]
        seconds = STEADY_LEASES * world.config.lease_seconds
        end = world.now + seconds
        while world.now < end:
            self._turn()
        allowed = []
        for engine, sent in zip(world.engines, beats, strict=True):
            most = 3 * STEADY_LEASES * engine.clock.rate + 3  # the ends of the window, and one nudge
            allowed.append(most)
            if engine.beats - sent > most:
                raise Violation(f"I5: e{engine.index} sent {engine.beats - sent} heartbeats in {STEADY_LEASES} leases")
        grew = {key: world.counts[key] - before.get(key, 0) for key in world.counts}
        # A proposal that is not taken is repeated with every heartbeat.
        beaten = dict.fromkeys(("hub messages", "leadership reads", "agent ticks", "proposals"), sum(allowed))
        over = dict.fromkeys(("reclaims", "wipes of the store", "sweeps of the store", "recorded", "published"), 0)
        for what, most in {**beaten, **over}.items():
            if grew.get(what, 0) > most:
                raise Violation(f"I5: {grew[what]} {what} in {STEADY_LEASES} quiet leases")

    # ------------------------------------------------------------------ time without faults

    def _turn(self) -> None:
        world = self.world
        process = self.process
        world.hub_side.drain(process)
        if world.hub_side.due(process):
            world.hub_side.drive(process)
        world.authority.settle()
        packets, world.network.packets = world.network.packets, []
        for packet in packets:
            to_leader = packet.receiver == f"h{process.index}"
            if to_leader or (packet.receiver[0] == "e" and not self.deaf):
                for _ in range(8):
                    if world.network.hand_over(packet):
                        break
                    self._engines()
        self._engines()
        world.store.land()
        world.removals.land()
        world.checks.step()
        world.now += STEP

    def _engines(self) -> None:
        for engine in self.world.engines:
            for _ in range(8):
                if self.world.now < engine.frozen_until or not self.world.engine_side.due(engine):
                    break
                self.world.engine_side.drive(engine)
            engine.lookup = None
            if engine.loads:
                self.world.serving.serve_one(engine)
