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
from bench.fence.parts import Child
from bench.report import Progress, Row, latency_figures
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
            total, began = WARM_UP + bumps, time.monotonic()
            bumped = measure(space.name, POOL, total, PAUSE_SECONDS, DEADLINE_SECONDS, lambda done: progress.step(done, total, began))
            samples = asyncio.run(bumped)[WARM_UP:]
    seconds = [bump.milliseconds / 1e3 for bump in samples]
    details = {"bumps": bumps, "seconds": seconds, "patch_seconds": [bump.patch_milliseconds / 1e3 for bump in samples]}
    return Row(f"patch -> status in a watch, {NUM_ENGINES} agents", latency_figures(seconds, AIM_P99_MS), details)
