"""Which admin ports belong to a pool: those of its own live masters, and of nobody else. What is made of their answers."""

import asyncio
import gzip
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from epochkv_operator.hub import masters
from epochkv_operator.hub.masters import Elections, master_urls
from epochkv_operator.kube.store import Key, Store, indexed

Json = dict[str, Any]
MOONCAKE = {"distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}}}}


def pool(spec: Json, name: str = "policy") -> Json:
    return {"metadata": {"name": name, "namespace": "rl", "uid": f"uid-{name}", "resourceVersion": "1"}, "spec": spec}


def pod(name: str, address: str | None, *, ready: bool = True, of: str = "policy", component: str = "master", **extra: Any) -> Json:
    labels = {"epochkv.io/pool": of, "app.kubernetes.io/component": component}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]} | ({"podIP": address} if address else {})
    metadata = {"name": name, "namespace": "rl", "uid": name, "resourceVersion": "1", "labels": labels}
    return {"metadata": metadata | extra.get("metadata", {}), "status": status | extra.get("status", {})}


def urls(spec: Json, *pods: Json) -> list[str]:
    store = Store(indexed)
    store.upsert("KVCachePool", pool(spec))
    for item in pods:
        store.upsert("Pod", item)
    return master_urls(store, "uid-policy")


def test_the_ready_master_comes_first() -> None:
    found = urls(MOONCAKE, pod("a", "10.0.0.1", ready=False), pod("b", "10.0.0.2"), pod("c", "fd00::3"))
    assert found == ["http://10.0.0.2:9003", "http://[fd00::3]:9003", "http://10.0.0.1:9003"]


@pytest.mark.parametrize(
    "other",
    [
        pod("a", "10.0.0.1", of="other"),
        pod("a", "10.0.0.1", component="store"),
        pod("a", "10.0.0.1", metadata={"namespace": "elsewhere"}),
        pod("a", "10.0.0.1", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        pod("a", "10.0.0.1", status={"phase": "Failed"}),
        pod("a", None),
        pod("a", "evil.example:80/x?"),
    ],
    ids=["other-pool", "store", "other-namespace", "going", "ended", "no-address", "no-ip"],
)
def test_what_is_not_a_live_master_of_the_pool_is_left_alone(other: Json) -> None:
    assert urls(MOONCAKE, other) == []


def test_a_store_of_somebody_else_is_never_named() -> None:
    for spec in ({"distributed": {"external": {"masterAddress": "m:1"}}}, {"local": {"capacity": "1Gi"}}):
        assert urls(spec, pod("a", "10.0.0.1")) == []
    assert master_urls(Store(indexed), "uid-policy") == [], "of a pool that is gone"


ELECTED = {"distributed": {"mooncake": {"master": {"highAvailability": {"backend": "Etcd", "etcd": {"endpoints": ["e:2379"]}}}}}}
_numbers = itertools.count(1)


@asynccontextmanager
async def answering(address: str, answer: Json | bytes | None) -> AsyncIterator[None]:
    """A master's admin port; `answer` None: nobody listens there, bytes: as they are, which may be packed."""
    if answer is None:
        yield
        return

    async def health(request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/health"
        if isinstance(answer, bytes):
            return web.Response(body=answer, headers={"Content-Encoding": "identity" if answer[:1] == b"[" else "gzip"})
        return web.json_response(answer)

    async with RawTestServer(health, host=address, port=9003):
        yield


SERVES, STANDS_BY = {"status": "ok", "service_ready": True}, {"status": "ok", "service_ready": False}


@pytest.mark.parametrize(
    ("answers", "leaderless"),
    [
        ([STANDS_BY, SERVES], False),
        ([STANDS_BY, STANDS_BY], True),
        ([STANDS_BY, None], False),  # who cannot be asked from here may lead
        ([{"status": "ok"}], False),  # of another version
        ([{**STANDS_BY, "padding": "x" * 70_000}], False),
        ([b"[" * 60_000], False),
        ([gzip.compress(json.dumps(STANDS_BY).encode())], False),  # it may be a thousand times as long
        ([], False),
    ],
    ids=["one-leads", "none-leads", "not-heard", "does-not-say", "no-master", "deep", "packed", "no-pod"],
)
def test_whether_a_master_leads(answers: list[Json | bytes | None], leaderless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "PERIOD_SECONDS", 0.02)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    changed: list[Key] = []
    store, network = Store(indexed), f"127.12.{os.getpid() % 250 + 1}"
    store.upsert("KVCachePool", pool(ELECTED))
    addresses = [f"{network}.{next(_numbers)}" for _ in answers]
    for number, address in enumerate(addresses):
        store.upsert("Pod", pod(f"m{number}", address))
    store.upsert("Pod", pod("starting", f"{network}.250", ready=False))

    async def watch() -> bool:
        elections = Elections(store, changed.append)
        async with AsyncExitStack() as stack:
            for address, answer in zip(addresses, answers, strict=True):
                await stack.enter_async_context(answering(address, answer))
            watching = asyncio.create_task(elections.watch())
            await asyncio.sleep(0.5)
            found = elections.leaderless("uid-policy")
            assert not watching.done(), "the operator would end with it"
            watching.cancel()
            return found

    assert asyncio.run(watch()) is leaderless
    assert changed == ([Key("KVCachePool", "rl", "policy")] if leaderless else []), "told once"


def test_masters_that_hang_hide_no_other_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PERIOD_SECONDS", 0.02), ("ANSWER_SECONDS", 0.2), ("AT_ONCE", 1)):
        monkeypatch.setattr(masters, name, value)
    store, network = Store(indexed), f"127.13.{os.getpid() % 250 + 1}"
    for number in range(5):
        elected = pool(ELECTED)
        store.upsert("KVCachePool", elected | {"metadata": elected["metadata"] | {"name": f"p{number}", "uid": f"uid-{number}"}})
        store.upsert("Pod", pod(f"m{number}", f"{network}.{number + 1}", of=f"p{number}"))

    async def watch() -> None:
        told = asyncio.Event()
        elections = Elections(store, lambda key: told.set())
        async with AsyncExitStack() as stack:
            hanging = [f"{network}.{number + 1}" for number in range(4)]
            stack.callback((await asyncio.start_server(lambda *_: asyncio.sleep(9), hanging, 9003)).close)
            await stack.enter_async_context(answering(f"{network}.5", STANDS_BY))
            watching = asyncio.create_task(elections.watch())
            await asyncio.wait_for(told.wait(), 30)
            assert elections.leaderless("uid-4")
            watching.cancel()

    asyncio.run(watch())
