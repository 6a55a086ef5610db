"""The trainer client against the operator's hub: no Kubernetes access, and yet what it asks for is in the pool's status."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import Pool, PoolError, Reset, WeightsDiverged
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import FIRST_WEIGHTS, FenceEngine
from tests.cluster.operator_harness import TAKEOVER_SECONDS, Namespace, OperatorProcess, condition
from tests.cluster.test_operator_external import joined, mounted
from tests.cluster.test_operator_faults import LEASES
from tests.cluster.test_operator_reset import History, published

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}


@contextlib.contextmanager
def trained(operator: OperatorProcess, space: Namespace, directory: Path, engines: int = 2) -> Iterator[tuple[Pool, list[FenceEngine]]]:
    """A pool with external engines, and a trainer connected to it."""
    operator.wait_ready()
    space.create_pool("policy", **POOL)
    connection = mounted(space, directory)
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(joined(connection, f"ray-{number}")) for number in range(engines)]
        eventually(lambda: all(engine.epoch == 0 for engine in found), "joined")
        yield stack.enter_context(Pool.connect(connection, timeout_s=30)), found


def test_a_trainers_reset_is_in_the_pools_status(namespace: Namespace, operator: OperatorProcess, tmp_path: Path) -> None:
    with trained(operator, namespace, tmp_path) as (pool, engines):
        done = pool.reset(timeout_s=30)
        assert (done.epoch, done.published, done.noop) == (1, True, False)
        # Published means: every engine is there, and the pool object says so already.
        assert {engine.epoch for engine in engines} == {1}
        assert namespace.status("policy")["epoch"] == 1
        status = eventually(lambda: published(namespace, 1), "reported")
        assert status["reset"]["origin"] == "Trainer"
        assert namespace.pool("policy")["spec"]["resetEpoch"] == 0, "the spec is its owner's"
        assert condition(status, "EpochConverged")["reason"] == "Published"
        said = eventually(lambda: namespace.events("EpochPublished"), "an Event")
        assert "asked for by Trainer" in said[0]["note"]
        seen = pool.status()
        assert (seen.target, seen.published, seen.origin) == (1, 1, "Trainer")
        assert {engine.name for engine in seen.engines} == {"ray-0", "ray-1"}
        again = pool.reset(epoch=1, timeout_s=30)
        assert (again.noop, again.published) == (True, True)
        # The spec's turn: origins change hands.
        namespace.bump("policy", 2)
        status = eventually(lambda: published(namespace, 2), "reported")
        assert status["reset"]["origin"] == "Spec"
        assert pool.status().origin == "Spec"


def test_a_spec_that_lags_behind_is_told_and_resets_nothing(namespace: Namespace, operator: OperatorProcess, tmp_path: Path) -> None:
    with trained(operator, namespace, tmp_path) as (pool, engines):
        assert pool.reset(epoch=5, timeout_s=30).published
        eventually(lambda: published(namespace, 5), "reported")
        for asked in (3, 5):
            before = namespace.pool("policy")["status"]["targetEpoch"]
            namespace.bump("policy", asked)
            found = eventually(
                lambda asked=asked: (
                    c
                    if f"spec.resetEpoch {asked} " in (c := condition(namespace.status("policy"), "EpochConverged")).get("message", "")
                    else None
                ),
                "told",
            )
            assert (found["status"], found["reason"]) == ("True", "EpochAhead")
            assert "Set 6 or higher" in found["message"]
            assert namespace.status("policy")["targetEpoch"] == before == 5
        assert {engine.epoch for engine in engines} == {5}
        namespace.bump("policy", 6)
        status = eventually(lambda: published(namespace, 6), "published")
        eventually(lambda: condition(namespace.status("policy"), "EpochConverged").get("reason") == "Published", "told")
        assert status["reset"]["origin"] == "Spec"
        assert condition(namespace.status("policy"), "Ready")["status"] == "True"


def test_kubectl_and_trainer_racing_end_at_the_maximum(namespace: Namespace, operator: OperatorProcess, tmp_path: Path) -> None:
    with trained(operator, namespace, tmp_path) as (pool, engines):
        with History(namespace) as history:
            top = 0
            for step in range(1, 5):
                spec, client = top + 1 + step % 3, top + 1 + (step + 1) % 3
                together = threading.Barrier(2)
                results: list[Reset] = []

                def train(epoch: int = client, together: threading.Barrier = together, results: list[Reset] = results) -> None:
                    together.wait(10)
                    results.append(pool.reset(epoch=epoch, timeout_s=30))

                trainer = threading.Thread(target=train)
                trainer.start()
                together.wait(10)
                namespace.bump("policy", spec)
                trainer.join(40)
                assert results, f"the trainer's reset of {client}"
                assert results[0].published
                top = max(spec, client)
                eventually(lambda top=top: namespace.status("policy").get("epoch") == top, f"epoch {top}")
                assert {engine.epoch for engine in engines} == {top}
            eventually(lambda: history.epochs and history.epochs[-1] == (top, top), "seen by the watch")
        history.assert_monotone()
        status = namespace.status("policy")
        assert status["reset"]["epoch"] == top
        assert status["reset"]["origin"] in ("Spec", "Trainer")


@pytest.mark.parametrize("moment", ["before", "after"], ids=["before-it-is-recorded", "after-it-is-recorded"])
def test_a_reset_survives_the_operator(plane: ControlPlane, namespace: Namespace, tmp_path: Path, moment: str) -> None:
    """The client repeats itself to whatever leads next; one reset is one epoch."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS))
        pool, engines = stack.enter_context(trained(first, namespace, tmp_path))
        history = stack.enter_context(History(namespace))
        for engine in engines:
            engine.hold.set()  # nothing can be published before we say so
        if moment == "before":
            first.process.freeze()
        results: list[Reset | PoolError] = []

        def train() -> None:
            try:
                results.append(pool.reset(timeout_s=90, on_failure="crash"))
            except PoolError as error:
                results.append(error)

        trainer = threading.Thread(target=train)
        trainer.start()
        if moment == "after":
            eventually(lambda: namespace.status("policy").get("targetEpoch") == 1, "recorded")
        else:
            time.sleep(1)
            assert namespace.status("policy").get("targetEpoch") == 0, "it was frozen"
        first.process.kill()
        assert not results
        for engine in engines:
            engine.hold.clear()
        second = stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, hub_port=first.hub_port))
        second.wait_ready()
        trainer.join(100)
        (done,) = results
        assert isinstance(done, Reset), done
        assert (done.epoch, done.published) == (1, True)
        assert namespace.status("policy")["epoch"] == 1
        status = eventually(lambda: s if (s := namespace.status("policy")).get("reset", {}).get("epoch") == 1 else None, "reported")
        assert status["reset"]["origin"] == "Trainer"
        eventually(lambda: {engine.epoch for engine in engines} == {1}, "adopted")
        history.assert_monotone()


def test_a_push_is_proved_and_labelled_without_an_epoch(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator, trained(operator, namespace, tmp_path) as (pool, engines):
        first, second = FIRST_WEIGHTS, bytes(range(16))
        with pool.weight_update("step-1", timeout_s=30):
            for engine in engines:
                engine.push(second)
        # Labelled means: it is on record already.
        assert namespace.status("policy")["weightsLabels"] == [{"id": second.hex(), "label": "step-1"}]
        found = eventually(
            lambda: w if (w := namespace.status("policy").get("weights") or [{}])[0].get("label") == "step-1" else None, "shown"
        )
        assert [(entry["id"], entry["engines"]) for entry in found] == [(second.hex(), 2)]
        assert namespace.status("policy")["targetEpoch"] == 0, "no epoch was needed for it"
        # Half a push: the one that it missed is named, by the client and by the condition.
        with pytest.raises(WeightsDiverged, match="ray-1") as raised, pool.weight_update("step-2", timeout_s=1):
            engines[0].push(first)
        assert list(raised.value.engines) == ["ray-1"]
        said = eventually(
            lambda: c if (c := condition(namespace.status("policy"), "WeightsConverged")).get("reason") == "Updating" else None, "told"
        )
        assert "ray-1 holds 00010203 (step-1) instead of 3f2a9c1e" in said["message"]
        engines[0].push(None, "rank 1: no answer within 10 s")
        unknown = eventually(
            lambda: c if (c := condition(namespace.status("policy"), "WeightsConverged")).get("status") == "Unknown" else None, "told"
        )
        assert "share nothing: ray-0 (rank 1: no answer within 10 s)" in unknown["message"]
        # Back to the weights before, which keep their label over a change of operator.
        engines[0].push(second)
        assert pool.wait_weights(timeout_s=30).groups[0].label == "step-1"
        operator.process.kill()
        namespace.delete(LEASES, "epochkv-operator")
        operator.start().wait_ready()
        eventually(lambda: pool.status().labels == {second.hex(): "step-1"}, "remembered")
