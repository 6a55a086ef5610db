"""Time to the first token of a prompt of 4096 tokens, by where its KV is."""

from __future__ import annotations

import time

from bench.connector.engines import BLOCK_TOKENS, GPU_BLOCKS, SETTLE_SECONDS, Fleet, OtherHit, empty_gpu, fleet, prompt, timed_answer
from bench.report import Figure, Progress, Row, repeated

PROMPT_TOKENS = 4096
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
CACHED_TOKENS = PROMPT_TOKENS - BLOCK_TOKENS
"""Hits end before the last token, so they never have the last block."""

NUM_ROTATING = 3
SMALL_L1_BLOCKS = GPU_BLOCKS
"""Holds one of the rotating prompts, so each comes from L2 again."""


def warm_up(group: Fleet) -> None:
    """Everything once with a short prompt, so that no first time is measured."""
    for name, engine in group.engines.items():
        tokens = prompt(f"warm-up {name}", 8 * BLOCK_TOKENS)
        engine.complete(tokens, 2)
        time.sleep(0.5)
        empty_gpu(engine)
        engine.complete(tokens, 2)


def own_tiers(repeats: int, progress: Progress) -> Row:
    """Two engines with L1 and L2 take turns: one computes a prompt, the other finds it in L2, the first in its L1."""
    samples: dict[str, list[float]] = {"cold": [], "L2 of another engine": [], "L1": []}
    with fleet({"a": "ours", "b": "ours"}, l1_blocks=(repeats + 1) * PROMPT_BLOCKS) as group:
        warm_up(group)
        began = time.monotonic()
        stored = len(group.mooncake.keys())
        for index in range(repeats):
            writer, reader = (group.engines[name] for name in ("ab" if index % 2 else "ba"))
            tokens = prompt(f"prompt {index}", PROMPT_TOKENS)
            samples["cold"].append(timed_answer(writer, tokens, 0))
            stored += PROMPT_BLOCKS
            group.wait_stored(stored)
            samples["L2 of another engine"].append(timed_answer(reader, tokens, CACHED_TOKENS))
            empty_gpu(writer)
            samples["L1"].append(timed_answer(writer, tokens, CACHED_TOKENS))
            progress.step(index + 1, repeats, began)
    figures = [
        repeated(f"warm {tier} / cold", [warm / cold for warm, cold in zip(samples[tier], samples["cold"], strict=True)], aim)
        for tier, aim in (("L1", 0.25), ("L2 of another engine", 0.5))
    ]
    figures += [repeated(tier, seconds, None, "s") for tier, seconds in samples.items()]
    return Row(f"time to first token, {PROMPT_TOKENS} tokens", figures, {"seconds": samples})


def against_stock(repeats: int, progress: Progress) -> Row:
    """The same prompts in the same store, read by an engine of ours and by one with vLLM's MooncakeStoreConnector, in turns.

    Names differ, so each writes its own copy. L1 is too small to answer: every measured hit of ours comes from L2. A turn in which
    one of them misses counts as a miss, and gives no ratio.
    """
    misses = dict.fromkeys(("ours", "stock"), 0)
    samples: dict[str, list[float]] = {"ours": [], "stock": []}
    with fleet({"ours": "ours", "stock": "stock"}, l1_blocks=SMALL_L1_BLOCKS) as group:
        warm_up(group)
        prompts = [prompt(f"prompt {index}", PROMPT_TOKENS) for index in range(NUM_ROTATING)]
        stored = len(group.mooncake.keys())
        for engine in group.engines.values():
            for tokens in prompts:
                timed_answer(engine, tokens, 0)
                stored += PROMPT_BLOCKS
                group.wait_stored(stored)  # one after the other: the small L1 is also where puts are read from
        began, order = time.monotonic(), ["ours", "stock"]
        for index in range(repeats * NUM_ROTATING):
            turn: dict[str, float] = {}
            for name in order:
                empty_gpu(group.engines[name])
                time.sleep(SETTLE_SECONDS)
                try:
                    turn[name] = timed_answer(group.engines[name], prompts[index % NUM_ROTATING], CACHED_TOKENS)
                except OtherHit:
                    misses[name] += 1
            if len(turn) == len(order):
                for name, seconds in turn.items():
                    samples[name].append(seconds)
            order.reverse()
            progress.step(index + 1, repeats * NUM_ROTATING, began)
    ratios = [own / other for own, other in zip(samples["ours"], samples["stock"], strict=True)]
    figures = [repeated("ours / vLLM's MooncakeStoreConnector, warm L2", ratios, 0.9)]
    figures += [repeated(name, seconds, None, "s") for name, seconds in samples.items()]
    figures += [Figure(f"turns in which {name} missed", count, None, "") for name, count in misses.items()]
    return Row(f"time to first token, {PROMPT_TOKENS} tokens, same store and prompts", figures, {"seconds": samples})
