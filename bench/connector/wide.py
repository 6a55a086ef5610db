"""A domain of two data-parallel ranks with and without EpochKV, in turns: what naming by all ranks costs, and what it finds.

The model is tiny, so that a step is short: what is added to one weighs more than it does on any real model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.connector.engines import CONCURRENCY, START_SECONDS, in_turns, prompt, timed_answer
from bench.connector.misses import Misses, medians, pairs, ratio
from bench.report import Figure, Progress, Row
from hack import models
from hack.standalone import cpu_collectives
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool

PROMPT_TOKENS, CACHED = 1000, 896
ANSWER_TOKENS = 128
IDLE_SECONDS = 0.8
"""More than after which a rank asks the others anew."""
ARGS = ("--data-parallel-size", "2")
VOCABULARY = 500


def tokens(seed: str, number: int = PROMPT_TOKENS) -> list[int]:
    return [2 + token % VOCABULARY for token in prompt(seed, number)]


def decode_milliseconds(rank: Engine, seed: str) -> float:
    """Of one token of an answer, behind the first."""
    began = time.perf_counter()
    rank.complete(tokens(seed, 64), 1)
    first, began = time.perf_counter() - began, time.perf_counter()
    rank.complete(tokens(f"{seed} again", 64), ANSWER_TOKENS + 1)
    return 1e3 * (time.perf_counter() - began - first) / ANSWER_TOKENS


def again_milliseconds(rank: Engine, seed: str, idle: float) -> float:
    """To the first token of a prompt that the GPU cache holds, after so many seconds without a request."""
    asked = tokens(seed)
    rank.complete(asked, 1)
    time.sleep(idle)
    return 1e3 * timed_answer(rank, asked, CACHED)


def unshared_after_push(ranks: tuple[Engine, Engine], base: Path, seed: str) -> int:
    """Requests that arrive at once behind a push to all ranks, and whose blocks the other rank does not find."""
    ranks[0].reload_weights(base)  # reaches both
    asked = [tokens(f"{seed} {index}") for index in range(CONCURRENCY)]
    with ThreadPoolExecutor(CONCURRENCY) as executor:
        list(executor.map(lambda one: ranks[0].complete(one, 1), asked))
    time.sleep(2.0)
    return sum(ranks[1].complete(one, 1).cached == 0 for one in asked)


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Ratios of neighbouring turns."""
    kinds = ("decode step", "first token, GPU hit", "the same after idling")
    samples: dict[str, dict[str, list[float | None]]] = {kind: {"with": [], "without": []} for kind in kinds}
    misses = Misses()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochkv-bench-")))
        base = models.make(folder / "model", 1, models.Shape(experts=4))
        mooncake, pool = stack.enter_context(Mooncake(folder)), stack.enter_context(Pool(folder))
        environ = cpu_collectives.install(folder / "plugin")
        connectors = {"with": pool.connector(64 << 20, mooncake.address), "without": None}
        engines = {name: Engine(name, base, folder, connector, args=ARGS, environ=environ) for name, connector in connectors.items()}
        for engine in engines.values():
            stack.callback(engine.end)
        ranks = {name: (engine.of_rank(0), engine.of_rank(1)) for name, engine in engines.items()}
        for name, engine in engines.items():
            engine.wait_ready(START_SECONDS)
            for rank in ranks[name]:
                rank.complete(tokens(f"{rank.name} warm"), 8)
        for index, name in in_turns(engines, 2 * arguments.repeats, progress):
            rank, seed = ranks[name][0], f"{name} {index}"
            measures = (
                partial(decode_milliseconds, rank, seed),
                partial(again_milliseconds, rank, f"{seed} a", 0.0),
                partial(again_milliseconds, rank, f"{seed} b", IDLE_SECONDS),
            )
            for kind, measure in zip(kinds, measures, strict=True):
                samples[kind][name].append(misses.attempt(f"{name}, {kind}", measure))
        unshared = [unshared_after_push(ranks["with"], base, f"push {index}") for index in range(arguments.repeats)]
    figures = [
        figure for kind, both in samples.items() for figure in ratio(f"{kind}, with / without", pairs(both["with"], both["without"]), 1.02)
    ]
    figures += [figure for kind, both in samples.items() for figure in medians(both, f"ms, {kind}")]
    figures += [Figure(f"of {CONCURRENCY} requests behind a push, without a shared name, at most", float(max(unshared)), 1.0, "")]
    return Row("two data-parallel ranks that hold experts together", [*figures, *misses.figures()], {**samples, "unshared": unshared})
