"""The operator against a real API server: what it makes, what it leaves alone, what it repairs. No kubelet: pods are
made ready by hand.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, Namespace, OperatorProcess, becomes, condition, leading_operator

L1_AND_L2 = {"local": {"capacity": "64Mi"}, "distributed": {"mooncake": {"store": {"replicas": 1, "segmentSize": "256Mi"}}}}
ENGINE = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}, "replicas": 2}


def make_pods_ready(space: Namespace) -> None:
    """What a kubelet would report: every pod runs and is ready."""
    for pod in space.request("GET", f"/api/v1/namespaces/{space.name}/pods")["items"]:
        if any(item["type"] == "Ready" for item in pod["status"].get("conditions") or []):
            continue
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("Ready", "ContainersReady")]
        status = {"phase": "Running", "conditions": conditions}
        path = f"/api/v1/namespaces/{space.name}/pods/{pod['metadata']['name']}/status"
        code, answer = space.plane.api.request("PATCH", path, {"status": status}, "application/merge-patch+json")
        assert code in (200, 404), answer  # 404: its controller was faster


def up(space: Namespace) -> bool:
    """Pool `policy` Ready and engine `rollout` Available (nothing heartbeats here, so its epoch is not current)."""
    make_pods_ready(space)
    conditions = (condition(space.status("policy"), "Ready"), condition(space.engine_status("rollout"), "Available"))
    return all(item.get("status") == "True" for item in conditions)


def test_a_pool_and_an_engine_become_objects_and_then_ready(namespace: Namespace, operator: OperatorProcess) -> None:
    pool = namespace.create_pool("policy", **L1_AND_L2)
    engine = namespace.create_engine("rollout", **ENGINE)
    expected = {
        "deployments": {"policy-master", "rollout"},
        "statefulsets": {"policy-store"},
        "configmaps": {"policy-connection"},
        "secrets": {"policy-fence"},
        "serviceaccounts": {"rollout"},
        "poddisruptionbudgets": {"policy-master", "policy-store", "rollout"},
        "services": {"policy-master", "policy-store", "rollout"},
    }
    for kind, names in expected.items():
        eventually(lambda k=kind, n=names: n <= namespace.names(k), f"{names} among the {kind}")
    owners = {"policy-master": pool, "rollout": engine}
    for name, owner in owners.items():
        deployment = namespace.get(CHILDREN["deployments"], name)
        assert deployment is not None
        reference = deployment["metadata"]["ownerReferences"][0]
        assert (reference["uid"], reference["controller"]) == (owner["metadata"]["uid"], True)

    eventually(lambda: up(namespace), "pool Ready, engine Available")
    namespace.kubectl("wait", "--for=condition=Ready", "kvp/policy", "--timeout=20s")
    assert namespace.kubectl("get", "kvp", "policy", "-o", "jsonpath={.status.targetEpoch}/{.status.epoch}") == "0/0"


def test_a_steady_and_a_restarted_operator_write_nothing(namespace: Namespace, tmp_path: Path) -> None:
    with leading_operator(namespace, tmp_path) as first:
        namespace.create_pool("policy", **L1_AND_L2)
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: up(namespace), "pool and engine up")
        time.sleep(3)  # the tail of the rollout: counters of other controllers
        before, writes = namespace.versions(), first.metric("epochkv_operator_api_writes_total")
        assert writes > 10  # the counter counts
        requests = first.metric("epochkv_operator_api_requests_total")
        time.sleep(8)
        assert namespace.versions() == before
        assert first.metric("epochkv_operator_api_writes_total") == writes
        assert first.metric("epochkv_operator_api_requests_total") > requests  # its Lease: the operator was not asleep
        assert first.terminate() == 0
    with leading_operator(namespace, tmp_path, hub_port=first.hub_port) as second:
        eventually(lambda: second.metric("epochkv_operator_reconciles_total") >= 2, "both objects reconciled")
        time.sleep(2)
        assert namespace.versions() == before, second.tail()


def test_children_that_somebody_deleted_or_changed_are_put_right(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **L1_AND_L2)
    namespace.create_engine("rollout", **ENGINE)
    children = {"rollout": "deployments", "policy-connection": "configmaps", "policy-store": "statefulsets"}
    old = {name: eventually(lambda k=kind, n=name: namespace.get(CHILDREN[k], n), f"{name} made") for name, kind in children.items()}
    for name, kind in children.items():
        namespace.delete(CHILDREN[kind], name)

        def back(name: str = name, kind: str = kind) -> bool:
            new = namespace.get(CHILDREN[kind], name)
            return new is not None and new["metadata"]["uid"] != old[name]["metadata"]["uid"]

        eventually(back, f"{name} back")
    namespace.patch(CHILDREN["deployments"], "rollout", {"metadata": {"annotations": {"team": "a"}}, "spec": {"replicas": 7}})
    namespace.patch(CHILDREN["networkpolicies"], "policy-master", {"spec": {"podSelector": {"matchLabels": {"team": "a"}}}})

    def put_right() -> bool:
        found = namespace.get(CHILDREN["deployments"], "rollout") or {}
        selected = (namespace.get(CHILDREN["networkpolicies"], "policy-master") or {})["spec"]["podSelector"]["matchLabels"]
        return bool(found["spec"]["replicas"] == 2) and found["metadata"]["annotations"]["team"] == "a" and "team" not in selected

    eventually(put_right, "replicas put right, and what is not ours stays")

    def reasons() -> set[str]:
        return {line["reason"] for line in operator.logged("child applied") if f" {namespace.name}/" in line["object"]}

    changed = {f"spec.{where} was changed by somebody else" for where in ("replicas", "podSelector.matchLabels.team")}
    eventually(lambda: {"it does not exist", *changed} <= reasons(), "and logged why")


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("services", "policy-master", "/spec/ports/0/port"),
        ("deployments", "rollout", "/spec/template/spec/containers/0/ports/0/containerPort"),
    ],
)
def test_a_port_that_somebody_renumbered_is_put_right(
    namespace: Namespace, operator: OperatorProcess, kind: str, name: str, path: str
) -> None:
    """An apply would add the right port beside the wrong one, which has its name: the API server refuses that."""
    namespace.create_pool("policy", **L1_AND_L2)
    namespace.create_engine("rollout", **ENGINE)
    made = eventually(lambda: namespace.get(CHILDREN[kind], name), "made")

    def ports(obj: dict[str, Any] | None) -> Any:
        found: Any = obj
        for part in path.split("/")[1:-2]:
            found = found[int(part) if part.isdigit() else part]
        return found

    target = f"{CHILDREN[kind].format(namespace.name)}/{name}"
    operations = [{"op": "replace", "path": path, "value": 81}]
    status, answer = namespace.plane.api.request("PATCH", target, operations, "application/json-patch+json", 15)
    assert status == 200, answer
    eventually(lambda: ports(namespace.get(CHILDREN[kind], name)) == ports(made), "put right")
    owner = "policy" if name.startswith("policy") else "rollout"
    state = namespace.status if owner == "policy" else namespace.engine_status
    eventually(lambda: condition(state(owner), "Ready").get("reason") != "ApplyRefused", "applied")

    def ours() -> list[str]:
        found = (namespace.get(CHILDREN[kind], name) or {})["metadata"]["managedFields"]
        return [entry["operation"] for entry in found if entry["manager"].startswith("epochkv-operator")]

    eventually(lambda: ours() == ["Apply"], "what a patch owns, too, no later apply takes away")


def test_an_engine_whose_pool_vanishes_serves_without_cache(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **L1_AND_L2)
    namespace.create_engine("rollout", **ENGINE)

    def arguments() -> str:
        deployment = namespace.get(CHILDREN["deployments"], "rollout")
        return json.dumps(deployment["spec"]["template"]["spec"]) if deployment else ""

    eventually(lambda: "kv-transfer-config" in arguments(), "engine with connector")
    namespace.delete(POOLS, "policy")
    eventually(lambda: arguments() and "kv-transfer-config" not in arguments(), "engine without connector")
    assert becomes(namespace.engine_status, "rollout", "PoolBound", status="False")["reason"] == "PoolNotFound"
    eventually(lambda: not namespace.names("statefulsets"), "the pool's objects are collected", 120)


def test_an_engine_that_comes_shortly_before_its_pool_starts_its_pods_once(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_engine("rollout", **ENGINE)
    waits = becomes(namespace.engine_status, "rollout", "Ready", status="False")
    assert (waits["reason"], namespace.get(CHILDREN["deployments"], "rollout")) == ("WaitingForPool", None)
    namespace.create_pool("policy", **L1_AND_L2)
    becomes(namespace.engine_status, "rollout", "PoolBound", status="True")
    deployment = eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "made with its pool")
    assert "kv-transfer-config" in json.dumps(deployment)
    assert deployment["metadata"]["generation"] == 1, "it was made without the pool before"


def test_an_engine_that_waited_long_enough_starts_without_its_pool(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_engine("rollout", **ENGINE)
    alone = eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "made alone")
    assert "kv-transfer-config" not in json.dumps(alone)
    namespace.create_pool("policy", **L1_AND_L2)
    becomes(namespace.engine_status, "rollout", "PoolBound", status="True")
    eventually(lambda: "kv-transfer-config" in json.dumps(namespace.get(CHILDREN["deployments"], "rollout")), "made anew with its pool")


def test_an_object_that_the_api_server_refuses_is_a_condition_not_a_crash(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_engine("rollout", model={"name": "tiny"}, template={"spec": {"nodeSelectr": {"disk": "fast"}}})
    refused = eventually(
        lambda: next((c for c in namespace.engine_status("rollout").get("conditions") or [] if "nodeSelectr" in c["message"]), None),
        "a condition that says so",
    )
    assert refused["status"] == "False"
    namespace.patch(ENGINES, "rollout", {"spec": {"template": None}})
    eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "made after the fix")
    namespace.patch(ENGINES, "rollout", {"spec": {"replicas": 3, "template": {"spec": {"nodeSelectr": {"disk": "fast"}}}}})
    becomes(namespace.engine_status, "rollout", "Ready", reason="ApplyRefused")
    assert (namespace.get(CHILDREN["deployments"], "rollout") or {})["spec"]["replicas"] == 1, "all of it, or nothing"


def test_what_a_pool_left_behind_belongs_to_the_next_one(namespace: Namespace, operator: OperatorProcess) -> None:
    """`kubectl delete --cascade=orphan`, and the same pool and engine again."""
    wanted = (("deployments", "policy-master"), ("statefulsets", "policy-store"), ("deployments", "rollout"), ("services", "rollout"))

    def metadata(kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (namespace.get(CHILDREN[kind], name) or {}).get("metadata") or {}
        return found

    def owners() -> dict[str, str | None]:
        return {name: (metadata(kind, name).get("ownerReferences") or [{}])[0].get("uid") for kind, name in wanted}

    def uids() -> dict[str, str | None]:
        return {name: metadata(kind, name).get("uid") for kind, name in wanted}

    def made() -> dict[str, str]:
        pool, engine = namespace.create_pool("policy", **L1_AND_L2), namespace.create_engine("rollout", **ENGINE)
        return {name: (pool if name.startswith("policy") else engine)["metadata"]["uid"] for _, name in wanted}

    def keys() -> dict[str, str]:
        data: dict[str, str] = (namespace.get(CHILDREN["secrets"], "policy-fence") or {}).get("data") or {}
        return {name: data.get(name, "") for name in ("root.secret", "client.pub")}

    first = made()
    eventually(lambda: owners() == first, "all is made")
    before, old_keys = uids(), keys()
    for collection, name in ((ENGINES, "rollout"), (POOLS, "policy")):
        namespace.request("DELETE", f"{collection.format(namespace.name)}/{name}", {"propagationPolicy": "Orphan"})
        eventually(lambda c=collection, n=name: namespace.get(c, n) is None, f"{name} is gone", 120)
    assert (owners(), uids()) == (dict.fromkeys(before), before), "what is left is nobody's"
    again = made()
    eventually(lambda: owners() == again, "each has an owner again", 60)
    assert uids() == before
    assert not set(keys().values()) & {*old_keys.values(), ""}, "the keys of a deleted pool are given to nobody"
    assert "NameConflict" not in str(namespace.status("policy")) + str(namespace.engine_status("rollout"))
