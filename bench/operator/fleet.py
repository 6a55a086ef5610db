"""What a fleet costs the operator: time until all of it is served, writes, memory, idle CPU, restarts, and what a reset takes meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.bump_to_published import measure
from bench.fence.parts import Child
from bench.report import Figure, Progress, Row, percentile
from epochkv_operator.api.base import GATE
from epochkv_operator.control.reporter import merge_patch
from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import client_keys
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, Namespace, OperatorProcess, condition, install_crds

ENGINES_OF_A_POOL = 20
PODS = 5
AGENTS = 100
QUIET_SECONDS = 5.0
HEARD_SECONDS = 35.0
"""More than a pool's lease: by then a hub that has begun to lead it has heard from all engines, and what their statuses say changes."""
RESYNCS = 2
PATIENCE = 1800.0
MAX_SHOWN = 4000
PODS_PATH = "/api/v1/namespaces/{}/pods"
LEASE_SECONDS = 15
PAUSE_SECONDS = 0.05


def pool_of(number: int) -> str:
    return f"pool-{number}"


class EndedOperator(RuntimeError):
    """The operator ended by itself; the text has the end of its log."""


class Fleet:
    """Pools and engines in a namespace, and the operator that serves them. `size`: engines there are. `gates`: pods wait for weights."""

    def __init__(self, space: Namespace, operator: OperatorProcess, pods: int = PODS, *, gates: bool = False) -> None:
        self.space, self.operator, self.pods, self.gates = space, operator, pods, gates
        self.size, self.begun = 0, 0.0

    def grow(self, size: int) -> float:
        """Make engines, and pools for them, until there are `size`; the seconds until each has a status of its newest generation."""
        began, there = time.monotonic(), self.size
        pools = range(math.ceil(there / ENGINES_OF_A_POOL), math.ceil(size / ENGINES_OF_A_POOL))
        with ThreadPoolExecutor(8) as threads:
            serve = {"serve": {"weights": "Converged"}} if self.gates else {}
            list(threads.map(lambda number: self.space.create_pool(pool_of(number), local={"capacity": "1Gi"}, **serve), pools))
            list(threads.map(self._create_engine, range(there, size)))
        self.size = size
        self._wait(lambda: self.served() == size, "a status of each engine")
        self.begun = time.monotonic()
        seconds = self.begun - began
        if self.gates:
            self._wait(self.made, "all pods")
            self._start()
            self._wait(lambda: self._closed() == 0, "a gate of each pod")
        return seconds

    def _closed(self) -> int:
        """Pods whose gate is not True. No engine reports, so that it opens when their containers have been ready for a lease."""
        time.sleep(2.0)
        pods = self.space.request("GET", PODS_PATH.format(self.space.name))["items"]
        return sum(condition(pod["status"], GATE).get("status") != "True" for pod in pods)

    def _start(self) -> None:
        """The containers of each pod are ready from now on, as a kubelet says it."""
        ready = {"type": "ContainersReady", "status": "True", "lastTransitionTime": datetime.now(UTC).isoformat(timespec="seconds")}
        path, body = PODS_PATH.format(self.space.name), {"status": {"conditions": [ready]}}
        content = "application/strategic-merge-patch+json"
        names = [pod["metadata"]["name"] for pod in self.space.request("GET", path)["items"] if not condition(pod["status"], GATE)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: self.space.request("PATCH", f"{path}/{name}/status", body, content), names))

    def _wait(self, probe: Callable[[], bool], what: str) -> None:
        """Raises `EndedOperator` at once when nothing can come any more."""

        def look() -> bool:
            if self.operator.process.popen.poll() is not None:
                raise EndedOperator(f"the operator ended before {what}:\n{self.operator.tail()}")
            return probe()

        eventually(look, what, PATIENCE)

    def _create_engine(self, number: int) -> None:
        pool = {"name": pool_of(number // ENGINES_OF_A_POOL)}
        self.space.create_engine(f"engine-{number}", poolRef=pool, model={"name": "tiny"}, replicas=self.pods)

    @property
    def pid(self) -> int:
        return self.operator.process.popen.pid

    def made(self) -> bool:
        """Whether the controllers have made all pods. While they do, statuses change."""
        time.sleep(0.5)
        pods = self.space.request("GET", f"{PODS_PATH.format(self.space.name)}?limit=1")
        return len(pods["items"]) + (pods["metadata"].get("remainingItemCount") or 0) == self.size * self.pods

    def calm(self) -> bool:
        """Whether every Deployment has the pods of its newest spec, the hub has heard from all engines, and no key waits."""
        time.sleep(0.5)
        deployments = self.space.request("GET", CHILDREN["deployments"].format(self.space.name))["items"]
        rolled = sum((one.get("status") or {}).get("updatedReplicas") == self.pods for one in deployments)
        heard = time.monotonic() > self.begun + HEARD_SECONDS
        return heard and rolled == self.size and self.operator.metric("epochkv_operator_queue_depth") == 0

    def objects(self) -> dict[str, Any]:
        """Pools and engines, by kind and name."""
        items = [one for path in (POOLS, ENGINES) for one in self.space.request("GET", path.format(self.space.name))["items"]]
        return {f"{one['kind']} {one['metadata']['name']}": one for one in items}

    def longest_lag(self, loop: str) -> float:
        """No turn of a loop of the running operator was later than by this (seconds): the upper bound of a bucket of its histogram."""
        text = self.operator.http("/metrics", 30.0)[1]
        buckets = re.findall(rf'^epochkv_operator_loop_lag_seconds_bucket{{le="([^"]+)",loop="{loop}"}} (\S+)$', text, re.MULTILINE)
        return next((float(bound) for bound, count in buckets if float(count) == float(buckets[-1][1])), math.inf)

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
        """Return once all pods are there and nothing was written for a while."""
        self._wait(lambda: self.made() and self.calm(), "all pods")
        seen, since, deadline = self.writes(), time.monotonic(), time.monotonic() + PATIENCE
        while time.monotonic() - since < QUIET_SECONDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator still wrote after {PATIENCE:.0f} s")
            time.sleep(1.0)
            if (now := self.writes()) != seen:
                seen, since = now, time.monotonic()

    def exits(self) -> int:
        """How often an operator ended by itself."""
        return int(self.operator.process.popen.poll() is not None) + len(self.operator.logged("operator ends: a part ended"))

    def restart(self) -> float:
        """End the operator and start it: the seconds until it has looked at each engine."""
        assert self.operator.terminate(60.0) == 0, self.operator.tail()
        began = time.monotonic()
        self.operator.start()
        self._wait(lambda: self.looked() >= self.size, "a look at each engine")
        self.begun = time.monotonic()
        return self.begun - began


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
    """Milliseconds from the patch of the first pool to its status, with `AGENTS` agents."""
    pool = pool_of(0)
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


def idle(fleet: Fleet, seconds: float) -> dict[str, float]:
    """What the operator does while nothing happens."""
    were = fleet.objects()
    before, cpu, began = fleet.writes(), cpu_seconds(fleet.pid), time.monotonic()
    log = fleet.operator.log_file
    read = log.stat().st_size
    time.sleep(seconds)
    found = {"cpu": 100 * (cpu_seconds(fleet.pid) - cpu) / (time.monotonic() - began), "writes": fleet.writes() - before}
    if found["writes"]:
        for name, one in fleet.objects().items():
            if one["metadata"]["resourceVersion"] != were[name]["metadata"]["resourceVersion"]:
                old, new = were[name].get("status") or {}, one.get("status") or {}
                print(f"    {name} was {merge_patch(new, old)} and is {merge_patch(old, new)}"[:MAX_SHOWN], file=sys.stderr)
        with log.open(errors="replace") as lines:
            lines.seek(read)
            print(f"    what it logged while idle:\n{lines.read()[:MAX_SHOWN]}", file=sys.stderr)
    return found


def observed(fleet: Fleet, size: int, plane: ControlPlane, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Everything that one fleet shows, in the order in which it is measured. Resets first of all with one pool and its engines alone."""
    found: dict[str, Any] = {}
    with renewals(fleet.space) as gaps:
        fleet.grow(ENGINES_OF_A_POOL)
        fleet.settle()
        found["resets alone"] = reset_times(fleet, plane, arguments.bumps, progress)
        fleet.settle()
        found["rss alone"] = resident_mib(fleet.pid)
        writes, cpu = fleet.writes(), cpu_seconds(fleet.pid)
        found["create"] = fleet.grow(size)
        fleet.settle()
        found["writes"], found["create cpu"] = fleet.writes() - writes, cpu_seconds(fleet.pid) - cpu
        found["idle"] = idle(fleet, RESYNCS * arguments.resync)
        found["rss"] = resident_mib(fleet.pid)
        found["resets"] = reset_times(fleet, plane, arguments.bumps, progress)
        found["lag"] = {loop: fleet.longest_lag(loop) for loop in ("hub", "main")}
        fleet.settle()
        found["restarts"] = [fleet.restart() for _ in range(2)]
        found["restart cpu"] = cpu_seconds(fleet.pid)
        fleet.settle()
        found["rss after"] = resident_mib(fleet.pid)
        found["exits"] = fleet.exits()
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
                found = observed(Fleet(space, operator, gates=arguments.gates), size, plane, arguments, progress)
                assert operator.terminate(60.0) == 0, operator.tail()
    gated = " with gates" if arguments.gates else ""
    return Row(f"{size:,} engines of {PODS} pods{gated}", [*figures(size, found), *per_engine(size, found)], found)


def figures(size: int, found: dict[str, Any]) -> list[Figure]:
    """What there are aims for, and what explains it."""
    reset, alone = percentile(found["resets"], 0.5), percentile(found["resets alone"], 0.5)
    return [
        Figure("made -> a status of each engine", found["create"], None, "s"),
        Figure("restart -> a look at each engine", max(found["restarts"]), 30.0, "s"),
        Figure(f"writes while idle, over {RESYNCS} resyncs", found["idle"]["writes"], 0, "writes"),
        Figure("CPU while idle", found["idle"]["cpu"], 2.0, "% of a core"),
        Figure("memory (RSS)", max(found["rss"], found["rss after"]), 400.0, "MiB"),
        Figure(f"reset with {AGENTS} agents: median", reset, None),
        Figure(f"reset with {AGENTS} agents: p99", percentile(found["resets"], 0.99), 1000.0),
        Figure("the same without a fleet: median", alone, None),
        Figure("the same without a fleet: p99", percentile(found["resets alone"], 0.99), None),
        Figure("reset with / without a fleet: median", reset / alone, None, ""),
        Figure("longest time between renewals of the Lease", max(found["gaps"]), LEASE_SECONDS * 2 / 3, "s"),
        *(Figure(f"no turn of the loop {loop} was later than by", lag, None, "s") for loop, lag in found["lag"].items()),
        Figure("exits", found["exits"], 0, "exits"),
    ]


def per_engine(size: int, found: dict[str, Any]) -> list[Figure]:
    """What has to stay the same, however large the fleet is."""
    more = size - ENGINES_OF_A_POOL
    return [
        Figure("for each engine: writes until it is made", found["writes"] / more, None, "writes"),
        Figure("for each engine: CPU until it is made", 1e3 * found["create cpu"] / more, None),
        Figure("for each engine: CPU of a restart", 1e3 * found["restart cpu"] / size, None),
        Figure("for each engine: memory", 1024 * (found["rss after"] - found["rss alone"]) / more, None, "KiB"),
        Figure("for each engine: CPU while idle, each minute", 0.6e3 * found["idle"]["cpu"] / size, None),
    ]
