"""Real replicas of Ray Serve LLM share through the hub and Mooncake, and new weights reach them through Ray's own ingress."""

import json
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.engine_api import EngineApi, EngineError
from hack.loopback import free_port
from hack.standalone.engine import CPU_ENVIRONMENT, GPU_BLOCKS
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.engine.conftest import PATIENT
from tests.trainers.frameworks.conftest import CACHED, L1_BYTES, START_SECONDS, new_prompt

pytestmark = pytest.mark.timeout(900)


class Replica(EngineApi):
    """One model of the application, whose deployment has one replica."""

    def __init__(self, name: str, port: int) -> None:
        self.name = self.model = name
        self._port = port

    def request(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> bytes:
        address = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text: bytes = answer.read()
                return text
        except urllib.error.HTTPError as error:
            raise EngineError(f"{self.name} {path}: HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from error

    def push(self, weights: Path) -> None:
        """New weights, through the ingress, on all replicas of this model."""
        body = {"model": self.model, "method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        (result,) = self.post("/collective_rpc", body)["results"]
        assert len(result["worker_results"]) == 1


@pytest.fixture(scope="module")
def replicas(
    weights: tuple[Path, Path], pool: Pool, mooncake: Mooncake, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Replica, Replica]]:
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    temporary = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets are below it, and their paths may have 107 characters
    spec: dict[str, Any] = {
        "port": port,
        "temporary": temporary,
        "ready": str(folder / "ready"),
        "model": str(weights[0]),
        "names": ["rollout-0", "rollout-1"],
        "environ": {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT},
        "engine_kwargs": {
            **{"enforce_eager": True, "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8},
            **{"num_gpu_blocks_override": GPU_BLOCKS, "enable_prompt_tokens_details": True},
            "kv_transfer_config": pool.connector(L1_BYTES, mooncake.address, **PATIENT),
        },
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "tests.trainers.frameworks.serve_app", str(folder / "spec.json")]
    app = Process("Ray Serve", command, folder / "serve.log", {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"})
    try:
        app.wait_until(Path(spec["ready"]).exists, START_SECONDS, "serving")
        pool.wait_engines(2)
        yield Replica("rollout-0", port), Replica("rollout-1", port)
    finally:
        app.end(30.0, whole_group=False)
        shutil.rmtree(temporary, ignore_errors=True)


def test_replicas_share_and_new_weights_keep_nothing_old(
    replicas: tuple[Replica, Replica], pool: Pool, mooncake: Mooncake, weights: tuple[Path, Path]
) -> None:
    one, two = replicas
    prompt = new_prompt(1)

    computed = one.complete(prompt)
    assert computed.cached == 0
    eventually(lambda: len(mooncake.keys()) >= CACHED // 128, "the first replica has stored its blocks")
    shared = two.complete(prompt)
    assert (shared.tokens, shared.cached) == (computed.tokens, CACHED)

    one.push(weights[1])
    new = one.complete(prompt)  # the other one has the old weights still
    assert (new.cached, new.tokens != computed.tokens) == (0, True)
    assert two.complete(prompt).tokens == computed.tokens
    assert two.complete(prompt).cached == CACHED

    two.push(weights[1])
    eventually(lambda: not pool.snapshot().diverged, "both hold the new weights")
    shared = two.complete(prompt)
    assert (shared.tokens, shared.cached) == (new.tokens, CACHED)

    for replica in replicas:
        replica.push(weights[0])
    again = two.complete(prompt)
    assert (again.tokens, again.cached) == (computed.tokens, CACHED)
