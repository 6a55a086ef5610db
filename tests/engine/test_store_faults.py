"""A store that dies, freezes, forgets, fills up, lies or is robbed under two serving engines.

Every answer is that of an engine without any cache, no request fails, the connector's counters say what happened, and the
engines share again by themselves. The tests use one pair of engines and leave it sharing; the last one ends them.
"""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epochkv_connector.naming.identity import CODEC_VERSION
from hack.engine_api import EngineError
from hack.models import Shape
from tests.engine.conftest import CACHED, Prompts, Reference, Weights
from tests.engine.server_nursery import ServerNursery
from tests.engine.store_faults import HUNG_SECONDS, FaultyPair, of_another_codec

SHAPE = Shape()
OBJECT_BYTES = 2 * SHAPE.kv_heads * SHAPE.head_dim * 4 * 128 * SHAPE.layers + 256
HUNG_LOADS = ("load_failed_store_transfer", "load_failed_store_timeout", "load_failed_deadline")


@pytest.fixture(scope="module")
def pair(folder: Path, weights: Weights, prompts: Prompts, reference: Reference, servers: ServerNursery) -> Iterator[FaultyPair]:
    pair = FaultyPair(folder, weights, prompts, reference, servers)
    try:
        pair.begin()
        yield pair
    finally:
        pair.end()


def test_a_hung_store_node_costs_a_few_loads_and_then_nothing(pair: FaultyPair) -> None:
    saved = [pair.saved()[0] for _ in range(6)]
    pauses, failed = pair.total(pair.b, "load_pauses"), pair.seen(pair.b, "loads_failed")
    hung = pair.seen(pair.b, *HUNG_LOADS)
    pair.store.freeze()
    try:
        with ThreadPoolExecutor(3) as threads:  # together: three failures in a row
            assert [answer.cached for answer in threads.map(lambda prompt: pair.ask(pair.b, prompt), saved[:3])] == [0, 0, 0]
        pair.grows(pair.b, pauses, "load_pauses")
        assert pair.seen(pair.b, "loads_failed") >= failed + 3
        assert pair.seen(pair.b, "loads_paused") == 1
        pair.grows(pair.b, hung, *HUNG_LOADS)
        skipped = pair.seen(pair.b, "lookups_paused")
        with ThreadPoolExecutor(3) as threads:  # at most one is a trial, the others do not even ask
            assert [answer.cached for answer in threads.map(lambda prompt: pair.ask(pair.b, prompt), saved[3:])] == [0, 0, 0]
        pair.grows(pair.b, skipped, "lookups_paused")
    finally:
        pair.store.thaw()
    pair.shares()
    assert pair.total(pair.b, "loads_paused") == 0


def test_foreign_bytes_under_our_keys_are_never_used(pair: FaultyPair) -> None:
    def junk(value: bytes) -> bytes:
        return random.Random(1).randbytes(len(value))

    lies = {
        "defect_magic": junk,
        "defect_digest": None,  # another key's object
        "defect_codec": lambda value: of_another_codec(value, CODEC_VERSION + 1),
        "defect_checksum": lambda value: value[:1000] + bytes([value[1000] ^ 1]) + value[1001:],
        "load_failed_store_size": lambda value: value[:-128],
    }
    for number, (counter, lie) in enumerate(lies.items()):
        if number % 2 == 0:
            pair.shares()  # failures in a row would pause loads
        prompt, keys = pair.saved()
        values = {key: pair.raw.get(key, OBJECT_BYTES) for key in sorted(keys)}
        others = dict(zip(values, [*values.values()][1:] + [*values.values()][:1], strict=True))
        name = counter if counter.startswith("load") else f"store_{counter}"
        before = pair.total(pair.b, name)
        for key, value in values.items():
            assert pair.raw.remove(key)
            pair.raw.put(key, others[key] if lie is None else lie(value))
        assert pair.ask(pair.b, prompt).cached == 0, f"B used an object with {counter}"
        pair.grows(pair.b, before, name)
    pair.shares()


CONTROL = {
    "reset": ("/reset_prefix_cache?reset_external=true", ""),
    "reset with running requests": ("/reset_prefix_cache?reset_external=true&reset_running_requests=true", ""),
    "pause, keep": ("/pause?mode=keep&clear_cache=false", "/resume"),
    "pause, abort and clear": ("/pause?mode=abort&clear_cache=true", "/resume"),
    "sleep": ("/sleep?level=1", "/wake_up"),
}


def control(pair: FaultyPair, path: str, undo: str) -> str:
    """One call of vLLM's development endpoints on B, and the one that undoes it; what vLLM said. Each must end in time."""
    try:
        said = str(pair.b.post(path, {}, HUNG_SECONDS))
    except EngineError as error:
        if "HTTP" not in str(error):  # no answer in time
            raise
        said = str(error)
    if undo:
        pair.b.post(undo, {}, HUNG_SECONDS)
    return said


def back_in_use(pair: FaultyPair) -> None:
    """B shares again, also when its caches were reset: then it has moved the pool on."""
    pair.pool.wait_engines(2)
    pair.shares()


@pytest.mark.parametrize("call", ["reset", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CONTROL)[1:])])
def test_control_calls_end_while_a_load_hangs(pair: FaultyPair, call: str) -> None:
    prompt, _ = pair.saved()
    pair.store.freeze()
    try:
        with pair.asks_for_a_load(prompt) as asked:
            control(pair, *CONTROL[call])
            answer = asked.result(HUNG_SECONDS)
        expected = pair.reference(prompt, pair.weights.base)
        aborted = call in ("pause, abort and clear", "sleep")
        assert answer.tokens == expected[: len(answer.tokens) if aborted else None]
        assert answer.cached == 0
    finally:
        pair.store.thaw()
    back_in_use(pair)


def test_control_calls_end_while_the_store_is_dead(pair: FaultyPair) -> None:
    prompt, _ = pair.saved()
    pair.store.kill()
    pair.master.kill()
    for path, undo in CONTROL.values():
        said = control(pair, path, undo)
        assert "HTTP" not in said
        assert "False" not in said, f"{path} was refused: {said}"
        assert pair.ask(pair.b, prompt).cached in (0, CACHED)
    pair.mooncake.start_master()
    pair.mooncake.start_store()
    back_in_use(pair)


def test_engines_end_when_told_to_although_the_store_hangs(pair: FaultyPair) -> None:
    """The last test: B ends with master and node frozen and a load under way, A with both dead; both end by themselves."""
    prompt, _ = pair.saved()
    pair.store.freeze()
    with pair.asks_for_a_load(prompt) as asked:
        pair.master.freeze()
        pair.b.process.popen.send_signal(signal.SIGTERM)
        assert pair.b.process.popen.wait(HUNG_SECONDS) in (0, -signal.SIGTERM), pair.b.process.tail()
        assert asked.exception(HUNG_SECONDS) or asked.result()
    pair.store.kill()
    pair.master.kill()
    pair.ask(pair.a, pair.prompts())
    pair.a.process.popen.send_signal(signal.SIGTERM)
    assert pair.a.process.popen.wait(HUNG_SECONDS) in (0, -signal.SIGTERM), pair.a.process.tail()
