"""Rollouts after a push, on four engines: what `warm` saves of prefill, and what each `save` policy stores and lets others find.

The model is tiny: tokens and bytes are counted, and no time is measured. Each stage begins with a push of weights that nobody has held, so
nothing of the stages before can be found. Answers are drawn at temperature 1, so that rollouts of one prompt differ. (vLLM 0.32's CPU
engines end at a seed for each request.) Requests go to the engines in turns, as from a router that does not look at caches.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.connector.engines import BLOCK_TOKENS, Fleet, fleet
from bench.report import Figure, Progress, Row
from epochkv_fence.client import warm
from hack import models

NUM_ENGINES, AT_ONCE = 4, 8
NUM_PROMPTS, ROLLOUTS = 16, 8
PREFIX_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 512, 128, 128
TURNS, SESSIONS, TOOL_TOKENS = 3, 32, 64
"""Of the variant with several turns: each prompt is the conversation so far and what a tool said."""
POLICIES: Mapping[str, Any] = {"All": "All", "Prompts": "Prompts", f"max_tokens {PREFIX_TOKENS}": {"max_tokens": PREFIX_TOKENS}}
L1_BLOCKS, GPU_BLOCKS = 690, 512
QUIET_SECONDS = 1.0
ARGS = ("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-num-batched-tokens", "2048")


@dataclass(slots=True)
class Counted:
    """Of one stage.

    Attributes:
        tokens, computed: of all prompts, and those that no cache had.
        put: bytes that engines put to L2.
    """

    tokens: int = 0
    computed: int = 0
    put: float = 0.0
    warmed: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)  # (tokens, found), turn by turn


class Rollouts:
    def __init__(self, group: Fleet) -> None:
        self._engines, self._mooncake, self._folder = list(group.engines.values()), group.mooncake, group.folder
        self._pushes = 1
        rng = random.Random(1)
        self._tokens = lambda count: [rng.randrange(2, 512) for _ in range(count)]
        self._prefix = self._tokens(PREFIX_TOKENS)
        self._prompts = [self._prefix + self._tokens(OWN_TOKENS) for _ in range(NUM_PROMPTS)]

    def push(self) -> None:
        """New weights everywhere."""
        self._pushes += 1
        model = models.make(self._folder / f"model{self._pushes}", self._pushes)
        for engine in self._engines:
            engine.reload_weights(model)

    def one_turn(self, save: Any, *, warmed: bool) -> Counted:
        """All rollouts of all prompts at once, behind a push."""
        self.push()
        before, counted = self._put(), Counted()
        if warmed:
            counted.warmed = warm([self._prefix], f"http://127.0.0.1:{self._engines[0].port}").computed
        self._ask([(prompt, ANSWER_TOKENS, save) for prompt in self._prompts for _ in range(ROLLOUTS)], counted)
        counted.put = self._put() - before
        return counted

    def several_turns(self, save: Any) -> Counted:
        """Conversations whose next turn another engine answers."""
        self.push()
        before, counted = self._put(), Counted()
        told = [list(self._prompts[index % NUM_PROMPTS]) for index in range(SESSIONS)]
        for turn in range(TURNS):
            tokens, computed = counted.tokens, counted.computed
            answers = self._ask([(session, ANSWER_TOKENS, save) for session in told], counted, shift=turn)
            tokens, computed = counted.tokens - tokens, counted.computed - computed
            counted.turns.append((tokens, tokens - computed))
            for session, answer in zip(told, answers, strict=True):
                session += [*answer, *self._tokens(TOOL_TOKENS)]
            self._settle()
        counted.put = self._put() - before
        return counted

    def _ask(self, wanted: Sequence[tuple[list[int], int, Any]], counted: Counted, shift: int = 0) -> list[list[int]]:
        def ask(number: int) -> tuple[list[int], int, int]:
            prompt, length, save = wanted[number]
            body = {
                "model": "model", "prompt": prompt, "max_tokens": length, "temperature": 1.0, "ignore_eos": True,
                "return_token_ids": True, "detokenize": False, "kv_transfer_params": {"epochkv": {"save": save}},
            }  # fmt: skip
            reply = self._engines[(number + shift) % NUM_ENGINES].post("/v1/completions", body, 300.0)
            found = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return list(reply["choices"][0]["token_ids"]), len(prompt), len(prompt) - int(found)

        with ThreadPoolExecutor(NUM_ENGINES * AT_ONCE) as executor:
            answers = list(executor.map(ask, range(len(wanted))))
        counted.tokens += sum(one[1] for one in answers)
        counted.computed += sum(one[2] for one in answers)
        return [one[0] for one in answers]

    def _settle(self) -> None:
        """Puts have ended: the store has stopped growing."""
        keys = -1
        while keys != (now := len(self._mooncake.keys())):
            keys = now
            time.sleep(QUIET_SECONDS)

    def _put(self) -> float:
        self._settle()
        for engine in self._engines:
            engine.report_metrics([3, 4, 5])
        return sum(engine.metric("vllm:epochkv_save_bytes_total", tier="L2") for engine in self._engines)


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Prompt tokens computed without and with `warm`; by policy, bytes put to L2 and tokens found in later turns."""
    stages: dict[str, Counted] = {}
    began = time.monotonic()
    with fleet({f"rollout-{number}": "ours" for number in range(NUM_ENGINES)}, L1_BLOCKS, ARGS, models.make) as group:
        rollouts = Rollouts(group)
        rollouts.one_turn("All", warmed=False)  # so that no first time is counted
        total = 1 + 2 * len(POLICIES)
        stages["cold"] = rollouts.one_turn("All", warmed=False)
        for name, save in POLICIES.items():
            stages[f"one turn, {name}"] = rollouts.one_turn(save, warmed=True)
            stages[f"turns, {name}"] = rollouts.several_turns(save)
            progress.step(len(stages), total, began)
    cold, warmed = stages["cold"], stages["one turn, All"]
    figures = [
        Figure("prompt tokens computed after a push", float(cold.computed), None, f"of {cold.tokens}"),
        Figure("the same, with the common prefix warmed", float(warmed.computed), None, f"and {warmed.warmed} by warm"),
    ]
    for name in POLICIES:
        one, several = stages[f"one turn, {name}"], stages[f"turns, {name}"]
        found, later = sum(turn[1] for turn in several.turns[1:]), sum(turn[0] for turn in several.turns[1:])
        figures += [
            Figure(f"put to L2, one turn, save {name}", one.put / 1e6, None, "MB"),
            Figure(f"put to L2, {TURNS} turns, save {name}", several.put / 1e6, None, "MB"),
            Figure(f"found in later turns, save {name}", 100 * found / later, None, f"% of {later} tokens"),
        ]
    return Row(
        f"{NUM_PROMPTS} prompts, {ROLLOUTS} rollouts each, on {NUM_ENGINES} engines",
        figures,
        {
            name: {"tokens": one.tokens, "computed": one.computed, "put": one.put, "warmed": one.warmed, "turns": one.turns}
            for name, one in stages.items()
        },
    )
