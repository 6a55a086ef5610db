"""Decode throughput with the connector (L1 and L2, nothing ever found) against an engine without one, in turns."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from bench.connector.engines import CONCURRENCY, SETTLE_SECONDS, cpu_seconds, fleet, in_turns, prompt
from bench.connector.first_token import warm_up
from bench.connector.misses import Misses, medians, pairs, ratio
from bench.report import Progress, Row
from hack.standalone.engine import Engine

PROMPT_TOKENS = 64
ANSWER_TOKENS = 192
L1_BLOCKS = 600


def tokens_per_second(engine: Engine, seed: str) -> tuple[float, float]:
    """A few unique requests at once: (tokens in a second of wall clock, tokens in a second of the engine's CPU time)."""
    prompts = [prompt(f"{seed} {index}", PROMPT_TOKENS) for index in range(CONCURRENCY)]
    cpu, began = cpu_seconds(engine), time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as executor:
        answers = list(executor.map(lambda tokens: engine.complete(tokens, ANSWER_TOKENS), prompts))
    count = sum(len(answer.tokens) for answer in answers)
    if any(answer.cached for answer in answers):
        raise RuntimeError(f"{engine.name}: a unique prompt was found in a cache")
    return count / (time.perf_counter() - began), count / (cpu_seconds(engine) - cpu)


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Ratios of neighbouring turns; a turn with a miss gives none."""
    wall: dict[str, list[float | None]] = {"with": [], "without": []}
    cpu: dict[str, list[float | None]] = {"with": [], "without": []}
    misses = Misses()
    with fleet({"with": "ours", "without": "none"}, l1_blocks=L1_BLOCKS) as group:
        warm_up(group, misses)
        for index, name in in_turns(group.engines, 2 * arguments.repeats, progress):
            time.sleep(SETTLE_SECONDS)
            ask = (group.engines[name], f"{name} {index}")
            by_clock, by_cpu = misses.attempt(name, lambda ask=ask: tokens_per_second(*ask)) or (None, None)
            wall[name].append(by_clock)
            cpu[name].append(by_cpu)
    figures = [
        figure
        for what, rates, aim in (("by wall clock", wall, 0.98), ("by CPU time of the engine", cpu, None))
        for figure in ratio(f"with / without connector, {what}", pairs(rates["with"], rates["without"]), aim, at_least=True)
    ]
    figures += [*medians(wall, "tokens/s"), *misses.figures()]
    return Row(f"decode throughput, {CONCURRENCY} requests, no hits", figures, {"tokens per second": wall, "tokens per CPU second": cpu})
