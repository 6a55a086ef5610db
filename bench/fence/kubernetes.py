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

from bench.bump_to_published import measure
from bench.fence.parts import Child, until
from bench.fence.report import Progress, Row, latency_figures
from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from tests.cluster.fence_engines import client_keys
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, eventually, install_crds

POOL = "policy"
NUM_ENGINES = 16
AIM_P99_MS = 300.0
CHUNK = 20
PAUSE_SECONDS = 0.02


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
        space.create_pool(POOL, local={"capacity": "64Mi"}, reset={"leaseSeconds": 30, "joinAfterSeconds": 0})
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
            until(lambda: swarm.ask("state")["live"] == NUM_ENGINES, 60, "engines granted")
            asyncio.run(measure(space.name, POOL, 3, PAUSE_SECONDS, 60))
            began, samples = time.monotonic(), []
            for part in _chunks(bumps):
                samples += asyncio.run(measure(space.name, POOL, len(part), PAUSE_SECONDS, 60))
                progress.step(len(samples), bumps, began)
    seconds = [sample.milliseconds / 1e3 for sample in samples]
    details = {"bumps": bumps, "seconds": seconds, "patch_seconds": [sample.patch_milliseconds / 1e3 for sample in samples]}
    return Row(f"patch -> status in a watch, {NUM_ENGINES} agents", latency_figures(seconds, AIM_P99_MS), details)


def _chunks(total: int) -> list[range]:
    return [range(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)]
