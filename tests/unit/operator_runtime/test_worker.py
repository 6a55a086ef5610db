"""Workers: who is looked at again, and who is left in peace."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from epochkv_operator.control import worker as module
from epochkv_operator.control.worker import Worker
from epochkv_operator.kube.client import Invalid
from epochkv_operator.kube.queue import WorkQueue
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.work_keys import Key, engine_key

HEALTHY, GONE, BROKEN = (engine_key("default", name) for name in ("healthy", "gone", "broken"))


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
    monkeypatch.setattr(module, "RECHECK_SECONDS", 0.2)
    seen: Counter[Key] = Counter()
    asyncio.run(serve_until_quiet(seen))
    assert seen[HEALTHY] == 4
    assert seen[GONE] == 1
    assert seen[BROKEN] >= 3
