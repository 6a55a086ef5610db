"""Engines whose weights are written in every way there is, requests that are watched while they run, and what must hold of both.

No trainer's client and no reset: engines find out by themselves what they hold. Prompts and answers of a request that runs across a
change are the prompts of later ones, so that a block which it computed with other weights than its name says is asked for.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from epochkv_fence.client.stamps import ASK, Stamp, stamps
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import (
    BLOCKS,
    CACHED,
    L1_BYTES,
    PATIENT,
    PATIENT_ENVIRON,
    Prompts,
    Reference,
    Weights,
    check,
    eventually,
    settled_keys,
)
from tests.support.nursery import Nursery
from tests.support.store import BlockKey, parse_key

WRITER = ("--worker-extension-cls", "hack.soak.weights_writer.Writer")
BLOCK_TOKENS = 128
OPENING = 2 * BLOCK_TOKENS + 4
"""Tokens of the prompt of a request that is watched: two blocks, and the third soon begun."""
MAX_TOKENS = 1700
"""Of its answer, which nobody waits for."""
SLOW_SECONDS = 0.02
MAX_PREFIXES = 4
FLIPPED = "model.layers.0.self_attn.k_norm.weight"
"""Times -1: every key of the first layer points the other way, and doing it again takes it back, bit by bit."""
SEEN = re.compile(r"EpochKV: weights ([0-9a-f]+), seen")
LEASE_SECONDS = 60.0


def open_pool(folder: Path) -> Pool:
    return Pool(folder, lease_seconds=LEASE_SECONDS)


def derive(folder: Path, base: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def flip(tensors: dict[str, Any]) -> None:
    """What the order `FLIPPED` does to weights."""
    tensors[FLIPPED] *= -1.0


class Stream:
    """A request whose tokens are seen as they come.

    Attributes:
        times: when each of `tokens` came.
        stamp: which weights made them; None: it has not ended.
        enough: it is given up with its next token.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> None:
        self.prompt, self.tokens, self.times = list(prompt), list[int](), list[float]()
        self.stamp: Stamp | None = None
        self._max_tokens = max_tokens
        self.error: BaseException | None = None
        self._engine = engine
        self.enough = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.tokens

    def end(self) -> None:
        self.enough = True
        self.join()

    def join(self) -> None:
        self._thread.join(120.0)
        assert self.error is None, f"a request failed: {self.error!r}"
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.error = error

    def _read(self) -> None:
        with closing(self._engine.stream(self.prompt, self._max_tokens, ASK)) as chunks:
            for chunk in chunks:
                if self.enough:
                    break
                for choice in chunk["choices"]:
                    self.tokens += choice.get("token_ids") or []
                self.times += [time.monotonic()] * (len(self.tokens) - len(self.times))
                self.stamp = stamps(chunk)[0] or self.stamp


class Streams:
    """Some requests to one engine at once, given up when the context is left.

    What is seen of them comes late on a loaded machine. The engine takes its steps slowly meanwhile, or it would be done with all of
    them before the first tokens are seen.
    """

    def __init__(self, engine: Engine, prompts: Iterable[Sequence[int]], max_tokens: int = MAX_TOKENS) -> None:
        self._slow = slow_file(engine)
        self._slow.touch()
        self.all = [Stream(engine, prompt, max_tokens) for prompt in prompts]

    def arrive(self, num_tokens: int) -> None:
        """Return once all of them have so many tokens, or have ended."""

        def there() -> bool:
            return all(len(one.tokens) >= num_tokens or one.stamp is not None or one.error is not None for one in self.all)

        eventually(there, f"{num_tokens} tokens of every request", 120.0)

    def wait(self) -> None:
        """Return once all of them have ended by themselves, which the engine does not delay any more."""
        self._slow.unlink(missing_ok=True)
        for stream in self.all:
            stream.join()

    def move_on(self, num_tokens: int) -> None:
        """Return once all have so many tokens more than the one that has most has now."""
        self.arrive(max(len(stream.tokens) for stream in self.all) + num_tokens)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.all:
            stream.enough = True
        for stream in self.all:
            stream.end()
        self._slow.unlink(missing_ok=True)

    def prefixes(self) -> Iterator[list[int]]:
        """What they were asked and answered, cut behind every block from the last of the prompt on: the first of these and the last."""
        for stream in self.all:
            ends = list(range(OPENING, len(stream.whole) + 1, BLOCK_TOKENS))
            yield from (stream.whole[:end] for end in (*ends[: MAX_PREFIXES - 1], *ends[MAX_PREFIXES - 1 :][-1:]))


def slow_file(engine: Engine) -> Path:
    """While it exists, an engine that may be slow takes its steps slowly."""
    return engine.process.log.with_suffix(".slow")


def may_be_slow(engine: Engine, seconds: float = SLOW_SECONDS) -> None:
    rpc(engine, "slow_while", path=str(slow_file(engine)), seconds=seconds)


class Orders:
    """Writes to an engine's parameters past vLLM, at once (`weights_writer.write_later`)."""

    def __init__(self, folder: Path, engine: Engine, rank: int | None = None) -> None:
        self._folder = folder
        folder.mkdir()
        rpc(engine, "write_later", folder=str(folder), rank=rank)

    def __call__(self, name: str, factor: float) -> None:
        """Scale the parameter. Returns when it is done."""
        order = self._folder / f"{name}.order"
        (self._folder / "new").write_text(str(factor))
        (self._folder / "new").rename(order)
        eventually(lambda: not order.exists(), f"{name} is written")


def rpc(engine: Engine, method: str, **arguments: Any) -> None:
    engine.post("/collective_rpc", {"method": method, "kwargs": arguments})


class Lab:
    """One pool and store, engines of it, and the right answers.

    Attributes:
        a, b: engines that hold base weights at first.
        local_bytes: of L1; None: there is none.
        num_shards: objects in the store for each block.
        args, environ: of every engine.
    """

    def __init__(
        self, folder: Path, pool: Pool, mooncake: Mooncake, servers: Nursery, weights: Weights, prompts: Prompts, reference: Reference
    ) -> None:
        self.folder, self.pool, self.mooncake = folder, pool, mooncake
        self.weights, self.prompts, self.reference = weights, prompts, reference
        self.local_bytes: int | None = L1_BYTES
        self.num_shards = 1
        self.args: tuple[str, ...] = ()
        self.environ: dict[str, str] = {}
        self._servers = servers
        self._held: dict[str, Path | None] = {}
        self._started: list[Engine] = []
        self.a: Engine
        self.b: Engine

    def begin(self) -> None:
        self.a, self.b = self.start("A", self.weights.base), self.start("B", self.weights.base)
        for engine in (self.a, self.b):
            self.wait_ready(engine)
        self.pool.wait_engines(2)
        for engine in (self.a, self.b):
            self.wait_named(engine)

    def start(self, name: str, model: Path, environ: Mapping[str, str] | None = None, args: Sequence[str] = ()) -> Engine:
        """One more engine; it may not be ready yet."""
        connector = self.pool.connector(self.local_bytes, self.mooncake.address, **PATIENT)
        environ = {**PATIENT_ENVIRON, **self.environ, **(environ or {})}
        engine = Engine(name, model, self.folder, connector, args=(*WRITER, *self.args, *args), environ=environ, popen=self._servers.popen)
        self._started.append(engine)
        self._held[name] = model
        return engine

    def close(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.end, self._started))

    def wait_ready(self, engine: Engine) -> None:
        """From then on it may be slow."""
        engine.wait_ready()
        may_be_slow(engine)

    def wait_named(self, engine: Engine) -> None:
        """Return once it names what it computes: looks at the weights keep their distance, and take long on a loaded machine."""
        prompt = self.prompts()
        eventually(lambda: engine.complete(prompt).cached > 0, "it finds what it has computed")

    # ------------------------------------------------------------------ weights
    def push(self, engine: Engine, model: Path) -> None:
        """These weights, the way that every framework has."""
        self._held[engine.name] = None
        engine.reload_weights(model)
        self._held[engine.name] = model

    def have(self, model: Path, *engines: Engine) -> None:
        """These weights for A and B, or those that are named, as far as they do not have them."""
        for engine in engines or (self.a, self.b):
            if self._held[engine.name] != model:
                self.push(engine, model)

    @contextmanager
    def written(self, engine: Engine) -> Iterator[None]:
        """Inside, weights are written that are no folder's; they are back at the end, unless the test fails."""
        held, self._held[engine.name] = self._held[engine.name], None
        yield
        self._held[engine.name] = held

    # ------------------------------------------------------------------ what must hold
    def right(self, engine: Engine, prompt: Sequence[int], model: Path) -> int:
        """The engine's answer is that of these weights; how many of the prompt's tokens were cached."""
        answer = engine.complete(prompt)
        assert answer.tokens == self.reference(prompt, model), f"a wrong answer, with {answer.cached} tokens from a cache"
        return answer.cached

    def save(self, engine: Engine, model: Path) -> list[int]:
        """A prompt that the engine, with these weights, was the first to compute, and whose blocks are in the store."""
        prompt, before = self.prompts(), settled_keys(self.mooncake)
        check(engine.complete(prompt), 0, self.reference(prompt, model))
        eventually(lambda: len(set(self.mooncake.keys()) - before) == self.num_shards * BLOCKS, f"{BLOCKS} blocks in the store")
        return prompt

    def share(self, model: Path) -> list[int]:
        """What A computes, B loads, and both are right. Returns the prompt."""
        prompt = self.save(self.a, model)
        check(self.b.complete(prompt), CACHED, self.reference(prompt, model))
        return prompt

    def apart(self, first: Engine, first_model: Path, second: Engine, second_model: Path) -> None:
        """Neither takes what the other has computed, and both keep their own."""
        for one, its, other, others in ((first, first_model, second, second_model), (second, second_model, first, first_model)):
            prompt = self.save(one, its)
            check(other.complete(prompt), 0, self.reference(prompt, others))
            check(one.complete(prompt), CACHED, self.reference(prompt, its))

    def all_right(self, prompts: Iterable[Sequence[int]], *engines: tuple[Engine, Path]) -> None:
        """Every engine, one after the other, answers each of them as it should, also from what those before have saved."""
        prompts = list(prompts)
        for engine, model in engines:
            for prompt in prompts:
                self.right(engine, prompt, model)
            settled_keys(self.mooncake)

    # ------------------------------------------------------------------ what is told
    def seen(self, engine: Engine) -> list[str]:
        """What the engine's log says that it holds, in order."""
        return SEEN.findall(engine.process.log.read_text(errors="replace"))

    def digest(self, engine: Engine) -> str:
        """Of what it holds now, 8 hex digits."""
        return self.seen(engine)[-1]

    def late(self, engine: Engine) -> float:
        """How often its ranks have seen a change behind a step."""
        engine.report_metrics(self.prompts(8))
        return engine.metric("vllm:epochkv_weights_events_total", what="late")

    def stored(self) -> list[BlockKey]:
        return [parse_key(key) for key in settled_keys(self.mooncake)]

    def wait_published(self, epoch: int) -> None:
        """Return once the pool is at least there, by itself."""
        eventually(lambda: self.pool.snapshot().published >= epoch, f"epoch {epoch}, which nobody has asked for but an engine", 120)
        self.pool.wait_engines(2)


class Traffic:
    """Requests to some engines, one after the other on each, from now on until the end; an engine named twice gets two at a time.

    Attributes:
        asked: (engine, prompt, when it began, when it had ended, answer, cached tokens).
    """

    def __init__(self, engines: Sequence[Engine], prompts: Sequence[Sequence[int]]) -> None:
        self.asked: list[tuple[Engine, Sequence[int], float, float, tuple[int, ...], int]] = []
        self._engines, self._prompts = engines, prompts
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=(engine,), daemon=True) for engine in engines]

    def _run(self, engine: Engine) -> None:
        try:
            while not self._stop.is_set():
                for prompt in self._prompts:
                    began = time.monotonic()
                    answer = engine.complete(prompt)
                    self.asked.append((engine, prompt, began, time.monotonic(), answer.tokens, answer.cached))
        except BaseException as error:
            self._error = error

    def go_on(self, num_requests: int) -> None:
        """Return once that many more were answered by every engine."""
        began = time.monotonic()

        def done() -> bool:
            counts = Counter(id(entry[0]) for entry in list(self.asked) if entry[2] >= began)
            return self._error is not None or all(counts[id(engine)] >= num_requests for engine in self._engines)

        eventually(done, f"{num_requests} more answers of every engine", 60.0)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120.0)
        assert self._error is None, f"a request failed: {self._error!r}"
