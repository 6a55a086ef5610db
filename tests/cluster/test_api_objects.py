"""Everything the planner wants, against a real API server: applied as it is, stable once applied, admitted as `restricted`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from epochkv_fence.protocol.pool import EngineView
from epochkv_operator.api import parse_engine, parse_pool
from epochkv_operator.planning.context import HubView, KeysView, Observed, Outlier, ReclaimView, WeightsGroup
from epochkv_operator.planning.plan import Plan, plan_engine, plan_pool
from epochkv_operator.planning.status import engine_status, pool_status
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.support.planning import CONTEXT, ENGINE_SPECS, POOL_SPECS

Json = dict[str, Any]
NAMESPACE = "planned"
MANAGER = "fieldManager=epochkv-operator&force=true"
PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "KVCachePool": "/apis/epochkv.io/v1alpha1/namespaces/{}/kvcachepools",
    "InferenceEngine": "/apis/epochkv.io/v1alpha1/namespaces/{}/inferenceengines",
}
CHILDREN = [kind for kind in PATHS if kind not in ("Pod", "KVCachePool", "InferenceEngine")]


class Cluster:
    """The few requests that these tests make, in one namespace at Pod Security level `restricted`."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def request(self, method: str, path: str, body: Json | None = None, content_type: str = "application/json") -> tuple[int, Json]:
        status, answer = self.plane.api.request(method, path, body, content_type, timeout=20)
        return status, json.loads(answer)

    def collection(self, kind: str) -> str:
        return PATHS[kind].format(NAMESPACE)

    def create(self, kind: str, name: str, spec: Json) -> Json:
        obj = {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}
        status, answer = self.request("POST", self.collection(kind), obj)
        assert status == 201, answer
        return answer

    def apply(self, obj: Json) -> Json:
        path = f"{self.collection(obj['kind'])}/{obj['metadata']['name']}?{MANAGER}"
        status, answer = self.request("PATCH", path, obj, "application/apply-patch+yaml")
        assert status in (200, 201), answer
        return answer

    def children(self) -> list[Json]:
        found = []
        for kind in CHILDREN:
            status, answer = self.request("GET", f"{self.collection(kind)}?labelSelector=app.kubernetes.io/managed-by=epochkv-operator")
            assert status == 200, answer
            found += [{**item, "kind": kind} for item in answer["items"]]
        return found

    def execute(self, plan: Plan) -> None:
        assert plan.problem is None
        for obj in plan.apply:
            self.apply(obj)
        for obj in plan.delete:
            body = {"preconditions": {"uid": obj["metadata"]["uid"]}, "propagationPolicy": "Background"}
            status, answer = self.request("DELETE", f"{self.collection(obj['kind'])}/{obj['metadata']['name']}", body)
            assert status == 200, answer

    def settled_children(self, kind: str, name: str) -> list[Json]:
        """Children once the controllers have had their say about a workload."""
        deadline = time.monotonic() + 30
        while True:
            children = self.children()
            workload = next(child for child in children if (child["kind"], child["metadata"]["name"]) == (kind, name))
            if workload.get("status", {}).get("observedGeneration") == workload["metadata"]["generation"]:
                return children
            assert time.monotonic() < deadline, f"no controller has looked at {kind} {name}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane) -> Cluster:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": level}}
    plane.api.apply(f"/api/v1/namespaces/{NAMESPACE}", namespace)
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
    eventually(lambda: plane.api.ok(account), "pods may be created", 60)
    return Cluster(plane)


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[Cluster]:
    """The namespace, emptied after the test."""
    yield cluster
    for kind in ("InferenceEngine", "KVCachePool", *CHILDREN):
        selector = "" if kind in ("InferenceEngine", "KVCachePool") else "?labelSelector=app.kubernetes.io/managed-by=epochkv-operator"
        status, answer = cluster.request("GET", f"{cluster.collection(kind)}{selector}")
        assert status == 200, answer
        for item in answer["items"]:
            cluster.request("DELETE", f"{cluster.collection(kind)}/{item['metadata']['name']}", {"propagationPolicy": "Background"})


def admit_pods(cluster: Cluster, children: list[Json]) -> list[tuple[int, str]]:
    """What admission says about a pod of each workload (dry run)."""
    verdicts = []
    for child in children:
        if "template" in child.get("spec", {}):
            template = child["spec"]["template"]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "probe"}, "spec": template["spec"]}
            status, answer = cluster.request("POST", f"{cluster.collection('Pod')}?dryRun=All", pod)
            verdicts.append((status, str(answer.get("message", ""))))
    return verdicts


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_a_pool_settles(clean: Cluster, spec: str) -> None:
    """Applied, defaulted and acted on by the controllers: the next plan is empty, and an apply would write nothing."""
    pool = parse_pool(clean.create("KVCachePool", "policy", POOL_SPECS[spec]))
    first = plan_pool(pool, Observed(clean.children()), CONTEXT)
    clean.execute(first)
    has_store = any(obj["kind"] == "StatefulSet" for obj in first.apply)
    children = clean.settled_children("StatefulSet", "policy-store") if has_store else clean.children()
    assert plan_pool(pool, Observed(children), CONTEXT) == Plan()
    for obj in first.apply:
        if obj["kind"] not in ("Deployment", "StatefulSet", "PodDisruptionBudget"):  # controllers write their status at any time
            path = f"{clean.collection(obj['kind'])}/{obj['metadata']['name']}"
            before = clean.request("GET", path)[1]["metadata"]["resourceVersion"]
            assert clean.apply(obj)["metadata"]["resourceVersion"] == before
    verdicts = admit_pods(clean, children)
    if spec in ("rdma", "rdma-plugin"):
        assert sorted(status for status, _ in verdicts) == [201, 403]  # the master is restricted, the store is not
        assert "violates PodSecurity" in next(text for status, text in verdicts if status == 403)
    else:
        assert [status for status, _ in verdicts] == [201] * len(verdicts), verdicts
    assert len(verdicts) == (2 if has_store else 0)


MODELS: dict[str, Json] = {
    "claim": {"volume": {"claimName": "models", "path": "qwen"}},
    "cache": {"cache": {"claimName": "hub"}},
    "image": {"volume": {"image": {"reference": "registry.example/qwen:1", "pullPolicy": "Never"}}},
}
USERS = ENGINE_SPECS | {f"model-in-{name}": {"model": {"name": "tiny", **model}} for name, model in MODELS.items()}


@pytest.mark.parametrize("spec", USERS)
def test_an_engine_settles(clean: Cluster, spec: str) -> None:
    pool = parse_pool(clean.create("KVCachePool", "policy", POOL_SPECS["l1-l2"])) if spec in ("minimal", "full") else None
    engine = parse_engine(clean.create("InferenceEngine", "rollout", USERS[spec]))
    clean.execute(plan_engine(engine, pool, Observed(clean.children()), CONTEXT))
    children = clean.settled_children("Deployment", "rollout")
    assert plan_engine(engine, pool, Observed(children), CONTEXT) == Plan()
    assert [status for status, _ in admit_pods(clean, children)] == [201]


def test_statuses_fit_the_schema(clean: Cluster) -> None:
    """Whole statuses, with everything in them, pass strict validation, and come back as they were written."""
    now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    pool = parse_pool(clean.create("KVCachePool", "policy", POOL_SPECS["l1-l2"]))
    engine = parse_engine(clean.create("InferenceEngine", "rollout", ENGINE_SPECS["minimal"]))
    clean.execute(plan_pool(pool, Observed(), CONTEXT))
    clean.execute(plan_engine(engine, pool, Observed(clean.children()), CONTEXT))
    crowd = [
        EngineView(
            number.to_bytes(16, "big"),
            epoch=6,
            converged=False,
            alive=True,
            pod=f"ray-{number % 70}",
            rank=number,
            old_epoch_requests=1,
            fingerprint=f"kind-{number % 9}",
            weights=(number % 20).to_bytes(16, "big"),
        )
        for number in range(80)
    ]
    hub = HubView(
        target=7,
        published=6,
        engines=crowd,
        laggards=[(f"ray-{number}", "Behind") for number in range(20)],
        reset_epoch=7,
        reset_started=now,
        origin="Trainer",
        weights=[WeightsGroup(f"{number:032x}", 4, now, "v" * 253) for number in range(20)],
        outliers=[Outlier(f"ray-{number}", f"{number:032x}", "f" * 32) for number in range(1, 20)],
        reclaim=ReclaimView(6, 12, 2**40, now, wipe_failed=True),
        keys=KeysView(2, 2, ("ray-1",)),
    )
    observed = Observed(clean.children(), (), hub)
    for kind, name, status in (
        ("KVCachePool", "policy", pool_status(pool, observed, CONTEXT, {"granting": True}, now)),
        ("InferenceEngine", "rollout", engine_status(engine, pool, observed, {}, now)),
    ):
        path = f"{clean.collection(kind)}/{name}/status?fieldValidation=Strict"
        code, answer = clean.request("PATCH", path, {"status": status}, "application/merge-patch+json")
        assert code == 200, answer
        assert answer["status"] == status
    reread = parse_pool(clean.request("GET", f"{clean.collection('KVCachePool')}/policy")[1])
    assert reread.status is not None
    assert (reread.status.target_epoch, reread.status.epoch, reread.status.granting) == (7, 6, True)
    assert reread.status.external_engines is not None
    assert len({engine.name for engine in reread.status.external_engines}) == 64
