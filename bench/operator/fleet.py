"""What a fleet costs the operator: time until all of it is served, writes, memory, idle CPU, restarts, and what a reset takes meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.bump_to_published import measure
from bench.fence.parts import Child
from bench.report import Figure, Progress, Row, percentile
from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import client_keys
from tests.cluster.operator_harness import CHILDREN, ENGINES, Namespace, OperatorProcess, install_crds

ENGINES_OF_A_POOL = 20
PODS = 5
AGENTS = 100
QUIET_SECONDS = 5.0
RESYNCS = 2
PATIENCE = 1800.0
LEASE_SECONDS = 15
PAUSE_SECONDS = 0.05


class Fleet:
    """Pools and engines in a namespace, and the operator that serves them."""

    def __init__(self, space: Namespace, operator: OperatorProcess, size: int) -> None:
        self.space, self.operator, self.size = space, operator, size
        self.pools = [f"pool-{number}" for number in range(max(1, size // ENGINES_OF_A_POOL))]

    def create(self) -> float:
        """Make everything; the seconds until each engine has a status of its newest generation."""
        began = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: self.space.create_pool(name, local={"capacity": "1Gi"}), self.pools))
            list(threads.map(self._create_engine, range(self.size)))
        eventually(lambda: self.served() == self.size, "a status of each engine", PATIENCE)
        return time.monotonic() - began

    def _create_engine(self, number: int) -> None:
        pool = {"name": self.pools[number % len(self.pools)]}
        self.space.create_engine(f"engine-{number}", poolRef=pool, model={"name": "tiny"}, replicas=PODS)

    def served(self) -> int:
        """Engines whose status speaks of what they are now."""
        time.sleep(1.0)
        engines = self.space.request("GET", ENGINES.format(self.space.name))["items"]
        return sum((engine.get("status") or {}).get("observedGeneration") == engine["metadata"]["generation"] for engine in engines)

    def writes(self) -> float:
        return self.operator.metric("epochkv_operator_api_writes_total")

    def looked(self) -> float:
        """Engines reconciled since the operator started."""
        text = self.operator.http("/metrics", 30.0)[1]
        wanted = 'epochkv_operator_reconciles_total{kind="InferenceEngine",result="ok"}'
        return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(wanted)), 0.0)

    def settle(self) -> None:
        """Return once nothing was written for a while."""
        seen, since, deadline = self.writes(), time.monotonic(), time.monotonic() + PATIENCE
        while time.monotonic() - since < QUIET_SECONDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator still wrote after {PATIENCE:.0f} s")
            time.sleep(1.0)
            if (now := self.writes()) != seen:
                seen, since = now, time.monotonic()

    def restart(self) -> float:
        """End the operator and start it: the seconds until it has looked at each engine."""
        assert self.operator.terminate(60.0) == 0, self.operator.tail()
        began = time.monotonic()
        self.operator.start()
        eventually(lambda: self.looked() >= self.size, "a look at each engine", PATIENCE)
        return time.monotonic() - began


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(status["VmRSS"].split()[0]) / 1024


@contextmanager
def renewals(space: Namespace) -> Iterator[list[float]]:
    """Seconds between renewals of the Lease by one holder, as they were seen; ends with the block."""
    gaps: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        last: tuple[str, str] | None = None
        while not ended.wait(0.2):
            spec = (space.get("/apis/coordination.k8s.io/v1/namespaces/{}/leases", "epochkv-operator") or {}).get("spec") or {}
            now = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
            if last is not None and last[0] == now[0] and last[1] != now[1]:
                gaps.append((datetime.fromisoformat(now[1]) - datetime.fromisoformat(last[1])).total_seconds())
            last = now if all(now) else None

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield gaps
    finally:
        ended.set()
        thread.join()


def reset_times(fleet: Fleet, plane: ControlPlane, bumps: int, progress: Progress) -> list[float]:
    """Milliseconds from the patch of one pool to its status, with `AGENTS` agents, while the fleet is there."""
    pool = fleet.pools[0]
    keys = client_keys(eventually(lambda: fleet.space.get(CHILDREN["secrets"], f"{pool}-fence"), "the pool's Secret", 60))
    settings: dict[str, object] = {
        "endpoint": f"tcp://127.0.0.1:{fleet.operator.hub_port}",
        "keys": [keys.hub_public, keys.public, keys.secret],
        "engines": AGENTS,
    }
    os.environ["KUBECONFIG"] = str(plane.kubeconfig)
    with Child("bench.fence.swarm", settings) as swarm:
        swarm.hear()
        eventually(lambda: swarm.ask("state")["live"] == AGENTS, "agents granted", 120)
        began = time.monotonic()
        bumped = measure(fleet.space.name, pool, bumps, PAUSE_SECONDS, 120.0, lambda done: progress.step(done, bumps, began))
        return [bump.milliseconds for bump in asyncio.run(bumped)]


def observed(fleet: Fleet, plane: ControlPlane, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Everything that one fleet shows, in the order in which it is measured."""
    found: dict[str, Any] = {}
    with renewals(fleet.space) as gaps:
        found["create"] = fleet.create()
        fleet.settle()
        found["writes"] = fleet.writes() / fleet.size
        pid, before = fleet.operator.process.popen.pid, fleet.writes()
        cpu, began = cpu_seconds(pid), time.monotonic()
        time.sleep(RESYNCS * arguments.resync)
        found["idle cpu"] = 100 * (cpu_seconds(pid) - cpu) / (time.monotonic() - began)
        found["idle writes"] = fleet.writes() - before
        found["rss"] = resident_mib(pid)
        found["resets"] = reset_times(fleet, plane, arguments.bumps, progress)
        found["restarts"] = [fleet.restart() for _ in range(2)]
        fleet.settle()
        found["rss after"] = resident_mib(fleet.operator.process.popen.pid)
        found["exits"] = int(fleet.operator.process.popen.poll() is not None) + len(fleet.operator.logged("operator ends: a part ended"))
    found["gaps"] = sorted(gaps)[-5:]
    return found


def row(size: int, arguments: argparse.Namespace, progress: Progress) -> Row:
    """One fleet on a control plane of its own."""
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as name:
        folder = Path(name)
        with ControlPlane(folder / "cp", binaries=build(lambda text: print(f"    {text}", file=sys.stderr))) as plane:
            install_crds(plane)
            space = Namespace.create_in(plane, "fleet")
            options = {"resync_seconds": arguments.resync, "lease_duration_seconds": LEASE_SECONDS}
            with OperatorProcess(plane, space.name, folder, **options) as operator:
                operator.wait_ready()
                found = observed(Fleet(space, operator, size), plane, arguments, progress)
                assert operator.terminate(60.0) == 0, operator.tail()
    figures = [
        Figure("made -> a status of each engine", found["create"], None, "s"),
        Figure("restart -> a look at each engine", max(found["restarts"]), 30.0, "s"),
        Figure("writes for each engine made", found["writes"], None, "writes"),
        Figure(f"writes while idle, over {RESYNCS} resyncs", found["idle writes"], 0, "writes"),
        Figure("CPU while idle", found["idle cpu"], 2.0, "% of a core"),
        Figure("memory (RSS)", max(found["rss"], found["rss after"]), 400.0, "MiB"),
        Figure(f"reset with {AGENTS} agents: median", percentile(found["resets"], 0.5), None),
        Figure(f"reset with {AGENTS} agents: p99", percentile(found["resets"], 0.99), 1000.0),
        Figure("longest time between renewals of the Lease", max(found["gaps"]), LEASE_SECONDS * 2 / 3, "s"),
        Figure("exits", found["exits"], 0, "exits"),
    ]
    return Row(f"{size:,} engines of {PODS} pods", figures, found)
