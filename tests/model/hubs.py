"""Hub processes: the production `Hub` and what its driver (`net.server.HubServer`) does around it.

The actions of a step are done one by one; the process may freeze between any two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_LABELS, Error, Heartbeat, Leave, Message, Reclaim, Refusal, Source
from epochkv_fence.protocol.pool import Term
from tests.model.parts import Call, HubProcess, Violation

if TYPE_CHECKING:
    from tests.model.world import World

SPLIT = 0.2
"""How often the actions of a step are not done at once."""


class HubSide:
    def __init__(self, world: World) -> None:
        self.world = world

    def make(self, index: int, incarnation: int = 0) -> HubProcess:
        """A new process, with the configuration of the pool as it is now."""
        return HubProcess(index, self.world.clock(), self.world.rules.hub(self.world.config), f"hub{index}.{incarnation}", incarnation)

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

    def hear(self, process: HubProcess, peer: bytes, message: Message) -> None:
        now, new = process.clock.read(self.world.now), False
        if isinstance(message, Heartbeat):
            new = process.history.hear(message, message.instance in process.hub.state.instances.known, now)
        elif isinstance(message, Leave):
            process.history.leave(message.instance)
        self.step(process, ev.Heard(peer, message), new_weights=new)

    def step(self, process: HubProcess, event: ev.Event, *, new_weights: bool = False) -> None:
        """One event; its actions follow, now or one by one. `new_weights`: it tells what an engine did not say before."""
        world = self.world
        now = process.clock.read(world.now)
        if isinstance(event, ev.Acquired):
            process.history.led_at, process.history.found = now, event.record.published
        actions = process.hub.step(event, now)
        world.checks.shown(process, actions, now, new_weights=new_weights)
        if isinstance(event, ev.Observed) and process.hub.state.leading:
            shown = process.hub.snapshot(now).labels
            if len(shown) < MAX_LABELS and not set(event.record.labels) <= set(shown):
                raise Violation(f"L: h{process.index} sees labels {event.record.labels} on record and shows {shown}")
        process.queue += actions
        if actions and (world.calm or world.rng.random() >= SPLIT):
            self.drain(process)

    def drain(self, process: HubProcess) -> None:
        while process.queue:
            self._do(process, process.queue.pop(0))

    def _do(self, process: HubProcess, action: ev.Action) -> None:
        world = self.world
        match action:
            case ev.Send(peer, message):
                if isinstance(message, Error) and message.code is not Refusal.NOT_LEADING:
                    raise Violation(f"a hub refused a message: {message}")
                if isinstance(message, Reclaim):
                    world.count("reclaims")
                world.count("hub messages")
                world.network.post(f"h{process.index}", peer.decode(), message)
            case ev.RecordTarget(epoch, origin):
                world.authority.call(process, "record", epoch, origin)
            case ev.Publish(epoch):
                world.authority.call(process, "publish", epoch)
            case ev.NoteGranting():
                world.authority.call(process, "note", 0)
            case ev.NoteLabels(labels):
                world.authority.call(process, "label", 0, dict(labels))
            case ev.RemoveAll(epoch, sweep):
                world.authority.call(process, "sweep" if sweep else "wipe", epoch)
            case ev.Changed():
                world.count("changes")

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
        if process.term != call.term:
            if self.world.rules.read_in_any_term and process.term == self.world.authority.leader:
                self.step(process, ev.RoundVerified(call.value))
            return
        process.round_running = False
        if not call.result:
            self.lose(process)
            return
        if self.world.rules.read_before_collecting:
            self.step(process, ev.RoundBegan(call.value))
        self.step(process, ev.RoundVerified(call.value))

    # ------------------------------------------------------------------ leadership

    def installed(self, process: HubProcess, term: Term | None) -> None:
        """The write that took leadership has returned: only now is the record read."""
        process.term = term
        process.round_running = False
        self.step(process, ev.SteppedDown())
        self.world.authority.call(process, "load", 0)

    def loaded(self, process: HubProcess, acquired: ev.Acquired) -> None:
        if not self.world.rules.config_late:
            self.configure(process)
        self.step(process, acquired)
        shown = process.hub.snapshot(process.clock.read(self.world.now)).labels
        if list(shown.items()) != list(acquired.record.labels.items()):
            raise Violation(f"L: h{process.index} leads with labels {shown}, on record are {acquired.record.labels}")

    def lose(self, process: HubProcess) -> None:
        process.term = None
        process.round_running = False
        self.step(process, ev.SteppedDown())

    # ------------------------------------------------------------------ what else a hub is told

    def watch(self, process: HubProcess) -> None:
        """A watch shows this hub the record as it is."""
        if self.free(process):
            self.step(process, ev.Observed(self.world.authority.record))

    def ask(self, process: HubProcess | None = None) -> None:
        """`spec.resetEpoch` as it is now reaches one of the hubs."""
        world = self.world
        process = process or world.rng.choice(world.hubs)
        if world.spec_epoch and self.free(process):
            self.step(process, ev.Asked(world.spec_epoch, Source.SPEC))

    def configure(self, process: HubProcess) -> None:
        if process.hub.state.config != self.world.config:
            self.step(process, ev.Configured(self.world.config))


class Tidings:
    """What hubs learn at any time, in any order: that they lead or do not, the record, the configuration."""

    def __init__(self, world: World) -> None:
        self.world = world

    def takeover(self) -> None:
        process = self.world.rng.choice(self.world.hubs)
        if self.world.hub_side.free(process):
            self.world.count("takeovers")
            self.world.authority.elect(process)

    def told_late(self) -> bool:
        """A hub that does not lead learns it; False: there is none."""
        for process in self.world.hubs:
            if process.term is not None and process.term != self.world.authority.leader and self.world.hub_side.free(process):
                self.world.hub_side.lose(process)
                return True
        return False

    def observe(self) -> None:
        """A watch shows the record, as it is or as it was."""
        process = self.world.rng.choice(self.world.hubs)
        if self.world.hub_side.free(process):
            history = self.world.authority.history
            seen = history[-1] if self.world.rng.random() < 0.7 else self.world.rng.choice(history[-6:])
            self.world.hub_side.step(process, ev.Observed(seen))

    def reconfigure(self) -> None:
        """The pool's configuration changes, or a hub learns that it has."""
        process = self.world.rng.choice(self.world.hubs)
        if not self.world.hub_side.free(process):
            return
        if process.hub.state.config != self.world.config:
            self.world.hub_side.configure(process)
        elif self.world.profile.reconfigures:
            self.world.change_config()
