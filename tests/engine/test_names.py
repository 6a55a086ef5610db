"""Weights that change under real engines in any way and order, with nobody telling anybody: KV goes only where the same weights are.

Every answer is compared with one of an engine that caches nothing and has exactly these weights; every hit is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.mooncake import Mooncake
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.engine.conftest import CACHED, PATIENT_ENVIRON, Prompts, Reference, Weights, check, settled_keys
from tests.engine.names_lab import (
    BLOCK_TOKENS,
    EMBEDDING,
    FLIPPED,
    OPENING,
    Lab,
    Orders,
    Streams,
    Traffic,
    connector_of,
    derive,
    flip,
    open_pool,
    rpc,
)
from tests.engine.server_nursery import ServerNursery

IN_PROCESS = Path(__file__).with_name("in_process_trainer.py")
NUM_RUNNING = 8
"""`--max-num-seqs` of these engines; more requests than that wait."""


@pytest.fixture(scope="module")
def lab(
    folder: Path, mooncake: Mooncake, servers: ServerNursery, weights: Weights, prompts: Prompts, reference: Reference
) -> Iterator[Lab]:
    with open_pool(folder) as pool:
        lab = Lab(folder, pool, mooncake, servers, weights, prompts, reference)
        try:
            lab.begin()
            yield lab
        finally:
            lab.end()


@pytest.fixture(scope="module")
def flipped(folder: Path, weights: Weights) -> Path:
    return derive(folder / "flipped", weights.base, flip)


@pytest.fixture(scope="module")
def half(folder: Path, weights: Weights) -> Path:
    """Base weights with the embedding of the new ones."""
    from safetensors.torch import load_file

    embedding = load_file(weights.new / "model.safetensors")[EMBEDDING]
    return derive(folder / "half", weights.base, lambda tensors: tensors.update({EMBEDDING: embedding}))


@pytest.fixture(scope="module")
def orders(lab: Lab) -> Orders:
    """Writes to A past vLLM."""
    lab.have(lab.weights.base)
    lab.share(lab.weights.base)
    seen = lab.seen(lab.a)
    orders = Orders(lab.folder / "orders", lab.a)
    lab.share(lab.weights.base)
    assert lab.seen(lab.a) == seen, "a call that writes nothing changes no name"
    return orders


# ---------------------------------------------------------------------- pushes


def test_staggered_pushes_under_traffic(lab: Lab, weights: Weights, prompts: Prompts) -> None:
    lab.have(weights.base)
    held = {id(lab.a): [(weights.base, 0.0, 0.0)], id(lab.b): [(weights.base, 0.0, 0.0)]}
    with Traffic((lab.a, lab.b), [prompts(OPENING) for _ in range(5)]) as traffic:
        traffic.go_on(6)
        for engine, model in ((lab.a, weights.new), (lab.b, weights.new), (lab.b, weights.third), (lab.a, weights.third)):
            began = time.monotonic()
            lab.push(engine, model)
            held[id(engine)].append((model, began, time.monotonic()))
            traffic.go_on(6)
    checked = hits = 0
    for engine, prompt, began, ended, tokens, cached in traffic.asked:
        changes = held[id(engine)]
        for (model, _, since), until in zip(changes, [*(change[1] for change in changes[1:]), ended], strict=True):
            if since <= began and ended <= until:
                checked += 1
                hits += cached > 0
                assert tokens == lab.reference(prompt, model), f"a wrong answer of {engine.name}, with {cached} tokens from a cache"
    assert checked >= 2 * 3 * 5
    assert hits >= 2 * 3
    lab.share(weights.third)


def test_a_push_that_misses_an_engine(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    lab.push(lab.a, weights.new)
    check(lab.a.complete(old), 0, lab.reference(old, weights.new))
    lab.apart(lab.a, weights.new, lab.b, weights.base)
    check(lab.b.complete(old), CACHED, lab.reference(old, weights.base))
    lab.push(lab.b, weights.new)
    check(lab.b.complete(old), CACHED, lab.reference(old, weights.new))
    lab.share(weights.new)


def test_half_a_push(lab: Lab, weights: Weights, half: Path) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    lab.half_a_push(lab.a, weights.new)
    check(lab.a.complete(old), 0, lab.reference(old, half))
    lab.apart(lab.a, half, lab.b, weights.base)
    lab.half_a_push(lab.b, weights.new)
    lab.share(half)
    for engine in (lab.a, lab.b):
        lab.push(engine, weights.new)
    check(lab.a.complete(old), 0, lab.reference(old, weights.new))
    lab.share(weights.new)


@pytest.mark.slow
def test_weights_that_return_while_requests_run(lab: Lab, weights: Weights, prompts: Prompts) -> None:
    """Base, new, base: requests that began with base complete blocks with new, and others when base has returned."""
    lab.have(weights.base)
    asked: list[list[int]] = []
    for _ in range(2):
        with Streams(lab.a, [prompts(OPENING) for _ in range(NUM_RUNNING + 4)]) as streams:
            streams.arrive(10, NUM_RUNNING)
            lab.push(lab.a, weights.new)
            streams.move_on(BLOCK_TOKENS + 10, NUM_RUNNING)
            lab.push(lab.a, weights.base)
            streams.move_on(BLOCK_TOKENS + 10, NUM_RUNNING)
        asked += streams.prefixes()
    lab.all_right(asked, (lab.a, weights.base), (lab.b, weights.base))
    lab.share(weights.base)


def test_a_roll_back_finds_what_there_was(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    for engine in (lab.a, lab.b):
        lab.push(engine, weights.new)
    check(lab.a.complete(old), 0, lab.reference(old, weights.new))
    lab.push(lab.a, weights.base)
    check(lab.a.complete(old), CACHED, lab.reference(old, weights.base))
    check(lab.b.complete(old), CACHED, lab.reference(old, weights.new))
    lab.apart(lab.a, weights.base, lab.b, weights.new)


def test_an_idle_engine_looks_by_itself(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    lab.share(weights.base)
    before = lab.seen(lab.a)
    lab.push(lab.a, weights.new)
    eventually(lambda: lab.seen(lab.a)[-1] != before[-1], "it has seen its weights without a request", 120)
    lab.push(lab.b, weights.new)
    eventually(lambda: lab.seen(lab.b)[-1] == lab.seen(lab.a)[-1], "the other one holds the same", 120)
    assert lab.seen(lab.a)[-1] != before[-1]
    lab.share(weights.new)


# ---------------------------------------------------------------------- calls that nobody has listed


def test_a_parameter_is_written_by_a_call_that_nobody_knows(lab: Lab, weights: Weights, flipped: Path, prompts: Prompts) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    with lab.written(lab.a):
        with Streams(lab.a, [prompts(OPENING) for _ in range(NUM_RUNNING)]) as streams:
            streams.arrive(20)
            rpc(lab.a, "scale_in_place", name=FLIPPED, factor=-1.0)
            streams.move_on(BLOCK_TOKENS + 10)
        check(lab.a.complete(old), 0, lab.reference(old, flipped))
        lab.all_right(streams.prefixes(), (lab.a, flipped), (lab.b, weights.base))
        lab.apart(lab.a, flipped, lab.b, weights.base)
        rpc(lab.a, "scale_in_place", name=FLIPPED, factor=-1.0)
    check(lab.a.complete(old), CACHED, lab.reference(old, weights.base))
    lab.share(weights.base)


def test_one_bit_of_one_element(lab: Lab, weights: Weights) -> None:
    """It changes no answer here, so names must tell."""
    lab.have(weights.base)
    old = lab.share(weights.base)
    before = lab.seen(lab.a)[-1]
    with lab.written(lab.a):
        rpc(lab.a, "change_one", name=EMBEDDING, index=12345)
        assert lab.a.complete(old, 1).cached == 0
        assert lab.seen(lab.a)[-1] != before
        assert lab.b.complete(lab.save(lab.a, weights.base), 1).cached == 0
        rpc(lab.a, "change_one", name=EMBEDDING, index=12345)
    check(lab.a.complete(old), CACHED, lab.reference(old, weights.base))
    assert lab.seen(lab.a)[-1] == before
    lab.share(weights.base)


@pytest.mark.slow
def test_an_engine_that_refuses_to_sleep_goes_on_sharing(lab: Lab, weights: Weights) -> None:
    """vLLM's CPU workers say that they cannot, its engine says that it does. It clears its caches, so the pool leaves its epoch."""
    lab.have(weights.base)
    for level in (1, 2):
        old, epoch = lab.share(weights.base), lab.pool.snapshot().target
        lab.a.post(f"/sleep?level={level}", {})
        lab.a.post("/wake_up", {})
        check(lab.a.complete(old), 0, lab.reference(old, weights.base))
        lab.wait_published(epoch + 1)
        lab.share(weights.base)


# ---------------------------------------------------------------------- past vLLM


@pytest.mark.slow
def test_weights_written_past_vllm_in_the_middle_of_requests(
    lab: Lab, orders: Orders, weights: Weights, flipped: Path, prompts: Prompts
) -> None:
    """And back: what was computed in between is found by nobody, and the pool leaves its epoch by itself."""
    lab.have(weights.base)
    late, epoch = lab.late(lab.a), lab.pool.snapshot().target
    asked: list[list[int]] = []
    with lab.written(lab.a):
        for times in (1, 2):
            with Streams(lab.a, [prompts(OPENING) for _ in range(5)]) as streams:
                streams.arrive(10)
                orders(FLIPPED, -1.0)
                streams.move_on(BLOCK_TOKENS + 10)
                if times == 2:
                    orders(FLIPPED, -1.0)
                    streams.move_on(BLOCK_TOKENS + 10)
            asked += streams.prefixes()
            lab.wait_published(epoch + times)
            assert lab.late(lab.a) >= late + times
            lab.all_right(streams.prefixes(), (lab.b, weights.base), (lab.a, flipped if times == 1 else weights.base))
            if times == 1:
                lab.apart(lab.a, flipped, lab.b, weights.base)
                orders(FLIPPED, -1.0)
                lab.share(weights.base)
    lab.all_right(asked, (lab.a, weights.base), (lab.b, weights.base))
    lab.share(weights.base)


def test_weights_written_past_vllm_and_back_within_one_block(lab: Lab, orders: Orders, weights: Weights, prompts: Prompts) -> None:
    """The steps that begin a block and end it have the right weights, those in the middle have not."""
    lab.have(weights.base)
    late = lab.late(lab.a)
    with lab.written(lab.a):
        with Streams(lab.a, [prompts(OPENING) for _ in range(NUM_RUNNING)]) as streams:
            streams.arrive(10)
            orders(FLIPPED, -1.0)
            streams.move_on(30)
            orders(FLIPPED, -1.0)
            streams.move_on(BLOCK_TOKENS + 10)
        asked = list(streams.prefixes())
        lab.all_right(asked, (lab.a, weights.base), (lab.b, weights.base))
        assert lab.late(lab.a) > late
    lab.share(weights.base)


@pytest.mark.slow
def test_weights_written_past_vllm_while_every_prompt_is_in_the_cache(lab: Lab, orders: Orders, weights: Weights, flipped: Path) -> None:
    """Nothing is saved then, and the engine is never idle."""
    lab.have(weights.base)
    known = lab.share(weights.base)
    with lab.written(lab.a), Traffic([lab.a] * 3, [known]) as traffic:
        for model in (flipped, weights.base):
            traffic.go_on(6)
            seen = lab.seen(lab.a)
            orders(FLIPPED, -1.0)
            eventually(lambda seen=seen: len(lab.seen(lab.a)) > len(seen), "it has seen that its weights were written")
            for _ in range(6):
                lab.right(lab.a, known, model)
    lab.share(weights.base)


@pytest.mark.slow
def test_an_idle_engine_is_written_to_past_vllm(lab: Lab, orders: Orders, weights: Weights, flipped: Path) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    with lab.written(lab.a):
        for swap in (False, True):
            time.sleep(1.0)  # that is idle
            orders(FLIPPED, -1.0, swap=swap)
            check(lab.a.complete(old), 0, lab.reference(old, flipped))
            lab.apart(lab.a, flipped, lab.b, weights.base)
            time.sleep(1.0)
            orders(FLIPPED, -1.0, swap=swap)
            check(lab.a.complete(old), CACHED, lab.reference(old, weights.base))
            lab.share(weights.base)
            old = lab.share(weights.base)


# ---------------------------------------------------------------------- other engines


def test_an_engine_restarts_with_base_weights_in_the_middle(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    lab.push(lab.a, weights.new)
    lab.b.end()
    lab.b = lab.start("B2", weights.base).wait_ready()
    lab.pool.wait_engines(2)
    check(lab.b.complete(old), CACHED, lab.reference(old, weights.base))
    lab.apart(lab.a, weights.new, lab.b, weights.base)
    lab.push(lab.b, weights.new)
    lab.share(weights.new)


def test_without_the_plugin_weights_are_unknown(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    known = lab.share(weights.base)
    with lab.start("no-plugin", weights.base, {"VLLM_PLUGINS": "none"}) as blind:
        said = [line for line in blind.process.log.read_text().splitlines() if "the weights are unknown" in line]
        assert len(said) == 1, said
        assert "VLLM_PLUGINS" in said[0]
        keys = settled_keys(lab.mooncake)
        for model in (weights.base, weights.new):
            lab.have(model, blind)
            for _ in range(2):
                check(blind.complete(known), 0, lab.reference(known, model))
        blind.report_metrics(known)
        assert blind.metric("vllm:epochkv_weights_known") == 0
        assert settled_keys(lab.mooncake) <= keys, "an engine that does not know its weights has written to the store"
    lab.share(weights.base)


@pytest.mark.slow
def test_load_weights_of_the_model_is_called_in_process(lab: Lab, weights: Weights, half: Path, prompts: Prompts) -> None:
    """As trainers do that have their engine in their own process; also while requests run, there and back."""
    lab.have(weights.base)
    known = lab.share(weights.base)
    job, go = lab.folder / "job.json", lab.folder / "go"
    openings = [prompts(OPENING) for _ in range(6)]
    connector = connector_of(lab.pool, None, lab.mooncake)
    job.write_text(json.dumps([str(weights.base), str(half), connector, known, openings, EMBEDDING, [OPENING, BLOCK_TOKENS]]))
    environ = {**CPU_ENVIRONMENT, **PATIENT_ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with Process(
        "in-process engine", [sys.executable, str(IN_PROCESS), str(job), str(go)], lab.folder / "in_process.log", environ
    ) as process:
        lab.pool.wait_engines(3, 240)
        go.touch()
        try:
            process.popen.wait(120)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the in-process engine hangs:\n{process.tail(60)}")
    results = [line for line in process.log.read_text().splitlines() if line.startswith("RESULT ")]
    assert results, process.tail(60)
    first, other, again, asked, answers = json.loads(results[0].removeprefix("RESULT "))
    assert first == [CACHED, list(lab.reference(known, weights.base))]
    assert other == [0, list(lab.reference(known, half))]
    assert again == [CACHED, list(lab.reference(known, weights.base))]
    assert len(asked) == 3 * len(openings)
    assert [tokens for _, tokens in answers] == [list(lab.reference(prompt, weights.base)) for prompt in asked], "a wrong answer"
    assert sum(cached for cached, _ in answers) > 0
    lab.all_right(asked, (lab.a, weights.base), (lab.b, weights.base))
    lab.share(weights.base)
