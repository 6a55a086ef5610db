"""Engines and masters on a real API server, with the real Deployment controller: how engines are replaced, and masters that serve nobody.

No node runs the pods; the tests write what a kubelet would.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, ENGINES, Namespace, OperatorProcess, condition

Json = dict[str, Any]
PODS = "/api/v1/namespaces/{}/pods"
ENGINE: Json = {"model": {"name": "tiny"}, "replicas": 3}
OURS = "?labelSelector=app.kubernetes.io/managed-by%3Depochkv-operator"


def pods_of(space: Namespace) -> list[Json]:
    """Pods that are not going, oldest first."""
    items = space.request("GET", PODS.format(space.name) + OURS)["items"]
    return sorted(
        (pod for pod in items if not pod["metadata"].get("deletionTimestamp")),
        key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]),
    )


def report(space: Namespace, pod: Json, *, ready: bool = False, waiting: Json | None = None) -> None:
    state = {"waiting": waiting} if waiting else {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    container = {"name": "engine", "image": "i:1", "imageID": "", "ready": ready, "restartCount": 0, "state": state}
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running" if ready else "Pending", "conditions": [condition], "containerStatuses": [container]}
    space.patch(PODS, pod["metadata"]["name"], {"status": status}, "/status")


def progress(space: Namespace, name: str = "rollout") -> tuple[str, str]:
    found = condition(space.engine_status(name), "Progressing")
    return found.get("status", ""), found.get("reason", "")


def serve(space: Namespace) -> None:
    """Have every living pod ready that is not; one that is gone since it was listed is left out."""
    for pod in pods_of(space):
        if pod["status"]["phase"] != "Failed" and not any(
            item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions", [])
        ):
            with contextlib.suppress(AssertionError):
                report(space, pod, ready=True)


def test_a_rollout_from_its_start_to_its_end(namespace: Namespace, operator: OperatorProcess) -> None:
    """Told by the real Deployment controller: new pods one by one, one that cannot be pulled, the way back."""
    namespace.create_engine("rollout", **ENGINE, updateStrategy={"maxUnavailable": "34%", "maxSurge": 1}, image="a:1")
    eventually(lambda: len(pods_of(namespace)) == 3, "pods")
    eventually(lambda: progress(namespace) == ("True", "RollingOut"), "under way")
    strategy = (namespace.get(CHILDREN["deployments"], "rollout") or {})["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "34%", "maxSurge": 1}}
    eventually(lambda: serve(namespace) or progress(namespace) == ("True", "RolledOut"), "over")
    assert condition(namespace.engine_status("rollout"), "Ready")["status"] == "True"

    # A pod that is lost is no rollout.
    first = pods_of(namespace)[0]
    report(namespace, first)
    eventually(lambda: condition(namespace.engine_status("rollout"), "Available").get("status") == "False", "not available")
    assert progress(namespace) == ("True", "RolledOut")
    report(namespace, first, ready=True)

    # One that its node evicts stays beside the pod that takes its place, and nothing waits for it.
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    namespace.patch(PODS, first["metadata"]["name"], {"status": evicted}, "/status")
    eventually(lambda: len(pods_of(namespace)) == 4, "the evicted pod, and one in its place")
    told = "3 of 3 replicas of the engine are ready; pods that ended and were not deleted: 1 Evicted (the last: The node was low on"

    def counted() -> bool:
        serve(namespace)
        return str(condition(namespace.engine_status("rollout"), "Available").get("message")).startswith(told)

    eventually(counted, "counted")
    namespace.delete(PODS, first["metadata"]["name"])
    eventually(lambda: len(pods_of(namespace)) == 3, "deleted")

    namespace.patch(ENGINES, "rollout", {"spec": {"image": "missing:2"}})
    eventually(lambda: progress(namespace) == ("True", "RollingOut"), "under way")

    def new() -> list[Json]:
        return [pod for pod in pods_of(namespace) if pod["spec"]["containers"][0]["image"] == "missing:2"]

    eventually(lambda: len(new()) == 2, "one that is added, and one in the place of a third of the old ones")
    eventually(lambda: len(pods_of(namespace)) == 4, "one more than asked for")
    report(namespace, new()[0], waiting={"reason": "ImagePullBackOff", "message": "missing:2 not found"})
    eventually(lambda: progress(namespace) == ("False", "ImagePullFailed"), "stalled")
    counts = "2 of 3 replicas run the current spec, 2 an older one; pod rollout-"

    def said() -> str | None:
        text = condition(namespace.engine_status("rollout"), "Progressing")["message"]
        return text if text.startswith(counts) else None

    assert eventually(said, "counts").endswith("missing:2 not found")

    namespace.patch(ENGINES, "rollout", {"spec": {"image": "a:1"}})
    eventually(lambda: serve(namespace) or progress(namespace) == ("True", "RolledOut"), "back")
    assert not new()


# ----------------------------------------------------------------------------------------------------------- masters
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
    eventually(lambda: (namespace.get(CHILDREN["deployments"], "policy-master") or {})["status"].get("readyReplicas") == 2, "ready pods")

    def said(status: str, reason: str) -> bool:
        available = condition(namespace.status("policy"), "MasterAvailable")
        return (available.get("status"), available.get("reason")) == (status, reason)

    eventually(lambda: said("False", "NoLeader"), "nobody leads")
    assert "does etcd.example:2379 answer" in condition(namespace.status("policy"), "MasterAvailable")["message"]
    health["body"] = '{"status":"ok","service_ready":true}'
    eventually(lambda: said("True", "Available"), "one leads")
