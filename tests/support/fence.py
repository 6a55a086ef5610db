"""Real parts around the fence for tests: an authority in memory, an engine that records what it was told, a loop in a thread."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from epochkv_fence import common
from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import AuthorityError, PoolConfig, PoolRecord, Term, merged_labels

T = TypeVar("T")
POOL, SECOND_POOL = "pool-uid-1", "pool-uid-2"
WEIGHTS = b"initial-weights!"
OLD, NEW, OTHER = b"\x0a" * 16, b"\x3f\x2a\x9c\x1e" * 4, b"\x77" * 16
"""Weights that tests push."""


class MemoryAuthority:
    """Linearizable, because one event loop runs it. `gate` makes every call wait."""

    def __init__(self) -> None:
        self.records: dict[str, PoolRecord] = {}
        self.term: Term | None = None
        self.calls: list[str] = []
        self.published: list[tuple[float, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def _enter(self, call: str) -> None:
        self.calls.append(call)
        await self.gate.wait()

    async def verify(self, term: Term) -> bool:
        await self._enter("verify")
        return term == self.term

    async def load(self, pool_uid: str) -> PoolRecord:
        await self._enter("load")
        return self.records.get(pool_uid, PoolRecord())

    async def record(self, pool_uid: str, target: int, origin: Source | None = None) -> None:
        await self._enter("record")
        old = self.records.get(pool_uid, PoolRecord())
        if target > old.target:
            self.records[pool_uid] = replace(old, target=target, origin=origin)

    async def publish(self, pool_uid: str, epoch: int) -> None:
        await self._enter("publish")
        old = self.records.get(pool_uid, PoolRecord())
        if epoch > old.target:
            raise AuthorityError(f"epoch {epoch} is above the recorded target {old.target}")
        self.published.append((time.monotonic(), epoch))
        self.records[pool_uid] = replace(old, published=max(old.published, epoch))

    async def note_granting(self, pool_uid: str) -> None:
        await self._enter("note")
        old = self.records.get(pool_uid, PoolRecord())
        self.records[pool_uid] = replace(old, granting=True)

    async def note_labels(self, pool_uid: str, labels: Mapping[bytes, str], held: Collection[bytes] = ()) -> None:
        await self._enter("note labels")
        old = self.records.get(pool_uid, PoolRecord())
        self.records[pool_uid] = replace(old, labels=merged_labels(old.labels, labels, held))


class FakeEngine:
    """Hooks of an engine without vLLM: keeps what it adopted. `holds`: its weights, or why it cannot tell; `lacks`: why it lacks tiers."""

    def __init__(self) -> None:
        self.adopted: list[int] = []
        self.is_ready = True
        self.is_busy = False
        self.num_old_epoch = 0
        self.left_to_reclaim = 0
        self.reclaims: list[tuple[int, tuple[bytes, ...]]] = []
        self.holds: bytes | str = WEIGHTS
        self.lacks = ("", "")
        self.labels: dict[bytes, str] = {}

    def ready(self) -> bool:
        return self.is_ready

    def adopt(self, epoch: int) -> None:
        self.adopted.append(epoch)

    def busy(self) -> bool:
        return self.is_busy

    def old_epoch_requests(self) -> int:
        return self.num_old_epoch

    def isolated(self) -> bool:
        return False

    def stats(self) -> dict[str, float]:
        return {"hits": 1.0}

    def weights(self) -> tuple[bytes | None, str]:
        return (None, self.holds) if isinstance(self.holds, str) else (self.holds, "")

    def labelled(self, weights: bytes, label: str) -> None:
        self.labels[weights] = label

    def tiers(self) -> tuple[str, str]:
        return self.lacks

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> tuple[int, int]:
        self.reclaims.append((below, keep))
        left, self.left_to_reclaim = self.left_to_reclaim, 0
        return left, 10 * left


class LoopThread(common.LoopThread):
    """Hub and agents run as apart as they do in real life."""

    def __init__(self) -> None:
        super().__init__("test", 5.0)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:  # type: ignore[override]  # tests wait for it
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def freeze(self) -> threading.Event:
        """Stop everything in this loop, as SIGSTOP would, until the event that is returned is set."""
        thawed, frozen = threading.Event(), threading.Event()

        def sleep() -> None:
            frozen.set()
            thawed.wait(60)

        self.loop.call_soon_threadsafe(sleep)
        assert frozen.wait(10)
        return thawed

    close = common.LoopThread.stop


class FenceWorld:
    """Hubs, agents and one authority, over real sockets on loopback."""

    def __init__(self, lease_seconds: float = 30.0, **config: Any) -> None:
        self.thread = LoopThread()
        self.authority = self.thread.call(MemoryAuthority)
        self.hub_pair = generate_keypair()
        self.pool_pair = generate_keypair()
        self.config = PoolConfig(POOL, "default/policy", (self.pool_pair.public,), lease_seconds=lease_seconds, **config)
        self.hubs: list[HubServer] = []
        self.agents: list[AgentThread] = []
        self._terms = 0

    @property
    def client_keys(self) -> ClientKeys:
        return ClientKeys(self.hub_pair.public, *self.pool_pair)

    def hub(self, bind: str = "tcp://127.0.0.1:0", deadline: float = 1.0, leads: bool = True, **extra: Any) -> HubServer:
        """Start a hub, which takes the lead."""

        async def make() -> HubServer:
            hub = HubServer(bind, self.hub_pair, self.authority, authority_deadline_seconds=deadline, **extra)
            await hub.start()
            hub.set_pool(self.config)
            return hub

        hub = self.thread.run(make())
        self.hubs.append(hub)
        if leads:
            self.lead(hub)
        return hub

    def lead(self, hub: HubServer) -> Term:
        def take() -> Term:
            self._terms += 1
            term = self.authority.term = Term(f"hub-{id(hub)}", self._terms)
            hub.lead(term)
            return term

        return self.thread.call(take)

    def reconfigure(self, **change: Any) -> PoolConfig:
        return replace(self.config, **change)

    def second_pool(self, hub: HubServer, **change: Any) -> ClientKeys:
        """The hub serves another pool, too: that pool's keys."""
        pair = generate_keypair()
        config = self.reconfigure(uid=SECOND_POOL, name="default/second", client_public_keys=(pair.public,), **change)
        self.thread.call(lambda: hub.set_pool(config))
        return ClientKeys(self.hub_pair.public, *pair)

    def agent(
        self, endpoint: str, keys: ClientKeys | None = None, engine: FakeEngine | None = None, pool: str = "", **extra: Any
    ) -> tuple[AgentThread, FakeEngine]:
        """Start an agent; its pod is `rollout-<number>`. `pool`: what it says; else the first pool's uid, or none with other keys."""
        engine = engine or FakeEngine()
        pool = pool or (POOL if keys is None else "")
        identity = EngineIdentity("rollout", f"rollout-{len(self.agents)}", 0, "fp", pool=pool)
        agent = AgentThread(endpoint, keys or self.client_keys, secrets.token_bytes(16), identity, engine, **extra)
        agent.start()
        self.agents.append(agent)
        return agent, engine

    def request(self, hub: HubServer, epoch: int) -> None:
        self.thread.call(lambda: hub.request(POOL, epoch))

    def published(self) -> int:
        return self.authority.records.get(POOL, PoolRecord()).published

    def close(self) -> None:
        for agent in self.agents:
            agent.stop()
        for hub in self.hubs:
            self.thread.run(hub.stop())
        self.thread.close()


class LeaseWatch:
    """Looks at agents all the time, in a `with` block; `gaps` counts how often one was seen without an epoch and a live lease."""

    def __init__(self, agents: Iterable[AgentThread]) -> None:
        self.gaps = self.looks = 0
        self._agents = list(agents)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            for agent in self._agents:
                view = agent.view
                self.looks += 1
                self.gaps += view.epoch is None or common.lease_clock() >= view.lease_until

    def __enter__(self) -> LeaseWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)


Running = tuple[AgentThread, FakeEngine]


def push(engines: Iterable[Running], holds: bytes | str) -> None:
    """They hold these weights now; text: nobody can tell which, and this is why."""
    for agent, engine in engines:
        engine.holds = holds
        agent.poke()


def engine_with(holds: bytes | str) -> FakeEngine:
    engine = FakeEngine()
    engine.holds = holds
    return engine
