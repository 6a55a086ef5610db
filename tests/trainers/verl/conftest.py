"""Two rollouts of verl with a pool and a Mooncake, and what an engine that caches nothing answers with each set of weights."""

import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hack import models
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine import conftest
from tests.trainers.verl.command_line import enabled
from tests.trainers.verl.lab import ROOT, WORKER, Verl, World

Answers = dict[str, list[tuple[int, ...]]]
SHAPE = models.Shape(hidden=128, intermediate=256, layers=4)
"""2.9 MB: a push takes several of verl's buckets of 1 MB."""
SEEDS = {"base": 1, "new": 2, "third": 3}
TIERS = ("local.capacity_bytes=67108864",)
PATIENT = tuple(f"{name}={value}" for name, value in conftest.PATIENT.items())


def write_tokenizer(folder: Path) -> None:
    """One that names every token of the model: verl asks a tokenizer how many there are."""
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(SHAPE.vocab)}, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", eos_token="t1", unk_token="t2", pad_token="t3").save_pretrained(folder)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of three sets of weights for one architecture."""
    root = tmp_path_factory.mktemp("models")
    made = {name: models.make(root / name, seed, SHAPE) for name, seed in SEEDS.items()}
    write_tokenizer(made["base"])
    return made


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Of 1,000 tokens each: 7 whole blocks of 128."""
    draw = random.Random(7)
    return [[draw.randrange(4, SHAPE.vocab) for _ in range(1000)] for _ in range(4)]


@pytest.fixture(scope="session")
def expected(
    weights: dict[str, Path], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, ...]]]:
    """What plain vLLM without any cache answers with each set of weights."""
    answers = {}
    logs, kernels = tmp_path_factory.mktemp("uncached"), ("--worker-cls", WORKER)  # those of the rollouts
    engine = Engine("uncached", weights["base"], logs, None, False, kernels, {"PYTHONPATH": str(ROOT)}, sys.executable)
    try:
        engine.wait_ready(600)
        for name, folder in weights.items():
            engine.reload_weights(folder)
            answers[name] = [engine.complete(prompt).tokens for prompt in prompts]
    finally:
        engine.end()
    assert all(len({answers[name][index] for name in answers}) == len(SEEDS) for index in range(len(prompts)))
    return answers


@pytest.fixture(scope="session")
def world(
    expected: Answers, weights: dict[str, Path], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Started after the engine without a cache has ended: each engine takes gigabytes."""
    folder = Path(tempfile.mkdtemp(prefix="v"))  # short: names of sockets have at most 107 characters, and Ray's are in it
    try:
        with Mooncake(folder) as mooncake, Pool(folder) as pool:
            keys = (f"extra_config.{one}" for one in (*TIERS, *PATIENT, f"distributed.master_address={mooncake.address}"))
            options = enabled(pool.credentials / "connection.json", "on_failure=crash", *keys)
            with Verl(weights["base"], folder, options, conftest.PATIENT_ENVIRON) as verl:
                yield World(verl, pool, mooncake, folder, weights, prompts, expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
