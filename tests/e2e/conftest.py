"""One cluster with the demo's pool and engines for the whole layer.

`EPOCHKV_CLUSTER=NAME` uses (and keeps) that cluster, for example the one that `make demo` left; otherwise a cluster of its own is made
and removed, whose name belongs to this checkout. What a run that was killed left of it goes first.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.demo.journey import NAMESPACE, POOL
from hack.demo.kube import Kube, condition
from hack.demo.setup import MANIFESTS, ROOT, SYSTEM, Setup
from hack.waiting import eventually

OWN_CLUSTER = "e2e-" + hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
SECONDS = 600.0


@pytest.fixture(scope="session")
def setup() -> Iterator[Setup]:
    """Everything installed; pool, engines and reference Ready."""
    given = os.environ.get("EPOCHKV_CLUSTER")
    made = Setup(cluster=given or OWN_CLUSTER)
    try:
        if given is None:
            made.remove(print)
        archives = made.prepare(lambda text, part="": print(f"{part}: {text}"))
        made.make_models(print)
        made.bring_up(print)
        made.load_images(archives, print)
        made.install(print)
        made.apply(print)
        made.wait_ready(lambda text: None)
        yield made
    finally:
        if given is None:
            made.remove(print)


@pytest.fixture(scope="session")
def kube(setup: Setup) -> Kube:
    return setup.kube()


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """The demo's namespace; pools and engines that a test adds carry the label `e2e` and go afterwards."""
    yield NAMESPACE
    kube.kubectl("-n", NAMESPACE, "delete", "ie,kvp", "-l", "e2e", "--wait=true", seconds=180)
    eventually(lambda: not kube.pods(NAMESPACE, "e2e=true"), lambda: "pods of deleted engines are still there", 120, 0.5)


def engine_manifest(name: str, pool: str | None) -> dict[str, Any]:
    """The demo's engine under another name, one replica, in another pool (or none)."""
    manifest: dict[str, Any] = yaml.safe_load((MANIFESTS / "engine.yaml").read_text())
    manifest["metadata"] |= {"name": name, "labels": {"e2e": name}}
    manifest["spec"]["replicas"] = 1
    manifest["spec"]["template"]["metadata"] = {"labels": {"e2e": "true"}}
    manifest["spec"].pop("poolRef")
    if pool is not None:
        manifest["spec"]["poolRef"] = {"name": pool}
    return manifest


def pool_manifest(name: str, image: str) -> dict[str, Any]:
    """The demo's pool under another name and with another store image."""
    manifest: dict[str, Any] = yaml.safe_load((MANIFESTS / "pool.yaml").read_text())
    manifest["metadata"] |= {"name": name, "labels": {"e2e": name}}
    manifest["spec"]["distributed"]["mooncake"]["image"] = image
    return manifest


def apply(kube: Kube, *manifests: dict[str, Any]) -> None:
    kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))


def wait_condition(kube: Kube, plural: str, name: str, kind: str, status: str, seconds: float = SECONDS) -> dict[str, Any]:
    """The condition once it has this status."""
    path = f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/{plural}/{name}"
    found: dict[str, Any] = {}

    def there() -> bool:
        found.clear()
        found.update(condition(kube.get(path), kind))
        return found.get("status") == status

    eventually(there, lambda: f"{plural}/{name}: condition {kind} is {found or 'absent'}, wanted {status}", seconds, 0.5)
    return dict(found)


@contextmanager
def forwarded_hub(kube: Kube) -> Iterator[int]:
    """The hub's Service on a local port, the way a trainer outside the cluster reaches it."""
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
