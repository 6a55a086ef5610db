"""Weights that change under real engines in any way and order, with nobody telling anybody: KV goes only where the same weights are.

Every answer is compared with one of an engine that caches nothing and has exactly these weights; every hit is counted.
"""

import json
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from epochkv_fence.client import warm
from epochkv_fence.client.stamps import ASK, stamps
from epochkv_fence.protocol.messages import UNKNOWN_WEIGHTS as UNKNOWN
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from tests.engine.conftest import CACHED, Prompts, Reference, Weights, check, eventually, settled_keys
from tests.engine.names_lab import BLOCK_TOKENS, FLIPPED, OPENING, Lab, Orders, Stream, Streams, Traffic, derive, flip, open_pool, rpc
from tests.support.nursery import Nursery

NUM_RUNNING = 8
"""`--max-num-seqs` of these engines; more requests than that wait."""
IN_FLIGHT = 16
"""So many tokens may be made, and not seen, while a push goes on and until the engine has looked at it."""


@pytest.fixture(scope="module")
def lab(folder: Path, mooncake: Mooncake, servers: Nursery, weights: Weights, prompts: Prompts, reference: Reference) -> Iterator[Lab]:
    with open_pool(folder) as pool, closing(Lab(folder, pool, mooncake, servers, weights, prompts, reference)) as lab:
        lab.begin()
        yield lab


@pytest.fixture(scope="module")
def flipped(folder: Path, weights: Weights) -> Path:
    return derive(folder / "flipped", weights.base, flip)


@pytest.fixture(scope="module")
def orders(lab: Lab) -> Orders:
    """Writes to A past vLLM."""
    lab.have(lab.weights.base)
    lab.share(lab.weights.base)
    seen = lab.seen(lab.a)
    orders = Orders(lab.folder / "orders", lab.a)
    lab.wait_named(lab.a)
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


def check_stamp(lab: Lab, stream: Stream, held: list[tuple[str, Path, float, float]], recomputed: bool) -> bool:
    """Whether tokens were surely made after the last push. `held`: digest, weights, and when their push began and ended, in order, the
    first before the request. `recomputed`: after each push, all KV before a token was."""
    assert stream.stamp is not None
    made = stream.stamp.made
    assert made[0].from_token == 0
    first = next(index for index, (_, _, _, ended) in reversed(list(enumerate(held))) if ended <= stream.times[0] or index == 0)
    order = [one.weights[:8] for one in made if one.weights != UNKNOWN]  # that is said between a push and the look behind it
    digests = [digest for digest, *_ in held]
    ends = [start + len(order) for start in range(first + 1) if digests[start : start + len(order)] == order]
    assert ends, f"{order} of pushes {digests}"
    for one in made[1:]:  # no token of these came before their push had begun
        began = min((began for digest, _, began, _ in held if digest == one.weights[:8]), default=held[1][2])
        assert stream.times[one.from_token] >= began
    until = [*(one.from_token for one in made[1:]), len(stream.tokens)]
    for one, end in list(zip(made, until, strict=True))[: None if recomputed else 1]:
        if one.weights != UNKNOWN:
            model = next(model for digest, model, *_ in held if digest == one.weights[:8])
            so_far = [*stream.prompt, *stream.tokens[: one.from_token]]
            assert lab.reference.answer(so_far, model, end - one.from_token) == tuple(stream.tokens[one.from_token : end])
    unknown = sum(end - one.from_token for one, end in zip(made, until, strict=True) if one.weights == UNKNOWN)
    assert unknown <= IN_FLIGHT * (len(held) - 1), f"{unknown} tokens are unknown"
    is_last = sum(seen > held[-1][3] for seen in stream.times) > IN_FLIGHT
    assert not is_last or (made[-1].weights != UNKNOWN and len(digests) in ends), f"{made} does not end with the last of {digests}"
    return is_last


def stamped(lab: Lab, engine: Engine, num_answers: int) -> None:
    """Answers while weights change: what their stamps say is what an engine without a cache says, and what pushes were made."""
    source, num_last = random.Random(num_answers), 0
    lab.have(lab.weights.base, engine)

    def told() -> bool:
        (stamp,) = stamps({"kv_transfer_params": engine.complete(lab.prompts(8), transfer=ASK).transfer})
        return stamp is not None and stamp.weights[:8] == lab.digest(engine)

    eventually(told, "the log says what it holds")
    held = [(lab.digest(engine), lab.weights.base, 0.0, 0.0)]
    for number in range(num_answers // NUM_RUNNING):
        held, model = held[-1:], held[-1][1]
        with Streams(engine, [lab.prompts(OPENING) for _ in range(NUM_RUNNING)], max_tokens=source.randrange(100, 130)) as streams:
            for _ in range(2 - number % 2):
                streams.move_on(source.randrange(1, 25))
                model, began, before = lab.weights.after(model), time.monotonic(), len(lab.seen(engine))
                recomputed = number % 2 == 0
                if recomputed:
                    engine.pause("keep", clear_cache=False)
                lab.push(engine, model)
                if recomputed:
                    eventually(lambda: engine.reset_prefix_cache(external=False), "running requests begin anew")
                    engine.resume()
                ended = time.monotonic()
                eventually(lambda before=before: len(lab.seen(engine)) > before, "the engine has seen them")
                held.append((lab.digest(engine), model, began, ended))
            streams.wait()
        num_last += sum(check_stamp(lab, stream, held, recomputed) for stream in streams.all)
    assert num_last > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_answers", [NUM_RUNNING, pytest.param(200, marks=pytest.mark.slow)])
def test_every_token_says_which_weights_made_it(lab: Lab, num_answers: int) -> None:
    stamped(lab, lab.a, num_answers)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_so_does_every_token_of_an_engine_with_drafts(lab: Lab) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = lab.start("drafts", lab.weights.base, args=("--speculative-config", json.dumps(drafts)))
    lab.wait_ready(engine)
    lab.wait_named(engine)
    stamped(lab, engine, 40)
    assert engine.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    engine.end()


def test_prompts_that_are_warmed_are_found_by_the_other_engine(lab: Lab) -> None:
    lab.have(lab.weights.base)
    prompts = [lab.prompts() for _ in range(3)]
    done = warm(prompts, f"http://127.0.0.1:{lab.a.port}", timeout_s=60)
    assert (done.prompts, done.tokens, done.weights[:8]) == (3, 3 * CACHED, lab.digest(lab.a))
    for prompt in prompts:
        check(lab.b.complete(prompt), CACHED, lab.reference(prompt, lab.weights.base))
    assert warm(prompts, f"http://127.0.0.1:{lab.b.port}", timeout_s=60).computed < 3 * BLOCK_TOKENS


def test_samples_of_two_prompts_have_a_stamp_each(lab: Lab) -> None:
    prompts = [lab.prompts(), lab.share(lab.weights.base)]
    body = {"model": lab.a.model, "prompt": prompts, "max_tokens": 4, "n": 2, "temperature": 1}
    said = [stamp for stamp in stamps(lab.a.post("/v1/completions", {**body, "kv_transfer_params": ASK})) if stamp is not None]
    assert [stamp.weights[:8] for stamp in said] == [lab.digest(lab.a)] * 4
    assert [sum(stamp.cached_tokens.values()) for stamp in (said[0], *said[2:])] == [0, CACHED, CACHED]


def test_an_answer_that_a_pause_aborts_has_its_stamp(lab: Lab) -> None:
    """As trainers do that push in the middle of rollouts and take the part that is there."""
    lab.have(lab.weights.base)
    with Streams(lab.a, [lab.prompts(OPENING)]) as streams:
        streams.arrive(10)
        lab.a.post("/pause?mode=abort", {})
        streams.wait()
        lab.a.post("/resume", {})
    (stream,) = streams.all
    assert stream.stamp is not None
    assert stream.stamp.weights[:8] == lab.digest(lab.a)


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


# ---------------------------------------------------------------------- past vLLM
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


# ---------------------------------------------------------------------- other engines
def test_a_push_misses_an_engine_that_restarts_with_base_weights(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    old = lab.share(weights.base)
    lab.push(lab.a, weights.new)
    check(lab.a.complete(old), 0, lab.reference(old, weights.new))
    lab.b.end()
    lab.b = lab.start("B2", weights.base).wait_ready()
    lab.pool.wait_engines(2)
    check(lab.b.complete(old), CACHED, lab.reference(old, weights.base))
    lab.apart(lab.a, weights.new, lab.b, weights.base)
    lab.push(lab.b, weights.new)
    check(lab.b.complete(old), CACHED, lab.reference(old, weights.new))
    lab.share(weights.new)


def test_without_the_plugin_weights_are_hidden_and_the_engine_keeps_its_cache_to_itself(lab: Lab, weights: Weights) -> None:
    lab.have(weights.base)
    known = lab.share(weights.base)
    with lab.start("no-plugin", weights.base, {"VLLM_PLUGINS": "none"}) as blind:
        said = [line for line in blind.process.log.read_text().splitlines() if "keeps its cache to itself" in line]
        assert len(said) == 1, said
        assert "VLLM_PLUGINS" in said[0]
        keys = settled_keys(lab.mooncake)
        for model in (weights.base, weights.new):
            lab.have(model, blind)
            for cached in (0, CACHED):
                check(blind.complete(known), cached, lab.reference(known, model))
        blind.report_metrics(known)
        assert blind.metric("vllm:epochkv_weights_known") == 0
        assert settled_keys(lab.mooncake) <= keys, "an engine that does not know its weights has written to the store"
    lab.share(weights.base)
