"""A world for the fence: the production `Agent` and `Hub`, everything around them made of seeded random faults.

Engines, hubs, network, authority and trainer take steps in an order drawn from a seed. Messages are lost, duplicated,
reordered and late by any amount; engines restart and freeze between any two actions, and their clocks run at any rate the
margin allows; leadership moves at any time, old leaders learn it late, their reads and writes land late or not at all.
After every step the invariants of the design page "fence" are checked against the *authority's* record and each engine's
own clock, never against what the hub believes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epochkv_fence import agent as ag
from epochkv_fence import hub_events as ev
from epochkv_fence.agent import Agent
from epochkv_fence.authority import PoolRecord, Term
from epochkv_fence.hub import Hub
from epochkv_fence.messages import Bump, Error, Heartbeat, Message, Mode, Refusal, decode, encode
from epochkv_fence.pool import PoolConfig

LEASE = 4.0
MARGIN = 1.0  # max(1 s, 10 %)
JOIN_AFTER = 3.0
PUSH_TO_ASK = 2.0
"""The trainer asks within this time after its push began; what is seen later counts as seen in a listing."""
SLOW, FAST = 0.805, 1.2
"""Rates of engine clocks: a lease of 4 s on the slowest lasts 4.97 s, inside lease and margin."""
MAX_IN_FLIGHT = 60
SLACK = 2.0
"""For retries and the pace of rounds, when checking that publication comes in time."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Faults:
    """Rules outside the state machines that a mutant takes away."""

    verify_always: bool = False
    read_before_collecting: bool = False
    holder_only: bool = False
    stale_load: bool = False
    record_lowers: bool = False
    agent: Callable[[bytes], Agent] = Agent
    hub: Callable[[PoolConfig], Hub] = Hub


@dataclass
class Engine:
    """One engine slot; a restart puts a new boot into it."""

    index: int
    rate: float
    offset: float
    agent: Agent
    born: float
    weights: int = 0
    paused: bool = False
    bound: int | None = None
    bound_mode: Mode = Mode.BYPASS
    settling: bool = False
    queue: list[ag.Action] = field(default_factory=list)
    frozen_until: float = 0.0


@dataclass
class HubProcess:
    """One hub process slot and what `transport.HubServer` keeps around the state machine."""

    index: int
    offset: float
    hub: Hub
    holder: str
    term: Term | None = None
    incarnation: int = 0
    rounds: int = 0
    round_running: bool = False
    frozen_until: float = 0.0


@dataclass
class Operation:
    """A call to the authority: its effect and its answer are two steps, either may come late or never."""

    process: HubProcess
    incarnation: int
    kind: str
    value: int
    term: Term | None
    not_before: float = 0.0
    effective: bool = False
    answered: bool = False
    result: Any = None


@dataclass
class Packet:
    """A message in flight, as frames. `engine` is None on the way to a hub."""

    hub: int
    engine: int | None
    frames: list[bytes]
    not_before: float = 0.0


class World:
    """One schedule."""

    def __init__(self, seed: int, num_engines: int = 2, faults: Faults | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.pace = self.rng.choice([0.2, 0.4, 0.8, 1.5])
        self.disorder = self.rng.choice([0.1, 0.4, 0.9])
        self.faults = faults or Faults()
        self.now = 1000.0
        self.trace: list[str] = []
        self.pushed = self.rng.random() < 0.5
        self.config = PoolConfig(
            uid="u",
            name="sim",
            client_public_keys=(),
            lease_seconds=LEASE,
            join_after_seconds=JOIN_AFTER,
            weights_source="Pushed" if self.pushed else "Model",
        )
        self.record = PoolRecord()
        self.leader = Term("nobody", 0)
        self.operations: list[Operation] = []
        self.packets: list[Packet] = []
        self.boots = 0
        self.routes: dict[bytes, int] = {}
        self.engines = [self._new_engine(i) for i in range(num_engines)]
        self.hubs = [self._new_hub(i) for i in range(2)]
        self.epoch_weights = {0: 0}
        self.next_weights = 1
        self.push: dict[str, Any] | None = None
        self.high: dict[Any, int] = {}
        self.counts: dict[str, int] = {}

    # ------------------------------------------------------------------ making things

    def _new_engine(self, index: int) -> Engine:
        self.boots += 1
        boot = self.boots.to_bytes(16, "big")
        rate = self.rng.choice([SLOW, 1.0, FAST, self.rng.uniform(SLOW, FAST)])
        engine = Engine(index, rate, self.rng.uniform(0, 1e4), self.faults.agent(boot), self.now)
        engine.queue = engine.agent.step(ag.Started(), self.engine_clock(engine))
        return engine

    def _new_hub(self, index: int, incarnation: int = 0) -> HubProcess:
        hub = self.faults.hub(self.config)
        return HubProcess(index, self.rng.uniform(0, 1e4), hub, f"hub{index}.{incarnation}", incarnation=incarnation)

    def engine_clock(self, engine: Engine) -> float:
        return engine.offset + self.now * engine.rate

    def hub_clock(self, process: HubProcess) -> float:
        return process.offset + self.now

    # ------------------------------------------------------------------ running

    def run(self, steps: int) -> None:
        """Random steps, then all faults end and publication must follow."""
        self._elect(self.hubs[0])
        trouble = self.rng.choice([0.1, 0.3, 1.0])
        choices: list[tuple[float, Callable[[], None]]] = [
            (16, self._advance),
            (30, self._deliver),
            (26, self._engine_step),
            (16, self._hub_step),
            (24, self._operate),
            (4, self._trainer_step),
            (1.0 * trouble, self._restart_engine),
            (0.3 * trouble, self._restart_hub),
            (1.2 * trouble, self._freeze),
            (1.4 * self.rng.choice([0.2, 0.5, 1.0]), self._takeover),
            (0.6 * self.rng.choice([0.1, 1.0]), self._told_late),
            (0.8 * self.rng.choice([0.1, 1.0]), self._observe),
        ]
        weights = [weight for weight, _ in choices]
        calls = [call for _, call in choices]
        try:
            for call in self.rng.choices(calls, weights, k=steps):
                call()
                self.check()
            self.counts["published under faults"] = self.counts.get("published", 0)
            self._heal()
        except Violation as violation:
            raise Violation(f"seed {self.seed}: {violation}\n" + "\n".join(self.trace[-40:])) from None

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now - 1000:8.2f}  {text}")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _advance(self) -> None:
        self.now += self.pace * self.rng.choice([0.02, 0.1, 0.3, 0.3, 1.0])

    # ------------------------------------------------------------------ network

    def _post(self, hub: int, engine: int | None, message: Message) -> None:
        self.packets.append(Packet(hub, engine, encode(message), self._late()))
        if len(self.packets) > MAX_IN_FLIGHT:
            self._count("lost")
            self.packets.pop(self.rng.randrange(len(self.packets)))

    def _late(self) -> float:
        """Until when a message or an answer is held back: mostly not at all, sometimes for longer than any lease."""
        return self.now + self.rng.choice([0.5, 2.0, 6.0, 12.0]) if self.rng.random() < 0.1 else 0.0

    def _deliver(self) -> None:
        ready = [index for index, packet in enumerate(self.packets) if packet.not_before <= self.now]
        if not ready:
            return
        index = self.rng.choice(ready) if self.rng.random() < self.disorder else ready[0]
        packet = self.packets[index]
        fate = self.rng.random()
        if fate < 0.05:
            self._count("lost")
            self.packets.pop(index)
            return
        if packet.engine is None:
            process = self.hubs[packet.hub]
            if self._frozen(process):
                return
            self._hub(process, ev.Heard(b"%d" % packet.hub, decode(packet.frames)))
        else:
            engine = self.engines[packet.engine]
            if self._frozen(engine) or engine.queue:
                return
            self._engine(engine, ag.Received(decode(packet.frames)))
        if fate < 0.15:
            self._count("duplicated")
        else:
            self.packets.pop(index)

    def _frozen(self, who: Engine | HubProcess) -> bool:
        return self.now < who.frozen_until

    # ------------------------------------------------------------------ engines

    def _engine_step(self) -> None:
        able = [
            engine
            for engine in self.engines
            if not self._frozen(engine) and (engine.queue or engine.settling or self.engine_clock(engine) >= engine.agent.deadline())
        ]
        if not able:
            return
        engine = self.rng.choice(able)
        if engine.queue:
            self._act(engine, engine.queue.pop(0))
        elif engine.settling:
            engine.settling = False
            self._engine(engine, ag.Settled())
        elif self.engine_clock(engine) >= engine.agent.deadline():
            self._engine(engine, ag.Tick())

    def _engine(self, engine: Engine, event: ag.Event) -> None:
        engine.queue += engine.agent.step(event, self.engine_clock(engine))

    def _act(self, engine: Engine, action: ag.Action) -> None:
        match action:
            case ag.Beat(seq, epoch, mode):
                age = self.engine_clock(engine) - (engine.offset + engine.born * engine.rate)
                beat = Heartbeat(engine.agent.boot, seq, epoch, mode, boot_age_seconds=age)
                for hub in (0, 1):  # both hear it: which of them leads is theirs to find out
                    self._post(hub, None, beat)
                self.routes[engine.agent.boot] = engine.index
            case ag.Adopt() if self.rng.random() < 0.3:
                engine.queue.insert(0, action)  # the scheduler thread holds the adoption lock
                engine.frozen_until = self.now + self.rng.choice([0.0, 1.0, 3.0])
            case ag.Adopt(epoch, mode):
                self.note(f"e{engine.index} adopts {epoch} {mode.value}")
                engine.bound, engine.bound_mode = epoch, mode
                engine.queue[:0] = engine.agent.step(ag.Adopted(epoch, mode), self.engine_clock(engine))
            case ag.Settle():
                engine.settling = True
            case _:
                pass

    def _restart_engine(self) -> None:
        index = self.rng.randrange(len(self.engines))
        self.note(f"e{index} restarts")
        self._count("engine restarts")
        self.engines[index] = self._new_engine(index)

    def _freeze(self) -> None:
        who = self.rng.choice([*self.engines, *self.hubs])
        who.frozen_until = self.now + self.rng.choice([0.5, 2.0, 6.0, 12.0])
        self._count("freezes")

    # ------------------------------------------------------------------ hubs

    def _hub(self, process: HubProcess, event: ev.Event) -> None:
        for action in process.hub.step(event, self.hub_clock(process)):
            self._do(process, action)

    def _do(self, process: HubProcess, action: ev.Action) -> None:
        match action:
            case ev.Send(_, message):
                boot = getattr(message, "boot", None)
                if isinstance(message, Error) and message.code is not Refusal.NOT_LEADING:
                    raise Violation(f"a hub refused a message: {message}")
                if boot in self.routes:  # by slot: grants of an old boot reach the new one
                    self._post(process.index, self.routes[boot], message)
            case ev.Record(epoch):
                self._call(process, "record", epoch)
            case ev.Publish(epoch):
                self._call(process, "publish", epoch)
            case ev.NoteGranting():
                self._call(process, "note", 0)
            case ev.Changed():
                pass

    def _call(self, process: HubProcess, kind: str, value: int) -> Operation:
        operation = Operation(process, process.incarnation, kind, value, process.term, self._late())
        self.operations.append(operation)
        return operation

    def _hub_step(self) -> None:
        able = [process for process in self.hubs if not self._frozen(process) and self._due(process)]
        if able:
            self._drive(self.rng.choice(able))

    def _due(self, process: HubProcess) -> bool:
        now = self.hub_clock(process)
        return now >= process.hub.tick_at() or self._round_due(process, now)

    def _round_due(self, process: HubProcess, now: float) -> bool:
        return process.term is not None and not process.round_running and process.hub.round_at(now) <= now

    def _drive(self, process: HubProcess) -> None:
        now = self.hub_clock(process)
        if now >= process.hub.tick_at():
            self._hub(process, ev.Tick())
        if not self._round_due(process, now):
            return
        process.rounds += 1
        process.round_running = True
        if not self.faults.read_before_collecting:
            self._hub(process, ev.RoundBegan(process.rounds))
            if not process.hub.round_open:
                process.round_running = False
                return
        self._call(process, "verify", process.rounds)

    def _restart_hub(self) -> None:
        index = self.rng.randrange(2)
        self.note(f"h{index} restarts")
        self._count("hub restarts")
        self.hubs[index] = self._new_hub(index, self.hubs[index].incarnation + 1)

    def _takeover(self) -> None:
        process = self.rng.choice(self.hubs)
        if not self._frozen(process):
            self._count("takeovers")
            self._elect(process)

    def _elect(self, process: HubProcess) -> None:
        """Leadership is taken by a write; the winner learns it when that write returns."""
        self.leader = Term(process.holder, self.leader.transitions + 1)
        self.note(f"h{process.index} takes leadership, {self.leader.transitions}")
        won = self._call(process, "lead", 0)
        won.term, won.effective, won.result = self.leader, True, self.record

    def _installed(self, process: HubProcess, won: Operation) -> None:
        process.term = won.term
        process.round_running = False
        self._hub(process, ev.SteppedDown())
        load = self._call(process, "load", 0)
        if self.faults.stale_load:
            load.result = self.rng.choice([won.result, PoolRecord(0, 0, won.result.granting)])

    def _told_late(self) -> None:
        """A hub that does not lead learns it."""
        for process in self.hubs:
            if process.term is not None and process.term != self.leader and not self._frozen(process):
                self._lose(process)

    def _lose(self, process: HubProcess) -> None:
        process.term = None
        process.round_running = False
        self._hub(process, ev.SteppedDown())

    def _observe(self) -> None:
        process = self.rng.choice(self.hubs)
        if not self._frozen(process):
            self._hub(process, ev.Observed(self.record))

    # ------------------------------------------------------------------ authority

    def _operate(self) -> None:
        ready = [operation for operation in self.operations if operation.not_before <= self.now]
        if not ready:
            return
        operation = self.rng.choice(ready)
        luck = self.rng.random()
        if not operation.effective and (luck < 0.85 or operation.kind == "load"):
            self._effect(operation)
            operation.not_before = self._late()
        elif not operation.answered and not self._frozen(operation.process):
            if operation.effective and luck < 0.93:
                self._answer(operation)
            elif operation.kind not in ("load", "lead"):
                self._count("timeouts")
                self._fail(operation)
        if operation.effective and operation.answered:
            self.operations.remove(operation)

    def _effect(self, operation: Operation) -> None:
        operation.effective = True
        old = self.record
        match operation.kind:
            case "verify":
                now_leads = operation.term == self.leader
                if self.faults.holder_only and operation.term is not None:
                    now_leads = operation.term.holder == self.leader.holder
                operation.result = now_leads or self.faults.verify_always
            case "load":
                operation.result = operation.result or old
            case "record":
                if operation.value > old.target:
                    self.note(f"authority: target {operation.value}")
                target = operation.value if self.faults.record_lowers else max(old.target, operation.value)
                self.record = PoolRecord(target, old.published, old.granting)
            case "publish":
                if operation.value > old.published:
                    self.note(f"authority: published {operation.value} (by h{operation.process.index})")
                    self._count("published")
                self.record = PoolRecord(old.target, max(old.published, operation.value), old.granting)
            case "note":
                self.record = PoolRecord(old.target, old.published, True)

    def _answer(self, operation: Operation) -> None:
        operation.answered = True
        process = operation.process
        if self.hubs[process.index] is not process:
            return
        match operation.kind:
            case "verify":
                if process.term != operation.term:
                    return
                process.round_running = False
                if not operation.result:
                    self._lose(process)
                    return
                if self.faults.read_before_collecting:
                    self._hub(process, ev.RoundBegan(operation.value))
                self._hub(process, ev.RoundVerified(operation.value))
            case "lead":
                if process.term is None or operation.term is None or process.term.transitions < operation.term.transitions:
                    self._installed(process, operation)
            case "load":
                if process.term == operation.term and operation.term is not None:
                    self._hub(process, ev.Acquired(operation.term, operation.result))
            case "record":
                self._hub(process, ev.Recorded(operation.value))
            case "publish":
                self._hub(process, ev.Published(operation.value))
            case "note":
                self._hub(process, ev.Noted())

    def _fail(self, operation: Operation) -> None:
        """No answer in time; the effect may still come."""
        operation.answered = True
        process = operation.process
        if self.hubs[process.index] is not process:
            return
        match operation.kind:
            case "verify":
                if process.term == operation.term:
                    process.round_running = False
                    self._hub(process, ev.RoundDropped(operation.value))
            case "record":
                self._hub(process, ev.RecordFailed(operation.value))
            case "publish":
                self._hub(process, ev.PublishFailed(operation.value))
            case "note":
                self._hub(process, ev.NoteFailed())

    # ------------------------------------------------------------------ trainer

    def _trainer_step(self) -> None:
        """Push under pause: pause everything, push, ask for the next epoch, wait until it is published, resume."""
        if self.push is None:
            self._begin_push()
        elif self.record.published >= self.push["epoch"]:
            for engine in self.engines:
                engine.paused = False
            self.push = None
        else:
            self._ask()

    def _begin_push(self) -> None:
        epoch = max([self.record.target, *self.epoch_weights]) + self.rng.choice([1, 1, 3])
        weights = self.next_weights if self.pushed else 0
        self.next_weights += 1
        self.epoch_weights[epoch] = weights
        boots = [engine.agent.boot for engine in self.engines]
        self.push = {
            "epoch": epoch,
            "at": self.now,
            "boots": boots,
            "by_client": self.rng.random() < 0.5,
            "asked": set(),
        }
        if self.pushed:
            for engine in self.engines:
                engine.weights, engine.paused = weights, True
        self.note(f"trainer pushes weights {weights} for epoch {epoch} (client: {self.push['by_client']})")

    def _ask(self) -> None:
        assert self.push is not None
        process = self.rng.choice(self.hubs)
        if self._frozen(process):
            return
        if self.pushed and self.push["by_client"]:
            self._post(process.index, None, Bump(1, self.push["epoch"], self.push["boots"]))
            return
        fresh = self.now - self.push["at"] <= PUSH_TO_ASK
        self._hub(process, ev.Asked(self.push["epoch"], self.hub_clock(process) if fresh else None))

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """I1, I2, I3 as they stand now."""
        for engine in self.engines:
            using = engine.bound is not None and self.engine_clock(engine) < engine.agent.view.lease_until
            self._never_lower(("engine", engine.agent.boot), engine.agent.epoch)
            if not using or engine.bound is None:
                continue
            if engine.bound < self.record.published:
                raise Violation(f"I2: published {self.record.published}, e{engine.index} may use epoch {engine.bound}")
            if engine.bound_mode is Mode.USE and not engine.paused:
                expected = self.epoch_weights.get(engine.bound)
                if engine.weights != expected:
                    raise Violation(f"I1: e{engine.index} has weights {engine.weights} and uses epoch {engine.bound} of weights {expected}")
        self._never_lower("target", self.record.target)
        self._never_lower("published", self.record.published)
        if self.record.published > self.record.target:
            raise Violation(f"I3: published {self.record.published} is above target {self.record.target}")
        for process in self.hubs:
            key = ("hub", process.index, process.incarnation)
            self._never_lower((*key, "target"), process.hub.target)
            self._never_lower((*key, "published"), process.hub.published)

    def _never_lower(self, key: Any, value: int | None) -> None:
        if value is None:
            return
        if value < self.high.get(key, value):
            raise Violation(f"I3: {key} fell from {self.high[key]} to {value}")
        self.high[key] = value

    def _heal(self) -> None:
        """I4: faults end, one hub leads; whatever engines do, publication comes within lease and margin."""
        deaf = self.rng.random() < 0.5
        process = self.rng.choice(self.hubs)
        for who in (*self.engines, *self.hubs):
            who.frozen_until = 0.0
        self._elect(process)
        wanted = max([self.record.target, *self.epoch_weights])
        self._hub(process, ev.Asked(wanted, None))
        start = self.now
        self.note(f"faults end; engines {'deaf' if deaf else 'answer'}; h{process.index} leads, {wanted} is wanted")
        while self.record.published < wanted:
            if self.now > start + LEASE + MARGIN + SLACK:
                raise Violation(f"I4: {wanted} is not published {self.now - start:.2f} s after leadership and record")
            self._calm(process, deaf)
            self.check()
            self.now += 0.05

    def _calm(self, process: HubProcess, deaf: bool) -> None:
        self._drive(process)
        for operation in list(self.operations):
            if not operation.effective:
                self._effect(operation)
            if not operation.answered:
                self._answer(operation)
            self.operations.remove(operation)
        packets, self.packets = self.packets, []
        for packet in packets:
            if packet.engine is None and self.hubs[packet.hub] is process:
                self._hub(process, ev.Heard(b"x", decode(packet.frames)))
            elif packet.engine is not None and not deaf:
                self._engine(self.engines[packet.engine], ag.Received(decode(packet.frames)))
        for engine in self.engines:
            while engine.queue:
                self._act(engine, engine.queue.pop(0))
            if engine.settling:
                engine.settling = False
                self._engine(engine, ag.Settled())
            if self.engine_clock(engine) >= engine.agent.deadline():
                self._engine(engine, ag.Tick())


def simulate(seed: int, faults: Faults | None = None, steps: int = 600) -> World:
    """Run one schedule.

    Raises:
        Violation: with the seed and the end of the trace.
    """
    world = World(seed, num_engines=1 + seed % 3, faults=faults)
    world.run(steps)
    return world
