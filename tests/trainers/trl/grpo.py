"""A GRPO run as a user of TRL writes one: a model, a tokenizer, a dataset, a reward; all of them made here, nothing downloaded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
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
GENERATIONS = 4
"""Completions of a prompt in a step: they share its KV."""
SHARED_TOKENS, OWN_TOKENS, COMPLETION_TOKENS = 384, 560, 12
PROMPTS = 3
BLOCK_TOKENS = 128
MAX_HITS = 2 * PROMPTS * GENERATIONS * ((SHARED_TOKENS + OWN_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS) - (
    SHARED_TOKENS + PROMPTS * (OWN_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS)
)
"""The most that a step may find if it finds nothing of other steps: whole blocks of all its prompts, but each of them once."""
VOCABULARY = models.Shape().vocab

SAMPLING = {"seed": 7}
"""vLLM draws the tokens of a request from a generator of its own then, so that equal logits give equal tokens. (At temperature 0
the completions of a prompt are equal, and GRPO learns nothing; vLLM refuses several of them.)"""


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


def make_prompts() -> list[str]:
    """Prompts that begin alike, each of them twice, and the second one only after all the others."""
    rng = random.Random(5)

    def draw(count: int) -> list[str]:
        return [f"<{rng.randrange(4, VOCABULARY)}>" for _ in range(count)]

    shared = draw(SHARED_TOKENS)
    return [" ".join(shared + draw(OWN_TOKENS)) for _ in range(PROMPTS)] * 2


@dataclass
class Step:
    """What a step generated, in the order of the prompts."""

    completions: list[list[int]]
    rewards: list[float]
    observed: Any = None


@dataclass
class Run:
    """A run, step by step.

    Attributes:
        gradients: their norms, as TRL logged them, one for each step of its optimiser.
        digest: of the weights at the end.
    """

    steps: list[Step] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    digest: str = ""


def reward(completion: Sequence[int]) -> float:
    """Small tokens are good: something that can be learned."""
    return 1.0 - sum(completion) / len(completion) / VOCABULARY


def digest(model: torch.nn.Module) -> str:
    """Of every bit of its weights."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    return found.hexdigest()


def train(
    model: Path, port: int, group_port: int, folder: Path,
    observe: Callable[[], Any] = lambda: None,
    prepare: Callable[[GRPOTrainer], None] = lambda _: None,
) -> Run:  # fmt: skip
    """Train by TRL's GRPO against a vLLM server that runs.

    Args:
        port: of the server, on loopback.
        group_port: where the trainer waits for its workers.
        observe: called after each generation.
        prepare: gets the trainer before it trains.
    """
    run = Run()

    def small_tokens(completion_ids: list[list[int]], **_: object) -> list[float]:
        rewards = [reward(ids) for ids in completion_ids]
        run.steps.append(Step([list(ids) for ids in completion_ids], rewards, observe()))
        return rewards

    prompts = make_prompts()
    config = GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, learning_rate=4e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=len(prompts) * GENERATIONS, num_generations=GENERATIONS, gradient_accumulation_steps=1,
        max_completion_length=COMPLETION_TOKENS, temperature=1.0, generation_kwargs=SAMPLING, shuffle_dataset=False, seed=3,
        use_vllm=True, vllm_mode="server", vllm_importance_sampling_correction=False,
        vllm_server_base_url=f"http://127.0.0.1:{port}", vllm_group_port=group_port, vllm_server_timeout=10.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(str(model), reward_funcs=small_tokens, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}))
    prepare(trainer)
    trainer.train()
    trainer.vllm_generation.vllm_client.close_communicator()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    run.gradients = [entry["grad_norm"] for entry in logged]
    run.digest = digest(trainer.model)
    return run
