"""Pods leave their Service while their engines hold other weights: real endpoints by the real controllers, at every step of a push, of
restarts with base weights, and of operators that die. No node runs the pods: `Node` writes what a kubelet would.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, LEASES, POOLS, Namespace, OperatorProcess, condition, leading_operator
from tests.cluster.test_operator_engines import PODS, pods_of
from tests.cluster.test_operator_lost_rights import bind, grant

Json = dict[str, Any]
GATE = "epochkv.io/weights"
NODES = "/api/v1/nodes"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
WRITES = "epochkv_operator_api_writes_total"
START_SECONDS = 2.5
MERGE = "application/strategic-merge-patch+json"
POOL: Json = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 3}}
PUSHED = bytes(range(16))


def clock() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Node:
    """A node's kubelet, as far as the API server sees it: a pod is ready when its containers are and its gates are True."""

    def __init__(self, space: Namespace) -> None:
        self.space, self.name = space, f"node-{space.name}"
        self.up: dict[str, str] = {}
        """Pods whose containers are ready, and since when they run."""
        self._addresses = itertools.count(1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Node:
        self.space.request("POST", NODES, {"metadata": {"name": self.name}, "spec": {"taints": []}})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.space.request("DELETE", f"{NODES}/{self.name}")

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            with contextlib.suppress(AssertionError, OSError):  # a pod that goes meanwhile
                ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": clock(), "reason": "Up", "message": ""}
                self.space.request("PATCH", f"{NODES}/{self.name}/status", {"status": {"conditions": [ready]}}, MERGE)
                for pod in pods_of(self.space):
                    self._sync(pod)

    def _sync(self, pod: Json) -> None:
        path = f"{PODS.format(self.space.name)}/{pod['metadata']['name']}"
        if not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": self.name}
            self.space.request("POST", f"{path}/binding", {"metadata": {"name": pod["metadata"]["name"]}, "target": target})
        since = self.up.get(pod["metadata"]["name"])
        state = {"running": {"startedAt": since}} if since else {"waiting": {"reason": "ContainerCreating"}}
        container = {"name": "engine", "image": "i", "imageID": "", "ready": bool(since), "restartCount": 0, "state": state}
        found = {item["type"]: item for item in pod["status"].get("conditions") or []}
        gates = pod["spec"].get("readinessGates") or []
        ready = bool(since) and all(found.get(gate["conditionType"], {}).get("status") == "True" for gate in gates)
        conditions = [
            {"type": kind, "status": str(value), "lastTransitionTime": clock()}
            for kind, value in (("ContainersReady", bool(since)), ("Ready", ready))
            if found.get(kind, {}).get("status") != str(value)
        ]
        if conditions or not pod["status"].get("podIP"):
            address = pod["status"].get("podIP") or f"10.9.0.{next(self._addresses)}"
            status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "containerStatuses": [container]}
            self.space.request("PATCH", f"{path}/status", {"status": {**status, "conditions": conditions}}, MERGE)


def endpoints(space: Namespace) -> set[str]:
    slices = space.request("GET", SLICES.format(space.name) + "?labelSelector=kubernetes.io/service-name%3Drollout")["items"]
    found = [endpoint for each in slices for endpoint in each.get("endpoints") or []]
    return {endpoint["targetRef"]["name"] for endpoint in found if endpoint["conditions"]["ready"]}


def gates(space: Namespace) -> dict[str, tuple[str, str]]:
    found = {pod["metadata"]["name"]: condition(pod["status"], GATE) for pod in pods_of(space)}
    return {name: (gate["status"], gate["reason"]) for name, gate in found.items() if gate}


def told(space: Namespace) -> tuple[str, str]:
    found = condition(space.status("policy"), "ServingGate")
    return found.get("status", ""), found.get("reason", "")


class Fleet:
    """The engines of an InferenceEngine of two pods, on a node."""

    def __init__(self, space: Namespace, node: Node, port: int) -> None:
        self.space, self.node, self._port = space, node, port
        secret = eventually(lambda: space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
        self._keys = client_keys(secret)
        eventually(lambda: len(pods_of(space)) == 2, "pods")
        self.names = sorted(pod["metadata"]["name"] for pod in pods_of(space))
        self.engines: dict[str, FenceEngine] = {}
        self.wrong: list[str] = []

    def start(self, name: str) -> None:
        """An engine of the pod, with base weights; its server is ready some time after it has reported."""
        began, engine = clock(), FenceEngine(f"tcp://127.0.0.1:{self._port}", self._keys, "rollout", pod=name)
        self.engines[name] = engine.__enter__()
        time.sleep(START_SECONDS)
        self.node.up[name] = began

    def stop(self, name: str) -> None:
        self.node.up.pop(name, None)
        self.engines.pop(name).__exit__()

    def restart(self, name: str) -> None:
        """In place: the pod stays, and its engine has base weights again."""
        self.stop(name)
        eventually(lambda: name not in endpoints(self.space), "the container is down")
        self.start(name)

    @contextlib.contextmanager
    def client(self, wanted: bytes) -> Iterator[None]:
        """Asks through the Service all the while, and notes answers of other weights."""
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                for name in endpoints(self.space):
                    engine = self.engines.get(name)
                    if engine is not None and name in self.node.up and engine.holds != wanted:
                        self.wrong.append(f"{name} at {clock()}")

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def close(self) -> None:
        for name in list(self.engines):
            self.stop(name)


@contextlib.contextmanager
def serving(space: Namespace, port: int, **serve: Any) -> Iterator[Fleet]:
    space.create_pool("policy", **POOL, serve=serve)
    space.create_engine("rollout", poolRef={"name": "policy"}, model={"name": "tiny"}, replicas=2)
    with Node(space) as node, contextlib.closing(Fleet(space, node, port)) as fleet:
        for name in fleet.names:
            fleet.start(name)
        yield fleet


@pytest.mark.timeout(240)
def test_a_push_a_restart_with_base_weights_and_dead_operators(namespace: Namespace, tmp_path: Path) -> None:
    space = namespace
    with leading_operator(space, tmp_path) as operator:
        with serving(space, operator.hub_port, weights="Converged") as fleet:
            first, second = fleet.names
            both = set(fleet.names)
            eventually(lambda: endpoints(space) == both, f"both serve; log:\n{operator.tail()}", 60)
            eventually(lambda: told(space) == ("True", "Gating"), f"told; log:\n{operator.tail()}")

            def written() -> float:
                """Gates written by the operator that runs."""
                lines = operator.http("/metrics")[1].splitlines()
                return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f'{WRITES}{{kind="Pod"'))

            assert written() == 2
            # Half a push changes nothing; the other half neither: W moves with the majority.
            fleet.engines[first].push(PUSHED)
            eventually(lambda: len(space.status("policy").get("weights") or []) == 2, f"seen; log:\n{operator.tail()}")
            assert endpoints(space) == both
            fleet.engines[second].push(PUSHED)
            served = [{"namespace": space.name, "fingerprint": "", "id": PUSHED.hex()}]
            eventually(lambda: space.status("policy").get("servedWeights") == served, f"W moves; log:\n{operator.tail()}")
            assert endpoints(space) == both
            assert written() == 2, "no gate had to change"

            with fleet.client(PUSHED):
                fleet.restart(second)
                eventually(lambda: gates(space)[second] == ("False", "OtherWeights"), f"closed; log:\n{operator.tail()}")
                assert endpoints(space) == {first}
                # The operator, and the hub in it, is killed. The next one knows nothing of pushes.
                operator.process.kill()
                space.delete(LEASES, "epochkv-operator")
                assert endpoints(space) == {first}
                operator.start().wait_ready()
                eventually(lambda: all(engine.leased for engine in fleet.engines.values()), f"heard; log:\n{operator.tail()}")
                time.sleep(POOL["reset"]["leaseSeconds"] + 2)  # it has heard of everybody
                assert endpoints(space) == {first}
                assert space.status("policy")["servedWeights"] == served
                assert written() == 0, "an operator that is new changes nothing"
                fleet.engines[second].push(PUSHED)
                eventually(lambda: endpoints(space) == both, f"back; log:\n{operator.tail()}")
            assert fleet.wrong == []

            # While no operator runs, gates stay; the next one closes what was started meanwhile.
            operator.process.kill()
            space.delete(LEASES, "epochkv-operator")
            fleet.restart(first)
            eventually(lambda: endpoints(space) == both, "nobody closes it")
            operator.start().wait_ready()
            eventually(lambda: endpoints(space) == {second}, f"closed; log:\n{operator.tail()}")
            # The same with the only one that has the weights left: what most hold are base weights then.
            fleet.stop(second)
            eventually(lambda: endpoints(space) == {first}, f"the majority moved; log:\n{operator.tail()}", 60)

            def at_rest() -> bool:
                before, gated = space.versions(), [pod["metadata"]["resourceVersion"] for pod in pods_of(space)]
                time.sleep(3)
                return (before, gated) == (space.versions(), [pod["metadata"]["resourceVersion"] for pod in pods_of(space)])

            eventually(at_rest, f"nothing is written; log:\n{operator.tail()}", 60)


def test_a_missing_right_is_told(namespace: Namespace, tmp_path: Path) -> None:
    space = namespace
    grant(space, but=lambda right: right.optional)
    config = bind(space, "operator-without-gates")
    with leading_operator(space, tmp_path, kubeconfig=config, resync_seconds=3) as operator:
        with serving(space, operator.hub_port, weights="Converged"):
            eventually(lambda: told(space) == ("False", "Forbidden"), f"told; log:\n{operator.tail()}", 60)
            message = condition(space.status("policy"), "ServingGate")["message"]
            assert 'cannot patch resource "pods/status"' in message
            assert "serve.gates=true" in message
            assert condition(space.status("policy"), "Ready")["status"] == "True"
            assert gates(space) == {}
            grant(space)
            eventually(lambda: len(endpoints(space)) == 2, f"both serve; log:\n{operator.tail()}", 60)
            eventually(lambda: told(space) == ("True", "Gating"), f"told; log:\n{operator.tail()}")


def test_a_pool_that_goes_leaves_no_gate_that_nobody_opens(namespace: Namespace, operator: OperatorProcess) -> None:
    space = namespace

    def make(name: str) -> None:
        """As the policy of the chart leaves it, or a template that names the gate."""
        labels = {"epochkv.io/pool": "policy", "app.kubernetes.io/managed-by": "epochkv-operator"}
        gate: Json = {"readinessGates": [{"conditionType": GATE}], "containers": [{"name": "engine", "image": "i"}]}
        space.create(PODS, {"metadata": {"name": name, "labels": labels}, "spec": gate})

    space.create_pool("policy", **POOL, serve={"weights": "Converged"})
    eventually(lambda: told(space) == ("True", "Gating"), f"told; log:\n{operator.tail()}")
    make("waits")
    time.sleep(POOL["reset"]["leaseSeconds"] + 2)
    assert gates(space) == {}, "its containers do not run"
    space.delete(POOLS, "policy")
    eventually(lambda: gates(space) == {"waits": ("True", "NotGated")}, f"open; log:\n{operator.tail()}")
    make("late")
    eventually(lambda: gates(space).get("late") == ("True", "NotGated"), f"open, too; log:\n{operator.tail()}")
