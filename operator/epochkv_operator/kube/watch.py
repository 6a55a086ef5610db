"""Keeps the store complete: one list-and-watch for each kind and scope, and lists that find what a watch has lost.

Children, pods and kinds of other projects are listed as a whole, watched from there, and listed anew when the version has expired. The two
kinds of our own are watched by kopf (`control/driver.py`), which tells what exists, never what went while it did not watch. Every kind is
compared regularly: a LIST that shows uids and versions only. The watch gets some time to bring what it has not brought yet; a kind of which
it does not bring everything is read as a whole, and what vanished goes.

A cluster may begin or cease to serve a kind of another project at any time, or not let us list it.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from epochkv_operator import metrics
from epochkv_operator.api.resources import CHILDREN, OPTIONAL, PODS, PRIMARY, Resource, selector
from epochkv_operator.kube.client import ApiError, Expired, Forbidden, Json, KubeClient, NotFound, Unavailable
from epochkv_operator.kube.store import Store

log = structlog.get_logger(__name__)
COMPARED: Final = (*PRIMARY, *CHILDREN, PODS)
AFTER_RELIST_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 0.1
"""Between the end of a watch and the next one."""
RETRY_SECONDS: Final = 2.0
ABSENT_SECONDS: Final = 10.0
MISSES: Final = 3
"""Lists in a row that must fail until a kind that was served is gone: API servers that start answer 404 and 403 for a moment."""
PATIENCE_SECONDS: Final = 3.0
"""How long a watch may bring nothing of what it is behind with."""
START_PATIENCE_SECONDS: Final = 15.0
"""The same when kopf starts."""
POLL_SECONDS: Final = 0.05

Place = tuple[Resource, str | None]
"""A kind in one namespace, or in the whole cluster."""
Seen = Callable[[Resource, str | None, Json], None]
"""Takes an object: ADDED, MODIFIED or DELETED, or None from a list. Must return at once and must not raise."""


@dataclass(eq=False)
class Watches:
    """`begin`, then `run` and `compare` for ever. `changed` is called when `served` or what `refused` says has become another."""

    _client: KubeClient
    _store: Store
    _seen: Seen
    _vanished: Callable[[Resource, Json], None]
    _changed: Callable[[], None]
    _scopes: tuple[str | None, ...]
    _period_seconds: float
    _versions: dict[Place, int | None] = field(default_factory=dict)
    _due: float = 0.0  # the next comparison
    _wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    _problem: dict[Resource, str] = field(default_factory=dict)
    _found: set[Place] = field(default_factory=set)
    _misses: Counter[Place] = field(default_factory=Counter)
    _served: frozenset[str] = frozenset()
    _refused: dict[Place, str] = field(default_factory=dict)
    unseen: set[str | None] = field(default_factory=set)
    """Namespaces of which the store lacks something: a list there was refused when we began, and still is."""
    _tried_at: dict[Resource, float] = field(default_factory=dict)

    async def begin(self) -> None:
        """Take in what there is of everything but our own kinds. Tries until the API server serves all kinds: CRDs may arrive after us."""
        await asyncio.gather(*(self._begin(resource, scope) for resource in (*COMPARED, *OPTIONAL) for scope in self._scopes))

    async def run(self) -> None:
        """Follow the kinds for ever."""
        async with asyncio.TaskGroup() as group:
            for resource, scope in self._versions:
                group.create_task(self._follow(resource, scope))

    async def complete(self) -> None:
        """Return once the store has all of our own kinds, which kopf has begun to watch."""
        first = partial(self._compare, patience_seconds=START_PATIENCE_SECONDS)
        await asyncio.gather(*(self._until_done(resource, first) for resource in PRIMARY))
        self.unseen.update(scope for _, scope in self._refused)
        self._due = time.monotonic() + self._period_seconds

    async def compare(self) -> None:
        """Compare all kinds, in each period and when that is wanted `soon`, for ever."""
        while True:
            self._wakeup.clear()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._due - time.monotonic()):
                    await self._wakeup.wait()
            except TimeoutError:
                self._due = time.monotonic() + self._period_seconds  # now, so that a `soon` during the LIST is kept
                for resource in COMPARED:
                    if not await self._try(resource, self._compare):
                        self._due = min(self._due, time.monotonic() + (ABSENT_SECONDS if self._refused else RETRY_SECONDS))

    def soon(self) -> None:
        """kopf has listed again: look for what vanished of its kinds."""
        due = time.monotonic() + AFTER_RELIST_SECONDS
        if due < self._due:
            self._due = due
            self._wakeup.set()

    def served(self) -> frozenset[str]:
        """Kinds of other projects that can be listed in every scope."""
        return self._served

    def refused(self, namespace: str) -> str:
        """What the API server does not let us list, of what objects of this namespace are judged by; empty: nothing."""
        return "; ".join(why for (_, scope), why in sorted(self._refused.items(), key=str) if scope in (None, namespace))

    def oldest_list_seconds(self) -> float:
        """Age of the least recent try to compare; 0 before the first round is through. One that was refused counts: a new process would be
        refused, too, and would begin no hub."""
        return time.monotonic() - min(self._tried_at.values()) if len(self._tried_at) == len(COMPARED) else 0.0

    # ---- list and watch ----

    async def _begin(self, resource: Resource, scope: str | None) -> None:
        for tries in itertools.count(1):
            if resource in PRIMARY:
                if done := await self._try(resource, lambda kind: self._shown(kind, scope)):
                    self._may(resource, scope, None)
            else:
                version = self._versions[resource, scope] = await self._list(resource, scope)
                done = version is not None or resource in OPTIONAL
            if done or (tries >= MISSES and self._lost(scope)):
                return
            await asyncio.sleep(RETRY_SECONDS)

    def _lost(self, scope: str | None) -> bool:
        """One of several namespaces, in which we may not list everything: it may be gone, and the rights with it. The others do not wait
        for it."""
        closed = {place for _, place in self._refused}
        return scope in closed and len(closed) < len(self._scopes)

    async def _follow(self, resource: Resource, scope: str | None) -> None:
        version = self._versions[resource, scope]
        while True:
            if version is None:
                version = await self._list(resource, scope)
            if version is None:
                await asyncio.sleep(ABSENT_SECONDS if resource in OPTIONAL and resource.kind not in self._served else RETRY_SECONDS)
                continue
            try:
                async for event in self._client.watch(resource, scope, str(version), selector(resource)):
                    obj = event["object"]
                    if event["type"] == "ERROR":
                        kind = Expired if obj.get("code") == Expired.STATUS else ApiError
                        raise kind(int(obj.get("code", 0)), str(obj.get("reason")), str(obj.get("message")), f"WATCH {resource.plural}")
                    version = int(obj["metadata"]["resourceVersion"])
                    if event["type"] != "BOOKMARK":
                        self._seen(resource, event["type"], obj)
                await asyncio.sleep(AGAIN_SECONDS)
            except Unavailable as error:  # it goes on where it ended
                log.debug("a watch was cut", kind=resource.kind, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            except ApiError as error:
                log.info("watch restarted", kind=resource.kind, reason=str(error))
                version = None
                await asyncio.sleep(AGAIN_SECONDS if isinstance(error, Expired) else RETRY_SECONDS)

    async def _list(self, resource: Resource, scope: str | None) -> int | None:
        """Take a kind in as a whole. The version of the list; None: there is none to be had now."""
        uids, version = set(), 0
        try:
            async for page, of_list in self._client.pages(resource, scope, selector(resource)):
                version = of_list
                for obj in page:
                    uids.add(obj["metadata"]["uid"])
                    self._seen(resource, None, obj)
        except ApiError as error:
            self._missed(resource, scope, error)
            return None
        self._may(resource, scope, None)
        for obj in self._store.retain(resource.kind, uids, version, scope):
            self._vanished(resource, obj)
        if resource in OPTIONAL:
            del self._misses[resource, scope]
            self._found.add((resource, scope))
            self._settle(resource, "the cluster serves it")
        return version

    def _missed(self, resource: Resource, scope: str | None, error: ApiError) -> None:
        place = (resource, scope)
        if resource not in OPTIONAL:
            self._may(resource, scope, error)
            self._complain(resource, error)
        elif isinstance(error, NotFound | Forbidden):
            self._misses[place] += 1
            if place not in self._found or self._misses[place] >= MISSES:
                self._found.discard(place)
                self._settle(resource, f"not used: {(error.message or error.reason).strip()}")

    def _may(self, resource: Resource, scope: str | None, error: ApiError | None) -> None:
        """The API server has let us list this, or it has not."""
        place, before = (resource, scope), dict(self._refused)
        if error is None:
            self._refused.pop(place, None)
            self.unseen.intersection_update([where for _, where in self._refused])
        elif isinstance(error, Forbidden):
            self._refused[place] = (error.message or error.reason).strip()
        if self._refused != before:
            self._changed()

    def _settle(self, resource: Resource, why: str) -> None:
        """Work out whether the kind is served, and say so when it is news."""
        everywhere = all((resource, scope) in self._found or self._lost(scope) for scope in self._scopes)
        served = self._served | {resource.kind} if everywhere else self._served - {resource.kind}
        if self._problem.get(resource) != why:
            self._problem[resource] = why
            log.info("optional kind", kind=resource.kind, why=why)
        if served != self._served:
            self._served = served
            self._changed()

    # ---- compare ----

    async def _compare(self, resource: Resource, patience_seconds: float = 0.0) -> None:
        """`patience_seconds`: kopf has just begun to watch, and will not bring what is deleted meanwhile. So long is the list repeated."""
        failed = None
        for scope in self._scopes:  # one that is refused keeps no other from being compared
            until = time.monotonic() + patience_seconds
            try:
                while True:
                    shown, version = await self._shown(resource, scope)
                    if await self._brought(resource, shown) or time.monotonic() >= until:
                        break
                await self._take_in(resource, scope, shown, version)
            except ApiError as error:
                if not (patience_seconds and (resource, scope) in self._refused and self._lost(scope)):
                    failed = failed or error
        if failed is not None:
            raise failed
        metrics.MISSED.labels(kind=resource.kind)  # there from the first list, at 0: an alert on its increase sees the first one

    async def _shown(self, resource: Resource, scope: str | None) -> tuple[dict[str, int], int]:
        try:
            return await self._client.shown(resource, scope, selector(resource))
        except ApiError as error:
            self._may(resource, scope, error)
            raise

    async def _brought(self, resource: Resource, shown: dict[str, int]) -> bool:
        """Whether the watch has brought what a LIST showed; False: it has brought nothing of it for too long."""
        behind, since = self._store.behind(resource.kind, shown), time.monotonic()
        while behind and time.monotonic() - since < PATIENCE_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            if (now := self._store.behind(resource.kind, shown)) < behind:
                behind, since = now, time.monotonic()
        return not behind

    async def _take_in(self, resource: Resource, scope: str | None, shown: dict[str, int], version: int) -> None:
        """Read the kind as a whole if the store lacks something of what a LIST showed; let go what it did not show."""
        if behind := self._store.behind(resource.kind, shown):
            log.warning("watch cache incomplete, listing again", kind=resource.kind, objects=behind)
            metrics.MISSED.labels(kind=resource.kind).inc(behind)
            async for page, _ in self._client.pages(resource, scope, selector(resource)):
                for obj in page:
                    self._seen(resource, None, obj)
        for obj in self._store.retain(resource.kind, shown, version, scope):
            self._vanished(resource, obj)
        self._may(resource, scope, None)  # not before: what is looked at then has to be in the store

    # ---- tries ----

    async def _until_done(self, resource: Resource, step: Callable[[Resource], Awaitable[object]]) -> None:
        while True:
            if await self._try(resource, step):
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _try(self, resource: Resource, step: Callable[[Resource], Awaitable[object]]) -> bool:
        """True: done. False: the API server did not let us; said once."""
        try:
            await step(resource)
        except ApiError as error:
            self._complain(resource, error)
            return False
        finally:
            self._tried_at[resource] = time.monotonic()
        if self._problem.pop(resource, None):
            log.info("listing works again", kind=resource.kind)
        return True

    def _complain(self, resource: Resource, error: ApiError) -> None:
        if self._problem.get(resource) != str(error):
            self._problem[resource] = str(error)
            log.warning("cannot list, trying again", kind=resource.kind, error=str(error))
