"""Which weights engines hold, as the real operator shows it: pushes in any order, one that misses an engine, one that nobody can tell."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from epochkv_operator.planning.context import PUSH_SECONDS
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import FIRST_WEIGHTS, FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, condition

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 5}}
A, B = FIRST_WEIGHTS, bytes.fromhex("77aa00ff" + "1" * 24)


@contextlib.contextmanager
def fleet(operator: OperatorProcess, space: Namespace, count: int) -> Iterator[list[FenceEngine]]:
    """A pool with so many engines that hold A."""
    operator.wait_ready()
    space.create_pool("policy", **POOL)
    secret = eventually(lambda: space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
    with contextlib.ExitStack() as stack:
        keys, endpoint = client_keys(secret), f"tcp://127.0.0.1:{operator.hub_port}"
        engines = [stack.enter_context(FenceEngine(endpoint, keys, f"engine-{number}")) for number in range(count)]
        eventually(lambda: held(space) == {A.hex(): count}, f"all hold A; log:\n{operator.tail()}")
        yield engines


def held(space: Namespace) -> dict[str, int]:
    """`status.weights`: engines by weights, in its order."""
    return {group["id"]: group["engines"] for group in space.status("policy").get("weights") or []}


def said(space: Namespace) -> tuple[str, str]:
    found = condition(space.status("policy"), "WeightsConverged")
    return found.get("status", ""), found.get("reason", "")


def column(space: Namespace, plane: ControlPlane) -> str:
    """What `kubectl get kvp` shows under WEIGHTS."""
    command = [str(plane.kubectl), f"--kubeconfig={plane.kubeconfig}", "-n", space.name, "get", "kvp", "policy"]
    head, row = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return row[head.index("WEIGHTS") : head.index("STORES")].strip()


@pytest.mark.slow  # `tests/unit/operator_runtime/test_view.py` has the minute, on a clock of its own
@pytest.mark.timeout(300)
def test_a_push_shows_and_one_that_misses_an_engine_is_named_after_a_minute(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator, fleet(operator, namespace, 3) as engines:
        assert said(namespace) == ("True", "Converged")
        assert column(namespace, plane) == "3f2a9c1e 3/3"
        began = datetime.now(UTC).replace(microsecond=0)
        for number, engine in enumerate(engines[:2]):
            engine.push(B)
            eventually(lambda n=number: held(namespace).get(B.hex()) == n + 1, f"shown; log:\n{operator.tail()}")
        assert list(held(namespace).items()) == [(B.hex(), 2), (A.hex(), 1)], "the most first"
        eventually(lambda: said(namespace) == ("False", "Updating"), f"told; log:\n{operator.tail()}")
        since = datetime.fromisoformat(namespace.status("policy")["weights"][0]["since"])
        assert began <= since <= datetime.now(UTC)
        assert column(namespace, plane) == "77aa00ff 2/3"
        assert namespace.events("Updating") == []
        assert operator.metric("epochkv_pool_weights_diverged_engines") == 1

        eventually(lambda: said(namespace) == ("False", "Diverged"), f"a push takes no longer; log:\n{operator.tail()}", PUSH_SECONDS + 30)
        status = namespace.status("policy")
        assert "engine-2 holds 3f2a9c1e instead of 77aa00ff" in condition(status, "WeightsConverged")["message"]
        assert condition(status, "Ready")["status"] == "True", "everybody serves"
        assert (status["targetEpoch"], status["epoch"]) == (0, 0), "and shares with those that hold the same"
        eventually(lambda: namespace.events("Diverged"), "an Event")
        before = namespace.versions()
        time.sleep(4)
        assert namespace.versions() == before, "engines that stay apart are not written about again and again"

        engines[2].push(B)
        eventually(lambda: held(namespace) == {B.hex(): 3}, f"shown; log:\n{operator.tail()}")
        assert said(namespace) == ("True", "Converged")
        assert datetime.fromisoformat(namespace.status("policy")["weights"][0]["since"]) == since, "a time is written once"


def test_weights_that_nobody_can_tell_are_said_to_be_unknown(plane: ControlPlane, namespace: Namespace, operator: OperatorProcess) -> None:
    with fleet(operator, namespace, 2) as engines:
        engines[1].push(None, "rank 1: no answer within 10 s")
        eventually(lambda: said(namespace) == ("Unknown", "Unknown"), f"told; log:\n{operator.tail()}")
        status = namespace.status("policy")
        assert "share nothing: engine-1 (rank 1: no answer within 10 s)" in condition(status, "WeightsConverged")["message"]
        assert {entry["name"]: entry.get("weights") for entry in status["externalEngines"]} == {"engine-0": "3f2a9c1e", "engine-1": None}
        assert column(namespace, plane) == "3f2a9c1e 1/2"
        assert condition(status, "Ready")["status"] == "True"
        assert 'state="unknown"} 1.0' in operator.http("/metrics")[1]
        engines[1].push(A)
        eventually(lambda: said(namespace) == ("True", "Converged"), f"told; log:\n{operator.tail()}")
