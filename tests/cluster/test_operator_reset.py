"""A reset through the real operator, the real API server and real sockets; and what must hold when processes die or
freeze in the middle of one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine, Service, client_keys
from tests.cluster.operator_harness import CHILDREN, POOLS, TAKEOVER_SECONDS, Namespace, OperatorProcess, condition

LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
#: L1 only: nothing to run. Short leases, so that a takeover does not take a minute.
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}


class History:
    """Every (targetEpoch, epoch) of a pool, in the order of its resourceVersions, from a real watch."""

    def __init__(self, space: Namespace) -> None:
        command = [str(space.plane.kubectl), f"--kubeconfig={space.plane.kubeconfig}", "-n", space.name]
        command += ["get", "kvp", "--watch", "-o", "json", "--output-watch-events"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.epochs: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> History:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        self._thread.join(10)

    def _read(self) -> None:
        decoder, text = json.JSONDecoder(), ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text += line
            with contextlib.suppress(ValueError):
                event, end = decoder.raw_decode(text.lstrip())
                text = text.lstrip()[end:]
                status = event["object"].get("status") or {}
                self.epochs.append((status.get("targetEpoch", 0), status.get("epoch", 0)))

    def assert_monotone(self) -> None:
        assert self.epochs == sorted(self.epochs), self.epochs
        assert all(epoch <= target for target, epoch in self.epochs), self.epochs


@contextlib.contextmanager
def engines(endpoint: str, space: Namespace, count: int = 2, pool: str = "policy") -> Iterator[list[FenceEngine]]:
    """`count` engine instances that joined the pool."""
    secret = eventually(lambda: space.get(CHILDREN["secrets"], f"{pool}-fence"), "the pool's Secret")
    with contextlib.ExitStack() as stack:
        keys = client_keys(secret)
        found = [stack.enter_context(FenceEngine(endpoint, keys, f"engine-{index}")) for index in range(count)]
        eventually(lambda: all(engine.epoch is not None for engine in found), "every engine has a grant")
        yield found


def published(space: Namespace, epoch: int, pool: str = "policy") -> dict[str, Any] | None:
    """The status once the whole reset is reported in it."""
    status = space.status(pool)
    reset = status.get("reset") or {}
    return status if status.get("epoch") == epoch and reset.get("epoch") == epoch and reset.get("completionTime") else None


def holder(space: Namespace) -> str:
    lease = space.get(LEASE, "epochkv-operator")
    return (lease or {}).get("spec", {}).get("holderIdentity") or ""


def test_a_raised_epoch_is_published_when_both_engines_have_adopted_it(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        with engines(f"tcp://127.0.0.1:{operator.hub_port}", namespace) as (first, second):
            eventually(lambda: (namespace.status("policy").get("engines") or {}).get("summary") == "2/2", "2/2")
            namespace.bump("policy", 1)
            namespace.kubectl("wait", "--for=jsonpath={.status.epoch}=1", "kvp/policy", "--timeout=20s")
            # Published means: both are there already, not soon.
            assert (first.epoch, second.epoch) == (1, 1)
            status = eventually(lambda: published(namespace, 1), "the reset reported")
            assert status["reset"]["durationMilliseconds"] >= 0
            assert status["engines"] | {"oldEpochRequests": 0} == {
                "total": 2,
                "converged": 2,
                "external": 2,
                "oldEpochRequests": 0,
                "summary": "2/2",
            }
            assert {engine["name"] for engine in status["externalEngines"]} == {"engine-0", "engine-1"}
            eventually(lambda: condition(namespace.status("policy"), "EpochConverged").get("status") == "True", "EpochConverged")
            eventually(lambda: operator.metric("epochkv_pool_published_epoch") == 1, "metric")
            assert operator.metric("epochkv_pool_reset_seconds_count") == 1
            assert operator.metric('epochkv_hub_messages_total{outcome="received"}') > 0
            assert operator.metric('epochkv_hub_messages_total{outcome="steps_failed"}') == 0
            assert 'epochkv_hub_messages_total{outcome="unencodable"} 0.0' in operator.http("/metrics")[1]
            events = namespace.request("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace.name}/events")["items"]
            eventually(lambda: operator.logged("epoch published"), "logged")
            assert [event["reason"] for event in events].count("EpochPublished") <= 1


def test_an_engine_that_holds_back_delays_publication_and_is_named(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **{**POOL, "reset": {"leaseSeconds": 60}})
    with engines(f"tcp://127.0.0.1:{operator.hub_port}", namespace) as (first, second):
        second.hold.set()
        namespace.bump("policy", 1)
        eventually(lambda: first.epoch == 1, "the first adopts")

        def named() -> dict[str, Any] | None:
            """The status once it names the one that holds back; the other one's answer may come after a first status."""
            status = namespace.status("policy")
            laggards = [laggard["name"] for laggard in status.get("reset", {}).get("laggards") or []]
            return status if laggards == ["engine-1"] else None

        status = eventually(named, "a laggard named")
        assert (status["targetEpoch"], status["epoch"]) == (1, 0)
        assert condition(status, "EpochConverged")["status"] == "False"
        second.hold.clear()
        status = eventually(lambda: published(namespace, 1), "published")
        assert "laggards" not in status["reset"]


def test_a_frozen_leader_that_wakes_up_after_a_reset_changes_nothing(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    operators: list[OperatorProcess] = []

    def ready_port() -> int | None:
        return next((operator.hub_port for operator in operators if operator.http("/readyz", 0.5)[0] == 200), None)

    with contextlib.ExitStack() as stack:
        operators += [
            stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS)) for _ in range(2)
        ]
        service = stack.enter_context(Service(ready_port))
        leader = eventually(lambda: next((o for o in operators if o.http("/readyz")[0] == 200), None), "a leader", 60)
        standby = next(operator for operator in operators if operator is not leader)
        eventually(lambda: standby.http("/livez")[0] == 200, "the standby alive")
        assert standby.http("/readyz")[0] == 503  # but not ready
        namespace.create_pool("policy", **POOL)
        found = stack.enter_context(engines(service.endpoint, namespace))
        history = stack.enter_context(History(namespace))
        old = holder(namespace)

        leader.process.freeze()
        standby.wait_ready()
        assert holder(namespace) not in ("", old)
        namespace.bump("policy", 1)
        eventually(lambda: namespace.status("policy").get("epoch") == 1, "published by the new leader", 60)
        leader.process.thaw()
        eventually(lambda: not leader.process.alive(), "the old leader ends")
        assert leader.process.popen.returncode == 1
        assert leader.logged("component exited")

        namespace.bump("policy", 2)
        eventually(lambda: namespace.status("policy").get("epoch") == 2, "published", 60)
        eventually(lambda: all(engine.epoch == 2 for engine in found), "adopted")
        history.assert_monotone()
        for engine in found:
            assert engine.adopted == sorted(engine.adopted)


def test_a_storm_of_conflicting_writes_does_not_keep_an_epoch_from_publication(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    stop = threading.Event()

    def storm(number: int) -> None:
        while not stop.is_set():
            namespace.patch(POOLS, "policy", {"metadata": {"annotations": {f"storm-{number}": str(time.monotonic())}}})

    conflicts = 'epochkv_operator_api_requests_total{code="409",verb="PATCH"}'
    before = operator.metric(conflicts)
    with engines(f"tcp://127.0.0.1:{operator.hub_port}", namespace):
        threads = [threading.Thread(target=storm, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for epoch in range(1, 11):
                namespace.bump("policy", epoch)
                eventually(lambda e=epoch: namespace.status("policy").get("epoch") == e, f"epoch {epoch}")
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        assert operator.metric(conflicts) > before, "the storm never hit a write"


def test_sigterm_releases_the_lease_and_the_standby_takes_over_with_the_engines(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> None:
    ports: list[int] = []
    with Service(lambda: ports[-1]) as service, OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=60) as first:
        ports.append(first.hub_port)
        first.wait_ready()
        namespace.create_pool("policy", **POOL)
        with engines(service.endpoint, namespace) as found:
            namespace.bump("policy", 1)
            eventually(lambda: published(namespace, 1), "published")
            assert first.terminate() == 0
            assert holder(namespace) == ""
            assert first.logged("lease released")
            # Its Lease would last another minute: only the release lets the next one in this fast.
            with OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=60) as second:
                ports.append(second.hub_port)
                second.wait_ready(30)
                namespace.bump("policy", 2)
                eventually(lambda: namespace.status("policy").get("epoch") == 2, "published", 60)
                assert all(engine.epoch == 2 for engine in found)
