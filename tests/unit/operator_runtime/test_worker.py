"""Workers: who is looked at again, and who is left in peace."""

import asyncio
import contextlib
from collections import Counter
from itertools import pairwise

from epochkv_operator.control.worker import Worker, WorkQueue
from epochkv_operator.kube.client import Invalid, Unavailable
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import Key, engine_key, pool_key

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
    task = asyncio.create_task(Worker(queue, {HEALTHY.kind: reconcile}, {HEALTHY.kind: 0.2}).run())
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


def test_healthy_objects_are_rechecked_failed_ones_tried_again_and_gone_ones_forgotten() -> None:
    """A key that stayed for ever after its object would make the operator slower with every engine that comes and goes."""
    seen: Counter[Key] = Counter()
    asyncio.run(serve_until_quiet(seen))
    assert seen[HEALTHY] == 4
    assert seen[GONE] == 1
    assert seen[BROKEN] >= 3


async def test_keys_that_need_no_request_leave_others_their_turn() -> None:
    """A thousand of them in a row: whoever shares the loop is served in between."""
    served, seen = [], []

    async def reconcile(key: Key) -> None:
        served.append(key)

    async def other() -> None:
        while len(served) < 1000:
            seen.append(len(served))
            await asyncio.sleep(0)

    queue: WorkQueue[Key] = WorkQueue()
    worker = Worker(queue, {engine_key("a", "b").kind: reconcile}, {})
    for number in range(1000):
        queue.add(engine_key("a", str(number)))
    workers = [asyncio.create_task(worker.run()) for _ in range(4)]
    async with asyncio.timeout(20):
        await other()
    for task in workers:
        task.cancel()
    assert max(after - before for before, after in pairwise(seen)) <= 4


def test_when_an_outage_is_over_nobody_waits_out_a_backoff() -> None:
    """Eight tries are behind the key, so the next one would come after a quarter of a minute."""
    tries: list[float] = []

    async def reconcile(key: Key) -> None:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) <= 8:
            raise Unavailable(503, "ServiceUnavailable", "not now", "PATCH")
        done.set()

    async def scenario() -> None:
        worker = asyncio.create_task(Worker(queue, {HEALTHY.kind: reconcile}, {}).run())
        queue.add(HEALTHY)
        async with asyncio.timeout(60):
            while len(tries) < 8:
                queue.add(HEALTHY)  # as events of its objects would
                await asyncio.sleep(0.01)
            queue.hurry()
            began = asyncio.get_running_loop().time()
            await done.wait()
        worker.cancel()
        queue.close()
        assert tries[-1] - began < 10

    queue: WorkQueue[Key] = WorkQueue()
    done = asyncio.Event()
    asyncio.run(scenario())
