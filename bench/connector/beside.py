"""Decode steps of a running request while another request loads from L2, or is saved, against steps without a transfer.

A step is the time between two tokens of the running request. One turn asks an engine for the same kind of second request three times:
its prompt is in the GPU's cache and nothing is saved (`hit`), the same with everything saved (`save`), and another prompt is in L2
(`load`). So each computes one block of a prompt that has 128, and that step counts nowhere: what is left is what a transfer costs.
Steps of a load lie between the request and the step that computes; those of a save, behind that step for as long as the engine's
metrics say that copying and putting took. Steps of `hit` at the same place, and steps without any second request, are the other side.
vLLM's connector saves while a prompt is computed, so only its loads are measured.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import Any

from bench.connector.engines import Fleet, fleet, in_turns, prompt, timed_answer
from bench.connector.first_token import CACHED_TOKENS, PROMPT_BLOCKS, PROMPT_TOKENS, SMALL_L1_BLOCKS, warm_up
from bench.connector.misses import Misses, OtherHit, medians, pairs, ratio
from bench.report import Progress, Row
from hack.standalone.engine import Engine

RUNNING_TOKENS, ANSWER_TOKENS = 32, 512
"""More than a turn takes; with a whole prompt, it fits into the GPU's cache."""
PAUSE_SECONDS = 1.5
"""Around each second request. Steps of its latter half are those without a transfer; the engine's counts have arrived by its end."""
AGO = 2
"""A prompt is loaded so many turns after it was saved: neither GPU nor L1 has room for it so long."""
NOTHING = {"max_tokens": 0}
Window = tuple[float, float]


def token_times(engine: Engine, tokens: Sequence[int], over: threading.Event) -> list[float]:
    """When each token of a streamed answer arrived, until `over`. Nothing of it is saved."""
    times: list[float] = []
    with closing(engine.stream(tokens, ANSWER_TOKENS, {"epochkv": {"save": NOTHING}})) as chunks:
        for _ in chunks:
            times.append(time.perf_counter())
            if over.is_set():
                break
    return times


def transfer_seconds(engine: Engine, direction: str) -> float:
    """All that its transfers have taken so far."""
    tiers = ("L2",) if direction == "load" else ("L1", "L2")  # a load copies what has come while it fetches the rest
    return sum(engine.metric(f"vllm:epochkv_{direction}_seconds_total", tier=tier) for tier in tiers)


def turn(engine: Engine, asked: Sequence[tuple[str, list[int], Any]]) -> tuple[list[float], dict[str, Window]]:
    """Arrivals of the running request's tokens, and when each second request (name, prompt, `save`) was sent and answered.

    Raises:
        OtherHit: a prompt was not where it should be, or the running request ended too early.
    """
    over, events = threading.Event(), dict[str, Window]()
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(token_times, engine, prompt(f"running {time.monotonic()}", RUNNING_TOKENS), over)
        try:
            time.sleep(2 * PAUSE_SECONDS)  # it is computed meanwhile
            for name, tokens, save in asked:
                sent = time.perf_counter()
                timed_answer(engine, tokens, CACHED_TOKENS, save)
                events[name] = sent, time.perf_counter()
                time.sleep(PAUSE_SECONDS)
        finally:
            over.set()
    times = running.result()
    if len(times) >= ANSWER_TOKENS:
        raise OtherHit(f"{engine.name}: {ANSWER_TOKENS} tokens of the running request were too few for a turn")
    return times, events


def steps(times: Sequence[float], window: Window) -> list[float]:
    """Milliseconds of the steps that lie in the window by half or more."""
    return [1e3 * (b - a) for a, b in pairwise(times) if window[0] <= (a + b) / 2 <= window[1]]


def windows(times: Sequence[float], events: dict[str, Window], save_seconds: float) -> dict[str, list[float]]:
    """Milliseconds of the steps without a transfer (`alone`), and of those of each second request."""
    found: dict[str, list[float]] = {"alone": []}
    for name, (sent, answered) in events.items():
        # The token that came with the answer ends the step that computed the prompt's last block.
        last = min(bisect(times, answered), len(times) - 1)
        last -= last > 1 and answered - times[last - 1] < times[last] - answered
        window = (sent, times[last - 1]) if name == "load" else (times[last], times[last] + save_seconds)
        found[name] = steps(times, window)
        found["alone"] += steps(times, (answered + max(PAUSE_SECONDS / 2, save_seconds), answered + PAUSE_SECONDS))
    return found


def measure(group: Fleet, name: str, index: int) -> dict[str, Any]:
    """A turn of one engine: steps by kind, and seconds that its transfers took. A first turn has nothing to load yet."""
    engine, ours = group.engines[name], name == "ours"
    new = prompt(f"{name} {index}", PROMPT_TOKENS)
    stored = len(group.mooncake.keys()) + PROMPT_BLOCKS
    timed_answer(engine, new, 0, NOTHING)
    asked = [("hit", new, NOTHING), *([("save", new, "All")] if ours else [])]
    if index >= AGO:
        asked.append(("load", prompt(f"{name} {index - AGO}", PROMPT_TOKENS), NOTHING))
    if not ours:
        group.wait_stored(stored)
    before = {direction: transfer_seconds(engine, direction) for direction in ("save", "load")}
    times, events = turn(engine, asked)
    taken = {direction: transfer_seconds(engine, direction) - seconds for direction, seconds in before.items()}
    return {"steps": windows(times, events, taken["save"]), "seconds": taken, "waited": {kind: b - a for kind, (a, b) in events.items()}}


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Ratios within a turn: median of its steps beside a transfer over the median of those without."""
    misses = Misses()
    turns: dict[str, list[dict[str, Any] | None]] = {"ours": [], "stock": []}
    with fleet({"ours": "ours", "stock": "stock"}, l1_blocks=SMALL_L1_BLOCKS) as group:
        warm_up(group, misses)
        for index, name in in_turns(group.engines, AGO + 2 * arguments.repeats, progress):
            turns[name].append(misses.attempt(name, lambda index=index, name=name: measure(group, name, index)))
    done = {name: [one for one in all_of[AGO:] if one] for name, all_of in turns.items()}
    ours = done["ours"]

    def median(name: str, kind: str) -> list[float | None]:
        return [statistics.median(found) if (found := one["steps"].get(kind)) else None for one in done[name]]

    def against(name: str, kind: str, other: str) -> list[tuple[float, float]]:
        return pairs(median(name, kind), median(name, other))

    figures = [
        *ratio("beside a load from L2 / alone, ours", against("ours", "load", "alone"), 1.05),
        *ratio("the same, vLLM's MooncakeStoreConnector", against("stock", "load", "alone"), None),
        *ratio("beside a save / beside the same request that saves nothing, ours", against("ours", "save", "hit"), 1.05),
        *ratio("beside a save / alone, ours", against("ours", "save", "alone"), None),
        *medians({f"step alone, {name}": median(name, "alone") for name in turns}, "ms"),
    ]
    for kind in ("load", "save"):
        seen = [one for one in ours if one["steps"].get(kind)]
        under_way = [100 * min(1.0, 1e3 * one["seconds"][kind] / sum(one["steps"][kind])) for one in seen]
        figures += medians({f"steps beside a {kind}, ours": [len(one["steps"][kind]) for one in seen]}, "a turn")
        figures += medians({f"of their time, the {kind} was under way": under_way}, "%")
        figures += medians({f"a {kind}, ours": [one["seconds"][kind] for one in seen]}, "s")
    return Row(f"decode step beside transfers of {PROMPT_TOKENS} tokens", [*figures, *misses.figures()], {"turns": turns})
