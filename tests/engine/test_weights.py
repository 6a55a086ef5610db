"""New weights in running engines: the two safe orders, the unsafe one, and engines that were not there for the push.

Every answer is compared, token by token, with an engine of those weights that caches nothing. The tests share two
engines and leave both with the same weights, in use of the pool's epoch.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from epochkv_fence import client
from tests.engine.conftest import (
    BLOCKS,
    CACHED,
    Pair,
    Prompts,
    Reference,
    Weights,
    check,
    eventually,
    fence_lines,
    settled_keys,
)


@pytest.fixture(scope="module")
def trainer(pair: Pair) -> Iterator[client.Pool]:
    """The trainer's client, as a trainer uses it: with the pool's connection file."""
    path = pair.folder / "connection.json"
    path.write_text(json.dumps(pair.pool.connection()))
    with client.Pool.connect(path) as pool:
        yield pool


def engine_states(trainer: client.Pool) -> list[str]:
    return sorted(engine.state for engine in trainer.engines())


class Traffic:
    """Requests to both engines, one after the other, on a thread of its own."""

    def __init__(self, pair: Pair, prompts: list[list[int]]) -> None:
        self._pair, self._prompts = pair, prompts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.cached: list[int] = []
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for prompt in self._prompts:
                    for engine in self._pair.both:
                        self.cached.append(engine.complete(prompt).cached)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Traffic:
        self._thread.start()
        eventually(lambda: len(self.cached) > 3 or self.error is not None, "requests are served")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120.0)
        assert self.error is None, f"a request failed: {self.error!r}"
        assert not self._thread.is_alive()


def test_push_under_pause(pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights) -> None:
    old = [prompts() for _ in range(2)]
    for prompt in old:
        pair.check_sharing(prompt, reference(prompt, pair.model))
    before = trainer.status().target
    stale = [reference(prompt, pair.model) for prompt in old]
    with trainer.weight_update("under-pause", timeout_s=60) as update:
        assert len(update.boots) == 2
        for engine in pair.both:
            engine.pause("abort", clear_cache=False)
        pair.push(weights.after(pair.model))
    assert update.reset is not None
    assert (update.reset.epoch, update.reset.published, update.reset.laggards, update.reset.bypassed) == (before + 1, True, (), 0)
    status = trainer.status()
    assert (status.published, status.weights_version, status.origin) == (before + 1, "under-pause", "Trainer")
    assert engine_states(trainer) == ["use", "use"]
    for engine in pair.both:
        engine.resume()
    for prompt, wrong in zip(old, stale, strict=True):
        assert reference(prompt, pair.model) != wrong, "the weights do not differ enough to show anything"
        pair.check_sharing(prompt, reference(prompt, pair.model))


def test_fence_first_and_push_while_serving(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights
) -> None:
    served = [prompts() for _ in range(2)]
    for prompt in served:
        pair.check_sharing(prompt, reference(prompt, pair.model))
    before = trainer.status().target
    with trainer.weight_update("fence-first", order="fence_first", timeout_s=60) as update:
        status = trainer.status()
        assert (status.target, status.published) == (before + 1, before + 1), "the old epoch is out of use before the push begins"
        assert engine_states(trainer) == ["bypass", "bypass"]
        keys = settled_keys(pair.mooncake)
        with Traffic(pair, served) as traffic:
            pair.push(weights.after(pair.model))
            begun = len(traffic.cached)
            eventually(lambda: len(traffic.cached) >= begun + 4, "requests are served after the push")
        assert set(traffic.cached) == {0}, "KV was reused while weights changed"
        assert settled_keys(pair.mooncake) <= keys, "KV was shared while weights changed"
    assert update.reset is not None
    assert (update.reset.epoch, update.reset.published, update.reset.bypassed) == (before + 1, True, 0)
    assert trainer.status().target == before + 1, "one epoch for the whole update"
    for prompt in served:
        pair.check_sharing(prompt, reference(prompt, pair.model))


def test_a_failed_push_leaves_nobody_sharing(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights
) -> None:
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))
    old = pair.model
    with pytest.raises(RuntimeError, match="the second engine"), trainer.weight_update("half", timeout_s=60):  # noqa: PT012
        pair.a.reload_weights(weights.after(old))
        raise RuntimeError("the second engine could not be reached")
    eventually(lambda: trainer.status().converged, "the epoch is published")
    assert engine_states(trainer) == ["bypass", "bypass"]
    for engine, model in zip(pair.both, (weights.after(old), old), strict=True):
        for _ in range(2):
            answer = engine.complete(prompt)
            check(answer, 0, reference(prompt, model))
    with trainer.weight_update("whole", timeout_s=60):
        pair.push(weights.after(old))
    pair.check_sharing(prompt, reference(prompt, pair.model))


@contextmanager
def no_gate(pair: Pair) -> Iterator[None]:
    """The pool as somebody declares it who says that weights never change under an engine."""
    pair.pool.configure(weights_source="Model")
    try:
        yield
    finally:
        pair.pool.configure(weights_source="Pushed")


def test_pushing_while_serving_and_raising_without_a_gate_goes_wrong(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights
) -> None:
    """The fault that the gate is for: an engine that the push has not reached poisons the new epoch."""
    old, new = pair.model, weights.after(pair.model)
    asked = [prompts() for _ in range(3)]
    with no_gate(pair):
        pair.a.reload_weights(new)  # B is late, and everybody serves
        assert trainer.reset(timeout_s=60).published
        assert engine_states(trainer) == ["use", "use"]
        wrong = []
        for prompt in asked:
            before = settled_keys(pair.mooncake)
            assert pair.b.complete(prompt).tokens == reference(prompt, old)
            eventually(lambda before=before: len(set(pair.mooncake.keys()) - before) == BLOCKS, "B's KV in the store")
            answer = pair.a.complete(prompt)
            assert answer.cached == CACHED, "A did not take what B had stored"
            wrong.append(answer.tokens != reference(prompt, new))
        assert all(wrong), "KV of other weights changed no answer"
    with trainer.weight_update("repaired", timeout_s=60):
        pair.push(new)
    for prompt in asked:
        pair.check_sharing(prompt, reference(prompt, new))


def test_the_gate_catches_an_engine_that_restarts_during_the_push(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights
) -> None:
    """It comes back with base weights (and from its environment alone), serves without any cache, and says so."""
    asked = [prompts() for _ in range(3)]
    with trainer.weight_update("one-restarts", timeout_s=60) as update:
        pair.b.end()
        pair.a.reload_weights(weights.after(pair.model))
        pair.model = weights.after(pair.model)
        pair.b = pair.start_from_environment()
        pair.b.wait_ready()
        eventually(lambda: len([e for e in pair.pool.snapshot().engines if e.alive and e.boot not in update.boots]) == 1, "B is back")
    assert update.reset is not None
    assert update.reset.published
    (late,) = [engine for engine in trainer.engines() if bytes.fromhex(engine.boot) not in update.boots]
    assert (late.state, late.epoch) == ("bypass", update.epoch)
    assert late.name.startswith(f"{socket.gethostname()}:"), "an engine without a name is called by its host and process"
    assert [view.boot.hex() for view in pair.pool.snapshot().weights_pending] == [late.boot]
    assert "in bypass: the hub does not let this engine use it now" in fence_lines(pair.b)[-1]
    for prompt in asked:
        keys = pair.mooncake.keys()
        for _ in range(2):
            answer = pair.b.complete(prompt)
            check(answer, 0, reference(prompt, weights.base))
        assert settled_keys(pair.mooncake) <= set(keys), "an engine in bypass has written to the store"  # reclaim may take old ones
        assert pair.save_through_a(prompt) == reference(prompt, pair.model)
        answer = pair.b.complete(prompt)
        check(answer, 0, reference(prompt, weights.base))


def test_an_engine_joins_with_the_first_update_that_it_is_part_of(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference, weights: Weights
) -> None:
    """B of the test before."""
    assert engine_states(trainer) == ["bypass", "use"]
    with trainer.weight_update("with-everybody", timeout_s=60) as update:
        assert len(update.boots) == 2
        pair.push(weights.after(pair.model))
    assert engine_states(trainer) == ["use", "use"]
    assert "in use, back from bypass" in fence_lines(pair.b)[-1]
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))


def test_a_private_reset_costs_one_engine_its_caches_until_the_next_epoch(
    pair: Pair, trainer: client.Pool, prompts: Prompts, reference: Reference
) -> None:
    """`on_local_reset: private`, the default, as B has it now: clear means clear, for this engine alone."""
    prompt = prompts()
    expected = reference(prompt, pair.model)
    pair.check_sharing(prompt, expected)
    target = trainer.status().target
    assert pair.b.reset_prefix_cache(external=True)
    for _ in range(2):
        answer = pair.b.complete(prompt)
        check(answer, 0, expected)
    assert pair.a.complete(prompt).cached == CACHED
    assert "the caches of this engine alone were reset" in fence_lines(pair.b)[-1]

    def measured() -> bool:
        pair.b.complete(prompt, 1)  # metrics travel with a step, at most once a second
        return pair.b.metric("vllm:epochkv_waiting_after_reset") == 1.0

    eventually(measured, "a metric of the engine")
    eventually(
        lambda: [view.stats["waiting_after_reset"] for view in pair.pool.snapshot().engines if view.alive].count(1.0) == 1,
        "a heartbeat that says so",
    )
    # What a trainer sees, from the heartbeat that the reset itself caused.
    assert engine_states(trainer) == ["private", "use"]
    assert trainer.status().target == target
    assert trainer.reset(timeout_s=60).published
    assert engine_states(trainer) == ["use", "use"]
    eventually(lambda: "in use, back from bypass" in fence_lines(pair.b)[-1], "its log says that it is back")
    pair.check_sharing(prompt, expected)
