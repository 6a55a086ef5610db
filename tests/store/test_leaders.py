"""Three masters with the arguments that the operator renders, and a real etcd: the leader dies, and the index of what is stored stays.
Without etcd none leads, and the operator sees it.
"""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.connection import StoreOutcome
from epochkv_operator.hub import masters
from epochkv_operator.hub.masters import Elections
from epochkv_operator.kube.store import Key, Store, indexed
from epochkv_operator.planning.connection import connection
from hack.cluster.binaries import build
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.store.conftest import ConnectTo
from tests.support.planning import CONTEXT, pool
from tests.support.pods import ADMIN_PORT, Etcd, rendered, start
from tests.support.store import Memory, block_keys, get, put

Json = dict[str, Any]
MASTERS, STORES, KEYS = 3, 2, 40
APPLIED = re.compile(r"^ha_oplog_applied_sequence_id (\d+)", re.MULTILINE)


class Pods:
    """The masters and stores of one pool with `highAvailability: Etcd`."""

    def __init__(self, endpoint: str, directory: Path, stores: int = STORES) -> None:
        master = {"replicas": MASTERS, "highAvailability": {"backend": "Etcd", "etcd": {"endpoints": [endpoint]}}}
        self.spec = {"distributed": {"mooncake": {"master": master, "store": {"replicas": STORES, "segmentSize": "64Mi"}}}}
        network = f"127.10.{os.getpid() % 250 + 1}"
        self._directory = directory
        self.hosts = [f"{network}.{number + 1}" for number in range(MASTERS)]
        self.masters: dict[str, Process] = {}
        self.stores: list[Process] = []
        self._read: list[int] = []
        for host in self.hosts:
            self.masters[host] = start(rendered(self.spec, "master"), f"master-{host}", host, directory)
        eventually(self.leader, "a leader", 40)
        for number in range(stores):
            name, host = f"store-{number}", f"{network}.{101 + number}"
            self.stores.append(start(rendered(self.spec, "store"), name, host, directory))
        eventually(lambda: len(self.ask("get_all_segments").split()) == stores, "the segments of the stores", 60)

    def leader(self) -> str | None:
        for host, master in self.masters.items():
            if master.alive() and json.loads(self.get(host, "health") or "{}").get("service_ready"):
                return host
        return None

    def ask(self, path: str) -> str:
        """The leader's answer; empty while there is none."""
        host = self.leader()
        return self.get(host, path) if host else ""

    def followed(self) -> bool:
        """The standbys have read what the leader has written: all the same, and no more since the last time."""
        read = [int(found) for host in self.hosts if host != self.leader() for found in APPLIED.findall(self.get(host, "metrics"))]
        before, self._read = self._read, read
        return read == before and len(set(read)) == 1 and read[0] >= KEYS

    def get(self, host: str, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{host}:{ADMIN_PORT}/{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def end(self) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda process: process.end(5.0), (*self.stores, *self.masters.values())))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    etcd = build().path("etcd")
    with Etcd(etcd, tmp_path) as backend:
        made = Pods(backend.endpoint, tmp_path)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture
def engine(pods: Pods, connect: ConnectTo, monkeypatch: pytest.MonkeyPatch) -> tuple[StoreClient, Memory]:
    """The connector's client, as an engine of the pool has it: the operator's cluster id and address."""
    wanted = pool(pods.spec)
    tier = connection(wanted, CONTEXT)["distributed"]
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", tier["cluster_id"])  # as the connector does, which takes it once in a process
    memory = Memory(KEYS, 10_000)
    return connect(tier["master_address"], memory), memory


def test_a_leader_that_is_killed_costs_no_stored_block(pods: Pods, engine: tuple[StoreClient, Memory]) -> None:
    client, memory = engine
    keys = block_keys(KEYS)
    values = [memory.fill(slot, seed=slot) for slot in range(KEYS)]
    assert put(client, memory, keys) == [StoreOutcome.OK] * KEYS
    eventually(pods.followed, "the standbys have read what the leader wrote", 30, pause=2.0)

    dead = pods.leader()
    assert dead is not None
    pods.masters[dead].kill()
    eventually(lambda: pods.leader() not in (None, dead), "another leader", 60)
    eventually(lambda: set(pods.ask("get_all_keys").split()) >= set(keys), "the index, once the stores have found the new leader", 30)
    memory.clear()
    assert client.wait_ready(60), client.stats()
    eventually(lambda: all(client.exists(keys).result(10)), "found again", 60)
    assert get(client, memory, keys) == [StoreOutcome.OK] * KEYS
    assert [bytes(memory.payload(slot)) for slot in range(KEYS)] == values
    more = block_keys(4)
    assert put(client, memory, more) == [StoreOutcome.OK] * 4, "the new leader takes blocks, too"


def test_the_operator_sees_that_none_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters whose etcd hangs stay alive, and their probes succeed."""
    monkeypatch.setattr(masters, "PERIOD_SECONDS", 0.5)
    woken: list[Key] = []

    def shown(hosts: list[str], spec: Json) -> Store:
        """The pool and its masters' pods, as the watches show them."""
        store, ready = Store(indexed), [{"type": "Ready", "status": "True"}]
        where, labels = {"namespace": "rl", "resourceVersion": "1"}, {"epochkv.io/pool": "policy", "app.kubernetes.io/component": "master"}
        store.upsert("KVCachePool", {"metadata": {"name": "policy", "uid": "u", **where}, "spec": spec})
        for host in hosts:
            status = {"phase": "Running", "podIP": host, "conditions": ready}
            store.upsert("Pod", {"metadata": {"name": host, "uid": host, "labels": labels, **where}, "status": status})
        return store

    async def watched(pods: Pods, etcd: int) -> None:
        elections = Elections(shown(pods.hosts, pods.spec), woken.append)
        watching = asyncio.create_task(elections.watch())

        async def until(leaderless: bool, changes: int) -> None:
            await asyncio.to_thread(eventually, lambda: len(woken) == changes, f"leaderless: {leaderless}", 60)
            assert elections.leaderless("u") is leaderless

        await asyncio.sleep(3 * masters.PERIOD_SECONDS)
        assert not elections.leaderless("u")
        os.kill(etcd, signal.SIGSTOP)
        try:
            await until(True, 1)
            answers = [json.loads(pods.get(host, "health")) for host in pods.hosts]
            assert {answer["status"] for answer in answers} == {"ok"}, "which is all that a probe sees"
        finally:
            os.kill(etcd, signal.SIGCONT)
        await until(False, 2)
        watching.cancel()

    with Etcd(build().path("etcd"), tmp_path) as backend:
        pods = Pods(backend.endpoint, tmp_path, stores=0)
        try:
            asyncio.run(watched(pods, backend.process.popen.pid))
        finally:
            pods.end()
