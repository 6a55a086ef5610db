"""The hub's thread: calls from other threads, and what the hub's writes know of the store."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from epochkv_fence import common
from epochkv_fence.common import LoopThread
from epochkv_operator.control.leader import WriteThroughCache
from epochkv_operator.kube.client import Json, KubeClient, Unavailable
from epochkv_operator.kube.store import Store, indexed


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test", 5.0)
    yield thread
    thread.stop()
    assert "test" not in {one.name for one in threading.enumerate()}


def pool(version: int) -> Json:
    return {"metadata": {"uid": "u", "name": "p", "namespace": "a", "resourceVersion": str(version)}}


def test_a_call_runs_there_and_brings_back_what_it_returns_or_raises(thread: LoopThread) -> None:
    assert thread.call(lambda: threading.current_thread().name) == "test"
    with pytest.raises(ValueError, match="no number"):
        thread.call(int, "no number")


def test_calls_and_posts_keep_their_order(thread: LoopThread) -> None:
    seen: list[int] = []
    for number in range(100):
        thread.post(seen.append, number)
    assert thread.call(lambda: list(seen)) == list(range(100))


def test_a_loop_that_stands_still_is_an_error_in_time(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "CALL_SECONDS", 0.1)
    late: list[str] = []
    thread.post(time.sleep, 1.0)
    with pytest.raises(TimeoutError):
        thread.call(late.append, "done anyway")
    monkeypatch.undo()
    assert thread.call(lambda: late) == [], "a call that nobody waits for has not been made"


def test_the_hub_knows_its_own_writes_before_the_stores_owner_does() -> None:
    store, told = Store(indexed), []
    cache = WriteThroughCache(store, lambda kind, obj: told.append((kind, obj)))
    store.upsert("KVCachePool", pool(3))
    assert cache.by_uid("KVCachePool", "u") == pool(3)
    cache.upsert("KVCachePool", pool(5))
    assert cache.by_uid("KVCachePool", "u") == pool(5)
    cache.upsert("KVCachePool", pool(4))  # an answer that comes late
    assert cache.by_uid("KVCachePool", "u") == pool(5)
    for kind, obj in told:
        store.upsert(kind, obj)
    store.upsert("KVCachePool", pool(9))
    assert cache.by_uid("KVCachePool", "u") == pool(9)
    store.remove("KVCachePool", pool(9))
    assert cache.by_uid("KVCachePool", "u") is None, "kept although the store had caught up"


def test_without_leadership_nothing_is_written() -> None:
    client = KubeClient.__new__(KubeClient)
    client.deadline_seconds, client.may_not_write = 1.0, lambda: "the Lease was last renewed 11.0 s ago"
    for verb in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(Unavailable, match="last renewed"):
            asyncio.run(client.request(verb, "/api/v1/namespaces/a/pods"))


def test_cancelling_the_wait_cancels_the_work(thread: LoopThread) -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def scenario() -> None:
        task = asyncio.create_task(thread.run(work()))
        await asyncio.sleep(0.1)
        task.cancel()

    asyncio.run(scenario())
    assert ended.wait(10)
