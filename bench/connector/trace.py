"""The chat trace: one hour of real traffic, published with the Mooncake FAST'25 paper (repository kvcache-ai/Mooncake, Apache-2.0).

One request per line, `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`; each id names
a block of 512 tokens together with everything before it. The file is `conversation_trace.jsonl` in the paper's folder of
that repository; plain or gzip. Without it a synthetic trace of the same shape is drawn, and the figures say so: known
answers exist for the real one only.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_ENV = "EPOCHKV_TRACE"
BLOCK_TOKENS = 512
NUM_REQUESTS = 12_031


@dataclass(frozen=True, slots=True)
class Request:
    """`blocks`: chained ids, the last one partly filled; `output_tokens`: length of the answer."""

    blocks: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; `real`: the published ones, for which the answers are known."""

    requests: Sequence[Request]
    source: str
    real: bool

    @property
    def num_blocks(self) -> int:
        """Blocks of all prompts together."""
        return sum(len(request.blocks) for request in self.requests)


def load(path: Path | None, num_requests: int | None = None) -> Trace:
    """Read the trace at `path`, else the one that the environment names, else draw one; only `num_requests` of it if given.

    Raises:
        OSError, ValueError: a file was named that is not a trace; the message names it.
    """
    named = path or (Path(os.environ[TRACE_ENV]) if os.environ.get(TRACE_ENV) else None)
    if named is None:
        return synthetic(num_requests or NUM_REQUESTS, 0)
    try:
        requests = list(_read(named))
    except (KeyError, TypeError, ValueError, EOFError) as error:
        raise ValueError(f"{named} is not a trace: {error!r}") from error
    requests = requests[:num_requests]
    return Trace(requests, named.name, len(requests) == NUM_REQUESTS)


def _read(path: Path) -> Iterator[Request]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in file:
            fields = json.loads(line)
            yield Request(tuple(fields["hash_ids"]), int(fields["output_length"]))


def synthetic(num_requests: int, seed: int) -> Trace:
    """Conversations that grow turn by turn under a common first block, and single questions, mixed as they arrive.

    Lengths and reuse are near those of the real trace (mean 24 blocks a prompt, a good third of the blocks seen before).
    """
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 60))
    open_chats: list[list[int]] = []
    requests: list[Request] = []
    for _ in range(num_requests):
        if open_chats and rng.random() < 0.36:
            chat = open_chats[max(0, len(open_chats) - 1 - int(rng.expovariate(1 / 250)))]
            chat.pop()  # its last block was not full; now it is, under another name
        else:
            chat = [0]
            open_chats.append(chat)
        grown = 1 + min(230, int(rng.lognormvariate(2.35, 0.95)))
        chat.extend(next(fresh) for _ in range(grown))
        del chat[240:]
        requests.append(Request(tuple(chat), 1 + min(2000, int(rng.lognormvariate(5.5, 0.8)))))
    return Trace(requests, f"synthetic (seed {seed})", False)
