"""What is there is compared with what is known, regularly: that heals edges that the watches lost, deletions in a gap above all.

kopf reads every object once, when its watches start. From then on a LIST shows uids and versions only. The watches get some time to
bring what they have not brought yet. A kind of which they do not bring everything is read as a whole.

Everything is also compared shortly after kopf listed something again: kopf tells its handlers what exists, never what vanished while
it was not watching. Each kind has its own moment in the period, so that their lists do not come together.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import structlog

from epochkv_operator import metrics
from epochkv_operator.kube.client import ApiError, Json, KubeClient
from epochkv_operator.kube.resources import CHILD_SELECTOR, PRIMARY, WATCHED, Resource
from epochkv_operator.kube.store import Store

log = structlog.get_logger(__name__)
AFTER_RELIST_SECONDS = 1.0
RETRY_SECONDS = 2.0
PATIENCE_SECONDS = 3.0
"""How long the watches may bring nothing of what they are behind with."""
START_PATIENCE_SECONDS = 15.0
"""The same when they start, of all kinds together: kinds wait for each other then."""
LOOK_AGAIN_SECONDS = 2.0
"""After so long without news at the start, see what is still there: what was deleted meanwhile, no watch will bring."""
LOOK_SECONDS = 0.05

Take = Callable[[Resource, Json], None]
"""An object that the watches missed."""
Compared = Callable[[Resource, list[Json]], None]
"""A kind was compared: the objects that have vanished."""


class _List(NamedTuple):
    scope: str | None
    shown: dict[str, int]
    version: int


class Resync:
    """Keeps `store` complete. `take` and `compared` must return soon."""

    def __init__(
        self,
        client: KubeClient,
        store: Store,
        take: Take,
        compared: Compared,
        scopes: tuple[str | None, ...],
        interval_seconds: float,
    ) -> None:
        self._client = client
        self._store = store
        self._take = take
        self._compared = compared
        self._scopes = scopes
        self._interval_seconds = interval_seconds
        self._began = time.monotonic()
        self._first: dict[Resource, list[_List]] = {}
        self._due: dict[Resource, float] = {}
        self._wakeup = asyncio.Event()
        self._problem: dict[Resource, str] = {}
        self.listed_at: dict[Resource, float] = {}

    def soon(self) -> None:
        """kopf has listed some kind again: look for what vanished, of every kind. A gap rarely hits one watch alone,
        and a kind of which nothing is left shows nothing when it is listed.
        """
        due = time.monotonic() + AFTER_RELIST_SECONDS
        if self._due and due < min(self._due.values()):
            self._due = dict.fromkeys(WATCHED, due)
            self._wakeup.set()

    async def initial(self) -> None:
        """See what is there, before the watches start. Keeps trying until the API server serves all kinds: its CRDs may arrive after us."""
        while missing := [resource for resource in WATCHED if resource not in self._first]:
            for resource in missing:
                await self._try(resource, self._look)
            if len(self._first) < len(WATCHED):
                await asyncio.sleep(RETRY_SECONDS)

    async def complete(self) -> None:
        """Return once the store has everything that was there; the watches have been started."""
        await self._watched()
        while self._first:
            for resource in list(self._first):
                if await self._try(resource, self._catch_up):
                    del self._first[resource]
                    self._done(resource)
            if self._first:
                await asyncio.sleep(RETRY_SECONDS)
        self._due = {resource: self._next_due(resource) for resource in WATCHED}

    async def _watched(self) -> None:
        """Return once the watches have brought everything, or nothing at all for too long."""
        behind, since, looked = self._behind(), time.monotonic(), time.monotonic()
        while behind and (now := time.monotonic()) - since < START_PATIENCE_SECONDS:
            if now - max(since, looked) >= LOOK_AGAIN_SECONDS:
                for resource in behind:
                    await self._try(resource, self._look)
                looked = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            if (found := self._behind(behind)) != behind:
                behind, since = found, time.monotonic()

    def _behind(self, kinds: Iterable[Resource] | None = None) -> dict[Resource, int]:
        """How many objects the store lacks of what was seen, by kind; a kind that it has whole is left out."""
        found = {
            resource: sum(self._store.behind(resource.kind, listed.shown) for listed in self._first[resource])
            for resource in (self._first if kinds is None else kinds)
        }
        return {resource: count for resource, count in found.items() if count}

    async def run(self) -> None:
        while True:
            delay = max(0.0, min(self._due.values()) - time.monotonic())
            self._wakeup.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._wakeup.wait()
            except TimeoutError:
                await self._round()

    def oldest_list_seconds(self) -> float:
        """Age of the least recently completed comparison; 0 before the first round is through."""
        if len(self.listed_at) < len(WATCHED):
            return 0.0
        return time.monotonic() - min(self.listed_at.values())

    async def _round(self) -> None:
        """Compare what is due."""
        for resource in WATCHED:
            if self._due[resource] > time.monotonic():
                continue
            self._due[resource] = self._next_due(resource)  # now, so that a `soon` during the LIST is kept
            if not await self._try(resource, self._compare):
                self._due[resource] = time.monotonic() + RETRY_SECONDS

    async def _try(self, resource: Resource, step: Callable[[Resource], Awaitable[None]]) -> bool:
        """True: done. False: the API server did not let us; said once."""
        try:
            await step(resource)
        except ApiError as error:
            if self._problem.get(resource) != str(error):
                self._problem[resource] = str(error)
                log.warning("cannot list, trying again", kind=resource.kind, error=str(error))
            return False
        if self._problem.pop(resource, None):
            log.info("listing works again", kind=resource.kind)
        return True

    def _next_due(self, resource: Resource) -> float:
        """The kind's own moment in a period, half a period from now at the earliest."""
        period = self._interval_seconds
        own = self._began + period * WATCHED.index(resource) / len(WATCHED)
        return own + period * math.ceil((time.monotonic() + period / 2 - own) / period)

    async def _look(self, resource: Resource) -> None:
        self._first[resource] = [_List(scope, *await self._client.shown(resource, scope, _selector(resource))) for scope in self._scopes]

    async def _catch_up(self, resource: Resource) -> None:
        for found in self._first[resource]:
            await self._read_missing(resource, found)

    async def _compare(self, resource: Resource) -> None:
        for scope in self._scopes:
            found = _List(scope, *await self._client.shown(resource, scope, _selector(resource)))
            await self._brought(resource, found)
            await self._read_missing(resource, found)
            self._compared(resource, self._store.retain(resource.kind, found.shown, found.version, scope))
        self._done(resource)

    def _done(self, resource: Resource) -> None:
        self.listed_at[resource] = time.monotonic()
        metrics.LAST_LIST.labels(kind=resource.kind).set_to_current_time()
        metrics.MISSED.labels(kind=resource.kind)  # there from the first list, at 0: an alert on its increase sees the first one

    async def _brought(self, resource: Resource, found: _List) -> None:
        """Return once the watches have brought what a LIST showed, or nothing of it for too long."""
        behind, since = self._store.behind(resource.kind, found.shown), time.monotonic()
        while behind and time.monotonic() - since < PATIENCE_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            if (now := self._store.behind(resource.kind, found.shown)) < behind:
                behind, since = now, time.monotonic()

    async def _read_missing(self, resource: Resource, found: _List) -> None:
        """Read the kind as a whole if the store lacks something of what a LIST showed."""
        if behind := self._store.behind(resource.kind, found.shown):
            log.warning("the watches lack objects, reading them", kind=resource.kind, objects=behind)
            metrics.MISSED.labels(kind=resource.kind).inc(behind)
            async for page, _ in self._client.pages(resource, found.scope, _selector(resource)):
                for obj in page:
                    self._take(resource, obj)


def _selector(resource: Resource) -> str:
    return "" if resource in PRIMARY else CHILD_SELECTOR
