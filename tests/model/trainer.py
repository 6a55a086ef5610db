"""A trainer: every order of pushing weights and raising the epoch that the documentation calls safe, step by step.

An order is a generator that yields between its steps, so everything else may happen in between. What a trainer does with
answers is what the client does (`epochkv_fence.client`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from epochkv_fence.authority import Origin
from epochkv_fence.messages import Bump, BumpStatus, Message, Moment, OpenUpdate, Status
from epochkv_fence.versions import FAILED
from tests.model.parts import JOIN_AFTER, PUSH_TO_ASK, SPREAD, Engine, Spec

if TYPE_CHECKING:
    from tests.model.world import World

Script = Iterator[None]
PATIENCE = 15.0
"""Seconds after which a trainer gives up waiting for publication."""
RESEND = 0.3
KEEP = 1.2
"""Seconds between two askings to keep an update open."""
RESCUES = ("", "people, a plain reset", "people, waiting")
UNNAMED = (
    "client, reset after a push",
    "client, push under pause, failing",
    "client, reset",
    "client, reset of listed weights",
    "people, a plain reset",
    "people, waiting",
)
"""Orders that do not say what the weights are called."""


class Trainer:
    """One training job; its process may be restarted, and then begins a new update."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.script: Script | None = None
        self.order = ""
        self.versions = 0
        self.frozen_until = 0.0
        self.idle_until = 0.0
        self.incarnation = 0
        self.must_push = False  # the last update was left in the middle: weights are unknown until the next one
        self.rescue = ""  # what people do about one that a hub knows of
        self._forget()

    def _forget(self) -> None:
        self.moment: Moment | None = None
        self.moment_at = 0.0
        self.status: Status | None = None
        self.bumped: BumpStatus | None = None
        self.request = 0
        self.questions = 0
        self.since = 0  # answers to older questions say nothing about now
        self.hub = 0
        self.resend_at = float("-inf")
        self.highest = 0
        self.published = 0
        self.mine: int | None = None
        self.recorded_at: float | None = None
        self.epoch = 0
        self.version = ""
        self.listed: list[bytes] = []
        self.marked_epoch = 0  # of the last list that was given
        self.update: bytes | None = None  # the one that is open, or that this trainer wants to open
        self.opened_at: float | None = None
        self.keep_at = 0.0
        self.ending = False

    # ------------------------------------------------------------------ running

    def turn(self) -> bool:
        """The next step of the present order, or the beginning of another one; False: it does nothing now."""
        if self.world.now < max(self.frozen_until, self.idle_until):
            return False
        if self.script is None:
            if self.world.spec.epoch > self.world.authority.record.target:  # asked for by an update that was left
                self.world.hub_side.ask(False)
                return True
            self.script = self._begin()
        self._keep()
        try:
            next(self.script)
        except StopIteration:
            self.script = None
            self.idle_until = self.world.now + self.world.profile.idle * self.world.rng.choice([0.0, 1.0, 3.0, 8.0])
        return True

    def restart(self) -> None:
        """The process dies; engines stay as they are (paused, if they were) until the next update is over."""
        if self.script is not None:
            self.world.note(f"trainer restarts in the middle of: {self.order}")
            self.world.count("trainer restarts")
            self.must_push = self.must_push or self.world.profile.pushed
            self.script = None
            known = self.opened_at is not None and not self.ending and not self.world.profile.restores
            self.rescue = self.world.rng.choice(RESCUES) if known else ""
        self.incarnation += 1
        self.world.checks.cascade_ended()
        self._forget()

    def _begin(self) -> Script:
        world = self.world
        orders = world.profile.orders
        if self.must_push:
            orders = (self.rescue,) if self.rescue else ("client, push under pause", "client, fence first")
        self.order = world.rng.choice(orders)
        self.versions += 1
        self.version = "" if self.order in UNNAMED else f"v{self.versions}"
        self.mine = self.recorded_at = self.status = self.bumped = None
        self.marked_epoch = 0
        self.update = self.opened_at = None
        self.ending = False
        world.count(self.order)
        return SCRIPTS[self.order](self)

    def receive(self, message: Message) -> None:
        """An answer of a hub, however late."""
        now = self.clock.read(self.world.now)
        if not isinstance(message, Status | BumpStatus):
            self.hub = self.world.rng.randrange(2)
            self.resend_at = now
            return
        if message.moment is not None:
            self.moment, self.moment_at = message.moment, now
        self.highest = max(self.highest, message.target)
        self.published = max(self.published, message.published)
        if isinstance(message, Status):
            self.status = message if message.request >= self.since else self.status
        elif message.request == self.request:
            self.bumped = message
            if message.target == self.epoch and message.may_answer(self.version, listed=bool(self.version)):
                self.mine = message.target
            if message.target >= self.epoch and self.recorded_at is None:
                self.recorded_at = now

    def _post(self, message: Message) -> None:
        """Again and again, but not more often than `RESEND`; the other hub, when this one does not lead or answer."""
        now = self.clock.read(self.world.now)
        if now >= self.resend_at:
            self.resend_at = now + RESEND
            if self.world.rng.random() < self.world.profile.wander:
                self.hub = 1 - self.hub
            self.world.network.post(f"t{self.incarnation}", f"h{self.hub}", message)

    # ------------------------------------------------------------------ engines

    def _pause(self) -> Script:
        """Pause every engine that is there; a frozen one is waited for."""
        waiting = {engine.agent.boot for engine in self.world.engines}
        while waiting:
            for engine in self.world.engines:
                if engine.agent.boot in waiting and self._reachable(engine):
                    engine.paused = True
                    waiting.discard(engine.agent.boot)
            waiting &= {engine.agent.boot for engine in self.world.engines}
            if waiting:
                yield

    def _push(self, paused: bool = True) -> Script:
        """New weights go to one engine after the other; under pause also one that came up since is paused first."""
        world = self.world
        world.weights += 1
        world.note(f"trainer pushes weights {world.weights} ({self.order})")
        slots = list(range(len(world.engines)))
        world.rng.shuffle(slots)
        self.push_began = world.now
        for slot in slots:
            while not self._reachable(world.engines[slot]):
                yield
            world.engines[slot].paused |= paused
            world.engines[slot].weights = world.weights
            if world.rng.random() < world.profile.push_crashes:
                world.engine_side.restart_one(slot)  # with base weights, and running
            until = world.now + world.rng.choice([0.0, 0.0, 0.3, 1.0])
            while world.now < until:
                yield

    def _resume(self) -> None:
        for engine in self.world.engines:
            engine.paused = False
        self.must_push = False

    def _reachable(self, engine: Engine) -> bool:
        return self.world.now >= engine.frozen_until

    # ------------------------------------------------------------------ hubs

    def _ask_status(self) -> Script:
        """The pool as a hub shows it: for its boots, and for its target."""
        self.since = self.questions + 1
        self.status = None
        self.resend_at = float("-inf")
        while self.status is None:
            self._post(self._question())
            yield
        self.highest = max(self.highest, self.status.target)

    def _question(self) -> Status:
        self.questions += 1
        if self.update is None:
            return Status(self.questions)
        since = 0.0 if self.opened_at is None else max(1e-3, self.clock.read(self.world.now) - self.opened_at)
        return Status(self.questions, update=OpenUpdate(self.update, "t", self.version, since))

    def _open(self) -> Script:
        """Wait until a hub says that nobody else pushes."""
        self.update = self.world.rng.randbytes(16)
        while self.opened_at is None:
            yield from self._ask_status()
            if self._is_open():
                self.opened_at = self.clock.read(self.world.now)
            else:
                yield

    def _is_open(self) -> bool:
        assert self.status is not None
        return self.update is None or (self.status.update is not None and self.status.update.number == self.update)

    def _keep(self) -> None:
        """Say that the push goes on."""
        now = self.clock.read(self.world.now)
        if self.opened_at is not None and not self.ending and now >= self.keep_at:
            self.keep_at = now + KEEP
            self.world.network.post(f"t{self.incarnation}", f"h{self.world.rng.randrange(2)}", self._question())

    def repeated(self) -> Bump:
        """The list of the last update, once more."""
        return Bump(self.request, self.marked_epoch, self.listed, self.version)

    def _boots(self) -> Script:
        """The boots that are there, for a list; returns them."""
        yield from self._ask_status()
        assert self.status is not None
        self.listed = [view.boot for view in self.status.engines]

    def _bump(self, boots: list[bytes] | None, ended: Callable[[], bool], asked_at: float | None = None) -> Script:
        """Ask for a new epoch until it is this trainer's own and `ended` says so.

        An epoch that somebody else asked for may be older than the push: it is exceeded, not joined.
        """
        self._next_epoch()
        self.resend_at = float("-inf")
        yield from self._repeat(boots, ended, asked_at)

    def _next_epoch(self) -> None:
        self.epoch = self.highest + 1
        self.request = self.world.rng.getrandbits(32)
        self.mine = self.recorded_at = self.bumped = None

    def _repeat(self, boots: list[bytes] | None, ended: Callable[[], bool], asked_at: float | None = None) -> Script:
        began = self.clock.read(self.world.now)
        while not ended():
            taken = self.highest >= self.epoch and self.mine != self.epoch
            if taken and not self.world.rules.trainer_takes_any_epoch:
                self._next_epoch()
            moment, ago = self.moment, 0.0
            if moment is not None and asked_at is not None:
                ago = max(0.0, self.moment_at - asked_at)
            if self.world.rules.trainer_says_now:
                ago = 0.0
            ends = self.update if self.ending else None
            self._post(Bump(self.request, self.epoch, boots, self.version, moment, ago, ends))
            yield
            if self.clock.read(self.world.now) > began + PATIENCE and self._given_up():
                return

    def _given_up(self) -> bool:
        """`on_failure="bypass"`: recorded, not published in time; every lease below is over by now."""
        if self.mine is None or self.recorded_at is None:
            return False
        hold = self.world.config.hold_seconds * SPREAD
        return self.clock.read(self.world.now) >= self.recorded_at + hold

    def _is_mine(self) -> bool:
        return self.mine == self.epoch or (self.world.rules.trainer_takes_any_epoch and self.highest >= self.epoch)

    def _published(self) -> bool:
        if self.world.rules.trainer_resumes_unpublished:
            return self._is_mine()
        return self._is_mine() and self.published >= self.epoch

    def _marked(self) -> bool:
        return self._published() and self.bumped is not None and self.bumped.pending == 0

    # ------------------------------------------------------------------ orders: `spec.resetEpoch`

    def _spec_until_published(self, fresh: Callable[[], bool]) -> Script:
        """An epoch of the same number that somebody else asked for is exceeded, as `EpochAhead` says."""
        world = self.world
        while world.authority.record.published < self.epoch or self.mine != self.epoch:
            record = world.authority.record
            if record.target >= self.epoch:
                if record.target == self.epoch and self._is_origin(record.origin):
                    self.mine = self.epoch
                elif self.mine != self.epoch and not world.rules.trainer_takes_any_epoch:
                    self._raise_spec(world.spec.ready)
                else:
                    self.mine = self.epoch
            world.hub_side.ask(fresh())
            yield

    def _is_origin(self, origin: Origin | None) -> bool:
        """Who asked for this target called its weights as this trainer does."""
        return origin is not None and ("" if origin.inherited else origin.weights_version) == self.version

    def spec_under_pause(self) -> Script:
        """pause -> push -> raise -> wait -> resume."""
        yield from self._pause()
        yield from self._push()
        self._raise_spec()
        yield from self._spec_until_published(lambda: self.world.now <= self.push_began + PUSH_TO_ASK)
        self._resume()

    def spec_fence_first(self) -> Script:
        """raise with a version -> wait -> push while serving -> ready."""
        world = self.world
        self._raise_spec(ready=False)
        asked = world.now
        yield from self._spec_until_published(lambda: world.now <= asked + 1.0)
        yield from self._push(paused=False)
        for _ in range(4):
            world.spec.ready = True
            world.hub_side.ask(False)
            yield

    def spec_reset(self) -> Script:
        """A pool whose weights never change is raised."""
        self._raise_spec()
        yield from self._spec_until_published(lambda: True)

    def _raise_spec(self, ready: bool = True) -> None:
        """`kubectl` sees the object: its target, and what was asked for before."""
        world = self.world
        self.epoch = max(world.authority.record.target, world.spec.epoch) + world.rng.choice([1, 1, 3])
        world.spec = Spec(self.epoch, self.version, ready)

    # ------------------------------------------------------------------ orders: the client

    def client_under_pause(self) -> Script:
        """list -> pause -> push -> raise with the list -> wait -> resume."""
        yield from self._open()
        yield from self._boots()
        listed = self.listed
        yield from self._pause()
        yield from self._push()
        if self.world.rules.trainer_lists_on_exit:
            yield from self._boots()
            listed = self.listed
        yield from self._ask_status()
        if not self._is_open():  # taken for dead, and somebody else pushed
            listed = []
        self.ending = True
        yield from self._bump(listed, self._published)
        self.listed, self.marked_epoch = listed, self.epoch
        self._resume()

    def client_under_pause_failing(self) -> Script:
        """The push fails: nobody has the weights of the next epoch."""
        yield from self._open()
        yield from self._pause()
        push = self._push()
        for _ in range(self.world.rng.choice([1, 2])):
            if next(push, True) is None:
                yield
        self.ending = True
        yield from self._ask_status()
        yield from self._bump([], self._published)
        self._resume()

    def client_fence_first(self) -> Script:
        """list -> raise, nobody has the weights -> wait -> push while serving -> mark."""
        yield from self._open()
        yield from self._boots()
        listed = self.listed
        yield from self._bump([], self._published)
        yield from self._push(paused=False)
        if self.world.rules.trainer_lists_on_exit:
            yield from self._boots()
            listed = self.listed
        yield from self._ask_status()
        if not self._is_open():
            listed = []
        self.ending = True
        self.listed = listed
        self.marked_epoch = self.epoch
        if self.must_push:
            yield from self._repeat(listed, self._marked)
            self._resume()
        for _ in range(8):
            self._post(self.repeated())
            yield

    def client_fence_first_failing(self) -> Script:
        """The push fails: nobody is marked."""
        yield from self._ask_status()
        yield from self._bump([], self._published)
        push = self._push(paused=False)
        for _ in range(2):
            if next(push, True) is None:
                yield

    def client_reset_after_push(self) -> Script:
        """pause -> push -> `reset()`: the age of each boot when it was asked for decides."""
        yield from self._pause()
        yield from self._push()
        in_time = self.world.now <= self.push_began + PUSH_TO_ASK
        asked_at = self.clock.read(self.world.now)
        yield from self._ask_status()
        yield from self._bump(None if in_time else [], self._published, asked_at)
        self._resume()

    def client_reset(self) -> Script:
        """A pool whose weights never change is raised through the client."""
        asked_at = self.clock.read(self.world.now)
        yield from self._ask_status()
        yield from self._bump(None, self._published, asked_at)

    def client_reset_of_listed_weights(self) -> Script:
        """`reset()` without a push, after one whose boots were listed. A restore may take the list away."""
        record = self.world.authority.record
        if self.world.profile.restores or record.origin is None or not record.origin.listed:
            return
        yield from self.client_reset()

    def client_reset_no_waiting(self) -> Script:
        """Asked for and not waited for."""
        yield from self._ask_status()
        self._next_epoch()
        self._post(Bump(self.request, self.epoch, None, self.version, self.moment, 0.0))
        yield

    # ------------------------------------------------------------------ people, after a trainer died in the middle of a push

    def rescue_by_resetting(self) -> Script:
        """A plain reset, at once or after a while, and engines go on."""
        until = self.world.now + self.world.rng.choice([0.0, 1.5 * self.world.config.hold_seconds])
        while self.world.now < until:
            yield
        asked_at = self.clock.read(self.world.now)
        yield from self._ask_status()
        yield from self._bump(None, self._published, asked_at)
        self._resume()

    def rescue_by_waiting(self) -> Script:
        """Engines go on when the hub has taken the trainer for dead."""
        began = self.clock.read(self.world.now)
        while self.clock.read(self.world.now) < began + 2 * PATIENCE:
            yield from self._ask_status()
            assert self.status is not None
            if self.status.weights_version.startswith(FAILED) and self.status.published == self.status.target:
                self._resume()
                return
        self.rescue = ""

    # ------------------------------------------------------------------ orders: vLLM's own reset on every engine

    def engines_reset_together(self) -> Script:
        """pause -> push -> reset every engine's own caches -> resume; the engines ask for the next epoch themselves."""
        world = self.world
        record = world.authority.record
        settled = record.target == record.published and not any(
            world.engine_side.live(engine) and engine.private_at is not None and engine.private_at >= (engine.bound or 0)
            for engine in world.engines
        )
        asked = any(process.hub.snapshot(0.0).asked > record.target for process in world.hubs)
        if not settled or asked or world.network.asks(record.target):
            return
        yield from self._pause()
        if world.profile.pushed:
            yield from self._push()
        began, at_once = world.authority.record.target, True
        waiting = {engine.agent.boot for engine in world.engines}
        while waiting:
            if world.profile.pushed and world.now > self.push_began + PUSH_TO_ASK:  # longer than `joinAfterSeconds` allows for
                yield from self._ask_status()
                yield from self._bump([], self._published)
                self._resume()
                return
            for engine in world.engines:
                if engine.agent.boot in waiting and self._reachable(engine) and not engine.queue:
                    world.engine_side.local_reset(engine)
                    waiting.discard(engine.agent.boot)
            waiting &= {engine.agent.boot for engine in world.engines}
            if waiting:
                at_once = False
                yield
        self._resume()
        if at_once and world.authority.record.target == began and not any(engine.floor_unknown for engine in world.engines):
            world.checks.cascade_began(max([began, *(engine.agent.epoch or 0 for engine in world.engines)]))
        for _ in range(6):
            yield
        world.checks.cascade_ended()

    def one_engine_reset(self) -> Script:
        """One engine's caches are reset alone, weights unchanged."""
        engine = self.world.rng.choice(self.world.engines)
        if self._reachable(engine) and not engine.queue:
            self.world.engine_side.local_reset(engine)
        yield

    # ------------------------------------------------------------------ an order that is not safe

    def unsafe_push_while_serving(self) -> Script:
        """push while serving -> raise. Engines that share compute with different weights under one name."""
        yield from self._push(paused=False)
        self._raise_spec()
        yield from self._spec_until_published(lambda: True)

    def unsafe_raise_and_push(self) -> Script:
        """raise -> push while serving, at once: what the gate is for."""
        self._raise_spec()
        for _ in range(2):
            self.world.hub_side.ask(True)
            yield
        yield from self._push(paused=False)
        yield from self._spec_until_published(lambda: False)


SCRIPTS: dict[str, Callable[[Trainer], Script]] = {
    "spec, push under pause": Trainer.spec_under_pause,
    "spec, fence first": Trainer.spec_fence_first,
    "spec, reset": Trainer.spec_reset,
    "client, push under pause": Trainer.client_under_pause,
    "client, push under pause, failing": Trainer.client_under_pause_failing,
    "client, fence first": Trainer.client_fence_first,
    "client, fence first, failing": Trainer.client_fence_first_failing,
    "client, reset after a push": Trainer.client_reset_after_push,
    "client, reset": Trainer.client_reset,
    "client, reset of listed weights": Trainer.client_reset_of_listed_weights,
    "client, reset, no waiting": Trainer.client_reset_no_waiting,
    "engines reset together": Trainer.engines_reset_together,
    "one engine reset": Trainer.one_engine_reset,
    "people, a plain reset": Trainer.rescue_by_resetting,
    "people, waiting": Trainer.rescue_by_waiting,
    "unsafe: push while serving, then raise": Trainer.unsafe_push_while_serving,
    "unsafe: raise, then push while serving": Trainer.unsafe_raise_and_push,
}
assert JOIN_AFTER > PUSH_TO_ASK * SPREAD
