"""Workers: who is looked at again, and who is left in peace."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from itertools import pairwise

import pytest

from epochkv_operator.control import worker as module
from epochkv_operator.control.worker import Worker
from epochkv_operator.kube.client import Invalid
from epochkv_operator.kube.queue import WorkQueue
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.work_keys import Key, engine_key, pool_key

HEALTHY, GONE, BROKEN = (pool_key("default", name) for name in ("healthy", "gone", "broken"))


async def serve_until_quiet(seen: Counter[Key]) -> None:
    """One worker over three keys, until the healthy one was rechecked three times."""
    done = asyncio.Event()

    async def reconcile(key: Key) -> None:
        seen[key] += 1
        if seen[HEALTHY] == 4:
            done.set()
        if key == GONE:
            raise ObjectGone(f"{key} is gone")
        if key == BROKEN and seen[key] < 3:
            raise Invalid(422, "Invalid", "not yet", "PATCH")

    queue: WorkQueue[Key] = WorkQueue()
    task = asyncio.create_task(Worker(queue, {HEALTHY.kind: reconcile}).run())
    for key in (GONE, BROKEN, HEALTHY):
        queue.add(key)
    try:
        async with asyncio.timeout(20):
            await done.wait()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        queue.close()


def test_healthy_objects_are_rechecked_failed_ones_tried_again_and_gone_ones_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that stayed for ever after its object would make the operator slower with every engine that comes and goes."""
    monkeypatch.setattr(module, "RECHECK_SECONDS", {HEALTHY.kind: 0.2})
    seen: Counter[Key] = Counter()
    asyncio.run(serve_until_quiet(seen))
    assert seen[HEALTHY] == 4
    assert seen[GONE] == 1
    assert seen[BROKEN] >= 3


def test_keys_that_need_no_request_leave_others_their_turn() -> None:
    """A thousand of them in a row: whoever shares the loop is served in between."""
    served, seen = [], []

    async def reconcile(key: Key) -> None:
        served.append(key)

    async def other() -> None:
        while len(served) < 1000:
            seen.append(len(served))
            await asyncio.sleep(0)

    async def scenario() -> None:
        queue: WorkQueue[Key] = WorkQueue()
        worker = Worker(queue, {engine_key("a", "b").kind: reconcile})
        for number in range(1000):
            queue.add(engine_key("a", str(number)))
        workers = [asyncio.create_task(worker.run()) for _ in range(4)]
        async with asyncio.timeout(20):
            await other()
        for task in workers:
            task.cancel()

    asyncio.run(scenario())
    assert max(after - before for before, after in pairwise(seen)) <= 4
