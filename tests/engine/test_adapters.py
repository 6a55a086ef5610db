"""Adapters that are loaded, and replaced, over HTTP while engines run: what one engine computes with one version, no engine takes for
another's."""

from __future__ import annotations

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
from tests.engine.server_nursery import ServerNursery

ARGS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
QUEUED_SECONDS = 1.0


@dataclass(frozen=True)
class Lab:
    """A and B with one pool and store, and two adapters that are older than both."""

    a: Engine
    b: Engine
    mooncake: Mooncake
    one: Path
    two: Path
    moving: Path  # a link to `one`, older as well

    def uncached(self, prompt: Sequence[int], adapter: str) -> tuple[int, ...]:
        """What B answers without any cache."""
        answer = self.b.complete(prompt, adapter=adapter, cache_salt=f"{adapter} {time.monotonic()}")
        assert answer.cached == 0
        return answer.tokens


@pytest.fixture(scope="module")
def lab(folder: Path, mooncake: Mooncake, weights: Weights, servers: ServerNursery) -> Iterator[Lab]:
    one, two = (models.make_adapter(folder / name, seed) for seed, name in enumerate(("one", "two"), 10))
    moving = folder / "moving"
    moving.symlink_to(one)
    time.sleep(0.1)  # the kernel's times of files are coarse
    environ = {**PATIENT_ENVIRON, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Pool(folder, lease_seconds=60.0) as pool:
        connector = pool.connector(L1_BYTES, mooncake.address, **PATIENT)
        with (
            Engine("A", weights.base, folder, connector, args=ARGS, environ=environ, popen=servers.popen) as a,
            Engine("B", weights.base, folder, connector, args=ARGS, environ=environ, popen=servers.popen) as b,
        ):
            for engine in (a, b):
                engine.wait_ready()
            pool.bump()
            pool.wait_engines(2)
            yield Lab(a, b, mooncake, one, two, moving)


def test_loading_in_place_ends_the_names_of_the_version_before(lab: Lab, prompts: Prompts) -> None:
    shared, queued = prompts(), prompts()
    for engine in (lab.a, lab.b):
        engine.load_adapter("tuned", lab.one)
    expected = lab.uncached(shared, "tuned")
    check(lab.a.complete(shared, adapter="tuned"), 0, expected)
    settled_keys(lab.mooncake)
    check(lab.b.complete(shared, adapter="tuned"), CACHED, expected)
    # A request waits, and has its names, while vLLM puts other weights in place.
    lab.a.pause("keep", clear_cache=False)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lab.a.complete, queued, 8, "tuned")
        time.sleep(QUEUED_SECONDS)
        lab.a.load_adapter("tuned", lab.two, in_place=True)
        lab.a.resume()
        other = asked.result(60.0)
    expected = lab.uncached(queued, "tuned")
    assert other.tokens != expected, "the versions do not differ enough to show anything"
    settled_keys(lab.mooncake)
    check(lab.b.complete(queued, adapter="tuned"), 0, expected)


def test_a_link_that_is_pointed_elsewhere_after_loading_is_shared_with_nobody(lab: Lab, prompts: Prompts) -> None:
    prompt = prompts()
    lab.a.load_adapter("moving", lab.moving)
    other = lab.moving.with_name("next")
    other.symlink_to(lab.two)
    other.rename(lab.moving)
    first = lab.a.complete(prompt, adapter="moving")
    settled_keys(lab.mooncake)
    lab.b.load_adapter("moving", lab.moving)
    expected = lab.uncached(prompt, "moving")
    assert first.tokens != expected, "the versions do not differ enough to show anything"
    check(lab.b.complete(prompt, adapter="moving"), 0, expected)
