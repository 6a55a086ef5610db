"""The processes of a soak: store, hub, relays before both, three engines, and what is known of each engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epochkv_fence.client import Pool as TrainerPool
from epochkv_fence.client import PoolError
from hack.engine_api import EngineError
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import transfer_config
from hack.standalone.process import Popen, Process, ProcessError, free_port
from hack.standalone.relay import Relay

NUM_ENGINES = 3
GPU_BLOCKS = 40
"""Of 128 tokens: less than the prompts need together, so that vLLM evicts and preempts."""
L1_BYTES = 12 << 20
"""About 60 blocks: less than there are prompts, so that L1 evicts, too."""
BOOT_SECONDS = 600.0
LEASE_SECONDS = 5.0
STORE_LEASE_SECONDS = 3.0
ENVIRON = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
"""For memory that can be judged. PyTorch's oneDNN keeps a compiled kernel for each of the last 1,024 shapes: without any connector
an engine's worker grew by 320 MB over 5,900 prompts of the soak, ever slower, and with these by 3 MB over 3,300 (measured)."""
CONNECTOR = {"lookup_deadline_ms": 500.0, "job_deadline_seconds": 5.0}


@dataclass
class Rank:
    """One engine of the run, over all its boots.

    Attributes:
        weights: folder that this boot has loaded; None: nobody knows.
        version: even while weights stand still; moves on with every change of weights and every end of a boot.
        up: it should answer.
        control: held by whoever pauses, resets or pushes, from the pause to the resume.
    """

    index: int
    engine: Engine
    weights: Path | None
    version: int = 0
    up: bool = True
    born: float = field(default_factory=time.monotonic)
    control: threading.RLock = field(default_factory=threading.RLock)
    _moving: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return "ABC"[self.index]

    def move(self, steps: int) -> None:
        """Advance the version."""
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

    def connection(self) -> dict[str, Any]:
        """What clients need to know."""
        content: dict[str, Any] = json.loads((self.credentials / "connection.json").read_text())
        return {"pool": content["pool"], "hub": {**content["hub"], "credentials_dir": str(self.credentials)}}


class World:
    """Everything that runs. `begin` starts it, `end` ends it."""

    def __init__(self, folder: Path, weights: Sequence[Path], popen: Popen = subprocess.Popen) -> None:
        self.folder, self.weights, self._popen = folder, tuple(weights), popen
        self.mooncake = Mooncake(folder / "mooncake", 2, 48 << 20, STORE_LEASE_SECONDS, client_ttl_seconds=5)
        self.master_relay = Relay(self.mooncake.address)
        self.current = self.weights[0]  # what the last complete update pushed
        self.updates = threading.RLock()
        """Held while weights are pushed, and while an engine boots: a trainer pushes to engines that can be reached."""
        self._boots = 0
        self.hub: HubProcess
        self.ranks: list[Rank] = []
        self.trainer: TrainerPool

    def begin(self) -> None:
        """Start everything; returns once all engines share."""
        self.mooncake.__enter__()
        self.hub = HubProcess(self.folder)
        self.hub.start()
        self.trainer = TrainerPool.connect(self.hub.connection())
        for index in range(NUM_ENGINES):  # known one by one, so that `end` finds those that were started
            self.ranks.append(Rank(index, self._start(index), self.weights[0]))
        for rank in self.ranks:
            rank.engine.wait_ready(BOOT_SECONDS)
            rank.born = time.monotonic()
        deadline = time.monotonic() + 120.0
        while sorted(engine.state for engine in self.trainer.engines()) != ["use"] * NUM_ENGINES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engines do not share: {self.trainer.engines()}")
            time.sleep(1.0)

    def _start(self, index: int) -> Engine:
        self._boots += 1
        connector = transfer_config(self.hub.connection(), L1_BYTES, self.master_relay.address, **CONNECTOR)
        args = ("--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-num-batched-tokens", "512")
        name = f"{'ABC'[index]}{self._boots}"
        return Engine(name, self.weights[0], self.folder, connector, args=args, environ=ENVIRON, popen=self._popen)

    def kill(self, rank: Rank) -> None:
        """SIGKILL to the whole engine."""
        rank.up = False
        rank.move(2)
        rank.engine.process.signal(signal.SIGKILL)
        rank.engine.process.popen.wait(30)

    def restart(self, rank: Rank) -> None:
        """Start a killed engine again, with the weights that it was given at first."""
        with self.updates:
            rank.weights = self.weights[0]
            engine = self._start(rank.index)
            rank.engine = engine
            engine.wait_ready(BOOT_SECONDS)
            rank.born = time.monotonic()
            rank.move(2)
            rank.up = True

    @contextmanager
    def paused(self, ranks: Sequence[Rank], mode: str = "abort") -> Iterator[list[Rank]]:
        """Engines paused without clearing their caches; gives those that took it. Nobody else controls them meanwhile."""
        with held([rank.control for rank in ranks]):
            taken = [rank for rank in ranks if rank.up and _tried(rank, f"/pause?mode={mode}&clear_cache=false")]
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
    """Hold all locks, taken in order."""
    for lock in locks:
        lock.acquire()
    try:
        yield
    finally:
        for lock in reversed(locks):
            lock.release()


def _tried(rank: Rank, path: str) -> bool:
    try:
        rank.engine.post(path, {}, 60.0)
    except (EngineError, ProcessError):
        return False
    return True
