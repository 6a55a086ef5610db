"""Masters that are ready and serve nobody, on a real API server with the real Deployment controller.

No node runs the pods: the tests write what a kubelet would, and answer where the masters would.
"""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, condition

Json = dict[str, Any]
PODS = "/api/v1/namespaces/{}/pods"
ADMIN_PORT = 9003
ADDRESS = f"127.13.{os.getpid() % 250 + 1}.1"


@pytest.fixture
def health() -> Iterator[dict[str, str]]:
    """What every master of `ADDRESS` answers, under `body`."""
    said = {"body": '{"status":"ok","service_ready":false}'}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(said["body"])))
            self.end_headers()
            self.wfile.write(said["body"].encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((ADDRESS, ADMIN_PORT), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield said
        server.shutdown()


def test_masters_of_which_none_leads_are_not_available(namespace: Namespace, operator: OperatorProcess, health: dict[str, str]) -> None:
    etcd = {"replicas": 2, "highAvailability": {"backend": "Etcd", "etcd": {"endpoints": ["etcd.example:2379"]}}}
    namespace.create_pool("policy", distributed={"mooncake": {"master": etcd, "store": {"segmentSize": "64Mi"}}})

    def found() -> list[Json]:
        items: list[Json] = namespace.request("GET", PODS.format(namespace.name))["items"]
        return [pod for pod in items if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "master"]

    eventually(lambda: len(found()) == 2, "masters")
    for pod in found():
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}], "conditions": ready}
        namespace.patch(PODS, pod["metadata"]["name"], {"status": status}, "/status")
    eventually(
        lambda: (namespace.get(CHILDREN["deployments"], "policy-master") or {})["status"].get("readyReplicas") == 2, "ready to Kubernetes"
    )

    def said(status: str, reason: str) -> bool:
        available = condition(namespace.status("policy"), "MasterAvailable")
        return (available.get("status"), available.get("reason")) == (status, reason)

    eventually(lambda: said("False", "NoLeader"), "nobody leads")
    assert "does etcd.example:2379 answer" in condition(namespace.status("policy"), "MasterAvailable")["message"]
    health["body"] = '{"status":"ok","service_ready":true}'
    eventually(lambda: said("True", "Available"), "one leads")
