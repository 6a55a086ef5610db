"""Time to the first token of a prompt of 4096 tokens, by where its KV is."""

from __future__ import annotations

import argparse
import time

from bench.connector.engines import BLOCK_TOKENS, GPU_BLOCKS, SETTLE_SECONDS, Fleet, empty_gpu, fleet, in_turns, prompt, timed_answer
from bench.connector.misses import Misses, medians, pairs, ratio
from bench.report import Progress, Row
from hack.standalone.engine import Engine

PROMPT_TOKENS = 4096
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
CACHED_TOKENS = PROMPT_TOKENS - BLOCK_TOKENS
"""Hits end before the last token, so they never have the last block."""

NUM_ROTATING = 3
SMALL_L1_BLOCKS = GPU_BLOCKS
"""Holds one of the rotating prompts, so each comes from L2 again."""


def warm_up(group: Fleet, misses: Misses) -> None:
    """Everything once with a short prompt, so that no first time is measured."""
    for name, engine in group.engines.items():
        misses.attempt(name, lambda name=name, engine=engine: _warm_up(name, engine))


def _warm_up(name: str, engine: Engine) -> None:
    tokens = prompt(f"warm-up {name}", 8 * BLOCK_TOKENS)
    engine.complete(tokens, 2)
    time.sleep(0.5)
    empty_gpu(engine)
    engine.complete(tokens, 2)


def own_tiers(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Two engines with L1 and L2 take turns: one computes a prompt, the other finds it in L2, the first in its L1.

    Whatever is not answered as it should be counts as a miss, and gives no ratio.
    """
    repeats = arguments.repeats
    tiers = ("cold", "L2 of another engine", "L1")
    samples: dict[str, list[float | None]] = {tier: [] for tier in tiers}
    misses = Misses()
    with fleet({"a": "ours", "b": "ours"}, l1_blocks=(repeats + 1) * PROMPT_BLOCKS) as group:
        warm_up(group, misses)
        began = time.monotonic()
        for index in range(repeats):
            writer, reader = (group.engines[name] for name in ("ab" if index % 2 else "ba"))
            for tier, seconds in zip(tiers, _turn(group, writer, reader, prompt(f"prompt {index}", PROMPT_TOKENS), misses), strict=True):
                samples[tier].append(seconds)
            progress.step(index + 1, repeats, began)
    figures = [
        figure
        for tier, aim in (("L1", 0.25), ("L2 of another engine", 0.5))
        for figure in ratio(f"warm {tier} / cold", pairs(samples[tier], samples["cold"]), aim)
    ]
    figures += [*medians(samples, "s"), *misses.figures()]
    return Row(f"time to first token, {PROMPT_TOKENS} tokens", figures, {"seconds": samples})


def _turn(group: Fleet, writer: Engine, reader: Engine, tokens: list[int], misses: Misses) -> tuple[float | None, ...]:
    """Seconds cold, from L2, from L1."""
    stored = len(group.mooncake.keys()) + PROMPT_BLOCKS
    cold = misses.attempt(writer.name, lambda: timed_answer(writer, tokens, 0))
    misses.attempt(writer.name, lambda: group.wait_stored(stored))

    def from_l1() -> float:
        empty_gpu(writer)
        return timed_answer(writer, tokens, CACHED_TOKENS)

    shared = misses.attempt(reader.name, lambda: timed_answer(reader, tokens, CACHED_TOKENS))
    return cold, shared, misses.attempt(writer.name, from_l1)


def against_stock(arguments: argparse.Namespace, progress: Progress) -> Row:
    """The same prompts in the same store, read by an engine of ours and by one with vLLM's MooncakeStoreConnector, in turns.

    Names differ, so each writes its own copy. L1 is too small to answer: every measured hit of ours comes from L2. A turn in which
    one of them misses counts as a miss, and gives no ratio.
    """
    samples: dict[str, list[float | None]] = {"ours": [], "stock": []}
    misses = Misses()
    with fleet({"ours": "ours", "stock": "stock"}, l1_blocks=SMALL_L1_BLOCKS) as group:
        warm_up(group, misses)
        prompts = [prompt(f"prompt {index}", PROMPT_TOKENS) for index in range(NUM_ROTATING)]
        for name, engine in group.engines.items():
            for tokens in prompts:
                misses.attempt(name, lambda engine=engine, tokens=tokens: _store(group, engine, tokens))
        for index, name in in_turns(group.engines, arguments.repeats * NUM_ROTATING, progress):
            ask = (group.engines[name], prompts[index % NUM_ROTATING])
            samples[name].append(misses.attempt(name, lambda ask=ask: _from_store(*ask)))
    figures = ratio("ours / vLLM's MooncakeStoreConnector, warm L2", pairs(samples["ours"], samples["stock"]), 0.9)
    figures += [*medians(samples, "s"), *misses.figures()]
    return Row(f"time to first token, {PROMPT_TOKENS} tokens, same store and prompts", figures, {"seconds": samples})


def _store(group: Fleet, engine: Engine, tokens: list[int]) -> None:
    """Have the engine compute and store a prompt: one after the other, as the small L1 is also where puts are read from."""
    stored = len(group.mooncake.keys()) + PROMPT_BLOCKS
    timed_answer(engine, tokens, 0)
    group.wait_stored(stored)


def _from_store(engine: Engine, tokens: list[int]) -> float:
    empty_gpu(engine)
    time.sleep(SETTLE_SECONDS)
    return timed_answer(engine, tokens, CACHED_TOKENS)
