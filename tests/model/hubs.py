"""Hub processes: the production `Hub` and what its driver (`transport.HubServer`) does around it.

The actions of a step are done one by one; the process may freeze between any two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Origin, Term
from epochkv_fence.messages import Error, Grant, Mode, Refusal, Source
from tests.model.parts import Call, HubProcess, Violation

if TYPE_CHECKING:
    from tests.model.world import World

SPLIT = 0.2
"""How often the actions of a step are not done at once."""


class HubSide:
    """Both hubs' drivers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.instances = 0

    def make(self, index: int, incarnation: int = 0) -> HubProcess:
        """A new process, with the configuration of the pool as it is now."""
        self.instances += 1
        hub = self.world.rules.hub(self.world.config, self.instances.to_bytes(8, "big"))
        return HubProcess(index, self.world.clock(), hub, f"hub{index}.{incarnation}", incarnation)

    def restart(self) -> None:
        """A process dies; another one takes its place."""
        world = self.world
        index = world.rng.randrange(2)
        world.note(f"h{index} restarts")
        world.count("hub restarts")
        world.hubs[index] = self.make(index, world.hubs[index].incarnation + 1)

    def free(self, process: HubProcess) -> bool:
        """Whether it runs and has done all that its last step asked for."""
        return self.world.now >= process.frozen_until and not process.queue

    # ------------------------------------------------------------------ steps and actions

    def step(self, process: HubProcess, event: ev.Event, readers: str | None = None) -> None:
        """One event; its actions follow, now or one by one."""
        world = self.world
        actions = process.hub.step(event, process.clock.read(world.now))
        if any(isinstance(action, ev.Wipe) for action in actions):
            found = readers if isinstance(event, ev.RoundVerified) else world.store.readers()
            if found:
                raise Violation(f"W: a wipe is decided by h{process.index} while {found}")
        process.queue += actions
        if actions and (world.calm or world.rng.random() >= SPLIT):
            self._drain(process)

    def _drain(self, process: HubProcess) -> None:
        while process.queue:
            self._do(process, process.queue.pop(0))

    def _do(self, process: HubProcess, action: ev.Action) -> None:
        world = self.world
        match action:
            case ev.Send(peer, message):
                if isinstance(message, Error) and message.code is not Refusal.NOT_LEADING:
                    raise Violation(f"a hub refused a message: {message}")
                if isinstance(message, Grant):
                    self._keeps_use(process, message)
                world.count("hub messages")
                world.network.post(f"h{process.index}", peer.decode(), message)
            case ev.Record(epoch, origin):
                world.authority.call(process, "record", epoch, origin)
            case ev.Publish(epoch):
                wiper = process.hub._wiper
                world.authority.call(process, "publish", epoch, origin=wiper.done and not wiper.given_up)
            case ev.NoteGranting():
                world.authority.call(process, "note", 0)
            case ev.NoteUpdate(note):
                world.authority.call(process, "note update", 0, note)
            case ev.Wipe(epoch, before):
                call = world.authority.call(process, "wipe", epoch)
                call.deadline = (before - process.clock.offset) / process.clock.rate
            case ev.Sweep(below):
                world.authority.call(process, "sweep", below)
            case ev.Changed():
                world.count("changes")

    def _keeps_use(self, process: HubProcess, grant: Grant) -> None:
        """Whoever reports that it uses an epoch keeps it, whichever hub grants; but for a store that is to be wiped, or that
        the hub before may still wipe, which lasts no longer than the epoch is unpublished."""
        profile, hub = self.world.profile, process.hub
        if grant.mode is Mode.USE or profile.policy == "RemoveAll" or profile.reconfigures:
            return
        granted_at = process.clock.read(self.world.now) if grant.moment is None else grant.moment.at  # it may be sent later
        if hub._others_may_wipe(granted_at):
            return
        for engine in self.world.engines:
            uses = engine.agent.boot == grant.boot and engine.said.get(grant.seq) == (grant.epoch, Mode.USE)
            if uses and engine.clock.read(self.world.now) < engine.sent[grant.seq] + grant.lease_seconds:
                raise Violation(f"I4: h{process.index} takes epoch {grant.epoch} away from e{engine.index}, which uses it")

    # ------------------------------------------------------------------ time and rounds

    def turn(self) -> bool:
        """One hub goes on; False: none has anything to do."""
        now = self.world.now
        able = [process for process in self.world.hubs if now >= process.frozen_until and (process.queue or self.due(process))]
        if able:
            process = self.world.rng.choice(able)
            if process.queue:
                self._do(process, process.queue.pop(0))
            else:
                self.drive(process)
        return bool(able)

    def due(self, process: HubProcess) -> bool:
        """Whether its loop has something to do."""
        now = process.clock.read(self.world.now)
        return now >= process.hub.tick_at() or self._round_due(process, now)

    def _round_due(self, process: HubProcess, now: float) -> bool:
        return process.term is not None and not process.round_running and process.hub.round_at(now) <= now

    def drive(self, process: HubProcess) -> None:
        """One turn of its loop: a tick, then a round."""
        now = process.clock.read(self.world.now)
        if now >= process.hub.tick_at():
            self.step(process, ev.Tick())
            if process.queue:
                return
        if not self._round_due(process, now):
            return
        process.rounds += 1
        process.round_running = True
        if not self.world.rules.read_before_collecting:
            self.step(process, ev.RoundBegan(process.rounds))
            if not process.hub.round_open:
                process.round_running = False
                return
        self.world.count("leadership reads")
        self.world.authority.call(process, "verify", process.rounds)

    def verified(self, process: HubProcess, call: Call) -> None:
        """A leadership read has answered."""
        if process.term != call.term:
            if self.world.rules.read_in_any_term and process.term == self.world.authority.leader:
                self.step(process, ev.RoundVerified(call.value), readers=call.origin)
            return
        process.round_running = False
        if not call.result:
            self.lose(process)
            return
        if self.world.rules.read_before_collecting:
            self.step(process, ev.RoundBegan(call.value))
        self.step(process, ev.RoundVerified(call.value), readers=call.origin)

    # ------------------------------------------------------------------ leadership

    def takeover(self) -> None:
        """A hub takes leadership."""
        process = self.world.rng.choice(self.world.hubs)
        if self.free(process):
            self.world.count("takeovers")
            self.world.authority.elect(process)

    def installed(self, process: HubProcess, term: Term | None) -> None:
        """The write that took leadership has returned: only now is the record read."""
        process.term = term
        process.round_running = False
        self.step(process, ev.SteppedDown())
        self.world.authority.call(process, "load", 0)

    def loaded(self, process: HubProcess, acquired: ev.Acquired) -> None:
        """The record was read, and with it the pool's configuration."""
        if not self.world.rules.config_late:
            self.configure(process)
        self.step(process, acquired)

    def told_late(self) -> bool:
        """A hub that does not lead learns it; False: there is none."""
        for process in self.world.hubs:
            if process.term is not None and process.term != self.world.authority.leader and self.free(process):
                self.lose(process)
                return True
        return False

    def lose(self, process: HubProcess) -> None:
        """It steps down."""
        process.term = None
        process.round_running = False
        self.step(process, ev.SteppedDown())

    # ------------------------------------------------------------------ what else a hub is told

    def observe(self) -> None:
        """A watch shows the record, as it is or as it was."""
        process = self.world.rng.choice(self.world.hubs)
        if self.free(process):
            history = self.world.authority.history
            seen = history[-1] if self.world.rng.random() < 0.7 else self.world.rng.choice(history[-6:])
            self.step(process, ev.Observed(seen))

    def watch(self, process: HubProcess) -> None:
        """A watch shows this hub the record as it is."""
        if self.free(process):
            self.step(process, ev.Observed(self.world.authority.record))

    def ask(self, fresh: bool, process: HubProcess | None = None) -> None:
        """`spec.resetEpoch` as it is now reaches one of the hubs; fresh: it saw the change itself."""
        world = self.world
        process = process or world.rng.choice(world.hubs)
        if world.spec.epoch and self.free(process):
            at = process.clock.read(world.now) if fresh else None
            spec = world.spec
            self.step(process, ev.Asked(spec.epoch, at, Origin(Source.SPEC, spec.version), spec.ready))

    def finish(self, process: HubProcess) -> None:
        """It does all that its last step asked for."""
        self._drain(process)

    def reconfigure(self) -> None:
        """The pool's configuration changes, or a hub learns that it has."""
        process = self.world.rng.choice(self.world.hubs)
        if not self.free(process):
            return
        if process.hub.config != self.world.config:
            self.configure(process)
        elif self.world.profile.reconfigures:
            self.world.change_config()

    def configure(self, process: HubProcess) -> None:
        """This hub learns the pool's configuration."""
        if process.hub.config != self.world.config:
            self.step(process, ev.Configured(self.world.config))
