"""Frameworks as PyPI has them, beside vLLM on CPU: models with a tokenizer of numbers, the production hub, a real Mooncake."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hack import models
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool

L1_BYTES = 64 << 20
CACHED = 896
"""Whole blocks of 128 tokens of a prompt of 1,000."""
START_SECONDS = 480.0
"""Of CPU engines use about 60 each, most of it to import: a busy machine takes minutes."""


def make_model(folder: Path, seed: int) -> Path:
    """A model with a tokenizer, whose words are the numbers of its tokens: OpenRLHF has no option to leave it out."""
    models.make(folder, seed)
    words = Tokenizer(WordLevel({str(number): number for number in range(512)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="0", eos_token="1", pad_token="0").save_pretrained(folder)
    return folder


def new_prompt(seed: int, num_tokens: int = 1000) -> list[int]:
    """Prompts of different seeds share nothing, so that every hit has one explanation."""
    return [random.Random(seed).randrange(2, 512) for _ in range(num_tokens)]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of them for one architecture."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "base", 1), make_model(folder / "new", 2)


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with Mooncake(tmp_path_factory.mktemp("mooncake")) as mooncake:
        yield mooncake


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def transfer(pool: Pool) -> dict[str, Any]:
    """The `kv_transfer_config` that the pages of frameworks show."""
    return pool.connector(L1_BYTES)
