"""A world for the fence: the production `Agent` and `Hub`, everything around them made of seeded random faults.

Engines, hubs, network, authority, store, trainer and whoever pushes weights take steps in an order drawn from a seed. Messages are lost,
duplicated, reordered and late by any amount; processes restart and freeze between any two actions, and their clocks run at
any rate the margin allows; leadership moves at any time, old leaders learn it late, their reads and writes land late or not
at all. After every step the invariants of the design page "fence" are checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from epochkv_fence.protocol.messages import Bump, Message, Propose, decode, encode
from tests.model import parts
from tests.model.authority import Authority
from tests.model.calm import Calm
from tests.model.checks import Checks
from tests.model.engines import EngineSide, Pushes
from tests.model.hubs import HubSide, Tidings
from tests.model.parts import START, Clock, Engine, HubProcess, Packet, Profile, Rules, Violation
from tests.model.store import Removals, Serving, Store
from tests.model.trainer import Trainer

TRACE_LINES = 60
TRIES = 4
"""Time passes when so many draws had nothing to do."""


class Network:
    """Loses, duplicates, reorders and holds back, by any amount; what arrives is what was sent, as frames."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.packets: list[Packet] = []

    def post(self, sender: str, receiver: str, message: Message) -> None:
        world = self.world
        self.packets.append(Packet(sender, receiver, message, encode(message), world.late()))
        if len(self.packets) > parts.MAX_IN_FLIGHT:
            world.count("lost")
            self.packets.pop(world.rng.randrange(len(self.packets)))

    def asks(self, target: int) -> bool:
        """Whether somebody's wish for an epoch above this one is on its way."""
        return any(isinstance(packet.message, Bump | Propose) and packet.message.epoch > target for packet in self.packets)

    def deliver(self) -> bool:
        """One packet arrives, twice, or never; False: none is there that could."""
        world, rng = self.world, self.world.rng
        now = world.now
        shut = self._shut()
        ready = [index for index, packet in enumerate(self.packets) if packet.not_before <= now and packet.receiver not in shut]
        if not ready:
            return False
        index = rng.choice(ready) if rng.random() < world.profile.disorder else ready[0]
        packet = self.packets[index]
        fate = rng.random()
        if fate < 0.05:
            world.count("lost")
            self.packets.pop(index)
        else:
            if fate < 0.15:
                world.count("duplicated")
            else:
                self.packets.pop(index)
            self._arrive(packet)
        return True

    def _shut(self) -> set[str]:
        """Who takes no messages now: frozen, or busy with what the last one set off."""
        world, now = self.world, self.world.now
        engines = {f"e{engine.index}" for engine in world.engines if now < engine.frozen_until or engine.queue}
        return engines | {f"h{process.index}" for process in world.hubs if not world.hub_side.free(process)}

    def hand_over(self, packet: Packet) -> bool:
        """Give a packet to its receiver; False: it is frozen or busy."""
        if packet.receiver in self._shut():
            return False
        self._arrive(packet)
        return True

    def _arrive(self, packet: Packet) -> None:
        world = self.world
        who, index = packet.receiver[0], int(packet.receiver[1:])
        if who == "h":
            world.hub_side.hear(world.hubs[index], packet.sender.encode(), decode(packet.frames))
        elif who == "e":
            world.engine_side.receive(world.engines[index], decode(packet.frames))
        elif index == world.trainer.incarnation:
            world.trainer.receive(decode(packet.frames))


class World:
    """One schedule."""

    def __init__(self, seed: int, rules: Rules | None = None, focus: dict[str, Any] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.rules = rules or Rules()
        self.profile = Profile.draw(self.rng, focus)
        self.now = START
        self.calm = False
        self.trace: list[str] = []
        self.counts: dict[str, int] = {}
        spread = parts.SPREAD_WITH_LONGER_LEASE if self.profile.reconfigures else parts.SPREAD
        slowest = self.rng.uniform(0.8, 1.0)
        self.rates = (slowest, slowest * spread)
        self.config = self.profile.config()
        self.newest_weights = 1
        self.spec_epoch = 0
        self.checks = Checks(self)
        self.network = Network(self)
        self.authority = Authority(self)
        self.store = Store(self)
        self.engine_side = EngineSide(self)
        self.serving = Serving(self)
        self.removals = Removals(self)
        self.hub_side = HubSide(self)
        self.tidings = Tidings(self)
        self.engines = [self.engine_side.make(index) for index in range(self.profile.engines)]
        self.hubs = [self.hub_side.make(index) for index in (0, 1)]
        self.trainer = Trainer(self)
        self.pushes = Pushes(self)

    # ------------------------------------------------------------------ helpers of the parts

    def clock(self) -> Clock:
        low, high = self.rates
        return Clock(self.rng.choice([low, low, high, high, self.rng.uniform(low, high)]), self.rng.uniform(0, 1e4))

    def late(self) -> float:
        """Until when a message or an answer is held back: mostly not at all, sometimes for longer than any lease."""
        if self.calm or self.rng.random() >= 0.1:
            return 0.0
        return self.now + self.rng.choice([0.5, 2.0, 6.0, 12.0])

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now - START:8.2f}  {text}")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def change_config(self) -> None:
        choices: list[dict[str, Any]] = [{"reclaim": policy, "store_admin": True} for policy in ("Delete", "RemoveAll", "Retain")]
        if self.config.lease_seconds == parts.LEASE:
            choices.append({"lease_seconds": parts.LONGER_LEASE})
        change = self.rng.choice(choices)
        self.config = replace(self.config, **change)
        self.count("configurations")
        self.note(f"the pool's owner changes {change}")

    # ------------------------------------------------------------------ running

    def run(self) -> None:
        """Random steps, then all faults end and publication must follow."""
        self.authority.elect(self.hubs[0])
        choices = self._choices()
        weights = list(accumulate(weight for weight, _ in choices))
        calls = [call for _, call in choices]
        try:
            for _ in range(self.profile.steps):
                for call in self.rng.choices(calls, cum_weights=weights, k=TRIES):
                    if call() is not False:
                        break
                else:
                    self._advance()
                self.checks.step()
            self.count("schedules that publish" if self.counts.get("published") else "schedules that do not")
            Calm(self).run()
        except Violation as violation:
            lines = "\n".join(self.trace[-TRACE_LINES:])
            raise Violation(f"seed {self.seed}: {violation}\n{self.profile}\n{lines}") from None

    def _choices(self) -> list[tuple[float, Callable[[], object]]]:
        profile = self.profile
        choices: list[tuple[float, Callable[[], object]]] = [
            *((16, self._advance), (45, self.network.deliver), (26, self.engine_side.turn), (24, self.serving.serve)),
            *((16, self.hub_side.turn), (24, self.authority.turn), (10, self.trainer.turn), (profile.pushes, self.pushes.turn)),
            *((0.6 * profile.trouble, turn) for turn in (self.engine_side.restart, self.engine_side.shut_down)),
            *((0.3 * profile.trouble, self.hub_side.restart), (profile.trainer_restarts, self.trainer.restart)),
            *((1.2 * profile.freezes, self._freeze), (1.4 * profile.takeovers, self.tidings.takeover)),
            *((0.6 * profile.told_late, self.tidings.told_late), (0.8 * profile.watch, self.tidings.observe)),
        ]
        if profile.restores:
            choices.append((0.3, self.authority.restore))
        if profile.reconfigures:
            choices.append((1.0, self.tidings.reconfigure))
        return choices

    def _advance(self) -> None:
        self.now += self.profile.pace * self.rng.choice([0.02, 0.1, 0.3, 0.3, 1.0])
        self.store.land()
        self.removals.land()

    def _freeze(self) -> None:
        everybody: list[Engine | HubProcess | Trainer] = [*self.engines, *self.hubs, self.trainer]
        who = self.rng.choice(everybody)
        who.frozen_until = self.now + self.rng.choice([0.5, 2.0, 6.0, 12.0])
        self.count("freezes")


def simulate(seed: int, rules: Rules | None = None, focus: dict[str, Any] | None = None) -> World:
    """Run one schedule; a `Violation` has its seed and the end of the trace."""
    world = World(seed, rules, focus)
    world.run()
    return world
