"""The row that needs a control plane: from the patch of `spec.resetEpoch` to `status.epoch` in a watch.

A real API server, the operator as a process, and engines over real sockets, all on this machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.bump_to_published import Watcher
from bench.fence.parts import Child
from bench.report import Progress, Row, latency_figures
from epochkv_operator.kube.client import MERGE_PATCH, KubeClient
from epochkv_operator.kube.resources import POOLS
from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import client_keys
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, install_crds

POOL = "policy"
NUM_ENGINES = 16
AIM_P99_MS = 300.0
WARM_UP = 5
PAUSE_SECONDS = 0.02
DEADLINE_SECONDS = 60.0


def bump_latency(bumps: int, progress: Progress) -> Row:
    """Patch -> status visible in a watch, 16 agents."""
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder:
        with ControlPlane(Path(folder) / "cp", binaries=build(lambda text: print(f"    {text}", file=sys.stderr))) as plane:
            return _measure(plane, Path(folder), bumps, progress)


def _measure(plane: ControlPlane, folder: Path, bumps: int, progress: Progress) -> Row:
    install_crds(plane)
    space = Namespace(plane, "bench")
    space.request("POST", "/api/v1/namespaces", {"metadata": {"name": space.name}})
    with OperatorProcess(plane, space.name, folder) as operator:
        space.create_pool(POOL, local={"capacity": "64Mi"}, reset={"leaseSeconds": 30})
        secret = eventually(lambda: space.get(CHILDREN["secrets"], f"{POOL}-fence"), "the pool's Secret", 60)
        keys = client_keys(secret)
        settings: dict[str, object] = {
            "endpoint": f"tcp://127.0.0.1:{operator.hub_port}",
            "keys": [keys.hub_public, keys.public, keys.secret],
            "engines": NUM_ENGINES,
        }
        os.environ["KUBECONFIG"] = str(plane.kubeconfig)
        with Child("bench.fence.swarm", settings) as swarm:
            swarm.hear()
            eventually(lambda: swarm.ask("state")["live"] == NUM_ENGINES, "engines granted", 60)
            samples = asyncio.run(_bump(space.name, bumps, progress))
    seconds = [published for published, _ in samples]
    details = {"bumps": bumps, "seconds": seconds, "patch_seconds": [patched for _, patched in samples]}
    return Row(f"patch -> status in a watch, {NUM_ENGINES} agents", latency_figures(seconds, AIM_P99_MS), details)


async def _bump(namespace: str, bumps: int, progress: Progress) -> list[tuple[float, float]]:
    """(seconds until seen in the watch, seconds until the patch was answered) of each bump."""
    client = await KubeClient.connect()
    current = await client.get(POOLS, namespace, POOL)
    watcher = Watcher(client, namespace, POOL)
    task = asyncio.create_task(watcher.run(current["metadata"]["resourceVersion"]))
    samples: list[tuple[float, float]] = []
    began = time.monotonic()
    try:
        for epoch in range(1, WARM_UP + bumps + 1):
            await asyncio.sleep(PAUSE_SECONDS)
            started = time.perf_counter()
            patch = {"spec": {"resetEpoch": epoch}}
            await client.request("PATCH", POOLS.path(namespace, POOL), body=patch, content_type=MERGE_PATCH)
            patched = time.perf_counter()
            published = await watcher.published(epoch, DEADLINE_SECONDS)
            samples.append((published - started, patched - started))
            progress.step(len(samples), WARM_UP + bumps, began)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
    return samples[WARM_UP:]
