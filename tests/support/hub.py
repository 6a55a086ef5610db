"""The standalone hub as tests use it: in a thread, or as the real process `epochkv hub`; agents that join it by its client folder."""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from epochkv_fence.client import Pool
from epochkv_fence.common import lease_clock
from epochkv_fence.connection import Connection
from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.protocol.pool import PoolSnapshot
from epochkv_fence.standalone.hub import HubOptions, StandaloneHub
from hack.loopback import free_port
from hack.standalone.relay import Relay
from hack.waiting import eventually
from tests.support.fence import FakeEngine, LoopThread

CLI = (sys.executable, "-m", "epochkv_fence.cli")


def epochkv(*arguments: str, config: Path | None = None, seconds: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environ}
    variables.pop("EPOCHKV_CONFIG", None)
    if config is not None:
        variables["EPOCHKV_CONFIG"] = str(config)
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=seconds, env=variables, check=False)


def altered(folder: Path, copy: Path, **keys: Any) -> str:
    """Copy a client folder, with these keys of its connection.json changed; the path of that file."""
    file = shutil.copytree(folder, copy) / "connection.json"
    content = json.loads(file.read_text())
    for key, value in keys.items():
        content[key] = {**content[key], **value} if key in content else value
    file.write_text(json.dumps(content))
    return str(file)


@contextmanager
def interruptible() -> Iterator[None]:
    """For children that are started here: a shell has its background jobs ignore SIGINT, and the tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Agents:
    """Engines without vLLM that join by a client folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[AgentThread] = []

    def start(
        self, name: str = "", endpoint: str = "", engine: FakeEngine | None = None, identity: EngineIdentity | None = None
    ) -> tuple[AgentThread, FakeEngine]:
        connection = Connection.load(self.folder, {})
        engine = engine or FakeEngine()
        identity = identity or EngineIdentity(name or f"engine-{len(self.all)}", "", 0, "fp")
        where, keys = endpoint or connection.hub.endpoint, connection.client_keys
        agent = AgentThread(where, keys(), secrets.token_bytes(16), identity, engine, credentials=keys)
        agent.start()
        self.all.append(agent)
        return agent, engine

    def stop(self) -> None:
        for agent in self.all:
            agent.stop()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def using(agent: AgentThread, epoch: int) -> bool:
    """It may use that epoch, under a live lease."""
    view = agent.view
    return view.epoch == epoch and lease_clock() < view.lease_until


class HubWorld:
    """A standalone hub in a thread, its agents and its clients."""

    def __init__(self, state: Path, **options: Any) -> None:
        self.options = HubOptions("policy", "tcp://127.0.0.1:0", state, **options)
        self.thread = LoopThread()
        self.folder = state / "client"
        self.hub: StandaloneHub | None = None
        self.start_hub()
        self.agents = Agents(self.folder)
        self.pools: list[Pool] = []

    def start_hub(self) -> StandaloneHub:
        """Start it, the second time at the address of the first."""
        hub = StandaloneHub(self.options)
        self.thread.run(hub.start())
        self.hub = hub
        self.options = replace(self.options, listen=hub.server.endpoint)
        return hub

    @property
    def port(self) -> int:
        return int(self.options.listen.rpartition(":")[2])

    def stop_hub(self) -> None:
        if self.hub is not None:
            self.thread.run(self.hub.stop())
            self.hub = None

    def snapshot(self) -> PoolSnapshot:
        hub = self.hub
        assert hub is not None
        return self.thread.call(lambda: hub.server.snapshot(hub.uid))

    def ask(self, epoch: int) -> None:
        hub = self.hub
        assert hub is not None
        self.thread.call(lambda: hub.server.request(hub.uid, epoch))

    def serving(self, num_agents: int = 2) -> list[tuple[AgentThread, FakeEngine]]:
        """Agents that share the present epoch."""
        agents = [self.agents.start() for _ in range(num_agents)]
        target = self.snapshot().target
        eventually(lambda: all(agent.view.epoch == target for agent, _ in agents), "everyone is granted")
        return agents

    def connect(self, timeout_s: float = 20.0) -> Pool:
        pool = Pool.connect(self.folder, timeout_s)
        self.pools.append(pool)
        return pool

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.agents.stop()
        self.stop_hub()
        self.thread.close()


class HubProcess:
    """The real `epochkv hub`."""

    def __init__(self, state: Path, *options: str, port: int = 0, pool: str = "policy") -> None:
        self.state, self.folder = state, state / "client"
        self.port = port or free_port()
        self.command = [*CLI, "hub", "--pool", pool, "--listen", f"tcp://127.0.0.1:{self.port}", "--state", str(state), *options]
        self.log = state.parent / f"{state.name}.log"
        self.child: subprocess.Popen[bytes]

    def start(self, wait: bool = True) -> HubProcess:
        """Start (again); returns when it leads."""
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as sink:
            self.child = subprocess.Popen(self.command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True)
        if wait:
            eventually(lambda: b"leading" in self.log.read_bytes()[offset:] or self.child_ended(), "the hub leads", 60)
            assert not self.child_ended(), self.text()
        return self

    def child_ended(self) -> bool:
        return self.child.poll() is not None

    def text(self) -> str:
        return self.log.read_text()

    def target(self) -> int:
        """The newest epoch that it was asked for."""
        with Pool.connect(self.folder) as pool:
            return pool.status().target

    def send(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(30)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to end; its exit status."""
        if self.child.poll() is None:
            os.kill(self.child.pid, signal.SIGCONT)
            os.kill(self.child.pid, number)
        try:
            return self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise

    def __enter__(self) -> HubProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.end()


class Switch(Relay):
    """A TCP address in front of hubs: forwards new connections to the port that `upstream` is or gives (None: nowhere)."""

    def __init__(self, upstream: int | Callable[[], int | None] | None) -> None:
        self.upstream = upstream
        super().__init__("")

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self.turn(None)

    def turn(self, upstream: int | None) -> None:
        """New connections go there; those there are break."""
        self.upstream = upstream
        self.cut()
        self.mend()

    def target(self) -> str:
        port = self.upstream() if callable(self.upstream) else self.upstream
        return f"127.0.0.1:{port or 1}"


def together(works: list[Callable[[], Any]], seconds: float = 120.0) -> list[Any]:
    """Run in threads at once; their results in order, or the first exception."""
    results: list[Any] = [None] * len(works)
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    gate = threading.Barrier(len(works))

    def run(index: int) -> None:
        gate.wait(30)
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a thread hangs"
    if not errors.empty():
        raise errors.get()
    return results


def hub_world(state: Path, **options: Any) -> closing[HubWorld]:
    return closing(HubWorld(state, **options))
