"""Blocks of a request that waits for its turn come from L2 into L1 meanwhile."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.tiers.lookup import Prefetches
from tests.scheduler.rigs import TOKENS, WHOLE, MakeRig, every_layout, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt

LONG = prompt(2, 8 * BLOCK)
OTHERS = prompt(3, len(TOKENS))


@pytest.fixture
def busy(make_rig: MakeRig) -> Callable[..., Any]:
    """An engine that serves one request at a time, and is busy with one; another engine has stored `TOKENS` and `OTHERS`."""

    def make(layout: tuple[str, ...] = ("full",), first: list[int] = LONG, **options: Any) -> Any:
        store = SharedStore()
        writer = make_rig(store=store, groups=layout, num_blocks=64, epoch=0)
        writer.serve(TOKENS)
        writer.serve(OTHERS)
        rig = make_rig(store=store, groups=layout, **{"num_blocks": 64, "max_num_seqs": 1, **options}, epoch=0)
        rig.add(first, max_tokens=20, request_id="first")
        rig.step()
        store.fetched.clear()
        return rig

    return make


def stats(rig: Any) -> dict[str, float]:
    return dict(rig.tiers.stats())


def under_way(rig: Any) -> tuple[Any, Any, Any]:
    """The worker, a request that waits, and its prefetch, which the worker holds."""
    (worker,) = rig.workers
    worker.hold_loads = True
    waiting = rig.add(TOKENS)
    rig.steps(3)
    (job,) = worker.loads
    return worker, waiting, job


@every_layout
def test_a_request_that_waits_finds_its_blocks_in_l1(busy: Callable[..., Any], layout: tuple[str, ...]) -> None:
    rig = busy(layout)
    waiting = rig.add(TOKENS)
    rig.steps(4)
    assert waiting.request_id not in rig.cached
    fetched = len(rig.store.fetched)
    assert stats(rig)["blocks_prefetched"] == fetched > 0
    rig.run()
    assert rig.cached[waiting.request_id] == WHOLE
    assert len(rig.store.fetched) == fetched, "nothing is fetched twice"
    assert (stats(rig)["loads_done"], stats(rig)["blocks_loaded"]) == (1, fetched)


def test_a_hit_that_vllm_has_no_memory_for_comes_meanwhile(busy: Callable[..., Any]) -> None:
    rig = busy(first=prompt(2, 40 * BLOCK), num_blocks=46, max_num_seqs=4)
    waiting = rig.add(TOKENS)
    rig.steps(6)
    assert (len(rig.store.fetched), stats(rig)["slots_reserved"], waiting.num_computed_tokens) == (WHOLE // BLOCK, 0, 0)
    rig.run()
    assert (rig.cached[waiting.request_id], len(rig.store.fetched)) == (WHOLE, WHOLE // BLOCK)


@pytest.mark.parametrize("ended", ["names", "request"])
def test_a_prefetch_is_cancelled_with_its_names_and_with_its_request(busy: Callable[..., Any], ended: str) -> None:
    """What arrives under old names all the same is not found."""
    rig = busy()
    worker, waiting, job = under_way(rig)
    if ended == "names":
        rig.adopt(1, "w1")
    else:
        rig.scheduler.finish_requests(waiting.request_id, RequestStatus.FINISHED_ABORTED)
    rig.steps(2)
    assert worker.cancelled == {job.job_id}
    if ended == "names":
        worker.cancelled.clear()  # too late for this rank
    release(rig)
    rig.run()
    assert rig.cached.get(waiting.request_id, 0) == 0
    assert stats(rig)["load_pauses"] == 0


def test_nothing_is_prefetched_that_the_gpu_holds(busy: Callable[..., Any]) -> None:
    rig = busy()
    waiting = rig.add(LONG)
    rig.steps(4)
    assert not rig.store.fetched
    rig.run()
    assert rig.cached[waiting.request_id] == len(LONG) - BLOCK


def test_what_one_request_has_not_taken_leaves_no_room_for_another(busy: Callable[..., Any]) -> None:
    rig = busy()
    rig.tiers.state.index.num_slots = 4 * WHOLE // BLOCK
    rig.add(TOKENS)
    rig.steps(3)
    second = rig.add(OTHERS)
    rig.steps(3)
    assert stats(rig)["blocks_prefetched"] == WHOLE // BLOCK, "the first has not had its turn"
    rig.run()
    assert rig.cached[second.request_id] == WHOLE
    assert len(rig.store.fetched) == 2 * WHOLE // BLOCK


@pytest.mark.parametrize("blocks", [8, 24, 40])
def test_prefetches_get_a_quarter_of_l1_and_others_wait_for_it(busy: Callable[..., Any], blocks: int) -> None:
    """`blocks`: that L1 has room for."""
    rig = busy()
    index = rig.tiers.state.index
    (worker,) = rig.workers
    for slot in index.allocate(index.num_available - blocks):  # the others are not there
        del index._refs[slot]
        index.num_slots -= 1
    worker.hold_loads = True
    rig.add(TOKENS)
    rig.steps(3)
    held = [move for job in worker.loads for move in job.moves]
    assert len(held) == min(WHOLE // BLOCK, blocks // 4)
    release(rig)
    rig.run()


def test_one_step_walks_along_one_prompt() -> None:
    """Hundreds of requests may be answered at once, of which L1 holds everything."""
    walked: list[str] = []
    index = SimpleNamespace(indexed=True, num_slots=64, num_available=64)
    named: Any = (
        SimpleNamespace(index=index),
        SimpleNamespace(unasked=lambda name: SimpleNamespace(name=name), is_stale=lambda query: False),
        SimpleNamespace(paused=False),
    )
    prefetches = Prefetches(*named, missing=lambda query: walked.append(query) or ())  # type: ignore[arg-type, func-returns-value]
    for name in "abc":
        query: Any = SimpleNamespace(answer=SimpleNamespace(add_done_callback=lambda done: done(None)))
        prefetches.watch(name, query)
    for num_walked in (1, 2, 3, 3):
        assert prefetches.end_step() == ((), ())
        assert len(walked) == num_walked
