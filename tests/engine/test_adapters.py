"""Adapters that trainers write, replace and send while engines run: equal tensors share, and what one engine computes with others no
engine takes for its own. Every answer is compared with one that found nothing in any cache."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hack import models
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import CACHED, L1_BYTES, PATIENT, PATIENT_ENVIRON, Prompts, Weights, check, settled_keys
from tests.engine.server_nursery import ServerNursery

ROOT = Path(__file__).parents[2]
ONE, TWO = 10, 11
"""Seeds: two versions of an adapter."""
QUEUED_SECONDS = 1.0


def engine_args(num_adapters: int) -> tuple[str, ...]:
    numbers = ("--max-loras", str(num_adapters), "--max-cpu-loras", str(num_adapters), "--max-lora-rank", "8")
    return ("--enable-lora", *numbers, "--worker-extension-cls", "tests.engine.adapters_sender.Sender")


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
    loaded: list[str] = field(default_factory=list)  # by A, which numbers them from 1 on

    def load(self, name: str, path: Path) -> str:
        """A loads it."""
        self.a.load_adapter(name, path)
        self.loaded.append(name)
        return name

    def write(self, seed: int, name: str | None = None) -> tuple[str, Path]:
        """A trainer writes this version to a new path, or over another one; returns the adapter's name."""
        name = name or f"adapter-{next(self.numbers)}"
        return name, models.make_adapter(self.folder / name, seed)

    def expected(self, seed: int, prompt: Sequence[int]) -> tuple[int, ...]:
        """What this version answers."""
        name, path = self.write(seed)
        self.b.load_adapter(name, path)
        answer = self.b.complete(prompt, adapter=name, cache_salt=f"{name} {time.monotonic()}")
        assert answer.cached == 0
        return answer.tokens


@pytest.fixture(scope="module")
def lab(folder: Path, mooncake: Mooncake, weights: Weights, servers: ServerNursery) -> Iterator[Lab]:
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    environ = {**PATIENT_ENVIRON, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONPATH": paths}
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
    lab.load(*first)
    check(lab.a.complete(prompt, adapter=first[0]), 0, expected)
    settled_keys(lab.mooncake)
    lab.b.load_adapter(*second)
    check(lab.b.complete(prompt, adapter=second[0]), CACHED, expected)
    lab.load(*third)
    check(lab.a.complete(prompt, adapter=third[0]), CACHED, expected)
    check(lab.a.complete(prompt, adapter=first[0]), CACHED, expected)  # A had no room for both: it has read it again
    check(lab.a.complete(prompt), 0, lab.b.complete(prompt, cache_salt="nobody").tokens)


def in_place(lab: Lab, name: str, seed: int) -> None:
    """The trainer overwrites the files and says so."""
    _, path = lab.write(seed, name)
    lab.a.load_adapter(name, path, in_place=True)


def in_memory(lab: Lab, name: str, seed: int) -> None:
    """The trainer sends tensors to the workers."""
    _, path = lab.write(seed)
    lab.a.post("/collective_rpc", {"method": "take_adapter", "args": [lab.loaded.index(name) + 1, str(path)]})


@pytest.mark.parametrize("replace", [in_place, pytest.param(in_memory, marks=pytest.mark.slow)])
def test_a_new_version_in_the_place_of_another_is_named_by_its_tensors(
    lab: Lab, prompts: Prompts, replace: Callable[[Lab, str, int], None]
) -> None:
    prompt, queued = prompts(), prompts()
    one, two = lab.expected(ONE, prompt), lab.expected(TWO, prompt)
    name = lab.load(*lab.write(ONE))
    check(lab.a.complete(prompt, adapter=name), 0, one)
    replace(lab, name, TWO)
    check(lab.a.complete(prompt, adapter=name), 0, two)
    settled_keys(lab.mooncake)
    other = lab.write(TWO)
    lab.b.load_adapter(*other)
    check(lab.b.complete(prompt, adapter=other[0]), CACHED, two)
    replace(lab, name, ONE)
    check(lab.a.complete(prompt, adapter=name), CACHED, one)
    # A request waits, and has its names, while other tensors are put in place.
    lab.a.pause("keep", clear_cache=False)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lab.a.complete, queued, 8, name)
        time.sleep(QUEUED_SECONDS)
        replace(lab, name, TWO)
        lab.a.resume()
        check(asked.result(60.0), 0, lab.expected(TWO, queued))
    settled_keys(lab.mooncake)
    check(lab.b.complete(queued, adapter=other[0]), CACHED, lab.expected(TWO, queued))
    old = lab.write(ONE)
    lab.b.load_adapter(*old)
    check(lab.b.complete(queued, adapter=old[0]), 0, lab.expected(ONE, queued))


@pytest.mark.slow
def test_files_that_were_overwritten_and_read_again_without_a_word_mislead_nobody(lab: Lab, prompts: Prompts) -> None:
    """A has no room for two adapters, so vLLM reads the first one's files again, which are others by now."""
    prompt = prompts()
    one, two = lab.expected(ONE, prompt), lab.expected(TWO, prompt)
    name = lab.load(*lab.write(ONE))
    lab.load(*lab.write(TWO))
    lab.write(TWO, name)
    check(lab.a.complete(prompt, adapter=name), 0, two)
    settled_keys(lab.mooncake)
    same = lab.write(ONE)
    lab.load(*same)
    check(lab.a.complete(prompt, adapter=same[0]), 0, one)
    lab.b.load_adapter(*same)
    check(lab.b.complete(prompt, adapter=same[0]), 0, one)
    check(lab.a.complete(prompt, adapter=name), 0, two)
    settled_keys(lab.mooncake)
    check(lab.a.complete(prompt, adapter=name), CACHED, two)
