"""Throughput on conversations of the chat trace: an engine of ours and one with vLLM's MooncakeStoreConnector, in turns.

Whole conversations are drawn at random until there are enough requests, and keep their order of arrival. That keeps the
trace's reuse, about 37 % of the blocks, which its first minutes do not have. A 512-token block of the trace becomes one
block of the engine (32 tokens), an answer a sixteenth of its length.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.connector.engines import BLOCK_TOKENS, CONCURRENCY, MAX_TOKENS, SETTLE_SECONDS, cpu_seconds, empty_gpu, fleet, in_turns, prompt
from bench.connector.first_token import warm_up
from bench.connector.misses import Misses, pairs, ratio
from bench.connector.trace import Request, Trace, load
from bench.report import Figure, Progress, Row
from hack.engine_api import Answer, EngineApi

SHRINK = 16
MAX_ANSWER = 64
L1_BLOCKS = 600
SEED = 2


@dataclass(frozen=True)
class Chat:
    tokens: list[int]
    answer_tokens: int


def excerpt(trace: Trace, num_requests: int) -> list[Request]:
    """Whole conversations, at least so many requests together, in order of arrival."""
    conversations: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        # Block 0 is common to all; the next one tells conversations apart.
        conversations.setdefault(request.blocks[1] if len(request.blocks) > 1 else -number, []).append(number)
    longest = MAX_TOKENS // BLOCK_TOKENS - MAX_ANSWER // BLOCK_TOKENS - 1
    drawn: list[int] = []
    groups = list(conversations.values())
    random.Random(SEED).shuffle(groups)
    for group in groups:
        if len(group) <= num_requests // 2 and all(len(trace.requests[number].blocks) <= longest for number in group):
            drawn += group
        if len(drawn) >= num_requests:
            break
    return [trace.requests[number] for number in sorted(drawn)[:num_requests]]


def to_chat(request: Request) -> Chat:
    """Each block id becomes tokens of its own; the last block of a prompt is half full, as on average in the trace."""
    tokens = [token for block in request.blocks for token in prompt(f"block {block}", BLOCK_TOKENS)]
    answer = max(1, min(MAX_ANSWER, request.output_tokens // SHRINK))
    return Chat(tokens[: len(tokens) - BLOCK_TOKENS // 2], answer)


def serve(engine: EngineApi, chats: Sequence[Chat], misses: Misses) -> tuple[float | None, int]:
    """Keep a few requests at the engine until all are over: seconds (None if one was not answered), and tokens it took from caches."""

    def ask(chat: Chat) -> Answer | None:
        return misses.attempt(engine.name, lambda: engine.complete(chat.tokens, chat.answer_tokens))

    began = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as executor:
        answers = list(executor.map(ask, chats))
    seconds = time.perf_counter() - began
    answered = [answer for answer in answers if answer is not None]
    return seconds if len(answered) == len(chats) else None, sum(answer.cached for answer in answered)


def against_stock(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Windows of the excerpt, each served by both engines before the next begins. A window with a miss gives no ratio."""
    trace, repeats, window = load(arguments.trace), arguments.repeats, arguments.window
    chats = [to_chat(request) for request in excerpt(trace, repeats * window)]
    seconds: dict[str, list[float | None]] = {"ours": [], "stock": []}
    misses = Misses()
    cached = {"ours": 0, "stock": 0}
    with fleet({"ours": "ours", "stock": "stock"}, l1_blocks=L1_BLOCKS) as group:
        warm_up(group, misses)
        for name, engine in group.engines.items():
            misses.attempt(name, lambda engine=engine: empty_gpu(engine))
        cpu = {name: -cpu_seconds(engine) for name, engine in group.engines.items()}
        for index, name in in_turns(group.engines, repeats, progress):
            time.sleep(SETTLE_SECONDS)
            took, reused = serve(group.engines[name], chats[index * window : (index + 1) * window], misses)
            seconds[name].append(took)
            cached[name] += reused
        cpu = {name: cpu[name] + cpu_seconds(engine) for name, engine in group.engines.items()}
    total = sum(len(chat.tokens) for chat in chats)
    turns = pairs(seconds["stock"], seconds["ours"])
    figures = [
        *ratio("ours / vLLM's MooncakeStoreConnector, by window", turns, 1.0, at_least=True),
        *ratio("the same, all windows without a miss", [(sum(a for a, _ in turns), sum(b for _, b in turns))] if turns else [], None),
        *misses.figures(),
        *(Figure(f"prompt tokens from caches, {name}", 100 * count / total, None, "%") for name, count in cached.items()),
        Figure("CPU seconds, ours / stock", cpu["ours"] / cpu["stock"], None, ""),
    ]
    details = {"trace": trace.source, "requests": len(chats), "prompt tokens": total, "seconds": seconds, "cpu seconds": cpu}
    return Row(f"throughput on chats ({trace.source})", figures, details)
