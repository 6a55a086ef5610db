"""The hub as a trainer outside the cluster reaches it: a forwarded port, and the pool's ConfigMap and Secret as files."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.demo.journey import NAMESPACE, POOL
from hack.demo.kube import Kube
from hack.demo.setup import SYSTEM


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
