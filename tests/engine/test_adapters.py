"""Adapters that trainers write and replace while engines run: equal tensors share, and what one engine computes with others no
engine takes for its own. Every answer is compared with one that found nothing in any cache."""

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack import models
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import CACHED, L1_BYTES, PATIENT, PATIENT_ENVIRON, Prompts, Weights, check, settled_keys
from tests.support.nursery import Nursery

ONE, TWO = 10, 11
"""Seeds: two versions of an adapter."""
QUEUED_SECONDS = 1.0


def engine_args(num_adapters: int) -> tuple[str, ...]:
    return ("--enable-lora", "--max-loras", str(num_adapters), "--max-cpu-loras", str(num_adapters), "--max-lora-rank", "8")


@dataclass
class Lab:
    """A, which has room for one adapter, and B, which has room for four, with one pool and store; they are older than every adapter.

    B answers for nobody's cache: with a salt of its own, from tensors that were loaded from a folder nobody else knows.
    """

    a: Engine
    b: Engine
    mooncake: Mooncake
    folder: Path
    numbers: Iterator[int]

    def write(self, seed: int, name: str | None = None) -> tuple[str, Path]:
        """A trainer writes this version to a new path, or over another one; returns the adapter's name."""
        name = name or f"adapter-{next(self.numbers)}"
        return name, models.make_adapter(self.folder / name, seed)

    def expected(self, seed: int, prompt: Sequence[int]) -> tuple[int, ...]:
        name, path = self.write(seed)
        self.b.load_adapter(name, path)
        answer = self.b.complete(prompt, adapter=name, cache_salt=f"{name} {time.monotonic()}")
        assert answer.cached == 0
        return answer.tokens

    def replace(self, name: str, seed: int) -> None:
        """The trainer overwrites the files of A's adapter, and says so."""
        _, path = self.write(seed, name)
        self.a.load_adapter(name, path, in_place=True)


@pytest.fixture(scope="module")
def lab(folder: Path, mooncake: Mooncake, weights: Weights, servers: Nursery) -> Iterator[Lab]:
    environ = {**PATIENT_ENVIRON, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Pool(folder, lease_seconds=60.0) as pool:
        connector = pool.connector(L1_BYTES, mooncake.address, **PATIENT)
        with (
            Engine("A", weights.base, folder, connector, args=engine_args(1), environ=environ, popen=servers.popen) as a,
            Engine("B", weights.base, folder, connector, args=engine_args(4), environ=environ, popen=servers.popen) as b,
        ):
            for engine in (a, b):
                engine.wait_ready()
            pool.bump()
            pool.wait_engines(2)
            yield Lab(a, b, mooncake, folder / "adapters", itertools.count())


def test_adapters_written_while_engines_run_are_shared_by_what_they_hold(lab: Lab, prompts: Prompts) -> None:
    """Under other names, ids and paths in each, and twice in one."""
    prompt = prompts()
    expected = lab.expected(ONE, prompt)
    assert lab.expected(TWO, prompt) != expected, "the versions do not differ enough to show anything"
    first, second, third = (lab.write(ONE) for _ in range(3))
    lab.a.load_adapter(*first)
    check(lab.a.complete(prompt, adapter=first[0]), 0, expected)
    settled_keys(lab.mooncake)
    lab.b.load_adapter(*second)
    check(lab.b.complete(prompt, adapter=second[0]), CACHED, expected)
    lab.a.load_adapter(*third)
    check(lab.a.complete(prompt, adapter=third[0]), CACHED, expected)
    check(lab.a.complete(prompt, adapter=first[0]), CACHED, expected)  # A had no room for both: it has read it again
    check(lab.a.complete(prompt), 0, lab.b.complete(prompt, cache_salt="nobody").tokens)


def test_a_new_version_in_the_place_of_another_is_named_by_its_tensors(lab: Lab, prompts: Prompts) -> None:
    prompt, queued = prompts(), prompts()
    one, two = lab.expected(ONE, prompt), lab.expected(TWO, prompt)
    name, path = lab.write(ONE)
    lab.a.load_adapter(name, path)
    check(lab.a.complete(prompt, adapter=name), 0, one)
    lab.replace(name, TWO)
    check(lab.a.complete(prompt, adapter=name), 0, two)
    settled_keys(lab.mooncake)
    other = lab.write(TWO)
    lab.b.load_adapter(*other)
    check(lab.b.complete(prompt, adapter=other[0]), CACHED, two)
    lab.replace(name, ONE)
    check(lab.a.complete(prompt, adapter=name), CACHED, one)
    # A request waits, and has its names, while other tensors are put in place.
    lab.a.pause("keep", clear_cache=False)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lab.a.complete, queued, 8, name)
        time.sleep(QUEUED_SECONDS)
        lab.replace(name, TWO)
        lab.a.resume()
        check(asked.result(60.0), 0, lab.expected(TWO, queued))
    settled_keys(lab.mooncake)
    check(lab.b.complete(queued, adapter=other[0]), CACHED, lab.expected(TWO, queued))
    old = lab.write(ONE)
    lab.b.load_adapter(*old)
    check(lab.b.complete(queued, adapter=old[0]), 0, lab.expected(ONE, queued))
