"""Both safe orders of push and reset on real engines in pods: with kubectl alone, and with the trainer client.

The engines answer while the weights are replaced in the one order that allows it; every answer is compared with that of an engine
without any cache.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from epochkv_fence.client import Pool
from hack.demo.journey import (
    ANSWER_TOKENS,
    BASE_WEIGHTS,
    CACHED,
    ENGINE,
    MODEL,
    NAMESPACE,
    NEW_WEIGHTS,
    POOL,
    REFERENCE,
    Prompt,
    make_prompts,
)
from hack.demo.kube import Json, Kube, condition, wait_until
from hack.engine_api import Answer, EngineApi
from tests.e2e.conftest import connection_folder, forwarded_hub, wait_condition

pytestmark = pytest.mark.timeout(900)
SECONDS = 120.0


@dataclass
class Fleet:
    """The demo's two engines and the judge, at known weights."""

    kube: Kube
    engines: list[EngineApi]
    reference: EngineApi
    weights: str = ""

    def pool(self) -> Json:
        return self.kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/kvcachepools/{POOL}")

    def next_epoch(self) -> int:
        return int(self.pool()["status"]["targetEpoch"]) + 1

    def patch(self, **spec: object) -> None:
        self.kube.kubectl("-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", json.dumps({"spec": spec}))

    def wait_epoch(self, epoch: int) -> None:
        self.kube.kubectl("-n", NAMESPACE, "wait", f"kvp/{POOL}", f"--for=jsonpath={{.status.epoch}}={epoch}", "--timeout=60s")

    def push(self, weights: str) -> None:
        for engine in (*self.engines, self.reference):
            engine.reload_weights(weights)
        self.weights = weights

    def right(self, prompt: Prompt) -> tuple[int, ...]:
        answer = self.reference.complete(prompt, ANSWER_TOKENS)
        assert answer.cached == 0
        return answer.tokens

    def bypassed(self) -> int:
        return int(self.pool()["status"]["engines"]["bypassed"])

    def other_weights(self) -> str:
        return NEW_WEIGHTS if self.weights == BASE_WEIGHTS else BASE_WEIGHTS

    def shares(self, prompt: Prompt) -> None:
        """The first engine computes, the other one takes it from L2; both are right.

        A lookup that meets its deadline on a busy machine is a miss, so a few prompts are tried; each answer has to be right.
        """
        first, second = self.engines
        for attempt in range(5):
            asked = prompt if attempt == 0 else make_prompts(hash(prompt) % 10**6 + attempt, 1)[0]
            right = self.right(asked)
            written = first.complete(asked, ANSWER_TOKENS)
            assert (written.tokens, written.cached) == (right, 0)
            time.sleep(1.0)
            read = second.complete(asked, ANSWER_TOKENS)
            assert read.tokens == right
            if read.cached == CACHED:
                return
        pytest.fail("five prompts in a row were not shared between the engines")


@pytest.fixture(scope="module")
def fleet(kube: Kube) -> Fleet:
    """Base weights everywhere, and an epoch that says so: engines in use of it."""
    engines = kube.engines(NAMESPACE, ENGINE, MODEL)
    references = kube.engines(NAMESPACE, REFERENCE, MODEL)
    assert len(engines) == 2
    assert references
    made = Fleet(kube, list(engines), references[0])
    made.push(BASE_WEIGHTS)
    epoch = made.next_epoch()
    made.patch(resetEpoch=epoch)
    made.wait_epoch(epoch)
    wait_until(lambda: made.bypassed() == 0, SECONDS, lambda: f"engines stay in bypass: {made.pool()['status']}")
    return made


@dataclass
class Traffic:
    """Prompts to every engine in turn, until it is stopped."""

    fleet: Fleet
    prompts: list[Prompt]
    answers: list[tuple[Prompt, Answer]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        stop = threading.Event()

        def send() -> None:
            number = 0
            while not stop.is_set():
                engine = self.fleet.engines[number % 2]
                prompt = self.prompts[number // 2 % len(self.prompts)]
                try:
                    self.answers.append((prompt, engine.complete(prompt, ANSWER_TOKENS)))
                except Exception as error:
                    self.errors.append(error)
                number += 1

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_fence_first_with_kubectl(fleet: Fleet) -> None:
    """Epoch and version together; the engines answer, without any reuse, while they get the weights; then `weightsReady`."""
    prompts = make_prompts(7001, 3)
    fleet.shares(prompts[0])
    epoch, version = fleet.next_epoch(), f"fence-first-{time.time_ns()}"
    old_right = {prompt: fleet.right(prompt) for prompt in prompts}

    fleet.patch(resetEpoch=epoch, weightsVersion=version)
    fleet.wait_epoch(epoch)
    wait_until(lambda: fleet.bypassed() == 2, SECONDS, lambda: f"not in bypass: {fleet.pool()['status']}")
    waiting = wait_condition(fleet.kube, "kvcachepools", POOL, "WeightsConverged", "False", SECONDS)
    assert waiting["reason"] == "WeightsPending"
    assert "weightsReady" in waiting["message"]

    traffic = Traffic(fleet, prompts)
    with traffic.flowing():
        wait_until(lambda: len(traffic.answers) >= 4, SECONDS, lambda: "no answers before the push")
        fleet.push(fleet.other_weights())
        seen = len(traffic.answers)
        wait_until(lambda: len(traffic.answers) >= seen + 6, SECONDS, lambda: "no answers after the push")
        assert fleet.bypassed() == 2
    assert traffic.errors == []
    assert {answer.cached for _, answer in traffic.answers} == {0}
    new_right = {prompt: fleet.right(prompt) for prompt in prompts}
    assert all(old_right[prompt] != new_right[prompt] for prompt in prompts)
    for prompt, answer in traffic.answers[:4]:
        assert answer.tokens == old_right[prompt]
    for prompt, answer in traffic.answers[seen + 2 :]:
        assert answer.tokens == new_right[prompt]

    fleet.patch(weightsReady=version)
    wait_condition(fleet.kube, "kvcachepools", POOL, "WeightsConverged", "True", SECONDS)
    wait_until(lambda: fleet.bypassed() == 0, SECONDS, lambda: f"still in bypass: {fleet.pool()['status']}")
    assert fleet.pool()["status"]["weightsVersion"] == version
    assert fleet.pool()["status"]["epoch"] == epoch  # the same epoch: `weightsReady` resets nothing
    fleet.shares(prompts[1])


def test_push_under_pause_with_the_client(fleet: Fleet, tmp_path: Path) -> None:
    """The client lists the engines, the trainer pushes, the client bumps and waits; no Kubernetes access is used."""
    (prompt,) = make_prompts(7002, 1)
    fleet.shares(prompt)
    old = fleet.right(prompt)
    version, before = f"under-pause-{time.time_ns()}", fleet.next_epoch()
    with forwarded_hub(fleet.kube) as port, Pool.connect(connection_folder(fleet.kube, tmp_path, port)) as pool:
        for engine in fleet.engines:
            engine.request("POST", "/pause?mode=abort")
        with pool.weight_update(version, timeout_s=60):
            fleet.push(fleet.other_weights())
        status = pool.status()
        for engine in fleet.engines:
            engine.request("POST", "/resume")
    assert status.published == before
    right = fleet.right(prompt)
    assert right != old
    first, second = (engine.complete(prompt, ANSWER_TOKENS) for engine in fleet.engines)
    assert (first.tokens, second.tokens) == (right, right)
    assert first.cached == 0
    fleet.shares(make_prompts(7003, 1)[0])

    wait_until(
        lambda: fleet.pool()["status"].get("reset", {}).get("completionTime"), SECONDS, lambda: f"reset is open: {fleet.pool()['status']}"
    )
    reported = fleet.pool()["status"]
    assert (reported["epoch"], reported["targetEpoch"], reported["weightsVersion"]) == (before, before, version)
    assert reported["reset"]["origin"] == "Trainer"


def test_kubectl_below_the_clients_epoch_is_reported_and_not_applied(fleet: Fleet, tmp_path: Path) -> None:
    with forwarded_hub(fleet.kube) as port, Pool.connect(connection_folder(fleet.kube, tmp_path, port)) as pool:
        done = pool.reset(fleet.next_epoch() + 5, timeout_s=60)
        assert done.published
        again = pool.reset(done.epoch, timeout_s=60)
        assert again.noop
    fleet.patch(resetEpoch=done.epoch - 2)
    wait_until(
        lambda: condition(fleet.pool(), "EpochConverged").get("reason") == "EpochAhead",
        SECONDS,
        lambda: f"not reported: {condition(fleet.pool(), 'EpochConverged')}",
    )
    assert str(done.epoch + 1) in condition(fleet.pool(), "EpochConverged")["message"]  # the number to set
    assert fleet.pool()["status"]["epoch"] == done.epoch
    fleet.patch(resetEpoch=done.epoch + 1)
    fleet.wait_epoch(done.epoch + 1)
