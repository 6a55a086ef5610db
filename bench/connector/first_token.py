"""Time to the first token of a prompt of 4096 tokens, by where its KV is."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import torch

from bench.connector.engines import (
    ARGS,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    GPU_BLOCKS,
    SETTLE_SECONDS,
    Fleet,
    empty_gpu,
    fleet,
    in_turns,
    prompt,
    raw_client,
    timed_answer,
)
from bench.connector.misses import Misses, OtherHit, added, medians, pairs, ratio
from bench.connector.store import timed
from bench.report import Figure, Progress, Row, percentile
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
    samples: dict[str, list[float | None]] = {tier: [] for tier in (*tiers, "the GPU")}
    copies: list[float | None] = []
    misses = Misses()
    with fleet({"a": "ours", "b": "ours"}, l1_blocks=(repeats + 1) * PROMPT_BLOCKS) as group:
        warm_up(group, misses)
        began = time.monotonic()
        for index in range(repeats):
            writer, reader = (group.engines[name] for name in ("ab" if index % 2 else "ba"))
            for tier, seconds in zip(samples, _turn(group, writer, reader, prompt(f"prompt {index}", PROMPT_TOKENS), misses), strict=True):
                samples[tier].append(seconds)
            copies.append(_copy_seconds())
            progress.step(index + 1, repeats, began)
    figures = [
        figure
        for tier, aim in (("L1", 0.25), ("L2 of another engine", 0.5))
        for figure in ratio(f"warm {tier} / cold", pairs(samples[tier], samples["cold"]), aim)
    ]
    by_l1 = added(samples["L1"], samples["the GPU"])
    figures += ratio("added by L1 to a hit in the GPU's cache / plain copy of its bytes", pairs(by_l1, copies), 1.2)
    figures += [*medians({**samples, "plain copy": copies}, "s"), *misses.figures()]
    return Row(f"time to first token, {PROMPT_TOKENS} tokens", figures, {"seconds": samples, "copies": copies})


def _copy_seconds() -> float:
    """Of as many bytes as a prompt's hit has, both sides touched before."""
    source = torch.ones((PROMPT_BLOCKS - 1) * BLOCK_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def _turn(group: Fleet, writer: Engine, reader: Engine, tokens: list[int], misses: Misses) -> tuple[float | None, ...]:
    """Seconds cold, from L2, from L1, and behind that from the GPU."""
    stored = len(group.mooncake.keys()) + PROMPT_BLOCKS
    cold = misses.attempt(writer.name, lambda: timed_answer(writer, tokens, 0))
    misses.attempt(writer.name, lambda: group.wait_stored(stored))

    def from_l1() -> float:
        empty_gpu(writer)
        return timed_answer(writer, tokens, CACHED_TOKENS)

    shared = misses.attempt(reader.name, lambda: timed_answer(reader, tokens, CACHED_TOKENS))
    local = misses.attempt(writer.name, from_l1)
    return cold, shared, local, misses.attempt(writer.name, lambda: timed_answer(writer, tokens, CACHED_TOKENS))


def against_stock(arguments: argparse.Namespace, progress: Progress) -> Row:
    """The same prompts in the same store, read by an engine of ours and by one with vLLM's MooncakeStoreConnector, in turns.

    Each is asked twice: its GPU is emptied and the answer comes from L2, and then from its GPU. The difference is what L2 adds.
    Names differ, so each writes its own copy. L1 is too small to answer: every measured hit of ours comes from L2. A turn in which
    one of them misses counts as a miss, and gives no ratio.
    """
    samples: dict[str, list[float | None]] = {f"{name}, from {tier}": [] for name in ("ours", "stock") for tier in ("L2", "GPU")}
    fetched: list[float | None] = []
    misses = Misses()
    with (
        fleet({"ours": "ours", "stock": "stock"}, l1_blocks=SMALL_L1_BLOCKS) as group,
        raw_client(group.mooncake, PROMPT_BLOCKS - 1) as raw,
    ):
        warm_up(group, misses)
        keys = [f"raw/{index}" for index in range(PROMPT_BLOCKS - 1)]
        raw.put(keys, len(keys))

        def fetch() -> float:
            try:
                return timed(lambda: raw.get(keys, len(keys)))[0]
            except RuntimeError as error:  # a master that stood still has forgotten its store
                raise OtherHit(str(error)[:80]) from error

        prompts = [prompt(f"prompt {index}", PROMPT_TOKENS) for index in range(NUM_ROTATING)]
        for name, engine in group.engines.items():
            for tokens in prompts:
                misses.attempt(name, lambda engine=engine, tokens=tokens: _store(group, engine, tokens))
        before = _parts(group.engines["ours"])
        for index, name in in_turns(group.engines, arguments.repeats * NUM_ROTATING, progress):
            engine, tokens = group.engines[name], prompts[index % NUM_ROTATING]
            samples[f"{name}, from L2"].append(misses.attempt(name, lambda ask=(engine, tokens): _from_store(*ask)))
            samples[f"{name}, from GPU"].append(misses.attempt(name, lambda ask=(engine, tokens, CACHED_TOKENS): timed_answer(*ask)))
            if name == "ours":
                fetched.append(misses.attempt("Mooncake's own client", fetch))
        group.engines["ours"].report_metrics(prompt("last", BLOCK_TOKENS))
        after = _parts(group.engines["ours"])
    turns = max(1, len([seconds for seconds in samples["ours, from L2"] if seconds is not None]))
    taken = {what: (after[what] - before[what]) / turns for what in PARTS}
    parts = [Figure(f"ours, mean of {what}", taken[what], None, unit) for what, unit in PARTS.items()]
    by_l2 = {name: added(samples[f"{name}, from L2"], samples[f"{name}, from GPU"]) for name in group.engines}
    added_by_ours = [seconds for seconds in by_l2["ours"] if seconds is not None]
    if added_by_ours:
        rest = statistics.mean(added_by_ours) - taken["seconds in them"] - taken["seconds of calls that look up"]
        parts.append(Figure("ours, mean of the rest of what is added: steps, answers, copies that no call overlapped", rest, None, "s"))
    figures = [
        *ratio("added over a hit in the GPU's cache, ours / vLLM's MooncakeStoreConnector", pairs(by_l2["ours"], by_l2["stock"]), 0.7),
        *ratio("time to first token, ours / theirs", pairs(samples["ours, from L2"], samples["stock, from L2"]), None),
        *medians({f"added, {name}": values for name, values in by_l2.items()}, "s"),
        *medians({"Mooncake's own client, the same bytes in one call": fetched}, "s"),
        *ratio("added, ours / that", pairs(by_l2["ours"], fetched), None),
        *(medians(samples, "s") + parts + misses.figures()),
    ]
    return Row(f"L2, {PROMPT_TOKENS} tokens, same store and prompts", figures, {"seconds": samples, "added": by_l2})


def against_lmcache(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Hits from host memory: L1 of an engine of ours, and memory that LMCache's server shares with its engine, in turns.

    The prompts have one token more than whole blocks, so that both find all of their blocks.
    """
    tokens_of, blocks = PROMPT_TOKENS + 1, (arguments.repeats + 2) * PROMPT_BLOCKS
    samples: dict[str, list[float | None]] = {f"{name}, from {tier}": [] for name in ("ours", "LMCache") for tier in ("host", "GPU")}
    misses = Misses()
    with fleet({"ours": "ours", "LMCache": "lmcache"}, l1_blocks=blocks) as group:
        warm_up(group, misses)

        def from_host(engine: Engine, tokens: list[int]) -> float:
            timed_answer(engine, tokens, 0)
            time.sleep(SETTLE_SECONDS)
            empty_gpu(engine)
            return timed_answer(engine, tokens, PROMPT_TOKENS)

        for index, name in in_turns(group.engines, arguments.repeats, progress):
            engine, tokens = group.engines[name], prompt(f"prompt {index}", tokens_of)
            samples[f"{name}, from host"].append(misses.attempt(name, lambda ask=(engine, tokens): from_host(*ask)))
            again = misses.attempt(name, lambda ask=(engine, tokens, PROMPT_TOKENS): timed_answer(*ask))
            samples[f"{name}, from GPU"].append(again)
    by_host = {name: added(samples[f"{name}, from host"], samples[f"{name}, from GPU"]) for name in group.engines}
    figures = [
        *ratio("added over a hit in the GPU's cache, ours / LMCache", pairs(by_host["ours"], by_host["LMCache"]), None),
        *ratio("time to first token, ours / LMCache", pairs(samples["ours, from host"], samples["LMCache, from host"]), None),
        *medians({f"added, {name}": values for name, values in by_host.items()}, "s"),
        *(medians(samples, "s") + misses.figures()),
    ]
    return Row(f"host memory, {tokens_of} tokens, ours and LMCache 0.5.6", figures, {"seconds": samples, "added": by_host})


PARTS = {
    "calls that fetch": "",
    "seconds in them": "s",
    "seconds of copies to the GPU": "s",
    "seconds of calls that look up": "s",
    "answers a step later": "",
}


def _parts(engine: Engine) -> dict[str, float]:
    """What its loads have taken so far: the copies run while the next call does."""
    seconds = partial(engine.metric, "vllm:epochkv_load_seconds_total")
    values = (
        engine.metric("vllm:epochkv_store_calls_total", call="get"),
        seconds(tier="L2"),
        seconds(tier="L1"),
        engine.metric("vllm:epochkv_store_call_seconds_total", call="exists"),
        engine.metric("vllm:epochkv_lookups_total", result="deferred"),
    )
    return dict(zip(PARTS, values, strict=True))


SEAT_TOKENS, SEAT_PROMPTS = 24, 6
"""Tokens of the request that runs, which takes longer than a load; prompts that wait in turns, of which L1 holds four."""


def while_queued(arguments: argparse.Namespace, progress: Progress) -> Row:
    """A hit waits for the engine's only seat. From the last token of the request that had it to the hit's first: from L2, and from the GPU.

    Of engines of ours and with vLLM's MooncakeStoreConnector, in turns. Prompts are more than L1 holds, of which a quarter may come early.
    """
    samples: dict[str, list[float | None]] = {f"{name}, from {tier}": [] for name in ("ours", "stock") for tier in ("L2", "GPU")}
    misses = Misses()
    sides, seats = {"ours": "ours", "stock": "stock"}, (*ARGS, "--max-num-seqs", "1")
    with fleet(sides, l1_blocks=4 * PROMPT_BLOCKS, args=seats, store_bytes=LOAD_STORE_BYTES) as group:
        warm_up(group, misses)
        prompts = [prompt(f"queued {index}", PROMPT_TOKENS) for index in range(SEAT_PROMPTS)]
        for name, engine in group.engines.items():
            for tokens in prompts:
                misses.attempt(name, lambda engine=engine, tokens=tokens: _store(group, engine, tokens))
        for index, name in in_turns(group.engines, 3 * arguments.repeats, progress):
            engine, tokens = group.engines[name], prompts[index % SEAT_PROMPTS]
            misses.attempt(name, lambda engine=engine: empty_gpu(engine))
            for tier in ("L2", "GPU"):
                time.sleep(SETTLE_SECONDS)
                seconds = misses.attempt(name, lambda ask=(engine, tokens, f"seat {name} {index} {tier}"): _behind(*ask))
                samples[f"{name}, from {tier}"].append(seconds)
    by_l2 = {name: added(samples[f"{name}, from L2"], samples[f"{name}, from GPU"]) for name in group.engines}
    figures = [
        *ratio(
            "from the free seat to the hit's first token, ours / theirs", pairs(samples["ours, from L2"], samples["stock, from L2"]), None
        ),
        *medians({f"added by L2 over a GPU hit, {name}": values for name, values in by_l2.items()}, "s"),
        *(medians(samples, "s") + misses.figures()),
    ]
    return Row(f"a hit of {PROMPT_TOKENS} tokens that waits for a seat", figures, {"seconds": samples, "added": by_l2})


def _behind(engine: Engine, tokens: list[int], seed: str) -> float:
    """Seconds from the end of a running request to the first token of the one that waited behind it."""
    over, running = 0.0, prompt(seed, BLOCK_TOKENS)
    with (
        ThreadPoolExecutor(1) as executor,
        closing(engine.stream(running, SEAT_TOKENS, {"epochkv": {"save": {"max_tokens": 0}}})) as chunks,
    ):
        next(chunks)
        waiting = executor.submit(lambda: (timed_answer(engine, tokens, CACHED_TOKENS), time.perf_counter()))
        for _ in chunks:
            over = time.perf_counter()
        return waiting.result()[1] - over


LOAD_TOKENS = 2048
LOAD_REQUESTS = 16
LOAD_STORE_BYTES = 7 << 30
LOAD_ARGS = (*ARGS, "--num-gpu-blocks-override", "400")
"""Room for six of the prompts: with room for two, a hit that is loaded holds what the next one needs, and waits all the same."""
ARRIVAL_SECONDS = 0.02
"""Between two requests: vLLM serves in the order in which they come, which is the same for both sides then."""


def under_load(arguments: argparse.Namespace, progress: Progress) -> Row:
    """16 requests one after the other, every second of which L2 holds, to an engine of ours and to one with vLLM's connector, in turns.

    L1 has room for half of them: what is measured of ours comes from L2, and has room to come early.
    """
    blocks, half = LOAD_TOKENS // BLOCK_TOKENS, LOAD_REQUESTS // 2
    hits: dict[str, list[float]] = {"ours": [], "stock": []}
    rounds: dict[str, list[tuple[float, float] | None]] = {"ours": [], "stock": []}
    misses = Misses()
    with fleet({"ours": "ours", "stock": "stock"}, l1_blocks=half * blocks, args=LOAD_ARGS, store_bytes=LOAD_STORE_BYTES) as group:
        warm_up(group, misses)
        stored = [[prompt(f"stored {turn} {index}", LOAD_TOKENS) for index in range(half)] for turn in range(2)]
        for name, engine in group.engines.items():
            for tokens in (*stored[0], *stored[1]):
                misses.attempt(name, lambda engine=engine, tokens=tokens: _store(group, engine, tokens))
        for index, name in in_turns(group.engines, arguments.repeats, progress):
            engine = group.engines[name]
            fresh = [prompt(f"fresh {name} {index} {number}", LOAD_TOKENS) for number in range(half)]
            misses.attempt(name, lambda engine=engine: empty_gpu(engine))
            time.sleep(SETTLE_SECONDS)
            seconds = _at_once(engine, [one for both in zip(fresh, stored[index % 2], strict=True) for one in both], misses)[1::2]
            answered = [taken for taken in seconds if taken is not None]
            hits[name] += answered
            rounds[name].append((statistics.median(answered), percentile(answered, 0.95)) if len(answered) == half else None)
    turns = [(ours, stock) for ours, stock in zip(rounds["ours"], rounds["stock"], strict=True) if ours and stock]
    figures = [
        *ratio("p50 of the hits, ours / vLLM's MooncakeStoreConnector", [(ours[0], stock[0]) for ours, stock in turns], 0.6),
        *ratio("p95 of the hits, ours / theirs", [(ours[1], stock[1]) for ours, stock in turns], 0.7),
        *(medians(dict(hits), "s") + misses.figures()),
    ]
    return Row(f"{LOAD_REQUESTS} requests of {LOAD_TOKENS} tokens at once, {half} of them in L2", figures, {"seconds": hits})


def _at_once(engine: Engine, prompts: Sequence[list[int]], misses: Misses) -> list[float | None]:
    """Seconds to the first token of each; the second of two is to come from a cache."""

    def ask(number: int) -> float | None:
        cached = LOAD_TOKENS - BLOCK_TOKENS if number % 2 else 0
        time.sleep(number * ARRIVAL_SECONDS)
        return misses.attempt(engine.name, lambda: timed_answer(engine, prompts[number], cached))

    with ThreadPoolExecutor(len(prompts)) as executor:
        return list(executor.map(ask, range(len(prompts))))


def _store(group: Fleet, engine: Engine, tokens: list[int]) -> None:
    """Have the engine compute and store a prompt: one after the other, as the small L1 is also where puts are read from."""
    stored = len(group.mooncake.keys()) + len(tokens) // BLOCK_TOKENS
    timed_answer(engine, tokens, 0)
    group.wait_stored(stored)


def _from_store(engine: Engine, tokens: list[int]) -> float:
    empty_gpu(engine)
    time.sleep(SETTLE_SECONDS)
    return timed_answer(engine, tokens, CACHED_TOKENS)
