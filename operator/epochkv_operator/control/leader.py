"""The Lease and the hub, on a thread, a loop and connections of their own: nothing that reconciles delays a renewal or a grant.

Both threads share the store, which the main thread owns. The hub's thread reads it by single lookups, and posts what it learns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from epochkv_fence.net import KeyPair
from epochkv_fence.stores.mooncake import MooncakeAdmin
from epochkv_operator.hub.echo import Echo
from epochkv_operator.hub.loop import LoopThread
from epochkv_operator.hub.port import HubPort
from epochkv_operator.hub.service import HubFailed, HubService
from epochkv_operator.hub.stores import master_urls
from epochkv_operator.kube.client import Json, KubeClient
from epochkv_operator.kube.lease import LeaseHolder
from epochkv_operator.kube.resources import Resource
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.kube.store import Store
from epochkv_operator.kube.work_keys import Key
from epochkv_operator.lag import watch_lag
from epochkv_operator.settings import Settings

News = Callable[[Resource, Json], object]
Wake = Callable[[Key, float], None]


class Leader:
    """From standing by to giving the Lease back. On the main loop, `news` and `wake` are called, and `answers` when the Lease could be
    renewed again after it could not.
    """

    def __init__(self, settings: Settings, identity: str, store: Store, news: News, wake: Wake, answers: Callable[[], None]) -> None:
        self._settings = settings
        self._identity = identity
        self._store = store
        self._main = asyncio.get_running_loop()
        self._news: News = news
        self._wake: Wake = wake
        self._answers = answers
        self._thread = LoopThread("hub")
        self._client: KubeClient | None = None
        self._hub_client: KubeClient | None = None
        self._lease: LeaseHolder | None = None
        self._hub: HubService | None = None
        self.port: HubPort | None = None

    async def acquire(self) -> None:
        """Stand by until the Lease is ours."""
        await self._thread.run(self._acquire())

    async def hold(self) -> None:
        """Renew until the Lease is lost. Then the hub grants nothing more, before anybody else hears of it.

        Raises:
            LeaseLost
        """
        await self._thread.run(self._hold())

    async def serve(self, keys: KeyPair) -> HubPort:
        """Bind the hub.

        Raises:
            OSError: the address cannot be bound.
            HubFailed: the Lease was lost meanwhile.
        """
        await self._thread.run(self._serve(keys))
        if self._hub is None:
            raise HubFailed("the Lease was lost while the hub was started")
        self.port = HubPort(self._thread, self._hub)
        return self.port

    async def watch_hub(self) -> None:
        """Never returns. Raises `LeaseLost`, `HubFailed`."""
        if self._hub is None:
            raise HubFailed("the hub was not started")
        await self._thread.run(self._hub.run())

    def not_leading(self) -> str | None:
        """Why this process must not write now; None: it may. The answer holds on any thread, and when this process was frozen."""
        lease = self._lease
        if lease is None or lease.term is None:
            return "this process does not hold the Lease"
        age = time.monotonic() - lease.renewed_at
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
        self._client = await KubeClient.connect()
        self._lease = LeaseHolder(self._client, settings.namespace, settings.lease_name, self._identity, settings.lease_duration_seconds)
        self._lease.recovered = lambda: self._on_main(self._answers)
        await self._lease.acquire()

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
        echo = Echo(self._store, lambda kind, obj: self._on_main(self._store.upsert, kind, obj))

        def news(resource: Resource, obj: Json) -> None:
            echo.learn(obj)
            self._on_main(self._news, resource, obj)

        hub = self._hub = HubService(
            self._settings.hub_bind,
            keys,
            self._lease,
            StatusWriter(client, echo, news),
            lambda key, delay_seconds: self._on_main(self._wake, key, delay_seconds),
            MooncakeAdmin(partial(master_urls, self._store)),
            forgotten=echo.forget,
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
