"""Everything the planner wants, against a real API server: applied as it is, stable once applied, admitted as `restricted`."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import EngineView, WeightsView
from epochkv_operator.api import parse_engine, parse_pool
from epochkv_operator.api.resources import BY_KIND, CHILD_SELECTOR, CHILDREN, PODS
from epochkv_operator.planning.context import HubView, KeysView, Observed
from epochkv_operator.planning.plan import Plan, plan_engine, plan_pool
from epochkv_operator.planning.status import engine_status, pool_status
from hack.waiting import eventually
from tests.cluster.operator_harness import ENGINES, POOLS, ROOT, Namespace
from tests.support.planning import CONTEXT, ENGINE_SPECS, POOL_SPECS

Json = dict[str, Any]


@pytest.fixture
def space(namespace: Namespace) -> Namespace:
    """At Pod Security level `restricted`."""
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace.patch("/api/v1/namespaces", namespace.name, {"metadata": {"labels": level}})
    eventually(lambda: namespace.get("/api/v1/namespaces/{}/serviceaccounts", "default"), "pods may be created", 60)
    return namespace


def look(space: Namespace, kind: str, name: str) -> Json:
    found: Json = space.request("GET", BY_KIND[kind].path(space.name, name))
    return found


def apply(space: Namespace, obj: Json) -> Json:
    path = BY_KIND[obj["kind"]].path(space.name, obj["metadata"]["name"])
    applied: Json = space.request("PATCH", f"{path}?fieldManager=epochkv-operator&force=true", obj, "application/apply-patch+yaml")
    return applied


def children(space: Namespace) -> list[Json]:
    lists = {kind.kind: space.request("GET", f"{kind.path(space.name)}?labelSelector={CHILD_SELECTOR}")["items"] for kind in CHILDREN}
    return [{**item, "kind": kind} for kind, items in lists.items() for item in items]


def execute(space: Namespace, plan: Plan) -> None:
    assert (plan.problem, plan.delete) == (None, ())
    for obj in plan.apply:
        apply(space, obj)


def settled_children(space: Namespace, kind: str, name: str) -> list[Json]:
    """Children once the controllers have had their say about a workload."""

    def looked_at() -> bool:
        found = look(space, kind, name)
        return bool(found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"])

    eventually(looked_at, f"a controller has looked at {kind} {name}")
    return children(space)


def admit_pods(space: Namespace, children: list[Json]) -> list[tuple[int, str]]:
    """What admission says about a pod of each workload (dry run)."""
    verdicts = []
    for child in children:
        if "template" in child.get("spec", {}):
            template = child["spec"]["template"]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "probe"}, "spec": template["spec"]}
            status, answer = space.plane.api.request("POST", f"{PODS.path(space.name)}?dryRun=All", pod, timeout=20)
            verdicts.append((status, str(json.loads(answer).get("message", ""))))
    return verdicts


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_a_pool_settles(space: Namespace, spec: str) -> None:
    """Applied, defaulted and acted on by the controllers: the next plan is empty, and an apply would write nothing."""
    pool = parse_pool(space.create_pool("policy", **POOL_SPECS[spec]))
    first = plan_pool(pool, Observed(children(space)), CONTEXT)
    execute(space, first)
    has_store = any(obj["kind"] == "StatefulSet" for obj in first.apply)
    live = settled_children(space, "StatefulSet", "policy-store") if has_store else children(space)
    assert plan_pool(pool, Observed(live), CONTEXT) == Plan()
    for obj in first.apply:
        if obj["kind"] not in ("Deployment", "StatefulSet", "PodDisruptionBudget"):  # controllers write their status at any time
            before = look(space, obj["kind"], obj["metadata"]["name"])["metadata"]["resourceVersion"]
            assert apply(space, obj)["metadata"]["resourceVersion"] == before
    verdicts = admit_pods(space, live)
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
def test_an_engine_settles(space: Namespace, spec: str) -> None:
    pool = parse_pool(space.create_pool("policy", **POOL_SPECS["l1-l2"])) if spec in ("minimal", "full") else None
    engine = parse_engine(space.create_engine("rollout", **USERS[spec]))
    execute(space, plan_engine(engine, pool, Observed(children(space)), CONTEXT))
    live = settled_children(space, "Deployment", "rollout")
    assert plan_engine(engine, pool, Observed(live), CONTEXT) == Plan()
    assert [status for status, _ in admit_pods(space, live)] == [201]


def test_statuses_fit_the_schema(space: Namespace) -> None:
    """Whole statuses, with everything in them, pass strict validation, and come back as they were written."""
    now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    pool = parse_pool(space.create_pool("policy", **POOL_SPECS["l1-l2"]))
    engine = parse_engine(space.create_engine("rollout", **ENGINE_SPECS["minimal"]))
    execute(space, plan_pool(pool, Observed(), CONTEXT))
    execute(space, plan_engine(engine, pool, Observed(children(space)), CONTEXT))

    def held(number: int) -> Json:
        return {"fingerprint": f"kind-{number % 9}", "weights": (number % 20).to_bytes(16), "majority": b"\xff" * 16}

    crowd = [
        EngineView(number.to_bytes(16), 6, False, True, pod=f"ray-{number % 70}", rank=number, old_epoch_requests=1, **held(number))
        for number in range(80)
    ]
    weights, at = [WeightsView(number.to_bytes(16), "v" * 253, 4, 0.0) for number in range(20)], now.timestamp()
    told: Json = {"started_at": at, "origin": Source.TRAINER, "weights": weights, "keys": KeysView(2, 2, ("ray-1",))}
    reclaimed: Json = {"reclaimed": 6, "reclaimed_keys": 12, "reclaimed_bytes": 2**40, "reclaimed_at": at, "wipe_failed": True}
    hub = HubView(7, 6, crowd, **told, **reclaimed)
    observed = Observed(children(space), (), hub)
    for collection, name, status in (
        (POOLS, "policy", pool_status(pool, observed, CONTEXT, {"granting": True}, now)),
        (ENGINES, "rollout", engine_status(engine, pool, observed, {}, now)),
    ):
        answer = space.patch(collection, name, {"status": status}, "/status?fieldValidation=Strict")
        assert answer["status"] == status
    reread = parse_pool(space.pool("policy"))
    assert reread.status is not None
    assert (reread.status.target_epoch, reread.status.epoch, reread.status.granting) == (7, 6, True)
    assert reread.status.external_engines is not None
    assert len({engine.name for engine in reread.status.external_engines}) == 64


def test_before_the_operator_has_looked_no_tool_takes_it_for_well(space: Namespace) -> None:
    pool, engine = {"local": {"capacity": "1Gi"}}, {"model": {"name": "tiny"}}
    for kind, path, spec in (("KVCachePool", POOLS, pool), ("InferenceEngine", ENGINES, engine)):
        space.create(path, {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": {"name": "new"}, "spec": spec})
        assert look(space, kind, "new")["status"] == {"observedGeneration": -1}


@pytest.mark.parametrize("name", ["trainer.yaml", "trainer-job.yaml"])
def test_the_trainers_of_the_samples_are_admitted(space: Namespace, name: str) -> None:
    sample = yaml.safe_load((ROOT / "config/samples" / name).read_text())
    spec = (sample if sample["kind"] == "Pod" else sample["spec"]["template"])["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": spec}
    space.request("POST", f"/api/v1/namespaces/{space.name}/pods?dryRun=All", pod)
