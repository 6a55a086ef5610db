"""Stores leave without their blocks: a real API server, the StatefulSet's own controller, a real master and real stores behind the pods."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.controlplane import ControlPlane
from hack.standalone.mooncake import Mooncake
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, TAKEOVER_SECONDS, Namespace, OperatorProcess, condition
from tests.cluster.store_processes import ADMIN_PORT, ENGINE, announce, put

STORES, KEYS = 3, 30
LEASE_SECONDS = 3.0
PODS = "/api/v1/namespaces/{}/pods"
LONG = 3600


class Pool:
    """A pool `policy` whose store pods have processes, as a kubelet would start and end them."""

    def __init__(self, space: Namespace, directory: Path, network: str) -> None:
        self.space, self._network = space, network
        sizes = {"segment_bytes": 64 << 20, "lease_seconds": LEASE_SECONDS}
        self.mooncake = Mooncake(directory, host=f"{network}.1", admin_port=ADMIN_PORT, python=ENGINE, **sizes)  # type: ignore[arg-type]
        self.running: dict[str, tuple[str, Process]] = {}
        """By pod: its uid, and its process."""

    def create(self) -> None:
        self.mooncake.start_master()
        self.space.create_pool("policy", distributed={"mooncake": {"store": {"segmentSize": "64Mi", "replicas": STORES}}})
        announce(self.space, "policy", self.mooncake)

    def fill(self, timeout_seconds: int = LONG) -> set[str]:
        """All stores with keys; these."""
        self.set(replicas=STORES, drainTimeoutSeconds=timeout_seconds)
        self.settle(STORES)
        self.mooncake.flush()
        put(self.mooncake, KEYS, 100_000)
        assert all(self.held(number) for number in range(STORES)), "Mooncake places keys at random"
        return set(self.mooncake.keys())

    def keep(self) -> int:
        """What kubelets do: processes for new pods, none for those that are gone. The number of store pods."""
        pods = {pod["metadata"]["name"]: pod for pod in self._pods()}
        for name in [name for name, (uid, _) in self.running.items() if name not in pods or pods[name]["metadata"]["uid"] != uid]:
            self.running.pop(name)[1].end(10.0)
        for name, pod in sorted(pods.items()):
            if name not in self.running:
                host = f"{self._network}.{100 + int(name.rpartition('-')[2])}"
                self.running[name] = pod["metadata"]["uid"], self.mooncake.start_store(host=host)
                self._report(name, host)
        return len(pods)

    def settle(self, count: int, seconds: float = 90.0) -> None:
        eventually(lambda: self.keep() == count, lambda: f"{count} store pods; {self.why()}", seconds, pause=0.3)

    def set(self, **store: int) -> None:
        self.space.patch_spec("policy", distributed={"mooncake": {"store": store}})

    def held(self, ordinal: int) -> int:
        """Bytes on a store; 0 for one that drains."""
        return int(self.segment(ordinal).get("allocator_used_bytes", 0))

    def segment(self, ordinal: int) -> dict[str, Any]:
        detail = json.loads(self.mooncake.admin("get_segments_detail"))["segments"]
        return next((item for item in detail if item["segment_name"].startswith(f"{self._network}.{100 + ordinal}:")), {})

    @contextlib.contextmanager
    def read_all_the_time(self, keys: Sequence[str]) -> Iterator[None]:
        """Mooncake moves no key that is leased, and every look at a key leases it."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(LEASE_SECONDS / 10):
                for key in keys:
                    with contextlib.suppress(OSError):
                        self.mooncake.admin(f"query_key?key={key}")

        reader = threading.Thread(target=look)
        reader.start()
        time.sleep(LEASE_SECONDS / 2)
        try:
            yield
        finally:
            stop.set()
            reader.join()

    def why(self) -> tuple[str | None, str | None]:
        """Status and reason of the condition."""
        found = condition(self.space.status("policy"), "StoreScaled")
        return found.get("status"), found.get("reason")

    def scale_in(self) -> dict[str, Any]:
        found: dict[str, Any] = self.space.status("policy")["store"]["scaleIn"]
        return found

    def replicas(self) -> int:
        return int((self.space.get(CHILDREN["statefulsets"], "policy-store") or {})["spec"]["replicas"])

    def _pods(self) -> list[dict[str, Any]]:
        selector = "?labelSelector=app.kubernetes.io/component%3Dstore,epochkv.io/pool%3Dpolicy"
        found: list[dict[str, Any]] = self.space.request("GET", PODS.format(self.space.name) + selector)["items"]
        return found

    def _report(self, name: str, host: str) -> None:
        status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "conditions": [{"type": "Ready", "status": "True"}]}
        self.space.patch(PODS, name, {"status": status}, "/status")


@pytest.fixture(scope="module")
def pool(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    space = Namespace.create_in(plane, "scale-in")
    made = Pool(space, tmp_path_factory.mktemp("mooncake"), f"127.11.{os.getpid() % 250 + 1}")
    try:
        made.create()
        yield made
    finally:
        made.mooncake.end()


@pytest.fixture
def operator(plane: ControlPlane, pool: Pool, tmp_path: Path) -> Iterator[OperatorProcess]:
    with OperatorProcess(plane, pool.space.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS) as process:
        yield process.wait_ready()


def test_blocks_move_before_two_stores_go(pool: Pool, operator: OperatorProcess) -> None:
    keys = pool.fill()
    pool.set(replicas=1)
    eventually(lambda: pool.why() == ("False", "Draining"), f"said so; log:\n{operator.tail()}")
    pool.settle(1)
    eventually(lambda: pool.why() == ("True", "Scaled"), f"over; log:\n{operator.tail()}")
    assert set(pool.mooncake.keys()) == keys
    assert pool.held(0) >= KEYS * 100_000, "all on the store that is left"
    found = pool.scale_in()
    assert (found["from"], found["to"]) == (STORES, 1)
    assert found["bytes"] == found["movedBytes"] > 0
    assert found["completionTime"]
    before = pool.space.pool("policy")["metadata"]["resourceVersion"]
    time.sleep(3)
    assert pool.space.pool("policy")["metadata"]["resourceVersion"] == before, "what is over is left alone"


def test_stores_wait_for_a_master_that_does_not_answer(pool: Pool, operator: OperatorProcess) -> None:
    keys = pool.fill()
    assert pool.mooncake.master is not None
    pool.mooncake.master.freeze()
    try:
        pool.set(replicas=2)
        eventually(lambda: pool.why() == ("False", "MasterSilent"), f"said so; log:\n{operator.tail()}")
        assert pool.replicas() == STORES
        pool.space.patch_spec("policy", local={"capacity": "64Mi"})
        eventually(
            lambda: "67108864" in str(pool.space.get(CHILDREN["configmaps"], "policy-connection")),
            f"nothing waits; log:\n{operator.tail()}",
        )
        assert pool.why() == ("False", "MasterSilent")
    finally:
        pool.mooncake.master.thaw()
    pool.settle(2)
    eventually(lambda: pool.why() == ("True", "Scaled"), f"over; log:\n{operator.tail()}")
    assert set(pool.mooncake.keys()) == keys


def test_a_scale_in_goes_on_where_a_killed_operator_left_it(
    pool: Pool, operator: OperatorProcess, plane: ControlPlane, tmp_path: Path
) -> None:
    keys = pool.fill()
    with pool.read_all_the_time(sorted(keys)):
        pool.set(replicas=2)
        eventually(lambda: pool.why() == ("False", "Draining") and pool.scale_in().get("job"), f"begun; log:\n{operator.tail()}")
        began, job = pool.scale_in()["startTime"], pool.scale_in()["job"]
        operator.process.kill()
        with OperatorProcess(plane, pool.space.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS) as second:
            second.wait_ready()
            time.sleep(3)
            assert pool.replicas() == STORES, "still read"
            assert (pool.scale_in()["startTime"], pool.scale_in()["job"]) == (began, job)
            assert second.logged("stores are drained") == []
    with OperatorProcess(plane, pool.space.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS) as third:
        third.wait_ready()
        pool.settle(2)
        eventually(lambda: pool.why() == ("True", "Scaled"), f"over; log:\n{third.tail()}")
    assert set(pool.mooncake.keys()) == keys


def test_stores_that_are_wanted_back_stay_with_their_blocks(pool: Pool, operator: OperatorProcess) -> None:
    keys = pool.fill()
    pods = {name: uid for name, (uid, _) in pool.running.items()}
    with pool.read_all_the_time(sorted(keys)):
        pool.set(replicas=2)
        eventually(lambda: pool.segment(2).get("status") == "DRAINING", f"begun; log:\n{operator.tail()}")
        pool.set(replicas=STORES)
        eventually(lambda: pool.segment(2).get("status") == "OK", f"takes blocks again; log:\n{operator.tail()}")
        eventually(lambda: pool.why() == ("True", "Scaled"), f"over; log:\n{operator.tail()}")
    pool.settle(STORES)
    assert {name: uid for name, (uid, _) in pool.running.items()} == pods, "no pod restarted"
    assert set(pool.mooncake.keys()) == keys
    assert pool.scale_in()["to"] == STORES


def test_when_the_time_is_over_the_store_goes_with_what_it_holds(pool: Pool, operator: OperatorProcess) -> None:
    keys = pool.fill(timeout_seconds=5)
    with pool.read_all_the_time(sorted(keys)):
        pool.set(replicas=2)
        eventually(lambda: pool.why()[1] == "Draining", f"begun; log:\n{operator.tail()}")
        pool.settle(2)
        eventually(lambda: pool.why() == ("True", "ScaledWithLoss"), f"over; log:\n{operator.tail()}")
    assert pool.scale_in()["outcome"] == "TimedOut"
    eventually(lambda: set(pool.mooncake.keys()) < keys, "its blocks are gone")
