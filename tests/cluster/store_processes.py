"""A real Mooncake beside the API server, and a Pod object that says where its master is: there is no kubelet in this layer."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

from hack.standalone.mooncake import CLIENT_ENVIRONMENT
from hack.standalone.process import Process, free_port, port_open
from tests.cluster.operator_harness import ROOT, Namespace

ENGINE = Path(os.environ.get("EPOCHKV_PYTHON_ENGINE") or ROOT / ".build/venv-engine/bin/python")
ADMIN_PORT = 9003
"""Where the operator looks for it: a master has its pod's address for itself."""
CLIENT_TTL_SECONDS = 600
"""A master forgets a store, with every key in it, that it has not heard from for so long. Longer than any test stops one: a
master that is continued looks at its clock before it reads the pings that wait in its sockets."""


class PoolStore:
    """A master on a loopback address of its own and one store. Ended by their process groups."""

    def __init__(self, directory: Path, address: str) -> None:
        self.address, self.rpc_port, self.store_port = address, free_port(), free_port()
        self._directory = directory

    def __enter__(self) -> PoolStore:
        command = [
            str(ENGINE.parent / "mooncake_master"), f"--rpc_address={self.address}", f"--rpc_port={self.rpc_port}", "--rpc_thread_num=2",
            f"--metrics_host={self.address}", f"--metrics_port={ADMIN_PORT}", f"--client_ttl={CLIENT_TTL_SECONDS}",
            "--default_kv_lease_ttl=500", "--put_start_discard_timeout_sec=30", "--logtostderr=true",
        ]  # fmt: skip
        self.master = Process("mooncake_master", command, self._directory / "master.log")
        self.master.wait_until(lambda: port_open(self.rpc_port, self.address), 20, "accepting connections")
        environ = {
            **CLIENT_ENVIRONMENT,
            "MOONCAKE_MASTER": f"{self.address}:{self.rpc_port}",
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(64 << 20),
            "MOONCAKE_LOCAL_BUFFER_SIZE": str(16 << 20),
        }
        service = [str(ENGINE), "-m", "epochkv_connector.storenode", "--port", str(self.store_port), "--max-wait-time", "60"]
        self.store = Process("mooncake store", service, self._directory / "store.log", environ)
        self.store.wait_until(lambda: bool(self.admin("get_all_segments").split()), 60, "mounted")
        self.store.wait_until(lambda: port_open(self.store_port), 60, "accepting connections")
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.store, self.master):
            process.end(5.0)

    def put(self, count: int, size: int = 4096) -> None:
        """Put `count` keys of `size` bytes, as an engine of an older epoch would have."""
        for number in range(count):
            body = json.dumps({"key": f"kv/0/{number}", "value": "x" * size}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{self.store_port}/api/put", body, {"Content-Type": "application/json"})
            request.method = "PUT"
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert answer.status == 200

    def keys(self) -> list[str]:
        """Every key in the store; a master that does not answer is an error, not an empty store."""
        return self._ask("get_all_keys").split()

    def admin(self, path: str) -> str:
        """One call of the admin port; empty when it does not answer."""
        try:
            return self._ask(path)
        except OSError:
            return ""

    def _ask(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.address}:{ADMIN_PORT}/{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def clear(self) -> None:
        """Empty it for the next test."""
        request = urllib.request.Request(f"http://{self.address}:{ADMIN_PORT}/api/v1/remove_all?force=true", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def announce(self, space: Namespace, pool: str) -> None:
        """The master's pod, as a kubelet would report it."""
        labels = {
            "app.kubernetes.io/managed-by": "epochkv-operator",
            "app.kubernetes.io/component": "master",
            "epochkv.io/pool": pool,
        }
        name = f"{pool}-master-0"
        pods = f"/api/v1/namespaces/{space.name}/pods"
        pod = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [{"name": "master", "image": "none"}]}}
        space.request("POST", pods, pod)
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": self.address, "podIPs": [{"ip": self.address}], "conditions": ready}
        space.request("PATCH", f"{pods}/{name}/status", {"status": status}, "application/merge-patch+json")
