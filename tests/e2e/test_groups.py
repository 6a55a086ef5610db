"""A group of pods that LeaderWorkerSet's own controller makes: experts over two data-parallel ranks, one in each pod."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_fence.client import Pool
from epochkv_fence.client.warm import ASKED
from epochkv_fence.protocol.messages import STAMP_KEY
from hack import models
from hack.cluster import binaries
from hack.demo.journey import CACHED, NAMESPACE, POOL, make_prompts
from hack.demo.kube import Json, Kube, PodEngine, condition, pod_ready
from hack.demo.setup import MANIFESTS, SYSTEM, Setup
from hack.images import static
from hack.other_crds import LWS, module_folder
from hack.standalone import cpu_collectives
from hack.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NAME, MODEL, IMAGE = "wide", "moe", "epochkv/lws"
RANKS = (0, 1)
READY_SECONDS = 600.0


@pytest.fixture(scope="module")
def controller(setup: Setup) -> Iterator[None]:
    """LeaderWorkerSet by the chart of its release, with the controller built from the same module."""
    found = binaries.build(also=["lws"])
    setup.provider.load_images([static.ensure(found.path("lws"), "manager", f"{IMAGE}:dev")], print)
    helm = [str(found.path("helm")), "--kubeconfig", str(setup.provider.kubeconfig()), "--namespace", "lws-system"]
    image = {"repository": IMAGE, "tag": "dev", "pullPolicy": "IfNotPresent"}
    values = json.dumps({"image": {"manager": image}, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}})
    chart = str(module_folder(*LWS) / "charts/lws")
    subprocess.run(
        [*helm, "upgrade", "--install", "lws", chart, "--create-namespace", "--values", "-", "--wait", "--timeout", "3m"],
        input=values, text=True, timeout=240, check=True,
    )  # fmt: skip
    yield
    subprocess.run([*helm, "uninstall", "lws", "--wait"], timeout=120, check=True)


def manifest(setup: Setup) -> Json:
    """The demo's engine over two pods, with the model and the plugin that lie beside the demo's models."""
    models.make(setup.models / MODEL, 1, models.Shape(experts=4))
    cpu_collectives.install(setup.models / "plugin")
    made: Json = yaml.safe_load((MANIFESTS / "engine.yaml").read_text())
    made["metadata"]["name"], spec = NAME, made["spec"]
    spec["model"] = {"name": MODEL, "volume": {"claimName": "models", "path": MODEL}}
    spec |= {"replicas": 1, "parallelism": {"data": 2, "nodes": 2}}
    spec["env"].append({"name": "PYTHONPATH", "value": "/opt/epochkv:/venv/lib/python3.11/site-packages:/models/plugin"})
    return made


@pytest.fixture(scope="module")
def group(setup: Setup, kube: Kube, controller: None) -> Iterator[None]:
    kube.kubectl("apply", "-f", "-", stdin=json.dumps(manifest(setup)))
    yield
    kube.kubectl("-n", NAMESPACE, "delete", "ie", NAME, "--timeout=120s")
    eventually(lambda: pods(kube) == {}, "its pods are gone", 120)


def pods(kube: Kube) -> dict[str, str]:
    """Name and uid of each pod of the group."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in kube.pods(NAMESPACE, f"epochkv.io/engine={NAME}")}


def serves(setup: Setup, kube: Kube, seed: int) -> dict[str, str]:
    """Wait until the engine is Ready. Each rank then finds what it has answered in its cache, and the other one in L2. Returns `pods`."""

    def ready() -> bool:
        engine = kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/inferenceengines/{NAME}")
        found = kube.pods(NAMESPACE, f"epochkv.io/engine={NAME}")
        return condition(engine, "Ready").get("status") == "True" and len(found) == len(RANKS) and all(map(pod_ready, found))

    eventually(ready, lambda: f"not Ready\n{setup.diagnosis()}", READY_SECONDS, 1.0)
    prompts = make_prompts(seed, len(RANKS))
    engines = [PodEngine(kube, NAMESPACE, f"{NAME}-nodes-0", MODEL, rank) for rank in RANKS]
    for engine, prompt, other in zip(engines, prompts, reversed(engines), strict=True):
        first = engine.complete(prompt)
        assert (first.cached, engine.complete(prompt).cached) == (0, CACHED)
        eventually(lambda engine=engine, prompt=prompt: stored_tokens(engine, prompt) >= CACHED, "its blocks are in L2", 30)
        found = other.complete(prompt)
        assert (found.cached, found.tokens) == (CACHED, first.tokens)
    return pods(kube)


def stored_tokens(engine: PodEngine, prompt: list[int]) -> int:
    """Of the prompt, in L2."""
    answer = engine.complete(prompt, transfer=ASKED)
    assert answer.transfer is not None
    return int(answer.transfer[STAMP_KEY]["stored_tokens"])


@contextmanager
def forwarded_hub(kube: Kube) -> Iterator[int]:
    """The hub's Service on a local port, the way a trainer outside the cluster reaches it. It ends when the hub's pod is started again."""
    command = kube.command("-n", SYSTEM, "port-forward", "service/epochkv-hub", ":7700")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            assert found, f"kubectl port-forward said {line!r}"
            yield int(found[1])
        finally:
            process.terminate()
            process.wait(10.0)


def connection_folder(kube: Kube, folder: Path, port: int) -> Path:
    """What a trainer mounts: the pool's ConfigMap and Secret. Only the hub's address differs outside the cluster."""
    config_map = kube.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{POOL}-connection")
    secret = kube.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{POOL}-fence")
    for name, value in secret["data"].items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(base64.b64decode(value))
    connection = json.loads(config_map["data"]["connection.json"])
    connection["hub"] = {"endpoint": f"tcp://127.0.0.1:{port}", "credentials_dir": str(folder)}
    path = folder / "connection.json"
    path.write_text(json.dumps(connection))
    return path


def test_a_group_serves_and_restarts_as_one(setup: Setup, kube: Kube, group: None, tmp_path: Path) -> None:
    def instances() -> dict[str, Any]:
        with forwarded_hub(kube) as port, Pool.connect(connection_folder(kube, tmp_path, port)) as pool:
            return {engine.name: engine.instance for engine in pool.engines() if engine.engine == NAME}

    names = {f"{NAME}-nodes-0", f"{NAME}-nodes-0-1/1"}
    before, seen = serves(setup, kube, 9101), instances()
    assert seen.keys() == names

    # All of the second pod but its first process, which sees it, and ends.
    kube.kubectl("-n", NAMESPACE, "exec", f"{NAME}-nodes-0-1", "--", "sh", "-c", "kill -9 -1")
    eventually(lambda: not before.items() & pods(kube).items(), lambda: f"{before} were not replaced\n{setup.diagnosis()}", 300)
    after = serves(setup, kube, 9102)
    assert after.keys() == before.keys()
    eventually(lambda: instances().keys() == names, lambda: f"the hub lists {instances()}", 60)
    assert not seen.items() & instances().items()
