"""The processes of a soak: store, hub, relays before both, three engines, and what is known of each engine."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from epochkv_fence.client import Pool as TrainerPool
from epochkv_fence.client import PoolError
from hack.engine_api import EngineError
from hack.loopback import free_port
from hack.soak.answers import BLOCK_TOKENS
from hack.soak.states import FLIPPED, Kind, States
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import read_connection, transfer_config
from hack.standalone.process import Popen, Process, ProcessError
from hack.standalone.relay import Relay
from hack.waiting import eventually

NUM_ENGINES = 3
GPU_BLOCKS = 40
"""Of 128 tokens: less than the prompts need together, so that vLLM evicts and preempts."""
BOOT_SECONDS = 600.0
LEASE_SECONDS = 5.0
STORE_LEASE_SECONDS = 3.0
ENVIRON = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
"""For memory that can be judged. PyTorch's oneDNN keeps a compiled kernel for each of the last 1,024 shapes. Without any connector
an engine's worker grew by 320 MB over 5,900 prompts of the soak, ever slower; with these by 3 MB over 3,300 (measured)."""
WRITER = ("--worker-extension-cls", "hack.soak.weights_writer.Writer")
SEEN = re.compile(r"EpochKV: weights ([0-9a-f]+), seen")
WRITE_SECONDS, RPC_SECONDS = 60.0, 60.0
CONNECTOR = {"lookup_deadline_ms": 500.0, "job_deadline_seconds": 5.0}


@dataclass
class Rank:
    """One engine of the run, over all its boots.

    Attributes:
        weights: folder with exactly the weights that this boot holds; None: nobody knows.
        version: even while weights stand still; moves on with every change of weights and every end of a boot.
        up: it should answer.
        control: held by whoever pauses, resets or pushes, from the pause to the resume.
    """

    index: int
    engine: Engine
    weights: Path | None
    version: int = 0
    up: bool = True
    control: threading.RLock = field(default_factory=threading.RLock)
    _moving: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return "ABC"[self.index]

    def move(self, steps: int) -> None:
        with self._moving:
            self.version += steps


class HubProcess:
    """`epochkv hub` as a child, and a relay before it, so that its line can be cut."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.relay = Relay(f"tcp://127.0.0.1:{self._port}")
        self.credentials = folder / "hub" / "client"
        self.process: Process

    def start(self) -> Process:
        """Start (again) on the same state and port; returns when it leads."""
        log = self._folder / "hub.log"
        offset = log.stat().st_size if log.exists() else 0
        command = [
            sys.executable, "-m", "epochkv_fence.cli", "hub", "--pool", "soak", "--listen", f"tcp://127.0.0.1:{self._port}",
            "--advertise", self.relay.endpoint, "--state", str(self._folder / "hub"), "--lease-seconds", str(LEASE_SECONDS),
        ]  # fmt: skip
        self.process = Process("hub", command, log)
        self.process.wait_until(lambda: b"leading" in log.read_bytes()[offset:], 60, "leading")
        return self.process


class World:
    """Everything that runs. `begin` starts it, `end` ends it."""

    def __init__(self, folder: Path, states: States, kind: Kind, popen: Popen = subprocess.Popen) -> None:
        self.folder, self.states, self._kind, self._popen = folder, states, kind, popen
        self.mooncake = Mooncake(folder / "mooncake", 2, 48 << 20, STORE_LEASE_SECONDS, client_ttl_seconds=5)
        self.master_relay = Relay(self.mooncake.address)
        self.updates = threading.RLock()
        """Held while a push to all is to be proved, and while an engine boots, of which nobody knows when it will be there."""
        self.pushing = threading.RLock()
        """Held while weights are pushed to anybody, inside `updates`."""
        self._boots = 0
        self._fresh = random.Random(str(folder))
        self.hub: HubProcess
        self.ranks: list[Rank] = []
        self.trainer: TrainerPool

    def begin(self) -> None:
        """Start everything; returns once all engines share."""
        self.mooncake.__enter__()
        self.hub = HubProcess(self.folder)
        self.hub.start()
        self.trainer = TrainerPool.connect(read_connection(self.hub.credentials))
        for index in range(NUM_ENGINES):  # known one by one, so that `end` finds those that were started
            self.ranks.append(Rank(index, self._start(index), self.states.whole[0]))
        for rank in self.ranks:
            self._welcome(rank)
        eventually(
            lambda: [engine.state for engine in self.trainer.engines()] == ["sharing"] * NUM_ENGINES,
            lambda: f"the engines share: {self.trainer.engines()}",
            120.0,
            1.0,
        )

    def _start(self, index: int) -> Engine:
        self._boots += 1
        connector = transfer_config(read_connection(self.hub.credentials), self._kind.l1_bytes, self.master_relay.address, **CONNECTOR)
        args = ("--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-num-batched-tokens", "512", *WRITER, *self._kind.args)
        name = f"{'ABC'[index]}{self._boots}"
        return Engine(name, self.states.whole[0], self.folder, connector, args=args, environ=ENVIRON, popen=self._popen)

    def _welcome(self, rank: Rank) -> None:
        engine = rank.engine.wait_ready(BOOT_SECONDS)
        orders = self._orders(engine)
        orders.mkdir()
        rpc(engine, "write_later", folder=str(orders))

    def _orders(self, engine: Engine) -> Path:
        return self.folder / f"{engine.name}.orders"

    def kill(self, rank: Rank) -> None:
        rank.up = False
        rank.move(2)
        rank.engine.process.kill()

    def restart(self, rank: Rank) -> None:
        """Start a killed engine again, with the weights that it was given at first."""
        with self.updates:
            rank.weights = self.states.whole[0]
            rank.engine = self._start(rank.index)
            self._welcome(rank)
            rank.move(2)
            rank.up = True

    @contextmanager
    def paused(self, ranks: Sequence[Rank]) -> Iterator[list[Rank]]:
        """Engines paused without clearing their caches; gives those that took it. Nobody else controls them meanwhile."""
        with held([rank.control for rank in ranks]):
            taken = [rank for rank in ranks if rank.up and _tried(rank, "/pause?mode=abort&clear_cache=false")]
            try:
                yield taken
            finally:
                for rank in taken:
                    if rank.up:
                        _tried(rank, "/resume")

    def push(self, rank: Rank, folder: Path) -> bool:
        """New weights for one engine; False if it died meanwhile.

        Raises:
            EngineError: it lives and did not take them; nobody knows which weights it has.
        """
        engine = rank.engine
        rank.move(1)
        try:
            engine.reload_weights(folder)
            rank.weights = folder
        except EngineError:
            if rank.up and rank.engine is engine:
                rank.weights = None
                raise
            return False
        finally:
            rank.move(1)
        return True

    def push_half(self, rank: Rank) -> bool:
        """A push to one engine with whole weights that breaks off behind the embedding; False if it died meanwhile.

        Raises:
            EngineError: as `push`.
        """
        engine, before = rank.engine, rank.weights
        assert before is not None
        rank.move(1)
        rank.weights = None
        try:
            rpc(engine, "half_a_push", path=str(self.states.donors[before]))
        except EngineError as error:
            if not rank.up or rank.engine is not engine:
                return False
            if "HTTP 500" not in str(error):
                raise
            rank.weights = self.states.halves[before]
        finally:
            rank.move(1)
        return True

    def write_past(self, rank: Rank, unnoticed: Callable[[Rank, Path], None]) -> bool:
        """Somebody writes to a parameter of one engine with whole or flipped weights; nobody tells vLLM. False if it died meanwhile.

        Requests that run go on. What they make of two sets of weights is nobody's answer, so the next is asked when the engine says
        that it holds others; a step that began before the write has ended by then.

        Args:
            unnoticed: called when it does not say so although it answers.

        Raises:
            EngineError: it lives and did not answer.
        """
        engine, before = rank.engine, rank.weights
        assert before is not None
        rank.move(1)
        rank.weights = None
        try:
            self._step(engine)  # it has looked at what was pushed before
            held = self._seen(engine)
            order = self._orders(engine) / f"{FLIPPED}.order"
            order.with_suffix(".new").write_text("-1")
            order.with_suffix(".new").rename(order)
            deadline = time.monotonic() + WRITE_SECONDS
            while order.exists() or self._seen(engine) == held:
                self._step(engine)
                if time.monotonic() > deadline:
                    unnoticed(rank, before)
                    return False
            rank.weights = self.states.flips[before]
        except EngineError:
            if rank.up and rank.engine is engine:
                raise
            return False
        finally:
            rank.move(1)
        return True

    def _step(self, engine: Engine) -> None:
        """At least one step, which completes a block that nobody has."""
        engine.complete([self._fresh.randrange(2, 512) for _ in range(BLOCK_TOKENS + 8)], 1)

    @staticmethod
    def _seen(engine: Engine) -> str:
        """What the engine has said last that it holds."""
        return str((SEEN.findall(engine.process.log.read_text(errors="replace")) or [""])[-1])

    def unheld(self, number: float) -> Path:
        """Whole weights that a push to all would change, one of them by a number from 0 to 1: of those that no engine holds, if any."""
        held = [rank.weights for rank in self.ranks if rank.up]
        free = [folder for folder in self.states.whole if folder not in held]
        free = free or [folder for folder in self.states.whole if folder != held[0]]
        return free[int(number * len(free))]

    def end(self) -> None:
        """End everything that was started, also what stands still."""
        with suppress(PoolError, AttributeError):
            self.trainer.close()
        for rank in self.ranks:
            rank.up = False
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda rank: rank.engine.end(), self.ranks))
        with suppress(AttributeError):
            self.hub.process.end(10.0)
        self.mooncake.end()


@contextmanager
def held(locks: Sequence[threading.RLock]) -> Iterator[None]:
    for lock in locks:
        lock.acquire()
    try:
        yield
    finally:
        for lock in reversed(locks):
            lock.release()


def rpc(engine: Engine, method: str, **arguments: str) -> None:
    """Call a method on every worker of the engine.

    Raises:
        EngineError: it raised, or there was no answer.
    """
    engine.post("/collective_rpc", {"method": method, "kwargs": arguments}, RPC_SECONDS)


def _tried(rank: Rank, path: str) -> bool:
    try:
        rank.engine.post(path, {}, 60.0)
    except (EngineError, ProcessError):
        return False
    return True
