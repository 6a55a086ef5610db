"""Kinds that a cluster may not serve, through an API server that fails in every way that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from epochkv_operator.kube import optional
from epochkv_operator.kube.client import ApiError, Forbidden, NotFound, Unavailable
from epochkv_operator.kube.optional import OptionalKinds
from epochkv_operator.kube.resources import POD_MONITORS, Resource

Json = dict[str, Any]
GONE, DENIED = NotFound(404, "NotFound", "no such kind", "GET"), Forbidden(403, "Forbidden", "may not list", "GET")


def monitor(version: int) -> Json:
    return {"metadata": {"name": "m", "namespace": "a", "resourceVersion": str(version)}}


class Server:
    """Answers lists from a script for each scope (the last answer stays), and watches from another."""

    def __init__(self, **lists: list[int | ApiError]) -> None:
        self.lists = lists
        self.watches: list[Json | ApiError] = []
        self.watched_from: list[str] = []

    async def list(self, resource: Resource, scope: str | None, selector: str) -> tuple[list[Json], int]:
        await asyncio.sleep(0)
        script = self.lists[scope or "all"]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, ApiError):
            raise answer
        return [], answer

    async def watch(self, resource: Resource, scope: str | None, version: str, selector: str) -> AsyncIterator[Json]:
        self.watched_from.append(version)
        while self.watches:
            event = self.watches.pop(0)
            if isinstance(event, ApiError):
                raise event
            yield event
        await asyncio.sleep(0.01)


class Told:
    def __init__(self, server: Server, *scopes: str | None) -> None:
        self.seen: list[tuple[str | None, int]] = []
        self.lists = 0
        self.changes: list[frozenset[str]] = []
        self.kinds = OptionalKinds(server, scopes or (None,), self._listed, self._seen, self._changed, (POD_MONITORS,))  # type: ignore[arg-type]

    def _listed(self, resource: Resource, objects: list[Json], version: int, scope: str | None) -> None:
        self.lists += 1

    def _seen(self, resource: Resource, kind: str | None, obj: Json) -> None:
        self.seen.append((kind, int(obj["metadata"]["resourceVersion"])))

    def _changed(self) -> None:
        self.changes.append(self.kinds.served)

    def look(self) -> None:
        asyncio.run(self.kinds.look())

    def follow(self, until: Callable[[], bool]) -> None:
        """Run until then."""

        async def run() -> None:
            task = asyncio.create_task(self.kinds.run())
            async with asyncio.timeout(20):
                while not until():
                    assert not task.done()
                    await asyncio.sleep(0.005)
            task.cancel()

        asyncio.run(run())


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "ABSENT_SECONDS", 0.01)
    monkeypatch.setattr(optional, "RETRY_SECONDS", 0.01)


def test_the_first_look_tells_nobody() -> None:
    """All objects are about to be looked at anyway."""
    told = Told(Server(all=[7]))
    told.look()
    assert (told.kinds.served, told.changes) == (frozenset({"PodMonitor"}), [])


def test_a_kind_that_appears_and_goes() -> None:
    told = Told(Server(all=[GONE, GONE, 7, GONE]))
    told.kinds.client.watches = [Unavailable(0, "Unreachable", "cut", "WATCH")]  # type: ignore[attr-defined]
    told.look()
    assert told.kinds.served == frozenset()
    told.follow(lambda: len(told.changes) == 2)
    assert told.changes == [frozenset({"PodMonitor"}), frozenset()]


@pytest.mark.parametrize(("misses", "gone"), [(2, False), (3, True)])
def test_what_starting_api_servers_say_is_not_the_end_of_a_kind(misses: int, gone: bool) -> None:
    told = Told(Server(all=[7, *[DENIED] * misses, 8]))
    for _ in range(1 + misses):
        told.look()
    assert told.kinds.served == (frozenset() if gone else frozenset({"PodMonitor"}))
    told.look()
    assert told.kinds.served == frozenset({"PodMonitor"})


def test_an_api_server_that_is_away_says_nothing_about_kinds() -> None:
    told = Told(Server(all=[7, *[Unavailable(0, "Timeout", "", "GET")] * 9]))
    for _ in range(10):
        told.look()
    assert told.kinds.served == frozenset({"PodMonitor"})


def test_a_kind_that_may_not_be_listed_everywhere_is_not_used() -> None:
    """Made in one namespace and pruned in the next, over and over, otherwise."""
    told = Told(Server(a=[7], b=[DENIED]), "a", "b")
    for _ in range(5):
        told.look()
        assert told.kinds.served == frozenset()


def test_watches_go_on_where_they_ended_and_start_anew_when_they_cannot() -> None:
    server = Server(all=[7, 20])
    expired = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
    server.watches = [{"type": "ADDED", "object": monitor(8)}, {"type": "DELETED", "object": monitor(9)}, expired]
    told = Told(server)
    told.follow(lambda: len(server.watched_from) > 1)
    assert told.seen == [("ADDED", 8), ("DELETED", 9)]
    assert server.watched_from[:2] == ["7", "20"]
    assert told.lists == 2
