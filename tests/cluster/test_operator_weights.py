"""Who may join an epoch, through the real operator: by age and by name, with the operator frozen, killed or cut off meanwhile."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epochkv_fence.messages import Mode
from hack.cluster.controlplane import ControlPlane
from tests.cluster.fault_proxy import Fault, FaultProxy
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, TAKEOVER_SECONDS, Namespace, OperatorProcess, condition, eventually

JOIN_SECONDS = 3
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 10, "joinAfterSeconds": JOIN_SECONDS}}


@contextlib.contextmanager
def boot(operator: OperatorProcess, space: Namespace, name: str) -> Iterator[FenceEngine]:
    """An engine boot that starts now."""
    secret = eventually(lambda: space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", client_keys(secret), name) as engine:
        yield engine


def old_enough(space: Namespace, operator: OperatorProcess) -> None:
    """Long enough that every boot there is may join what is asked for from now on: its age by the slowest clock that the lease's
    margin allows for, and the read after it.
    """
    eventually(lambda: space.status("policy").get("engines", {}).get("total"), f"engines reported; log:\n{operator.tail()}")
    time.sleep(1.2 * JOIN_SECONDS + 1.5)


def test_old_boots_join_and_young_ones_say_what_they_wait_for(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        with boot(operator, namespace, "old") as old:
            eventually(lambda: old.epoch == 0, "joined")
            old_enough(namespace, operator)
            with boot(operator, namespace, "young") as young:
                eventually(lambda: young.epoch == 0, "joined")
                namespace.bump("policy", 1)
                eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
                eventually(lambda: (old.epoch, young.epoch) == (1, 1), "both there")
                assert (old.mode, young.mode) == (Mode.USE, Mode.BYPASS)
                found = eventually(
                    lambda: c if (c := condition(namespace.status("policy"), "WeightsConverged")).get("status") == "False" else None,
                    f"said so; log:\n{operator.tail()}",
                )
                assert found["reason"] == "WeightsPending"
                assert "weights of epoch 1: young" in found["message"]
                assert '{"spec":{"resetEpoch":2}}' in found["message"]
                assert condition(namespace.status("policy"), "Ready")["status"] == "True"
                assert namespace.status("policy")["engines"]["bypassed"] == 1
                eventually(lambda: operator.metric("epochkv_pool_weights_pending_engines") == 1, "metric")
                old_enough(namespace, operator)
                namespace.bump("policy", 2)
                eventually(lambda: (young.epoch, young.mode) == (2, Mode.USE), f"joined; log:\n{operator.tail()}")
                eventually(lambda: condition(namespace.status("policy"), "WeightsConverged").get("status") == "True", "said so")


def test_a_boot_that_started_while_the_operator_was_frozen_over_a_raise_does_not_join(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> None:
    """When it thaws, the raise comes out of a socket's buffer and looks new; the boot has grown old enough meanwhile, with base
    weights.
    """
    with OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=60) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        with boot(operator, namespace, "old") as old:
            eventually(lambda: old.epoch == 0, "joined")
            old_enough(namespace, operator)
            pid = operator.pid
            operator.freeze()
            namespace.bump("policy", 1)
            with boot(operator, namespace, "young") as young:
                time.sleep(1.2 * JOIN_SECONDS + 1.5)  # old enough, had the epoch been asked for only now
                assert namespace.status("policy").get("targetEpoch") == 0, "the operator was frozen"
                operator.thaw()
                eventually(lambda: (old.epoch, young.epoch) == (1, 1), f"both there; log:\n{operator.tail()}")
                eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
                assert (old.mode, young.mode) == (Mode.USE, Mode.BYPASS)
                assert operator.pid == pid
                assert operator.process is not None
                assert operator.process.poll() is None, "the very process that was frozen"
                assert (1, Mode.USE) not in young.adopted


def test_a_boot_that_started_while_the_watch_was_cut_off_does_not_join(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    """Everything about pools is held back, the Lease goes on: the watch that proves that watches live says nothing about this one."""
    with FaultProxy(plane, tmp_path) as proxy:
        with OperatorProcess(plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig, lease_duration_seconds=60) as operator:
            operator.wait_ready()
            namespace.create_pool("policy", **POOL)
            with boot(operator, namespace, "old") as old:
                eventually(lambda: old.epoch == 0, "joined")
                old_enough(namespace, operator)
                proxy.hold_streams("/kvcachepools")
                proxy.decide = lambda method, path: Fault(500) if "/kvcachepools" in path else None
                namespace.bump("policy", 1)
                with boot(operator, namespace, "young") as young:
                    eventually(lambda: proxy.faults, f"reads fail meanwhile; log:\n{operator.tail()}")
                    time.sleep(1.2 * JOIN_SECONDS + 1.5)
                    assert namespace.status("policy").get("targetEpoch") == 0, "the raise was held back"
                    assert proxy.held, "the watch had something to say"
                    proxy.decide = lambda method, path: None
                    proxy.release_streams()
                    eventually(lambda: (old.epoch, young.epoch) == (1, 1), f"both there; log:\n{operator.tail()}", 60)
                    assert (old.mode, young.mode) == (Mode.USE, Mode.BYPASS)


def test_an_operator_that_starts_after_the_raise_lets_nobody_join_by_age(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS))
        first.wait_ready()
        namespace.create_pool("policy", **POOL)
        engine = stack.enter_context(boot(first, namespace, "old"))
        eventually(lambda: engine.epoch == 0, "joined")
        old_enough(namespace, first)
        first.kill()
        namespace.bump("policy", 1)
        port = first.hub_port
        second = stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, hub_port=port))
        second.wait_ready()
        eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{second.tail()}", 60)
        eventually(lambda: engine.epoch == 1, "there", 60)
        assert engine.mode is Mode.BYPASS
        # It did see the next one being asked for.
        old_enough(namespace, second)
        namespace.bump("policy", 2)
        eventually(lambda: (engine.epoch, engine.mode) == (2, Mode.USE), f"joined; log:\n{second.tail()}")


def test_fence_first_holds_every_engine_until_the_weights_are_said_to_be_ready(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        with boot(operator, namespace, "old") as old:
            eventually(lambda: old.epoch == 0, "joined")
            old_enough(namespace, operator)
            namespace.patch_spec("policy", resetEpoch=1, weightsVersion="step-1")
            eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
            assert (old.epoch, old.mode) == (1, Mode.BYPASS)
            held = eventually(
                lambda: c if (c := condition(namespace.status("policy"), "WeightsConverged")).get("status") == "False" else None, "held"
            )
            assert held["reason"] == "WeightsPending"
            patch = held["message"].split("-p ")[1].strip("'")
            assert json.loads(patch) == {"spec": {"weightsReady": "step-1"}}
            status = namespace.status("policy")
            assert status["weightsVersion"] == "step-1"
            assert status["reset"]["weightsVersion"] == "step-1"
            with boot(operator, namespace, "young") as young:  # started in mid-push: with which weights, nobody knows
                eventually(lambda: young.epoch == 1, "there")
                namespace.patch_spec("policy", weightsReady="step-1")
                eventually(lambda: old.mode is Mode.USE, f"joined; log:\n{operator.tail()}")
                assert (young.epoch, young.mode) == (1, Mode.BYPASS)
                assert namespace.status("policy")["epoch"] == 1, "no epoch was needed for it"
            # The next one, named and ready at once: push under pause.
            namespace.patch_spec("policy", resetEpoch=2, weightsVersion="step-2", weightsReady="step-2")
            eventually(lambda: (old.epoch, old.mode) == (2, Mode.USE), f"joined; log:\n{operator.tail()}")
            eventually(lambda: namespace.status("policy").get("weightsVersion") == "step-2", "named")
