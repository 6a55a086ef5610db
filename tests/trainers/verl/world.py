"""Two rollouts of verl with a pool and a store, and what they must answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.trainers.verl.lab import Verl

CACHED = 896
"""Of a prompt of 1,000 tokens: its whole blocks of 128."""


@dataclass(frozen=True)
class World:
    """`weights`: folders by name. `expected`: what plain vLLM without any cache answers with them, by name and prompt."""

    verl: Verl
    pool: Pool
    mooncake: Mooncake
    folder: Path
    weights: Mapping[str, Path]
    prompts: Sequence[Sequence[int]]
    expected: Mapping[str, Sequence[tuple[int, ...]]]

    def ask(self, replica: int, prompt: int, name: str) -> int:
        """The answer is right for these weights; returns how many tokens of the prompt came from a cache."""
        answer = self.verl.answer(self.verl.generate(replica, self.prompts[prompt]))
        assert answer.tokens == self.expected[name][prompt], "a wrong answer"
        return answer.cached

    def first_answers(self, name: str) -> None:
        """After a push: no rollout finds what the weights before have left in the GPU, in the host's memory and in the store."""
        assert self.ask(0, 0, name) == 0, "a wrong answer: from blocks that are not to be found"
        assert self.ask(1, 1, name) == 0, "a wrong answer: from blocks that are not to be found"

    def shares(self, name: str, prompt: int) -> None:
        """The second rollout takes a prompt from the store that only the first has computed with these weights."""
        self.pool.wait_engines(2)
        before = set(self.mooncake.keys())
        assert self.ask(0, prompt, name) == 0, "a wrong answer: from blocks that are not to be found"
        eventually(lambda: len(set(self.mooncake.keys()) - before) >= CACHED // 128, f"blocks of prompt {prompt} in the store", 60)
        assert self.ask(1, prompt, name) == CACHED
