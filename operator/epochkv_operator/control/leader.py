"""The Lease and the hub, on a thread, a loop and connections of their own: nothing that reconciles delays a renewal or a grant.

Both threads share the store, which the main thread owns. The hub's thread reads it by single lookups, and posts what it learns.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from epochkv_fence.common import LoopThread, lease_clock
from epochkv_fence.mooncake_admin import MooncakeAdmin
from epochkv_fence.net.keys import KeyPair
from epochkv_operator import metrics
from epochkv_operator.api.resources import Resource
from epochkv_operator.hub.masters import master_urls
from epochkv_operator.hub.service import HubFailed, HubService
from epochkv_operator.kube.client import Json, KubeClient, Unavailable
from epochkv_operator.kube.lease import LeaseHolder
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.kube.store import Key, Store, resource_version
from epochkv_operator.settings import LEASE, Settings

P = ParamSpec("P")
T = TypeVar("T")

SWITCH_SECONDS = 0.0005
"""After so long, a thread that computes lets another one have the interpreter. With Python's 5 ms, each message of a reset may wait that
long for a reconcile: 200 round trips beside a busy thread took 0.24 s, and take 0.03 s."""
STOP_SECONDS = 5.0


@dataclass(eq=False)
class WriteThroughCache:
    """`status.Known` of the hub's writes. Its own last answers count at once: the owner may be busy for a while."""

    _store: Store
    _learn: Callable[[str, Json], object]
    """Has the owner of the store take in a state of an object of a kind. Called on the hub's thread."""
    _own: dict[str, Json] = field(default_factory=dict)

    def by_uid(self, kind: str, uid: str) -> Json | None:
        """The newest state that either has seen."""
        own, stored = self._own.get(uid), self._store.by_uid(kind, uid)
        if own is None or stored is None:
            return own or stored
        if resource_version(stored) < resource_version(own):
            return own
        del self._own[uid]  # the owner has caught up
        return stored

    def upsert(self, kind: str, obj: Json) -> None:
        self.learn(obj)
        self._learn(kind, obj)

    def learn(self, obj: Json) -> None:
        """A state that the owner hears of in another way."""
        uid = obj["metadata"]["uid"]
        own = self._own.get(uid)
        if own is None or resource_version(own) < resource_version(obj):
            self._own[uid] = obj

    def forget(self, uid: str) -> None:
        self._own.pop(uid, None)


@dataclass(eq=False)
class HubProxy:
    """Has methods of the hub called on its thread: `hub(HubService.snapshot, uid)`. Waits for the hub's loop, which never waits for us."""

    _thread: LoopThread
    _hub: HubService

    def __call__(self, method: Callable[Concatenate[HubService, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method, self._hub, *args, **kwargs)

    def seen(self, pool: Json) -> None:
        """`HubService.seen`, on the hub's own thread and event loop. Nobody waits for it; calls made after it see what it did."""
        self._thread.post(self._hub.seen, pool)


PERIOD_SECONDS = 0.25


async def watch_lag(loop: str) -> None:
    """Measure the loop that this runs on, for ever: by how much a sleep was too long (seconds), for `/metrics`."""
    histogram = metrics.LOOP_LAG.labels(loop=loop)
    while True:
        due = time.monotonic() + PERIOD_SECONDS
        await asyncio.sleep(PERIOD_SECONDS)
        histogram.observe(max(0.0, time.monotonic() - due))


@dataclass(eq=False)
class Leader:
    """From standing by to giving the Lease back. On the main loop, `news` and `wake` are called, and `answers` when the Lease could be
    renewed again after it could not."""

    _settings: Settings
    _identity: str
    _store: Store
    _news: Callable[[Resource, Json], object]
    _wake: Callable[[Key, float], None]
    _answers: Callable[[], None]
    _main: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _thread: LoopThread = field(default_factory=lambda: LoopThread("hub", STOP_SECONDS))
    _client: KubeClient | None = None
    _hub_client: KubeClient | None = None
    _lease: LeaseHolder | None = None
    _hub: HubService | None = None
    port: HubProxy | None = None

    async def acquire(self) -> None:
        """Stand by until the Lease is ours."""
        sys.setswitchinterval(SWITCH_SECONDS)
        await self._thread.run(self._acquire())

    async def hold(self) -> None:
        """Renew until the Lease is lost. Then the hub grants nothing more, before anybody else hears of it. Raises `LeaseLost`."""
        await self._thread.run(self._hold())

    async def serve(self, keys: KeyPair) -> HubProxy:
        """Bind the hub. Raises `OSError`: the address cannot be bound; `HubFailed`: the Lease was lost meanwhile."""
        await self._thread.run(self._serve(keys))
        if self._hub is None:
            raise HubFailed("the Lease was lost while the hub was started")
        self.port = HubProxy(self._thread, self._hub)
        return self.port

    async def watch_hub(self) -> None:
        """Never returns. Raises `LeaseLost`, `HubFailed`."""
        if self._hub is None:
            raise HubFailed("the hub was not started")
        await self._thread.run(self._hub.run())

    def not_leading(self) -> str | None:
        """Why this process must not write now; None: it may. The answer holds on any thread, and after a freeze or a suspension."""
        lease = self._lease
        if lease is None or lease.term is None:
            return "this process does not hold the Lease"
        age = lease_clock() - lease.renewed_at
        return f"the Lease was last renewed {age:.1f} s ago" if age >= lease.deadline_seconds else None

    @property
    def listening(self) -> bool:
        return self._hub is not None and self._hub.listening

    def hung(self) -> str | None:
        """What is wrong with the hub's thread, if anything is."""
        try:
            self._thread.call(lambda: None)
        except TimeoutError:
            return "the loop of the Lease and the hub does not answer"
        return None

    async def close_hub(self) -> None:
        self.port = None
        await self._thread.run(self._close_hub())

    async def close(self) -> None:
        """Give the Lease back, and end the thread."""
        await self._thread.run(self._close())
        await asyncio.to_thread(self._thread.stop)

    # ---- on the hub's thread ----

    async def _acquire(self) -> None:
        settings = self._settings
        place = (settings.namespace, LEASE, self._identity, settings.lease_duration_seconds)
        while True:
            self._client = await KubeClient.connect()
            self._lease = LeaseHolder(self._client, *place)
            self._lease.recovered = lambda: self._on_main(self._answers)
            try:
                await self._lease.acquire()
                return
            except Unavailable:  # the API server's CA may be another by now, and a connection has the one that it began with
                await self._client.close()

    async def _hold(self) -> None:
        assert self._lease is not None
        lag = asyncio.create_task(watch_lag("hub"))
        try:
            await self._lease.hold()
        finally:
            lag.cancel()
            await self._close_hub()

    async def _serve(self, keys: KeyPair) -> None:
        assert self._lease is not None
        # Not the Lease's own client, which has to write while this process does not lead.
        client = self._hub_client = await KubeClient.connect()
        client.may_not_write = self.not_leading
        cache = WriteThroughCache(self._store, lambda kind, obj: self._on_main(self._store.upsert, kind, obj))

        def news(resource: Resource, obj: Json) -> None:
            cache.learn(obj)
            self._on_main(self._news, resource, obj)

        hub = self._hub = HubService(
            self._settings.hub_bind,
            keys,
            self._lease,
            StatusWriter(client, cache, news),
            lambda key, delay_seconds: self._on_main(self._wake, key, delay_seconds),
            MooncakeAdmin(partial(master_urls, self._store)),
            forgotten=cache.forget,
        )
        await hub.start()

    def _on_main(self, function: Callable[..., object], *args: object) -> None:
        if not self._main.is_closed():
            self._main.call_soon_threadsafe(function, *args)

    async def _close_hub(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            await hub.close()

    async def _close(self) -> None:
        await self._close_hub()
        if self._lease is not None:
            await self._lease.release()
        for client in (self._client, self._hub_client):
            if client is not None:
                await client.close()
