"""Which weights engines hold, as the real operator shows it: pushes in any order, one that misses an engine, one that nobody can tell."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

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
