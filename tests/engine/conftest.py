"""Real vLLM CPU engines behind their OpenAI server, a real Mooncake, the production hub.

Answers are compared with those of an engine that caches nothing.
"""

import json
import random
import re
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from epochkv_fence import client
from epochkv_fence.mooncake_admin import MooncakeAdmin
from hack import models
from hack.engine_api import Answer
from hack.standalone.engine import CPU_ENVIRONMENT, Engine
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.support.nursery import Nursery

PROMPT_TOKENS = 1000
CACHED = 896  # whole blocks of 128 tokens of such a prompt
BLOCKS = CACHED // 128
SHAPE = models.Shape()
OBJECT_BYTES = 2 * SHAPE.kv_heads * SHAPE.head_dim * 4 * 128 * SHAPE.layers + 256
"""Keys and values of a block of float32, with header and trailer."""
L1_BYTES = 64 << 20
LEASE_SECONDS = 3.0
"""Of the store: a key that was read stays for so long, whoever removes it."""


@dataclass(frozen=True)
class Weights:
    """Folders of sets of weights for one architecture; engines start with `base`."""

    base: Path
    new: Path
    third: Path

    def after(self, current: Path) -> Path:
        """The next ones to push: never `base`, never those that are there."""
        return self.third if current == self.new else self.new


# A loaded machine may answer a lookup later than the 20 ms that an engine waits by default, which is a miss and no fault.
PATIENT = {"lookup_deadline_ms": 5000.0, "job_deadline_seconds": 30.0}
# For the same reason: a master that is starved for a second would count as hung, a store node after two, a transfer after five.
PATIENT_ENVIRON = {"MC_RPC_TIMEOUT_MS": "15000", "MC_TCP_STATUS_TIMEOUT_SEC": "20", "MC_TCP_PROGRESS_TIMEOUT_SEC": "20"}


def settled_keys(mooncake: Mooncake, seconds: float = 30.0) -> set[str]:
    """What the store holds once nothing has arrived for half a second."""
    keys, since, deadline = set(mooncake.keys()), time.monotonic(), time.monotonic() + seconds
    while time.monotonic() - since < 0.5:
        assert time.monotonic() < deadline, f"puts still arrive after {seconds} s"
        time.sleep(0.05)
        now = set(mooncake.keys())
        if now != keys:
            keys, since = now, time.monotonic()
    return keys


def fence_lines(engine: Engine) -> list[str]:
    """What an engine's log says of its standing with the pool, in order."""
    text = engine.process.log.read_text(errors="replace")
    return [line for line in text.splitlines() if re.search(r"EpochKV: .*\bbypass\b|EpochKV: epoch \d+ in use", line)]


def check(answer: Answer, cached: int, expected: tuple[int, ...]) -> None:
    """The answer is right, and so many of its prompt's tokens were found in a cache. Apart from each other: a machine that stands
    still costs hits, and such a test has a second run; one with a wrong answer, or with hits that nobody may have, has none."""
    assert answer.tokens == expected, "a wrong answer"
    assert answer.cached <= cached, "a wrong answer: from blocks that are not to be found"
    assert answer.cached == cached


class Prompts:
    """Prompts that share nothing with each other, so that every hit has one explanation."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self._random.randrange(2, 512) for _ in range(num_tokens)]


class Reference:
    """An engine without any cache; answers are remembered per prompt and set of weights."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine = engine
        self._loaded: Path | None = weights.base
        self._answers: dict[tuple[tuple[int, ...], Path], tuple[int, ...]] = {}

    def __call__(self, prompt: Sequence[int], model: Path) -> tuple[int, ...]:
        key = (tuple(prompt), model)
        if key not in self._answers:
            if model != self._loaded:
                self._engine.reload_weights(model)
                self._loaded = model
            answer = self._engine.complete(prompt)
            assert answer.cached == 0
            self._answers[key] = answer.tokens
        return self._answers[key]

    def answer(self, prompt: Sequence[int], model: Path, num_tokens: int) -> tuple[int, ...]:
        """A longer answer."""
        if model != self._loaded:
            self._engine.reload_weights(model)
            self._loaded = model
        return self._engine.complete(prompt, num_tokens).tokens

    def lend(self) -> Engine:
        """The engine itself, to somebody who may change its weights."""
        self._loaded = None
        return self._engine


LOGS = pytest.StashKey[dict[Path, int]]()
LOG_LINES = 40


def log_sizes(folder: Path) -> dict[Path, int]:
    return {log: log.stat().st_size for log in sorted(folder.rglob("*.log"))}


@pytest.fixture(autouse=True)
def _note_logs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    request.node.stash[LOGS] = log_sizes(tmp_path_factory.getbasetemp())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Below a failure, what connectors and stores have logged since the test began: the files may be out of reach then."""
    report = yield
    before = item.stash.get(LOGS, None)
    if before is not None and report.failed:
        for log in log_sizes(item.config._tmp_path_factory.getbasetemp()):  # type: ignore[attr-defined]
            with log.open("rb") as file:
                file.seek(before.get(log, 0))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if re.search("EpochKV|WARN|ERROR", line)]
            if lines:
                report.sections.append((f"{log.parent.name}/{log.name} since the test began", "\n".join(lines[-LOG_LINES:])))
    return report


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("models")
    return Weights(*(models.make(folder / name, seed) for seed, name in enumerate(("base", "new", "third"), 1)))


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts(20)


def nursery() -> Nursery:
    """Of engines."""
    return Nursery("tests.engine.preloaded", environ={**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT})


servers = pytest.fixture(nursery, scope="session")


@pytest.fixture(scope="session")
def reference(weights: Weights, servers: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    folder = tmp_path_factory.mktemp("reference")
    with Engine("reference", weights.base, folder, prefix_caching=False, popen=servers.popen) as engine:
        yield Reference(engine, weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def mooncake(folder: Path) -> Iterator[Mooncake]:
    with Mooncake(folder / "mooncake") as mooncake:
        yield mooncake


class Pair:
    """Engines A and B of a pool, and the weights that both have between tests."""

    def __init__(self, folder: Path, pool: Pool, mooncake: Mooncake, weights: Weights, servers: Nursery) -> None:
        self.folder, self.pool, self.mooncake, self.weights, self.servers = folder, pool, mooncake, weights, servers
        self.model = weights.base
        self._names = iter(("A", "B", *(f"B{number}" for number in range(2, 10))))
        self._started: list[Engine] = []
        self.a: Engine
        self.b: Engine

    def begin(self) -> None:
        """Start A and B; returns once they share an epoch."""
        self.a, self.b = self.start(), self.start()
        for engine in self.both:
            engine.wait_ready()
        self.pool.wait_engines(2)

    @property
    def both(self) -> tuple[Engine, Engine]:
        return self.a, self.b

    def start(self) -> Engine:
        """One more engine, with base weights; it may not be ready yet."""
        connector = self.pool.connector(L1_BYTES, self.mooncake.address, **PATIENT)
        name = next(self._names)
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events_of(name)}
        args = ("--kv-events-config", json.dumps(events))
        environ = {**PATIENT_ENVIRON, "EPOCHKV_ENGINE_NAME": name}
        engine = Engine(name, self.weights.base, self.folder, connector, args=args, environ=environ, popen=self.servers.popen)
        self._started.append(engine)
        return engine

    def events_of(self, name: str) -> str:
        """Where the engine of this name publishes its KV events."""
        return f"ipc://{self.folder}/{name}.events"

    def push(self, model: Path) -> None:
        for engine in self.both:
            engine.reload_weights(model)
        self.model = model

    def save_through_a(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """A computes the prompt; returns its answer once its blocks are in the store."""
        before = settled_keys(self.mooncake)
        answer = self.a.complete(prompt)
        assert answer.cached == 0
        eventually(lambda: len(set(self.mooncake.keys()) - before) == BLOCKS, f"{BLOCKS} blocks in the store")
        return answer.tokens

    def check_sharing(self, prompt: Sequence[int], expected: tuple[int, ...]) -> None:
        """A computes, B loads, and both say what they should."""
        assert self.save_through_a(prompt) == expected, "a wrong answer"
        answer = self.b.complete(prompt)
        check(answer, CACHED, expected)

    def end(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.end, self._started))


@pytest.fixture(scope="session")
def pair(weights: Weights, servers: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines for all tests of `test_sharing` and `test_weights`, which leave them in use of the pool's epoch.

    The fence's leases are short, so that losing one takes seconds.
    """
    folder = tmp_path_factory.mktemp("pair")
    # A node that was starved for ten seconds would count as gone, and its keys with it; tests also stop it for as long.
    with Mooncake(folder / "mooncake", lease_seconds=LEASE_SECONDS, client_ttl_seconds=120) as mooncake:
        admin = MooncakeAdmin(lambda uid: [f"http://127.0.0.1:{mooncake.admin_port}"])
        with Pool(folder, lease_seconds=6.0, stores=admin) as pool:
            pair = Pair(folder, pool, mooncake, weights, servers)
            try:
                pair.begin()
                yield pair
            finally:
                pair.end()


@pytest.fixture(scope="module")
def trainer(pair: Pair) -> Iterator[client.Pool]:
    """The trainer's client, as a trainer uses it: with the pool's connection file."""
    path = pair.folder / "connection.json"
    path.write_text(json.dumps(pair.pool.connection()))
    with client.Pool.connect(path) as pool:
        yield pool
