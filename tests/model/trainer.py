"""A trainer, and people: everything that asks a pool to forget, or to call weights something, step by step.

An order is a generator that yields between its steps, so everything else may happen in between. What a trainer does with
answers is what the client does (`epochkv_fence.client`), and what it counts on when a call has returned is checked from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from epochkv_fence.protocol.messages import Bump, BumpStatus, Label, Labelled, Message, Status
from tests.model.parts import SPREAD, digest

if TYPE_CHECKING:
    from tests.model.world import World

Script = Iterator[None]
PATIENCE = 15.0
"""Seconds after which a trainer gives up waiting for publication, and for weights."""
RESEND = 0.3


class Trainer:
    """One training job; its process may be restarted, and then begins anew."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.script: Script | None = None
        self.order = ""
        self.labels = 0
        self.frozen_until = 0.0
        self.idle_until = 0.0
        self.incarnation = 0
        self._forget()

    def _forget(self) -> None:
        self.status: Status | None = None
        self.labelled: int | None = None
        self.request = 0
        self.questions = 0
        self.since = 0  # answers to older questions say nothing about now
        self.hub = 0
        self.resend_at = float("-inf")
        self.highest = 0
        self.published = 0
        self.recorded_at: float | None = None
        self.epoch = 0

    # ------------------------------------------------------------------ running

    def turn(self) -> bool:
        """The next step of the present order, or the beginning of another one; False: it does nothing now."""
        if self.world.now < max(self.frozen_until, self.idle_until):
            return False
        if self.script is None:
            if self.world.spec_epoch > self.world.authority.record.target:  # asked for by an order that was left
                self.world.hub_side.ask()
                return True
            self.script = self._begin()
        try:
            next(self.script)
        except StopIteration:
            self.script = None
            self.idle_until = self.world.now + self.world.profile.idle * self.world.rng.choice([0.0, 1.0, 3.0, 8.0])
        return True

    def restart(self) -> None:
        if self.script is not None:
            self.world.note(f"trainer restarts in the middle of: {self.order}")
            self.world.count("trainer restarts")
            self.script = None
        self.incarnation += 1
        self.world.checks.cascade_ended()
        self._forget()

    def _begin(self) -> Script:
        self.order = self.world.rng.choice(self.world.profile.orders)
        self.recorded_at = self.status = self.labelled = None
        self.world.count(self.order)
        return SCRIPTS[self.order](self)

    def receive(self, message: Message) -> None:
        """An answer of a hub, however late."""
        now = self.clock.read(self.world.now)
        match message:
            case Status():
                self.status = message if message.request >= self.since else self.status
            case BumpStatus():
                if message.request == self.request and message.target >= self.epoch and self.recorded_at is None:
                    self.recorded_at = now
            case Labelled():
                self.labelled = message.request
                return
            case _:
                self.hub = self.world.rng.randrange(2)
                self.resend_at = now
                return
        self.highest = max(self.highest, message.target)
        self.published = max(self.published, message.published)

    def _post(self, message: Message) -> None:
        """Again and again, but not more often than `RESEND`; the other hub, when this one does not lead or answer."""
        now = self.clock.read(self.world.now)
        if now >= self.resend_at:
            self.resend_at = now + RESEND
            if self.world.rng.random() < self.world.profile.wander:
                self.hub = 1 - self.hub
            self.world.network.post(f"t{self.incarnation}", f"h{self.hub}", message)

    # ------------------------------------------------------------------ hubs

    def _ask_status(self) -> Script:
        """The pool as a hub shows it: for its target, and for its weights."""
        self.since = self.questions + 1
        self.status = None
        self.resend_at = float("-inf")
        while self.status is None:
            self.questions += 1
            self._post(Status(self.questions))
            yield

    def _reset(self) -> Script:
        """Ask for an epoch above the target until it is published, or until it was recorded a lease and margin ago."""
        world = self.world
        called_at, restores = world.now, world.counts.get("restores")
        if not world.rules.trainer_remembers_target:
            yield from self._ask_status()
        self.epoch = self.highest + 1
        self._renew()
        began = self.clock.read(world.now)
        while not self._published():
            self._post(Bump(self.request, self.epoch))
            yield
            if self.clock.read(world.now) > began + PATIENCE and self._given_up():
                break
        if world.counts.get("restores") == restores:
            world.checks.reset_is_done(self.epoch, called_at)

    def _renew(self) -> None:
        self.request = self.world.rng.getrandbits(32)
        self.recorded_at = None
        self.resend_at = float("-inf")

    def _published(self) -> bool:
        if self.world.rules.trainer_resumes_unpublished:
            return self.recorded_at is not None
        return self.published >= self.epoch

    def _given_up(self) -> bool:
        """Recorded, not published in time; every lease below is over by now."""
        if self.recorded_at is None:
            return False
        return self.clock.read(self.world.now) >= self.recorded_at + self.world.config.fence_timeout_seconds * SPREAD

    # ------------------------------------------------------------------ orders: `spec.resetEpoch`

    def spec_reset(self) -> Script:
        """`kubectl` sees the object: its target, and what was asked for before."""
        world = self.world
        called_at, restores = world.now, world.counts.get("restores")
        epoch = max(world.authority.record.target, world.spec_epoch) + world.rng.choice([1, 1, 3])
        world.spec_epoch = epoch
        while world.authority.record.published < epoch:
            world.hub_side.ask()
            yield
        if world.counts.get("restores") == restores:
            world.checks.reset_is_done(epoch, called_at)

    # ------------------------------------------------------------------ orders: the client

    def client_reset(self) -> Script:
        yield from self._reset()

    def client_reset_no_waiting(self) -> Script:
        """Asked for and not waited for."""
        yield from self._ask_status()
        self.epoch = self.highest + 1
        self._renew()
        self._post(Bump(self.request, self.epoch))
        yield

    def client_weight_update(self) -> Script:
        """push -> wait until every engine tells of the same weights -> call them something."""
        world = self.world
        world.pushes.begin(list(range(len(world.engines))))
        pushed, until = digest(world.pushes.weights), world.now + PATIENCE
        while world.now < until:
            yield from self._ask_status()
            assert self.status is not None
            if self.status.engines and {engine.weights for engine in self.status.engines} == {pushed}:
                yield from self._label(pushed)
                return

    def client_label(self) -> Script:
        yield from self._label(digest(self.world.rng.randrange(1, self.world.newest_weights + 1)))

    def _label(self, weights: bytes) -> Script:
        world = self.world
        self.labels += 1
        self._renew()
        restores, label = world.counts.get("restores"), f"step-{self.labels}"
        world.checks.label_asked(weights, label)
        until = world.now + PATIENCE
        while world.now < until:
            self._post(Label(self.request, weights, label))
            yield
            if self.labelled == self.request:
                world.count("labels")
                if world.counts.get("restores") == restores:
                    world.checks.label_answered(weights)
                return

    # ------------------------------------------------------------------ orders: vLLM's own reset

    def engines_reset_together(self) -> Script:
        """Reset every engine's own caches; the engines ask for the next epoch themselves, and one is enough for all."""
        world = self.world
        record = world.authority.record
        settled = record.target == record.published and not any(
            engine.live(world.now) and engine.private_at is not None and engine.private_at >= (engine.bound or 0)
            for engine in world.engines
        )
        asked = any(process.hub.snapshot(0.0).asked > record.target for process in world.hubs)
        if not settled or asked or world.network.asks(record.target):
            return
        began, at_once = record.target, True
        waiting = {engine.agent.instance for engine in world.engines}
        while waiting:
            for engine in world.engines:
                if engine.agent.instance in waiting and world.pushes.reachable(engine) and not engine.queue:
                    world.engine_side.local_reset(engine)
                    waiting.discard(engine.agent.instance)
            waiting &= {engine.agent.instance for engine in world.engines}
            if waiting:
                at_once = False
                yield
        if at_once and world.authority.record.target == began and not any(engine.floor_unknown for engine in world.engines):
            world.checks.cascade_began(max([began, *(engine.agent.epoch or 0 for engine in world.engines)]))
        for _ in range(6):
            yield
        world.checks.cascade_ended()

    def one_engine_reset(self) -> Script:
        engine = self.world.rng.choice(self.world.engines)
        if self.world.pushes.reachable(engine) and not engine.queue:
            self.world.engine_side.local_reset(engine)
        yield


SCRIPTS: dict[str, Callable[[Trainer], Script]] = {
    "spec, reset": Trainer.spec_reset,
    "client, reset": Trainer.client_reset,
    "client, reset, no waiting": Trainer.client_reset_no_waiting,
    "client, weight update": Trainer.client_weight_update,
    "client, label": Trainer.client_label,
    "engines reset together": Trainer.engines_reset_together,
    "one engine reset": Trainer.one_engine_reset,
}
