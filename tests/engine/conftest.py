"""Real vLLM CPU engines behind their OpenAI server, a real Mooncake, the production hub.

Answers are compared with those of an engine that caches nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack import models
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool

PROMPT_TOKENS = 1000
CACHED = 896  # whole blocks of 128 tokens of such a prompt
BLOCKS = CACHED // 128


@dataclass(frozen=True)
class Weights:
    """Folders of two sets of weights for one architecture."""

    base: Path
    new: Path


def eventually(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Poll until true.

    Raises:
        AssertionError: the deadline passed first.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


# A loaded machine may answer a lookup later than the 20 ms that an engine waits by default, which is a miss and no fault.
PATIENT = {"lookup_deadline_ms": 5000.0}
# For the same reason: a master that is starved for a second would count as hung.
PATIENT_ENVIRON = {"MC_RPC_TIMEOUT_MS": "15000"}


def settled_keys(mooncake: Mooncake, seconds: float = 30.0) -> set[str]:
    """What the store holds once nothing has arrived for half a second."""
    keys, since, deadline = set(mooncake.keys()), time.monotonic(), time.monotonic() + seconds
    while time.monotonic() - since < 0.5:
        assert time.monotonic() < deadline, f"puts still arrive after {seconds} s"
        time.sleep(0.05)
        now = set(mooncake.keys())
        if now != keys:
            keys, since = now, time.monotonic()
    return keys


class Prompts:
    """Prompts that share nothing with each other, so that every hit has one explanation."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self._random.randrange(2, 512) for _ in range(num_tokens)]


class Reference:
    """An engine without any cache; answers are remembered per prompt and set of weights."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine, self._loaded = engine, weights.base
        self._answers: dict[tuple[tuple[int, ...], Path], tuple[int, ...]] = {}

    def __call__(self, prompt: Sequence[int], model: Path) -> tuple[int, ...]:
        key = (tuple(prompt), model)
        if key not in self._answers:
            if model != self._loaded:
                self._engine.reload_weights(model)
                self._loaded = model
            answer = self._engine.complete(prompt)
            assert answer.cached == 0
            self._answers[key] = answer.tokens
        return self._answers[key]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("models")
    return Weights(models.make(folder / "base", 1), models.make(folder / "new", 2))


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts(20)


@pytest.fixture(scope="session")
def reference(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Engine("reference", weights.base, tmp_path_factory.mktemp("reference"), prefix_caching=False) as engine:
        yield Reference(engine, weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def mooncake(folder: Path) -> Iterator[Mooncake]:
    with Mooncake(folder / "mooncake") as mooncake:
        yield mooncake


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    """Leases are short, so that losing one takes seconds; a boot must be 3 s old to have got the weights of a bump."""
    with Pool(folder, lease_seconds=6.0, join_after_seconds=3.0) as pool:
        yield pool
