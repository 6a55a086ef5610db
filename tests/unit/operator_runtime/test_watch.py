"""Kinds that are listed and watched, through an API server that fails in every way that counts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kubernetes.aio import client as kubernetes_client

from epochkv_operator.api.resources import POD_MONITORS, POOLS, SERVICES, Resource
from epochkv_operator.control import driver
from epochkv_operator.kube import watch
from epochkv_operator.kube.client import ApiError, Forbidden, KubeClient, NotFound, Unavailable
from epochkv_operator.kube.store import Store, indexed
from epochkv_operator.settings import Settings

Json = dict[str, Any]
GONE, DENIED = NotFound(404, "NotFound", "no such kind", "GET"), Forbidden(403, "Forbidden", "may not list", "GET")
EXPIRED = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}


def thing(uid: str, version: int) -> Json:
    return {"metadata": {"name": uid, "uid": uid, "namespace": "a", "resourceVersion": str(version)}}


class Server:
    """Answers lists from a script for each scope, or kind in it (the last answer stays), watches from another. A number: an empty list."""

    def __init__(self, **lists: list[Any]) -> None:
        self.lists = lists
        self.watches: list[Json | ApiError] = []
        self.watched_from: list[str] = []

    async def pages(self, resource: Resource, scope: str | None, selector: str) -> AsyncIterator[tuple[list[Json], int]]:
        await asyncio.sleep(0)
        script = self.lists.get(f"{scope}/{resource.kind}") or self.lists[scope or "all"]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, ApiError):
            raise answer
        yield answer if isinstance(answer, tuple) else ([], answer)

    async def shown(self, resource: Resource, scope: str | None, selector: str) -> tuple[dict[str, int], int]:
        [(page, version)] = [page async for page in self.pages(resource, scope, selector)]
        return {obj["metadata"]["uid"]: version for obj in page}, version

    async def watch(self, resource: Resource, scope: str | None, version: str, selector: str) -> AsyncIterator[Json]:
        self.watched_from.append(version)
        while self.watches:
            event = self.watches.pop(0)
            if isinstance(event, ApiError):
                raise event
            yield event
        await asyncio.sleep(0.01)


class Followed:
    """One kind, and what was told of it."""

    def __init__(self, server: Server, *scopes: str | None, kind: Resource = POD_MONITORS) -> None:
        self.kind = kind
        self.scopes = scopes or (None,)
        self.seen: list[tuple[str | None, int]] = []
        self.vanished: list[str] = []
        self.changes: list[frozenset[str]] = []
        self.store = Store(indexed)
        self.watches = watch.Watches(server, self.store, self._saw, self._went, self._changed, self.scopes, 300.0)  # type: ignore[arg-type]

    def _saw(self, resource: Resource, event: str | None, obj: Json) -> None:
        self.seen.append((event, int(obj["metadata"]["resourceVersion"])))
        self.store.upsert(resource.kind, obj)

    def _went(self, resource: Resource, obj: Json) -> None:
        self.vanished.append(obj["metadata"]["uid"])

    def _changed(self) -> None:
        self.changes.append(self.watches.served())

    async def begin(self) -> frozenset[str]:
        await asyncio.gather(*(self.watches._begin(self.kind, scope) for scope in self.scopes))
        return self.watches.served()

    async def follow(self, until: Callable[[], bool]) -> None:
        """Run until then."""
        task = asyncio.create_task(self.watches.run())
        async with asyncio.timeout(20):
            while not until():
                assert not task.done()
                await asyncio.sleep(0.005)
        task.cancel()


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ABSENT_SECONDS", "RETRY_SECONDS", "AGAIN_SECONDS", "PATIENCE_SECONDS"):
        monkeypatch.setattr(watch, name, 0.01)


async def test_a_kind_that_appears_and_goes() -> None:
    server = Server(all=[GONE, 7, GONE])
    server.watches = [ApiError(403, "Forbidden", "cut", "WATCH")]
    followed = Followed(server)
    assert await followed.begin() == frozenset()
    await followed.follow(lambda: len(followed.changes) == 2)
    assert followed.changes == [frozenset({"PodMonitor"}), frozenset()]


@pytest.mark.parametrize(("misses", "served"), [([DENIED] * 2, True), ([DENIED] * 3, False), ([Unavailable(0, "", "", "")] * 9, True)])
async def test_what_a_starting_or_silent_api_server_says_is_not_the_end_of_a_kind(misses: list[ApiError], served: bool) -> None:
    followed = Followed(Server(all=[7, *misses, 8]))
    for _ in range(1 + len(misses)):
        await followed.begin()
    assert followed.watches.served() == (frozenset({"PodMonitor"}) if served else frozenset())
    assert await followed.begin() == frozenset({"PodMonitor"})


async def test_a_kind_that_may_not_be_listed_everywhere_is_not_used() -> None:
    """Made in one namespace and pruned in the next, over and over, otherwise."""
    followed = Followed(Server(a=[7], b=[DENIED]), "a", "b")
    for _ in range(5):
        assert await followed.begin() == frozenset()


async def test_a_kind_of_kubernetes_itself_is_waited_for() -> None:
    followed = Followed(Server(all=[DENIED, GONE, Unavailable(0, "Timeout", "", "GET"), ([thing("x", 3)], 7)]), kind=SERVICES)
    await followed.begin()
    assert followed.seen == [(None, 3)]


async def test_a_namespace_that_is_refused_is_no_reason_to_end_the_process_nor_to_compare_no_other() -> None:
    """It may be gone, and the rights with it: the next process would wait for them, and the other namespaces have no hub."""
    followed = Followed(Server(a=[DENIED], b=[7]), "a", "b")
    followed.store.upsert("Service", {"metadata": {**thing("x", 3)["metadata"], "namespace": "b"}})
    watches = followed.watches
    watches._tried_at = dict.fromkeys(watch.COMPARED, -1e6)
    for resource in watch.COMPARED:
        assert not await watches._try(resource, watches._compare)
    assert watches.oldest_list_seconds() < 600
    assert followed.vanished == ["x"]


async def test_the_other_namespaces_have_a_hub_where_one_is_refused_from_the_start() -> None:
    """A new process after a namespace was deleted, or a right. Where all are refused, it waits: an API server that starts does that."""

    async def begin(**lists: list[Any]) -> Followed:
        followed = Followed(Server(**lists), *(name for name in lists if "/" not in name))
        async with asyncio.timeout(1 if "b" not in lists else 20):
            await followed.watches.begin()
            await followed.watches.complete()
        return followed

    for denied in ({"b": [DENIED]}, {"b": [7], "b/NetworkPolicy": [DENIED]}, {"b": [7], "b/KVCachePool": [DENIED]}):
        begun = await begin(a=[7], **denied)
        watches, pools = begun.watches, list[list[Json]]()
        assert watches.unseen == {"b"}
        watches._client.lists = {"a": [7], "b": [([thing("x", 3)], 7)]}  # type: ignore[attr-defined]
        watches._changed = lambda it=begun, found=pools: found.append(it.store.every(POOLS.kind))  # type: ignore[misc]
        for resource in watch.COMPARED:
            await watches._compare(resource)
        assert watches.unseen == set()
        assert min(map(len, pools), default=0), "looked at, and when they are there"
    with pytest.raises(TimeoutError):
        await begin(a=[DENIED])


async def test_a_watch_goes_on_where_it_was_cut_and_begins_anew_when_its_version_has_expired() -> None:
    server = Server(all=[([thing("x", 3)], 7), ([thing("y", 19)], 20)])
    cut = Unavailable(0, "Unreachable", "cut", "WATCH")
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}}
    added, modified = ({"type": kind, "object": thing("z", version)} for kind, version in (("ADDED", 8), ("MODIFIED", 9)))
    server.watches = [added, cut, modified, bookmark, cut, EXPIRED]
    followed = Followed(server, kind=SERVICES)
    await followed.begin()
    await followed.follow(lambda: len(server.watched_from) > 3)
    assert server.watched_from[:4] == ["7", "8", "12", "20"]
    assert followed.seen == [(None, 3), ("ADDED", 8), ("MODIFIED", 9), (None, 19)]
    assert sorted(followed.vanished) == ["x", "z"], "what went in the gap"


@pytest.mark.parametrize(("trouble", "gap"), [(404, False), (410, True), (EXPIRED, True), ({**EXPIRED, "object": {"code": 500}}, True)])
async def test_kopf_goes_on_whatever_a_watch_is_told(trouble: int | Json, gap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a list nor a watch that begins anew shows what went meanwhile. So each counts as a gap, also when nothing is left."""
    monkeypatch.setattr("signal.pthread_kill", print)  # by which kopf ends a process that has not ended by itself after seconds
    kinds = [{"name": name, "kind": name, "singularName": "", "namespaced": True} for name in ("namespaces", POOLS.plural)]
    group = {"name": POOLS.group, "versions": [{"version": POOLS.version}], "preferredVersion": {"version": POOLS.version}}
    discovery = {"versions": ["v1"], "groups": [group], "resources": [{**kind, "verbs": ["list", "watch"]} for kind in kinds]}
    script: list[Any] = [trouble, {"type": "ADDED", "object": thing("x", 9)}]
    gaps, seen = set[int](), asyncio.Queue[str | None]()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != POOLS.path(None):
            return web.json_response(discovery)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})
        event = script.pop(0) if script else await asyncio.sleep(60, 503)
        return web.Response(status=event) if isinstance(event, int) else web.Response(text=json.dumps(event) + "\n")

    async with RawTestServer(answer) as server, asyncio.timeout(20):
        client = KubeClient(kubernetes_client.Configuration(host=f"http://127.0.0.1:{server.port}"))
        told = (lambda *event: seen.put_nowait(event[1]), lambda: gaps.add(len(script)))
        kopf = asyncio.create_task(driver.drive(*told, client, Settings("a"), asyncio.Event()))
        assert await seen.get() == "ADDED"
        kopf.cancel()
        await asyncio.wait([kopf])
        await client.close()
    assert (1 in gaps) == gap
