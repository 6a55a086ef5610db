"""Kinds of other projects, by their own CRDs: LeaderWorkerSets for engines that span nodes, PodMonitors for Prometheus.

The CRDs come and go while the operator runs. No controller of these kinds runs: the tests write what it would.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.controlplane import ControlPlane
from hack.other_crds import read_crd
from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, ENGINES, Namespace, becomes, condition, leading_operator

LWS_CRD, MONITOR_CRD = "leaderworkersets.leaderworkerset.x-k8s.io", "podmonitors.monitoring.coreos.com"
SETS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets"
MONITORS = "/apis/monitoring.coreos.com/v1/namespaces/{}/podmonitors"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SPANNING: dict[str, Any] = {
    "model": {"name": "tiny"},
    "poolRef": {"name": "policy"},
    "replicas": 2,
    "parallelism": {"tensor": 2, "pipeline": 2, "nodes": 2},
    "updateStrategy": {"maxUnavailable": "50%", "maxSurge": 1},
    "resources": {"limits": {"memory": "1Gi"}},
    "template": {"spec": {"tolerations": [{"operator": "Exists"}], "priorityClassName": "system-node-critical"}},
}
SEEN_SECONDS = 60.0

Install = Callable[[str], None]


@pytest.fixture
def install(plane: ControlPlane) -> Iterator[Install]:
    """Have the API server serve a kind for this test."""
    made: list[str] = []

    def do(name: str) -> None:
        crd = read_crd(name)
        made.append(name)
        plane.api.apply(f"{DEFINITIONS}/{name}", crd)
        path = f"/apis/{crd['spec']['group']}/v1/{crd['spec']['names']['plural']}"
        eventually(lambda: plane.api.ok(path), f"{name} served")

    yield do
    for name in made:
        remove(plane, name)


def remove(plane: ControlPlane, name: str) -> None:
    plane.api.request("DELETE", f"{DEFINITIONS}/{name}")
    eventually(lambda: not plane.api.ok(f"{DEFINITIONS}/{name}"), f"{name} gone")


def groups(space: Namespace) -> dict[str, Any]:
    """Spec of the LeaderWorkerSet."""
    found: dict[str, Any] = (space.get(SETS, "big-nodes") or {})["spec"]
    return found


def test_leaderworkersets_and_monitors_follow_their_kinds(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path, install: Install
) -> None:
    with leading_operator(namespace, tmp_path, monitor_label="release=prom"):
        namespace.create_pool("policy", local={"capacity": "64Mi"}, distributed={"mooncake": {"store": {"segmentSize": "64Mi"}}})
        namespace.create_engine("big", **SPANNING)
        said = becomes(namespace.engine_status, "big", "Ready", reason="KindNotServed")
        assert "LeaderWorkerSets (leaderworkerset.x-k8s.io/v1)" in said["message"]
        assert "install LeaderWorkerSet (https://lws.sigs.k8s.io)" in said["message"]
        assert "big" not in namespace.names("services")

        install(LWS_CRD)
        install(MONITOR_CRD)
        made = eventually(lambda: namespace.get(SETS, "big-nodes"), "admitted by the real CRD", SEEN_SECONDS)
        spec = made["spec"]["leaderWorkerTemplate"]
        assert made["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": "50%", "maxSurge": 1, "partition": 0}
        for template in (spec["leaderTemplate"], spec["workerTemplate"]):
            assert template["spec"]["tolerations"] == [{"operator": "Exists"}]
            assert template["spec"]["priorityClassName"] == "system-node-critical"
            assert template["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1088Mi"
        assert namespace.get(CHILDREN["deployments"], "big") is None

        # What LeaderWorkerSet's controller would say, but of which spec? No pod has the digest of ours.
        status = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "hpaPodSelector": "x"}
        namespace.patch(SETS, "big-nodes", {"status": status}, "/status")
        becomes(namespace.engine_status, "big", "Available", reason="Updating")
        assert condition(namespace.engine_status("big"), "Progressing")["reason"] == "RollingOut"

        # Edited by hand, scaled by an autoscaler, gone: as with any other child.
        namespace.patch(SETS, "big-nodes", {"spec": {"leaderWorkerTemplate": {"size": 7}}})
        eventually(lambda: groups(namespace)["leaderWorkerTemplate"]["size"] == 2, "restored")
        namespace.patch(ENGINES, "big", {"spec": {"replicas": 5}}, "/scale")
        eventually(lambda: groups(namespace)["replicas"] == 5, "scaled")
        namespace.delete(SETS, "big-nodes")
        again = eventually(lambda: namespace.get(SETS, "big-nodes"), "made again")
        assert again["metadata"]["uid"] != made["metadata"]["uid"]

        # To one node and back.
        namespace.patch(ENGINES, "big", {"spec": {"parallelism": {"nodes": 1}}})
        eventually(lambda: namespace.get(CHILDREN["deployments"], "big"), "a Deployment")
        eventually(lambda: namespace.get(SETS, "big-nodes") is None, "no set")
        namespace.patch(ENGINES, "big", {"spec": {"parallelism": {"nodes": 4}}})
        eventually(lambda: namespace.get(SETS, "big-nodes"), "a set")
        eventually(lambda: namespace.get(CHILDREN["deployments"], "big") is None, "no Deployment")

        # The monitors of the engine and of its pool, with the labels by which a Prometheus finds them.
        def names() -> set[str]:
            items = namespace.request("GET", MONITORS.format(namespace.name))["items"]
            return {item["metadata"]["name"] for item in items if item["metadata"]["labels"]["release"] == "prom"}

        everything = {"big", "policy-master", "policy-store"}
        eventually(lambda: names() == everything, "admitted by the real CRD", SEEN_SECONDS)
        namespace.delete(MONITORS, "big")
        eventually(lambda: names() == everything, "made again")
        remove(plane, MONITOR_CRD)
        namespace.create_engine("later", model={"name": "tiny"}, poolRef={"name": "policy"})
        eventually(lambda: namespace.get(CHILDREN["deployments"], "later"), "nothing waits for it")


def test_the_sample_of_kuberay_is_accepted(plane: ControlPlane, install: Install) -> None:
    install("rayclusters.ray.io")
    sample = Path(__file__).parents[2] / "config/samples/kuberay/raycluster.yaml"
    command = [str(plane.kubectl), f"--kubeconfig={plane.kubeconfig}", "apply", "--dry-run=server", "--validate=strict", "-f", str(sample)]
    said: list[str] = []

    def accepted() -> bool:  # an API server serves a kind before it lists it
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said[:] = [done.stdout, done.stderr]
        return done.returncode == 0

    eventually(accepted, lambda: f"the sample is accepted: {said}")
    assert said[0].split()[:2] == ["raycluster.ray.io/rollout", "created"]
