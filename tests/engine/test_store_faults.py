"""A store that dies, freezes, forgets, fills up, lies or is robbed under two serving engines.

Every answer is that of an engine without any cache, no request fails, the connector's counters say what happened, and the
engines share again by themselves. The tests use one pair of engines and leave it sharing; the last one ends them.
"""

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from epochkv_connector import metrics
from hack.engine_api import Answer, EngineError
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from hack.standalone.relay import Relay
from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, L1_BYTES, OBJECT_BYTES, Prompts, Reference, Weights
from tests.support.nursery import Nursery
from tests.support.store import RawClient

LOAD_DEADLINE_SECONDS = 5.0
# A hung master or store node is given up as late as in production, a starved one not sooner.
ENVIRON = {"MC_RPC_TIMEOUT_MS": "2000", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}
# Sooner than an RPC's limit, so that a frozen master is a late answer first.
STORE = {"lookup_deadline_ms": 1800.0, "job_deadline_seconds": LOAD_DEADLINE_SECONDS}
KEY = re.compile(rb"[0-9a-f]{8}/[0-9a-f]{16}/e\d+/w[0-9a-f]{16}/g\d+/r\d+/[0-9a-f]+")
HUNG_SECONDS = 40.0
"""A call that has not returned by then hangs."""


def series_of(name: str) -> tuple[str, dict[str, str]]:
    """The Prometheus series of a name that the connector's halves count under; of a rank's gauge, that of rank 0.

    Raises:
        KeyError: there is none.
    """
    for candidate in (name, f"worker_{name}"):
        for table, ending in ((metrics.COUNTER_OF, "_total"), (metrics.GAUGE_OF, "")):
            if (found := table.find(candidate)) is not None:
                family, values = found
                labels = dict(zip(family.labels, values, strict=True)) | ({"rank": "0"} if family.per_rank else {})
                return f"{metrics.PREFIX}{family.name}{ending}", labels
    raise KeyError(name)


class FaultyPair:
    """A and B, their store, the relay between B and the master, and a client of the store that belongs to nobody's pool."""

    def __init__(self, folder: Path, weights: Weights, prompts: Prompts, reference: Reference, servers: Nursery) -> None:
        self.weights, self.prompts, self.reference, self._servers = weights, prompts, reference, servers
        self._raw: RawClient | None = None
        with ExitStack() as stack:
            # A node that stands still is silent: its keys stay for longer than any test takes, or they are misses and no loads.
            store = Mooncake(folder / "mooncake", segment_bytes=96 << 20, lease_seconds=3.0, client_ttl_seconds=120)
            self.mooncake = stack.enter_context(store)
            self.relay = Relay(self.mooncake.address)
            stack.callback(self.relay.close)
            self.pool = stack.enter_context(Pool(folder, lease_seconds=60.0))
            # L2 alone, so that B asks the store whatever it has seen before.
            self.b = self._engine("B", folder, None, self.relay.address, stack)
            self.a = self._engine("A", folder, L1_BYTES, self.mooncake.address, stack)
            self._stack = stack.pop_all()

    def _engine(self, name: str, folder: Path, local_bytes: int | None, master: str, stack: ExitStack) -> Engine:
        connector = self.pool.connector(local_bytes, master, **STORE)
        engine = Engine(name, self.weights.base, folder, connector, environ=ENVIRON, popen=self._servers.popen)
        stack.callback(engine.end)
        return engine

    def begin(self) -> None:
        """Return once both share an epoch and B loads what A saves."""
        for engine in (self.a, self.b):
            engine.wait_ready()
        self.pool.wait_engines(2)
        self.shares()

    @property
    def raw(self) -> RawClient:
        """Somebody else who reaches the store's ports."""
        if self._raw is None:
            self._raw = RawClient(self.mooncake.address)
        return self._raw

    @property
    def store(self) -> Process:
        """The store node that was started last."""
        return self.mooncake.stores[-1]

    @property
    def master(self) -> Process:
        assert self.mooncake.master is not None
        return self.mooncake.master

    def ask(self, engine: Engine, prompt: Sequence[int]) -> Answer:
        """One request, which must not fail and must be answered as without any cache."""
        answer = engine.complete(prompt)
        assert answer.tokens == self.reference(prompt, self.weights.base), f"{engine.name} gave a wrong answer"
        return answer

    def save(self, prompt: Sequence[int]) -> set[str]:
        """A computes the prompt; the keys that appeared in the store: as many as it has blocks, unless puts were lost."""
        before = set(self.mooncake.keys())
        self.ask(self.a, prompt)
        new: set[str] = set()
        deadline = time.monotonic() + 5.0
        while len(new) < BLOCKS and time.monotonic() < deadline:
            time.sleep(0.05)
            new = set(self.mooncake.keys()) - before
        return new

    def saved(self) -> tuple[list[int], set[str]]:
        """A prompt whose blocks are all in the store, and their keys; until the store takes them."""
        deadline = time.monotonic() + 60.0
        while True:
            prompt = self.prompts()
            keys = self.save(prompt)
            if len(keys) == BLOCKS:
                return prompt, keys
            assert time.monotonic() < deadline, "the store takes no blocks"

    def shares(self) -> None:
        """B loads what A saves: the state that it must come back to by itself."""

        def loaded() -> bool:
            return self.ask(self.b, self.saved()[0]).cached == CACHED

        eventually(loaded, "B loads what A has saved", 90.0)

    @contextmanager
    def asks_for_a_load(self, prompt: Sequence[int]) -> Iterator[Future[Answer]]:
        """B is asked for a prompt that the store holds; from the moment when its load asks the master where the bytes are.

        B's client names a block to the master first to ask whether it is there, so the second time is the load.
        """
        begun, named, lock = threading.Event(), Counter[bytes](), threading.Lock()

        def watch(chunk: bytes) -> None:
            with lock:
                named.update(set(KEY.findall(chunk)))
                if max(named.values(), default=0) > 1:
                    begun.set()

        self.relay.watch = watch
        try:
            with ThreadPoolExecutor(1) as thread:
                asked = thread.submit(self.b.complete, prompt)
                assert begun.wait(HUNG_SECONDS), "B loads nothing"
                yield asked
        finally:
            self.relay.watch = None

    def total(self, engine: Engine, *names: str) -> float:
        """Sum of the connector's counters and gauges of these names, none older than this call."""
        engine.report_metrics(self.prompts(8))
        return self.seen(engine, *names)

    def seen(self, engine: Engine, *names: str) -> float:
        """The same as it was reported last."""
        return sum(engine.metric(series, **labels) for series, labels in map(series_of, names))

    def grows(self, engine: Engine, before: float, *names: str, seconds: float = 15.0) -> None:
        """A counter rises above `before` without anybody asking for a cached prompt."""

        def grown() -> bool:
            engine.complete(self.prompts(8), 1)
            return self.seen(engine, *names) > before

        eventually(grown, f"{engine.name} counts {', '.join(names)}", seconds)

    def end(self) -> None:
        """End everything, also what stands still."""
        if self._raw is not None:
            with suppress(Exception):
                self._raw.close()
        self._stack.close()


HUNG_LOADS = ("load_failed_store_transfer", "load_failed_store_timeout", "load_failed_deadline")


@pytest.fixture(scope="module")
def pair(folder: Path, weights: Weights, prompts: Prompts, reference: Reference, servers: Nursery) -> Iterator[FaultyPair]:
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
        failed = pair.total(pair.b, "loads_failed")
        with ThreadPoolExecutor(3) as threads:
            assert [answer.cached for answer in threads.map(lambda prompt: pair.ask(pair.b, prompt), saved[3:])] == [0, 0, 0]
        assert pair.total(pair.b, "loads_failed") <= failed + 1, "more than one trial"
    finally:
        pair.store.thaw()
    pair.shares()
    assert pair.total(pair.b, "loads_paused") == 0


def test_foreign_bytes_under_our_keys_are_never_used(pair: FaultyPair) -> None:
    lies = {
        "store_defect_digest": None,  # another key's object
        "load_failed_store_size": lambda value: value[:-128],
    }
    for name, lie in lies.items():
        prompt, keys = pair.saved()
        values = {key: pair.raw.get(key, OBJECT_BYTES) for key in sorted(keys)}
        others = dict(zip(values, [*values.values()][1:] + [*values.values()][:1], strict=True))
        before = pair.total(pair.b, name)
        for key, value in values.items():
            assert pair.raw.remove(key)
            pair.raw.put(key, others[key] if lie is None else lie(value))
        assert pair.ask(pair.b, prompt).cached == 0, f"B used an object with {name}"
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
