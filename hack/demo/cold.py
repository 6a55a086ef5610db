"""`python -m hack.demo cold`: a fresh engine's first load from the store, again and again, on a machine that others keep busy.

The first load of an engine is the hardest one: connections are new, and memory was not touched yet. One engine saves prompts.
One engine after the other then starts beside it and is asked for one of them. Each must answer as an engine without a cache.
A miss that its connector counts is the busy machine's; its run is repeated with another prompt, as in `make demo`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hack import models
from hack.cluster.binaries import cache_root
from hack.demo.claims import Claims
from hack.demo.journey import ANSWER_TOKENS, BLOCKS, CACHED, MAX_REPEATS, Prompt, Read, make_prompts
from hack.demo.progress import Progress
from hack.durations import Durations, clock
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Process, nothing_left
from hack.waiting import eventually

BUSY = "while True: pass"
READY_SECONDS = 600.0
"""As the operator's startup probe allows."""


@dataclass(frozen=True)
class Parts:
    """What each run needs. `writer` saves, `reference` has no cache."""

    folder: Path
    model: Path
    mooncake: Mooncake
    pool: Pool
    writer: Engine
    reference: Engine


def demo(console: Console, seed: int | None, runs: int, load: int) -> int:
    """The exit status is 0 only when every run's answer was right and came from the store."""
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    progress = Progress(console, Durations(cache_root() / "demo-cold-durations.json"), runs + 1)
    console.print(f"Prompts of {CACHED} tokens and more are drawn with --seed {seed}.", highlight=False)
    claims = Claims()
    with tempfile.TemporaryDirectory(prefix="epochkv-demo-") as name, nothing_left(lambda line: console.print(line, highlight=False)):
        os.environ["TMPDIR"] = name  # vLLM leaves its sockets behind
        with ExitStack() as stack, busy(Path(name), load):
            with progress.step("an engine that saves, and one without any cache", 60):
                parts = start(stack, Path(name))
            for number in range(1, runs + 1):
                with progress.step(f"cold engine {number}", 60):
                    read = first_read(parts, seed, number, progress)
                seen = f"{read.answer.cached} cached, {read.through_l2} through L2"
                held = read.answer.cached == read.through_l2 == CACHED
                claims.check(f"cold engine {number}: tokens it takes from the store", held, str(CACHED), seen)
                right = read.answer.tokens == read.right
                claims.check(f"cold engine {number}: its answer", right, "as without a cache", "as without a cache" if right else "wrong")
    claims.show(console, f"{runs} cold engines beside {load} busy processes ({clock(progress.elapsed)})")
    if claims.broken:
        console.print(f"[bold red]{len(claims.broken)} of {len(claims.items)} claims did not hold.[/]")
    return 1 if claims.broken else 0


@contextmanager
def busy(folder: Path, count: int) -> Iterator[None]:
    """So many processes that use a core each."""
    with ExitStack() as stack:
        for number in range(count):
            stack.enter_context(Process(f"busy {number}", [sys.executable, "-c", BUSY], folder / "busy.log"))
        yield


def start(stack: ExitStack, folder: Path) -> Parts:
    """Store, hub, the engine that saves and the one without a cache."""
    model = models.make(folder / "model", 1)
    mooncake = stack.enter_context(Mooncake(folder / "store"))
    pool = stack.enter_context(Pool(folder / "pool"))
    engines = (
        Engine("writer", model, folder, connector(pool, mooncake)),
        Engine("reference", model, folder, prefix_caching=False),
    )
    for engine in engines:
        stack.callback(engine.end)
    writer, reference = (engine.wait_ready(READY_SECONDS) for engine in engines)
    return Parts(folder, model, mooncake, pool, writer, reference)


def connector(pool: Pool, mooncake: Mooncake) -> dict[str, object]:
    """The configuration of an engine of this pool, with the deadlines that users have."""
    return pool.connector(local_bytes=64 << 20, master_address=mooncake.address)


def first_read(parts: Parts, seed: int, number: int, progress: Progress) -> Read:
    """What a fresh engine answers at first; a miss that its connector counts is repeated by another fresh engine, at most twice."""
    for repeat in range(MAX_REPEATS + 1):
        prompt, right = saved_prompt(parts, seed * 1000 + number * 10 + repeat)
        with ExitStack() as stack:
            engine = Engine(f"cold-{number}-{repeat}", parts.model, parts.folder, connector(parts.pool, parts.mooncake))
            stack.callback(engine.end)
            engine.wait_ready(READY_SECONDS)
            parts.pool.wait_engines(2)
            read = Read.of(engine, prompt, right)
        if not read.misses:
            break
        progress.note(f"{' and '.join(read.misses)} on this busy machine, so a miss; once more with another prompt")
    return read


def saved_prompt(parts: Parts, seed: int) -> tuple[Prompt, tuple[int, ...]]:
    """A prompt whose blocks the writer has saved, and its right answer."""
    (prompt,) = make_prompts(seed, 1)
    before = len(parts.mooncake.keys())
    parts.writer.complete(prompt, ANSWER_TOKENS)
    eventually(lambda: len(parts.mooncake.keys()) >= before + BLOCKS, "the writer's blocks are in the store", 60.0, 0.5)
    return prompt, parts.reference.complete(prompt, ANSWER_TOKENS).tokens
