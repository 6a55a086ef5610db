"""The end of a schedule: faults end, one hub leads, and what has to happen must happen in time (I4) and quietly (I5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochkv_fence.messages import Mode
from epochkv_fence.versions import FAILED
from tests.model.parts import RECLAIM_SECONDS, STAYS, Engine, HubProcess, Violation

if TYPE_CHECKING:
    from tests.model.world import World

SLACK = 2.0
"""For retries and the pace of rounds."""
WIPE_SECONDS = 10.0
"""A wipe is given up after this time."""
STEP = 0.05
STEADY_LEASES = 4
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
        for who in (*world.engines, *world.hubs):
            who.frozen_until = 0.0
        for engine in world.engines:
            if engine.leaving != STAYS:
                world.engine_side.restart_one(engine.index)
        for call in world.authority.calls:
            call.not_before = 0.0
        leaders = [process for process in world.hubs if process.term == world.authority.leader and process.hub.term == process.term]
        if leaders and not world.profile.restores and rng.random() < 0.5:
            self.process = leaders[0]
        else:
            world.authority.elect(self.process)
        self._turn()
        wanted = max(world.authority.record.target, world.spec.epoch, *(engine.agent.epoch or 0 for engine in world.engines))
        world.note(f"faults end; engines {'deaf' if self.deaf else 'answer'}; h{self.process.index} leads, {wanted} is wanted")
        self._until_published(wanted, self.process)
        if thorough:
            self._until_sharing()
            self._until_reclaimed()
            self._quiet()

    # ------------------------------------------------------------------ what must happen

    def _until_published(self, wanted: int, process: HubProcess) -> None:
        world = self.world
        world.hub_side.configure(process)
        limit = world.config.hold_seconds / min(world.rates) + SLACK
        if world.config.reclaim == "RemoveAll" or world.profile.reconfigures:
            limit += WIPE_SECONDS / min(world.rates)
        start, failed = world.now, self._failed_epoch()
        while world.authority.record.published < wanted:
            if self._failed_epoch() > failed:  # a trainer that pushed when faults ended is taken for dead: a reset of its own
                start, failed = world.now, self._failed_epoch()
            if world.now > start + limit:
                raise Violation(f"I4: {wanted} is not published {world.now - start:.2f} s after leadership and record")
            world.hub_side.watch(process)
            world.hub_side.ask(False, process)
            self._turn()

    def _failed_epoch(self) -> int:
        record = self.world.authority.record
        failed = record.origin is not None and not record.origin.inherited and record.origin.weights_version.startswith(FAILED)
        return record.target if failed else 0

    def _until_sharing(self) -> None:
        """Weights that are never pushed: every engine uses the published epoch soon, unless it waits for another one."""
        world = self.world
        patience = world.config.lease_seconds / min(world.rates) + SETTLE_SECONDS
        if world.config.reclaim == "RemoveAll" or world.profile.reconfigures:  # a new leader may wipe once more
            patience += WIPE_SECONDS / min(world.rates)
        limit = world.now + patience
        while True:
            if world.authority.record.target > world.authority.record.published:  # an engine asked for one more
                self._until_published(world.authority.record.target, self.process)
                limit = world.now + patience
            if world.trainer.marked_epoch == world.authority.record.target and world.profile.pushed:
                world.network.post(f"t{world.trainer.incarnation}", f"h{self.process.index}", world.trainer.repeated())
            late = [engine for engine in world.engines if not self._settled(engine)]
            if not late:
                return
            if world.now > limit:
                names = ", ".join(f"e{engine.index} ({engine.bound}, {engine.bound_mode.value})" for engine in late)
                raise Violation(f"I4: published {world.authority.record.published}, and without faults {names} is not in it")
            self._turn()

    def _settled(self, engine: Engine) -> bool:
        """In the published epoch, and in use of it if it may be: weights are never pushed, or a trainer listed this boot."""
        world, record = self.world, self.world.authority.record
        if not world.engine_side.live(engine) or engine.bound is None or engine.bound < record.published:
            return False
        trainer = world.trainer
        if world.profile.pushed:
            listed = trainer.marked_epoch == record.target and engine.agent.boot in trainer.listed
            return engine.bound_mode is Mode.USE or not listed
        return engine.bound_mode is Mode.USE and (world.profile.local == "private" or world.engine_side.shares(engine))

    def _until_reclaimed(self) -> None:
        """Keys of older epochs go away, also those that landed late."""
        world = self.world
        if world.config.reclaim != "Delete":
            return
        limit = world.now + 10 * RECLAIM_SECONDS / min(world.rates)
        while world.store.puts or world.store.older(world.authority.record.published):
            if world.now > limit:
                raise Violation(f"R: keys of older epochs stay: {world.store.older(world.authority.record.published)}")
            self._turn()

    def _quiet(self) -> None:
        """I5: one heartbeat per engine and third of a lease, one grant for it, one read for all; nothing else."""
        world = self.world
        for _ in range(int(2 * world.config.lease_seconds / STEP)):  # what the end of the faults set off
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
        reclaims = seconds / RECLAIM_SECONDS * max(world.rates) + 2
        for what, most in (
            ("hub messages", sum(allowed) + reclaims),
            ("leadership reads", sum(allowed)),
            ("agent ticks", sum(allowed)),
            ("recorded", 0),
            ("published", 0),
            ("proposals", sum(allowed)),  # one that is not taken is repeated with every heartbeat
        ):
            if grew.get(what, 0) > most:
                raise Violation(f"I5: {grew[what]} {what} in {STEADY_LEASES} quiet leases")

    # ------------------------------------------------------------------ time without faults

    def _turn(self) -> None:
        world = self.world
        process = self.process
        world.hub_side.finish(process)
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
        world.engine_side.reclaim()
        world.checks.step()
        world.now += STEP

    def _engines(self) -> None:
        for engine in self.world.engines:
            for _ in range(8):
                if self.world.now < engine.frozen_until or not self.world.engine_side.due(engine):
                    break
                self.world.engine_side.drive(engine)
            engine.lookup = None
            if engine.loads and not engine.paused:
                self.world.engine_side.serve_one(engine)
