"""Memory of old epochs and old weights: wiped behind a publication, or removed by name. Real store, real reads and puts."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from epochkv_fence import client
from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, LEASE_SECONDS, OBJECT_BYTES, Pair, Prompts, Reference, settled_keys
from tests.support.store import parse_key


@contextmanager
def hung_store(pair: Pair) -> Iterator[None]:
    """The store node stands still; the master goes on."""
    (store,) = pair.mooncake.stores
    store.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        store.signal(signal.SIGCONT)


def put_starts(pair: Pair) -> float:
    """Puts that clients have begun so far, as the master counts them."""
    names = ("master_put_start_requests_total", "master_batch_put_start_items_total")
    lines = pair.mooncake.admin("metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def old_keys(pair: Pair, below: int) -> list[str]:
    names = pair.mooncake.keys()
    return [name for name in names if "/e" in name and parse_key(name).epoch < below]


def test_a_wipe_waits_for_nobody_and_leaves_nothing_old(pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference) -> None:
    pair.pool.configure(reclaim="RemoveAll", store_admin=True)
    saved = [prompts() for _ in range(3)]
    for prompt in saved:
        assert pair.save_through_a(prompt) == reference(prompt, pair.model)
    keys = len(settled_keys(pair.mooncake))
    assert keys >= 3 * BLOCKS
    before = pair.pool.snapshot()
    with ThreadPoolExecutor(1) as thread:
        with hung_store(pair):
            answer = thread.submit(pair.b.complete, saved[0])  # B reads from the store, which does not answer
            eventually(lambda: pair.b.metric("vllm:num_requests_waiting") >= 1, "B waits for a load", 8.0)
            reset = trainer.reset(timeout_s=60)
            assert reset.published
            assert pair.b.metric("vllm:num_requests_waiting") >= 1, "it was published only when B had read"
            assert not answer.done()
        assert answer.result(60.0).tokens == reference(saved[0], pair.model)
    eventually(lambda: not old_keys(pair, reset.epoch), "no old name is left", 60.0)
    eventually(lambda: pair.pool.snapshot().reclaimed >= reset.epoch, "the hub knows that nothing is left", 60.0)
    after = pair.pool.snapshot()
    assert not after.wipe_failed
    assert after.reclaimed_keys - before.reclaimed_keys >= keys
    assert after.reclaimed_bytes - before.reclaimed_bytes >= keys * OBJECT_BYTES
    for prompt in saved[1:]:
        pair.check_sharing(prompt, reference(prompt, pair.model))


@pytest.mark.slow
def test_old_names_are_removed_and_so_are_puts_that_land_behind_the_sweep(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference
) -> None:
    pair.pool.configure(reclaim="Delete", store_admin=False, reclaim_seconds=LEASE_SECONDS + 1.0)
    prompt, late = prompts(), prompts()
    pair.save_through_a(prompt)
    before = pair.pool.snapshot()
    with hung_store(pair):
        begun = put_starts(pair)
        assert pair.a.complete(late).tokens == reference(late, pair.model)
        eventually(lambda: put_starts(pair) > begun, "A has begun to put", 8.0)
        reset = trainer.reset(timeout_s=60)
        assert reset.published
    eventually(lambda: bool(old_keys(pair, reset.epoch)), "a put that was under way lands under its old name", 20.0)
    eventually(lambda: not old_keys(pair, reset.epoch), "no old name is left", 60.0)
    eventually(lambda: pair.pool.snapshot().reclaimed >= reset.epoch, "the hub knows that nothing is left", 60.0)
    after = pair.pool.snapshot()
    removed = after.reclaimed_keys - before.reclaimed_keys
    assert removed > BLOCKS
    assert after.reclaimed_bytes - before.reclaimed_bytes == removed * OBJECT_BYTES
    pair.check_sharing(prompt, reference(prompt, pair.model))
    assert pair.b.complete(prompt).cached == CACHED
