"""Kinds of other projects, which a cluster may or may not serve, and may begin or cease to serve at any time.

kopf settles once, at its start, which kinds exist, so these are watched here: listed, watched until the watch ends, listed again. A kind
that is not served, or that the operator may not list, is asked for again after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from epochkv_operator.kube.client import ApiError, Forbidden, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import CHILD_SELECTOR, OPTIONAL, Resource

log = structlog.get_logger(__name__)
ABSENT_SECONDS: Final = 10.0
MISSES: Final = 3
"""Lists in a row that must fail until a kind that was served is gone: API servers that start answer 404 and 403 for a moment."""
RETRY_SECONDS: Final = 2.0
_UNTIL_LISTED_AGAIN: Final = 300.0

Listed = Callable[[Resource, list[Json], int, str | None], None]
"""A whole list: its objects, its version and its scope."""
Seen = Callable[[Resource, str | None, Json], None]
Changed = Callable[[], None]


@dataclass(eq=False)
class OptionalKinds:
    """Follows the kinds in every scope. `listed` and `seen` are told as by the other watches, `changed` that `served` is another set."""

    client: KubeClient
    scopes: tuple[str | None, ...]
    listed: Listed
    seen: Seen
    changed: Changed
    kinds: Iterable[Resource] = OPTIONAL
    served: frozenset[str] = frozenset()
    """Kinds that can be listed in every scope."""
    _found: set[tuple[str, str | None]] = field(default_factory=set)
    _misses: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    _following: bool = False
    _said: dict[str, str] = field(default_factory=dict)

    async def look(self) -> None:
        """List each kind once, so that the first plans know what there is."""
        for resource in self.kinds:
            for scope in self.scopes:
                await self._list(resource, scope)

    async def run(self) -> None:
        """Follow them for ever."""
        self._following = True
        async with asyncio.TaskGroup() as group:
            for resource in self.kinds:
                for scope in self.scopes:
                    group.create_task(self._follow(resource, scope))

    async def _follow(self, resource: Resource, scope: str | None) -> None:
        while True:
            version = await self._list(resource, scope)
            if version is None:
                await asyncio.sleep(ABSENT_SECONDS if resource.kind not in self.served else RETRY_SECONDS)
                continue
            until = time.monotonic() + _UNTIL_LISTED_AGAIN
            try:
                while time.monotonic() < until:
                    version = await self._watch(resource, scope, version)
            except ApiError as error:
                log.debug("a watch ended", kind=resource.kind, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _list(self, resource: Resource, scope: str | None) -> int | None:
        """The version of the list; None: there is none to be had now."""
        try:
            objects, version = await self.client.list(resource, scope, CHILD_SELECTOR)
        except (NotFound, Forbidden) as error:
            self._missed(resource, scope, error)
            return None
        except ApiError:
            return None
        self.listed(resource, objects, version, scope)
        del self._misses[resource.kind, scope]
        self._found.add((resource.kind, scope))
        self._settle(resource, "the cluster serves it")
        return version

    async def _watch(self, resource: Resource, scope: str | None, version: int) -> int:
        """One watch, from this version on. Returns the version to go on from; raises when only a list can tell."""
        async for event in self.client.watch(resource, scope, str(version), CHILD_SELECTOR):
            obj = event["object"]
            if event["type"] == "ERROR":
                raise ApiError(int(obj.get("code", 0)), str(obj.get("reason")), str(obj.get("message")), f"WATCH {resource.plural}")
            version = int(obj["metadata"]["resourceVersion"])
            self.seen(resource, event["type"], obj)
        return version

    def _missed(self, resource: Resource, scope: str | None, error: ApiError) -> None:
        place = (resource.kind, scope)
        self._misses[place] += 1
        if place in self._found and self._misses[place] < MISSES:
            return
        self._found.discard(place)
        self._settle(resource, f"not used: {error.message or error.reason}")

    def _settle(self, resource: Resource, why: str) -> None:
        """Work out whether the kind is served, and say so when it is news."""
        everywhere = all((resource.kind, scope) in self._found for scope in self.scopes)
        served = self.served | {resource.kind} if everywhere else self.served - {resource.kind}
        if self._said.get(resource.kind) != why:
            self._said[resource.kind] = why
            log.info("kind of another project", kind=resource.kind, why=why)
        if served != self.served:
            self.served = served
            if self._following:
                self.changed()
