"""What goes wrong in a soak: one actor for each part that may fail, each with its own random numbers.

What an actor does, and after how long, follows from the seed and its name alone, so a seed replays the same faults at the
same times; how they fall on requests differs from run to run. Every fault is undone by the actor that made it.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from hack.soak.tally import Tally
from hack.soak.world import Rank, World
from hack.standalone.process import Process, ProcessError


class Actor(ABC):
    """A thread that waits `calm` seconds (drawn between two bounds), does one thing, and so on until the run ends."""

    name: str
    calm: tuple[float, float] = (4.0, 12.0)

    def __init__(self, world: World, tally: Tally, seed: int, stop: threading.Event) -> None:
        self.world, self.tally, self.stop = world, tally, stop
        self.rng = random.Random(f"{seed}:{self.name}")
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"soak-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until its last action is undone; False if it hangs."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @abstractmethod
    def act(self) -> None:
        """One action, undone when this returns."""

    def fault(self, kind: str) -> None:
        """Count one."""
        self.tally.count(f"fault {self.name} {kind}")
        self.tally.count("faults")
        self.tally.note(f"{self.name} {kind}")

    def _run(self) -> None:
        try:
            while not self.stop.wait(self.rng.uniform(*self.calm)):
                self.act()
        except BaseException as error:  # reported by the run
            self.error = error
            self.tally.problem("broken actor", name=self.name, error=repr(error))


def freeze(process: Process, actor: Actor, seconds: float) -> None:
    """SIGSTOP for a while, not beyond the run."""
    process.signal(signal.SIGSTOP)
    actor.fault("stop")
    try:
        actor.stop.wait(seconds)
    finally:
        process.signal(signal.SIGCONT)
        actor.tally.note(f"{actor.name} goes on")


def start_again(start: Callable[[], Process], started: Callable[[], Process | None], tally: Tally) -> None:
    """Start what was killed; again if it cannot (a port that is not free yet, a machine without a thread to spare), five times.

    `started`: what `start` has started, whether or not it became ready: one that is only slow would keep the port.
    """
    for attempt in range(5):
        try:
            start()
        except ProcessError as error:
            if (process := started()) is not None:
                process.end(1.0)
            if attempt == 4:
                raise
            tally.note(f"once more: {error}")
            time.sleep(1.0)
        else:
            return


class Master(Actor):
    """The store's master: frozen, or killed and started again empty; sometimes everything in the store is removed by force."""

    name = "master"

    def act(self) -> None:
        mooncake = self.world.mooncake
        assert mooncake.master is not None
        kind, seconds = self.rng.choice(("stop", "kill", "wipe")), self.rng.uniform(0.1, 4.0)
        if kind == "stop":
            freeze(mooncake.master, self, seconds)
        elif kind == "kill":
            mooncake.master.kill()
            self.fault("kill")
            self.stop.wait(seconds)
            start_again(mooncake.start_master, lambda: mooncake.master, self.tally)
        else:
            with suppress(OSError):
                mooncake.flush()
            self.fault("wipe")


class StoreNode(Actor):
    """One store node: frozen, or killed and replaced."""

    def __init__(self, number: int, world: World, tally: Tally, seed: int, stop: threading.Event) -> None:
        self.name = f"store{number}"
        self._process = world.mooncake.stores[number]
        super().__init__(world, tally, seed, stop)

    def act(self) -> None:
        frozen, seconds = self.rng.random() < 0.6, self.rng.uniform(0.2, 6.0)
        if not self._process.alive():  # it found no master for too long
            self.tally.count("store nodes that gave up")
            self.tally.note(f"{self.name} had ended by itself")
            self._process = self.world.mooncake.start_store(wait=False)
        elif frozen:
            freeze(self._process, self, seconds)
        else:
            self._process.kill()
            self.fault("kill")
            self.stop.wait(seconds)
            self._process = self.world.mooncake.start_store(wait=False)


class Hub(Actor):
    """The hub: frozen, or killed and started again; long enough at times for leases to run out."""

    name = "hub"

    def act(self) -> None:
        hub = self.world.hub
        frozen, seconds = self.rng.random() < 0.8, self.rng.uniform(0.2, 8.0)
        if frozen:
            freeze(hub.process, self, seconds)
        else:
            hub.process.kill()
            self.fault("kill")
            self.stop.wait(seconds)
            start_again(hub.start, lambda: hub.process, self.tally)


class Lines(Actor):
    """The network before the store's master and before the hub: slow, or broken."""

    name = "line"

    def act(self) -> None:
        to_store = self.rng.random() < 0.6
        relay, where = (self.world.master_relay, "store") if to_store else (self.world.hub.relay, "hub")
        slow, delay, seconds = self.rng.random() < 0.5, self.rng.uniform(0.02, 1.5), self.rng.uniform(0.1, 4.0)
        if slow:
            relay.delay_seconds = delay
            self.fault(f"{where} slow")
            self.stop.wait(seconds)
            relay.delay_seconds = 0.0
        else:
            relay.cut()
            self.fault(f"{where} cut")
            self.stop.wait(seconds)
            relay.mend()


class FrozenEngine(Actor):
    """An engine stands still, at times for longer than its lease, and goes on as if nothing had been."""

    name = "engine"
    calm = (8.0, 24.0)

    def act(self) -> None:
        rank, seconds = self.rng.choice(self.world.ranks), self.rng.uniform(0.2, 8.0)
        process = rank.engine.process
        if not rank.up:
            return
        with suppress(ProcessLookupError):  # killed meanwhile
            process.signal(signal.SIGSTOP)
            self.fault("stop")
            self.stop.wait(seconds)
            process.signal(signal.SIGCONT)


class KilledEngine(Actor):
    """Engines B and C are killed and come back with the weights of their start. A is spared, so that its memory can be watched."""

    name = "engine"
    calm = (60.0, 150.0)

    def __init__(self, ranks: Sequence[Rank], world: World, tally: Tally, seed: int, stop: threading.Event, soon: bool) -> None:
        self._ranks = ranks
        if soon:
            self.calm = (15.0, 30.0)
        super().__init__(world, tally, seed + 1, stop)

    def act(self) -> None:
        rank, seconds = self.rng.choice(self._ranks), self.rng.uniform(0.5, 5.0)
        self.world.kill(rank)
        self.fault("kill")
        self.stop.wait(seconds)
        self.world.restart(rank)
        self.tally.note(f"{rank.name} is back")
