"""Prompts of the soak and what an engine without any cache says to them, for every set of weights.

Answers are worked out before the run, by an engine of their own that is ended again. Prompts whose answer hangs on a
rounding error (two tokens almost equally likely at some position) are left out: they would tell nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.engine_api import EngineApi

BLOCK_TOKENS = 128
MAX_TOKENS = 6
MIN_MARGIN = 1e-3
"""Between the likeliest token and the next, in natural logarithms; KV that was moved is equal bit by bit, batches differ by 1e-5."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the answer by folder of weights."""

    tokens: tuple[int, ...]
    answers: dict[Path, tuple[int, ...]]


def draw(number: int, rng: random.Random) -> list[list[int]]:
    """Prompts of 1 to 8 blocks and a bit; about half begin like an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(number):
        start: list[int] = []
        if prompts and rng.random() < 0.5:
            other = rng.choice(prompts)
            start = other[: rng.randrange(0, len(other) // BLOCK_TOKENS + 1) * BLOCK_TOKENS]
        length = max(len(start) + 5, rng.randrange(BLOCK_TOKENS, 8 * BLOCK_TOKENS))
        prompts.append(start + [rng.randrange(2, 512) for _ in range(length - len(start))])
    return prompts


def certain_answer(engine: EngineApi, prompt: Sequence[int]) -> tuple[int, ...] | None:
    """The engine's greedy answer; None if another token was almost as likely somewhere."""
    body = {
        "model": engine.model, "prompt": list(prompt), "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False, "logprobs": 2, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    choice = engine.post("/v1/completions", body)["choices"][0]
    for likeliest in choice["logprobs"]["top_logprobs"]:
        first, second, *_ = sorted(likeliest.values(), reverse=True)
        if first - second < MIN_MARGIN:
            return None
    return tuple(choice["token_ids"])


def work_out(engine: EngineApi, folders: Sequence[Path], drawn: Sequence[Sequence[int]], say: Callable[[str], None]) -> list[Prompt]:
    """The prompts with a certain answer under every set of weights; `engine` caches nothing and ends with the last folder's weights."""
    answers: list[dict[Path, tuple[int, ...]]] = [{} for _ in drawn]
    for folder in folders:
        engine.reload_weights(folder)
        for known, prompt in zip(answers, drawn, strict=True):
            answer = certain_answer(engine, prompt)
            if answer is not None:
                known[folder] = answer
        say(f"answers of the cache-less engine with weights {folder.name}: {sum(folder in known for known in answers)} of {len(drawn)}")
    return [Prompt(tuple(prompt), known) for prompt, known in zip(drawn, answers, strict=True) if len(known) == len(folders)]
