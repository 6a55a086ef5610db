"""An engine that nobody provisioned: a trainer's own vLLM process joins the pool with a file, counts, and leaves by its lease."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import Pool
from hack.demo.journey import BASE_WEIGHTS, ENGINE, MODEL, NAMESPACE, NEW_WEIGHTS, POOL, make_prompts
from hack.demo.kube import Kube
from hack.demo.setup import Setup
from hack.standalone.engine import Engine
from hack.waiting import eventually
from tests.e2e.hub import connection_folder, forwarded_hub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME = "trainer-0"
TRANSFER = {
    "kv_connector": "EpochKVConnector",
    "kv_connector_module_path": "epochkv_connector.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def status(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/kvcachepools/{POOL}")["status"]
    return found


def external(kube: Kube) -> dict[str, Any] | None:
    return next((entry for entry in status(kube)["externalEngines"] if entry["name"].startswith(NAME)), None)


def holds(kube: Kube) -> str | None:
    return (external(kube) or {}).get("weights")


def raise_epoch(kube: Kube) -> int:
    """One epoch further with kubectl; returns when it is published."""
    epoch = int(status(kube).get("targetEpoch", 0)) + 1
    kube.kubectl("-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", json.dumps({"spec": {"resetEpoch": epoch}}))
    kube.kubectl("-n", NAMESPACE, "wait", f"kvp/{POOL}", f"--for=jsonpath={{.status.epoch}}={epoch}", "--timeout=60s")
    return epoch


def test_it_joins_counts_and_leaves(setup: Setup, kube: Kube, tmp_path: Path) -> None:
    python = os.environ.get("EPOCHKV_PYTHON_ENGINE", sys.executable)
    ours = [*kube.engines(NAMESPACE, ENGINE, MODEL)]
    before = status(kube)["engines"]["total"]
    with forwarded_hub(kube) as port, Pool.connect(connection_folder(kube, tmp_path, port)) as pool:
        path = tmp_path / "connection.json"
        connection = json.loads(path.read_text())
        # Only the hub is reached from outside the cluster, so this one has an L1 of its own and no L2.
        joined = {key: connection[key] for key in ("pool", "hub")} | {"local": {"capacity_bytes": 64 << 20}}
        (tmp_path / "engine.json").write_text(json.dumps(joined))
        environ = {"EPOCHKV_CONFIG": str(tmp_path / "engine.json"), "EPOCHKV_ENGINE_NAME": NAME}
        engine = Engine(NAME, setup.models / "base", tmp_path, TRANSFER, environ=environ, python=python)
        for other in ours:
            other.reload_weights(BASE_WEIGHTS)
        try:
            engine.wait_ready(500)
            eventually(lambda: holds(kube) is not None, lambda: f"its weights are not known: {status(kube)}", 60, 0.5)
            assert status(kube)["engines"]["total"] == before + 1

            (prompt,) = make_prompts(8001, 1)
            assert [engine.complete(prompt).cached for _ in range(2)] == [0, 896]  # nobody has to let it in
            with pool.weight_update(f"for-everybody-{time.time_ns()}", timeout_s=60) as update:
                for other in ours:
                    other.reload_weights(NEW_WEIGHTS)
                engine.reload_weights(setup.models / "new")
            assert update.report is not None
            assert update.report.equal
            pushed = {group.id[:8] for group in update.report.groups}
            eventually(lambda: holds(kube) in pushed, lambda: f"not shown: {status(kube)}", 60, 0.5)
            assert engine.complete(prompt).cached == 0, "KV of the weights before"

            epoch = raise_epoch(kube)
            assert engine.complete(prompt).cached == 0
            eventually(lambda: (external(kube) or {}).get("epoch") == epoch, lambda: f"not at {epoch}: {status(kube)}", 60, 0.5)
        finally:
            engine.process.kill()
            engine.end()
        eventually(lambda: external(kube) is None, lambda: f"still counted: {status(kube)}", 120, 0.5)
        assert status(kube)["engines"]["total"] == before
