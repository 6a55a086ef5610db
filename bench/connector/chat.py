"""Throughput on conversations of the chat trace: an engine of ours and one with vLLM's MooncakeStoreConnector, in turns.

Whole conversations are drawn at random until there are enough requests, and keep their order of arrival: that keeps the
trace's reuse (about 37 % of the blocks), which its first minutes do not have. A 512-token block of the trace becomes one
block of the engine (32 tokens), an answer a sixteenth of its length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.connector.engines import BLOCK_TOKENS, CONCURRENCY, MAX_TOKENS, SETTLE_SECONDS, cpu_seconds, empty_gpu, fleet, prompt
from bench.connector.first_token import warm_up
from bench.connector.trace import Request, Trace
from bench.report import Figure, Progress, Row, repeated
from hack.standalone.engine import Engine

SHRINK = 16
MAX_ANSWER = 64
L1_BLOCKS = 600
SEED = 2


@dataclass(frozen=True)
class Chat:
    """One request for an engine."""

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


def serve(engine: Engine, chats: Sequence[Chat]) -> tuple[float, int]:
    """Keep a few requests at the engine until all are answered: seconds, and tokens it took from caches."""
    began = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as executor:
        answers = list(executor.map(lambda chat: engine.complete(chat.tokens, chat.answer_tokens), chats))
    return time.perf_counter() - began, sum(answer.cached for answer in answers)


def against_stock(trace: Trace, repeats: int, window: int, progress: Progress) -> Row:
    """Windows of the excerpt, each served by both engines before the next begins."""
    chats = [to_chat(request) for request in excerpt(trace, repeats * window)]
    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    cached = {"ours": 0, "stock": 0}
    cpu: dict[str, float] = {}
    with fleet({"ours": "ours", "stock": "stock"}, l1_blocks=L1_BLOCKS) as group:
        warm_up(group)
        began = time.monotonic()
        for engine in group.engines.values():
            empty_gpu(engine)
        cpu = {name: -cpu_seconds(engine) for name, engine in group.engines.items()}
        order = ["ours", "stock"]
        for index in range(repeats):
            for name in order:
                time.sleep(SETTLE_SECONDS)
                took, reused = serve(group.engines[name], chats[index * window : (index + 1) * window])
                seconds[name].append(took)
                cached[name] += reused
            order.reverse()
            progress.step(index + 1, repeats, began)
        cpu = {name: cpu[name] + cpu_seconds(engine) for name, engine in group.engines.items()}
    total = sum(len(chat.tokens) for chat in chats)
    ratios = [other / own for own, other in zip(seconds["ours"], seconds["stock"], strict=True)]
    figures = [
        repeated("ours / vLLM's MooncakeStoreConnector, by window", ratios, 1.1, at_least=True),
        Figure("the same, whole excerpt", sum(seconds["stock"]) / sum(seconds["ours"]), None, ""),
        *(Figure(f"prompt tokens from caches, {name}", 100 * count / total, None, "%") for name, count in cached.items()),
        Figure("CPU seconds, ours / stock", cpu["ours"] / cpu["stock"], None, ""),
    ]
    details = {"trace": trace.source, "requests": len(chats), "prompt tokens": total, "seconds": seconds, "cpu seconds": cpu}
    return Row(f"throughput on chats ({trace.source})", figures, details)
