"""Whole LISTs of every kind, regularly: they heal edges that the watches lost, deletions in a gap above all.

Everything is also listed again shortly after kopf listed something: kopf tells its handlers what exists, never what
vanished while it was not watching. Each kind has its own moment in the period, so that their lists do not come together.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import structlog

from epochkv_operator import metrics
from epochkv_operator.kube.client import ApiError, Json, KubeClient
from epochkv_operator.kube.resources import CHILD_SELECTOR, PRIMARY, WATCHED, Resource

log = structlog.get_logger(__name__)
AFTER_RELIST_SECONDS = 1.0
RETRY_SECONDS = 2.0


Listed = Callable[[Resource, list[Json], int, str | None, bool], Awaitable[None]]


class Resync:
    """Lists everything in time. `listed` takes (kind, objects, version of the list, scope, whether it is the first one); a scope is a
    namespace, or None: all.
    """

    def __init__(
        self,
        client: KubeClient,
        listed: Listed,
        scopes: tuple[str | None, ...],
        interval_seconds: float,
    ) -> None:
        self._client = client
        self._listed = listed
        self._scopes = scopes
        self._interval_seconds = interval_seconds
        self._began = time.monotonic()
        self._due: dict[Resource, float] = dict.fromkeys(WATCHED, 0.0)
        self._wakeup = asyncio.Event()
        self._problem: dict[Resource, str] = {}
        self.listed_at: dict[Resource, float] = {}

    def soon(self) -> None:
        """kopf has listed some kind (again): look for what vanished, of every kind. A gap rarely hits one watch alone,
        and a kind of which nothing is left shows nothing when it is listed.
        """
        due = time.monotonic() + AFTER_RELIST_SECONDS
        if due < min(self._due.values()):
            self._due = dict.fromkeys(WATCHED, due)
            self._wakeup.set()

    async def initial(self) -> None:
        """List everything once; keep trying until the API server serves all kinds (its CRDs may arrive after us)."""
        while not await self._round():  # noqa: ASYNC110 - a backoff, not a wait for an event
            await asyncio.sleep(RETRY_SECONDS)

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
        """Age of the least recently completed LIST; 0 before the first round is through."""
        if len(self.listed_at) < len(WATCHED):
            return 0.0
        return time.monotonic() - min(self.listed_at.values())

    async def _round(self) -> bool:
        """List what is due. True when nothing is due any more."""
        complete = True
        for resource in WATCHED:
            if self._due[resource] > time.monotonic():
                continue
            try:
                await self._list(resource)
            except ApiError as error:
                complete = False
                self._due[resource] = time.monotonic() + RETRY_SECONDS
                if self._problem.get(resource) != str(error):
                    self._problem[resource] = str(error)
                    log.warning("cannot list, trying again", kind=resource.kind, error=str(error))
            else:
                if self._problem.pop(resource, None):
                    log.info("listing works again", kind=resource.kind)
        return complete and min(self._due.values()) > time.monotonic()

    def _next_due(self, resource: Resource) -> float:
        """The kind's own moment in a period, half a period from now at the earliest."""
        period = self._interval_seconds
        own = self._began + period * WATCHED.index(resource) / len(WATCHED)
        return own + period * math.ceil((time.monotonic() + period / 2 - own) / period)

    async def _list(self, resource: Resource) -> None:
        first = resource not in self.listed_at
        self._due[resource] = self._next_due(resource)  # now, so that a `soon` during the LIST is kept
        selector = "" if resource in PRIMARY else CHILD_SELECTOR
        for scope in self._scopes:
            objects, version = await self._client.list(resource, scope, selector)
            await self._listed(resource, objects, version, scope, first)
        self.listed_at[resource] = time.monotonic()
        metrics.LAST_LIST.labels(kind=resource.kind).set_to_current_time()
