"""A GRPO run as a user of TRL writes one: a model, a tokenizer, a dataset, a reward; all of them made here, nothing downloaded."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from hack import models

STEPS = 6
COMPLETION_TOKENS = 12
BLOCK_TOKENS = 128
VOCABULARY = models.Shape().vocab


def make_model(folder: Path) -> Path:
    """A model with a tokenizer, whose words are the numbers of its tokens."""
    models.make(folder, seed=1)
    words = WordLevel({f"<{index}>": index for index in range(VOCABULARY)}, unk_token="<2>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<0>", eos_token="<1>", pad_token="<3>", padding_side="left"
    ).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Hits:
    """Tokens of prompts that vLLM found, so far, in its own cache and through its connector."""

    own: int
    external: int

    def since(self, before: Hits) -> Hits:
        return Hits(self.own - before.own, self.external - before.external)

    @property
    def both(self) -> int:
        return self.own + self.external


@dataclass(frozen=True)
class Batch:
    """What TRL generates at a time: completions of `prompts` prompts that begin alike.

    A step of the optimiser has two such batches: its gradients are accumulated. The prompts are the same, in reverse order, and so
    are the weights: the second batch asks again for what the first one asked, and has waited for the gradients of that.

    Attributes:
        generations: completions of a prompt: they share its KV.
    """

    prompts: int
    shared_tokens: int
    own_tokens: int
    generations: int

    @property
    def size(self) -> int:
        return self.prompts * self.generations

    @property
    def max_hits(self) -> int:
        """The most tokens that it may find if it finds nothing but its own: whole blocks of its prompts, but each of them once."""
        shared, own = self.shared_tokens // BLOCK_TOKENS, self.own_tokens // BLOCK_TOKENS
        return BLOCK_TOKENS * (self.size * (shared + own) - shared - self.prompts * own)

    def check_hits(self, hits: Sequence[Hits]) -> None:
        """Every step shares within itself, and nothing across: what it needs at all, it has to compute once.

        Args:
            hits: after each batch.
        """
        by_batch = [after.since(before) for before, after in itertools.pairwise((Hits(0, 0), *hits))]
        assert len(by_batch) == 2 * STEPS
        for step in range(STEPS):
            first, second = by_batch[2 * step : 2 * step + 2]
            assert first.both <= self.max_hits, f"wrong tokens: step {step} has found more than it computed: {first}"
            assert first.own > 0, f"step {step}: completions of a prompt share on the GPU: {first}"
            assert second.external > 0, f"step {step}: what the GPU has lost is found: {second}"

    def texts(self) -> list[str]:
        """The prompts of a step."""
        rng = random.Random(5)

        def draw(count: int) -> list[str]:
            return [f"<{rng.randrange(4, VOCABULARY)}>" for _ in range(count)]

        shared = draw(self.shared_tokens)
        texts = [" ".join(shared + draw(self.own_tokens)) for _ in range(self.prompts)]
        return texts + texts[::-1]


@dataclass
class Generated:
    """What a batch generated, in the order of its prompts."""

    completions: list[list[int]]
    rewards: list[float]
    observed: Any = None


@dataclass
class Run:
    """A run.

    Attributes:
        batches: two for each step of the optimiser.
        gradients: their norms, as TRL logged them, one for each step of its optimiser.
        digest: of the weights at the end.
    """

    batches: list[Generated] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    digest: str = ""

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Run:
        """A run that came as JSON."""
        return cls(**{**fields, "batches": [Generated(**batch) for batch in fields["batches"]]})

    @property
    def completions(self) -> list[list[list[int]]]:
        return [batch.completions for batch in self.batches]

    def check(self, expected: Run) -> None:
        for number, (right, found) in enumerate(zip(expected.completions, self.completions, strict=True)):
            assert found == right, f"wrong tokens in batch {number}"
        assert (self.gradients, self.digest) == (expected.gradients, expected.digest)

    @property
    def learns(self) -> bool:
        """Every step changes what is generated, so that old KV would show."""
        steps = [self.completions[2 * index : 2 * index + 2] for index in range(STEPS)]
        differ = all(before != after for before, after in itertools.pairwise(steps))
        return differ and len(self.gradients) == STEPS and all(norm > 0 for norm in self.gradients)


def reward(completion: Sequence[int]) -> float:
    """Small tokens are good: something that can be learned."""
    return 1.0 - sum(completion) / len(completion) / VOCABULARY


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    return found.hexdigest()


def train(
    model: Path, batch: Batch, where: Mapping[str, Any], folder: Path,
    observe: Callable[[], Any] = lambda: None,
    prepare: Callable[[GRPOTrainer], None] = lambda _: None,
) -> Run:  # fmt: skip
    """Train by TRL's GRPO.

    Args:
        where: TRL's settings of its vLLM.
        observe: called after each generation.
        prepare: gets the trainer before it trains.
    """
    run = Run()

    def small_tokens(completion_ids: list[list[int]], **_: object) -> list[float]:
        rewards = [reward(ids) for ids in completion_ids]
        run.batches.append(Generated([list(ids) for ids in completion_ids], rewards, observe()))
        return rewards

    config = GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, learning_rate=4e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=batch.size, num_generations=batch.generations, gradient_accumulation_steps=2, steps_per_generation=1,
        max_completion_length=COMPLETION_TOKENS, temperature=1.0, shuffle_dataset=False, seed=3,
        use_vllm=True, vllm_importance_sampling_correction=False,
        use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        **where,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": batch.texts()})
    trainer = GRPOTrainer(str(model), reward_funcs=small_tokens, args=config, train_dataset=dataset)
    prepare(trainer)
    trainer.train()
    if trainer.vllm_mode == "server":
        trainer.vllm_generation.vllm_client.close_communicator()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    run.gradients = [entry["grad_norm"] for entry in logged]
    run.digest = digest(trainer.model)
    return run
