"""Pods that join a pool by a label: what the chart's admission policy does to them, and what the operator keeps for other namespaces."""

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, POOLS, ROOT, Namespace, OperatorProcess, condition, install_crds
from tests.cluster.test_operator_external import external, joined, mounted

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}
PODS = "/api/v1/namespaces/{}/pods"
ADMISSION = "/apis/admissionregistration.k8s.io/v1/"
RESTRICTED = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER = {"image": "vllm", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
BY_FIELD = {"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
EMPTY = {"name": "a", "emptyDir": {}}
GATED = {"epochkv.io/weights-gate": "true"}


def has(field: str, item: dict[str, Any]) -> dict[str, Any]:
    """A pod whose container has it."""
    return {"containers": [{"name": "vllm", **CONTAINER, field: [item]}]}


GPU = {"limits": {"nvidia.com/gpu": "1", "memory": "1.5Gi"}}


def rendered(plane: ControlPlane, template: str = "join", security: str = "restricted") -> list[dict[str, Any]]:
    sets = ("--set=join.enabled=true", f"--set=podSecurity={security}")
    chart = (str(ROOT / "charts/epochkv"), f"--show-only=templates/{template}.yaml", *sets)
    text = subprocess.run([str(plane.helm), "template", "epochkv", *chart], capture_output=True, text=True, timeout=60, check=True).stdout
    return list(yaml.safe_load_all(text))


def path(obj: dict[str, Any]) -> str:
    kind = obj["kind"].lower()
    return f"{ADMISSION}{kind[:-1] + 'ies' if kind.endswith('y') else kind + 's'}/{obj['metadata']['name']}"


def apply_policy(plane: ControlPlane, template: str = "join", security: str = "restricted") -> None:
    for obj in rendered(plane, template, security):
        plane.api.apply(path(obj), obj)


def delete_policy(plane: ControlPlane, template: str = "join") -> None:
    for obj in rendered(plane, template):
        plane.api.request("DELETE", path(obj), None, timeout=15)


@pytest.fixture(scope="module")
def policy(plane: ControlPlane) -> Iterator[None]:
    """The chart's policy, on this API server."""
    apply_policy(plane)
    yield
    delete_policy(plane)


def pod(space: Namespace, name: str, pool: str | None = "policy", notes: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Make a pod as a Deployment would, and return what the API server made of it."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    space.plane.api.apply(f"/api/v1/namespaces/{space.name}/serviceaccounts/default", account)
    labels = {"app": "serving"} if pool is None else {"app": "serving", "epochkv.io/pool": pool}
    body: dict[str, Any] = {"metadata": {"name": name, "labels": labels, "annotations": notes or {}}}
    body["spec"] = {"securityContext": RESTRICTED, "containers": [{"name": "vllm", **CONTAINER}], **spec}
    made: dict[str, Any] = space.create(PODS, body)
    return made


def joins(space: Namespace, name: str, **given: Any) -> dict[str, Any]:
    """The first pod of these that joins: an API server takes in policies, and what they go by, after a moment."""
    for attempt in range(30):
        made = pod(space, f"{name}-{attempt}", **given)
        if "epochkv.io/joined" in made["metadata"].get("annotations", {}):
            return made
        space.request("DELETE", f"{PODS.format(space.name)}/{name}-{attempt}?gracePeriodSeconds=0")
        time.sleep(0.5)
    raise AssertionError(f"no pod joined: {made['metadata']}")


def container(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in made["spec"]["containers"] if one["name"] == name)


def env(made: dict[str, Any], name: str) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(made, name).get("env", [])}


def not_joined(space: Namespace, name: str, operator: OperatorProcess) -> dict[str, Any]:
    """The Event that says why this pod has not joined."""
    return eventually(
        lambda: next((one for one in space.events("NotJoined") if one["regarding"]["name"] == name), None),
        lambda: f"an Event; log:\n{operator.tail()}",
    )


def test_a_label_is_all_that_a_pod_needs(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace.patch("/api/v1/namespaces", namespace.name, {"metadata": {"labels": labels}})
    namespace.create_pool("policy", **POOL)
    namespace.create_pool("other", **POOL | {"local": {"capacity": "1Gi"}}, serve={"weights": "Converged"})
    made = joins(namespace, "plain")
    (init,) = made["spec"]["initContainers"]
    assert init["image"].startswith("epochkv/connector:")
    assert {volume["name"] for volume in made["spec"]["volumes"]} >= {"epochkv", "epochkv-connection", "epochkv-fence"}
    mounts = {mount["mountPath"] for mount in container(made, "vllm")["volumeMounts"]}
    assert mounts >= {"/epochkv", "/etc/epochkv/connection", "/etc/epochkv/fence"}
    assert env(made, "vllm").items() >= {"PYTHONPATH": "/epochkv", "EPOCHKV_ATTACH": "1"}.items()
    assert env(made, "vllm")["EPOCHKV_CONFIG"] == "/etc/epochkv/connection/connection.json"
    assert env(made, "vllm")["EPOCHKV_LOCAL_CAPACITY"] == str(2**26), "also when the pool is given another one later"
    assert not made["spec"]["containers"][0].get("resources")
    assert not init.get("resources")

    # The container that asks for an accelerator; what the pod has already stays, L1 comes on top.
    given = [{"name": name, "value": value} for name, value in (("PYTHONPATH", "/a"), ("PYTHONPATH", "/mine"), ("POD_IP", "me"))]
    containers = [{"name": "proxy", **CONTAINER}, {"name": "vllm", **CONTAINER, "resources": GPU, "env": given}]
    download, models = {"name": "download", **CONTAINER}, {"name": "models", "emptyDir": {}}
    two = pod(namespace, "two", containers=containers, initContainers=[download], volumes=[models])
    assert two["metadata"]["annotations"] == {"epochkv.io/joined": "vllm"}
    assert [one["name"] for one in two["spec"]["initContainers"]] == ["epochkv-connector", "download"]
    assert env(two, "vllm").items() >= {"PYTHONPATH": "/epochkv:/mine", "POD_IP": "me"}.items()
    assert container(two, "vllm")["resources"]["limits"]["memory"] == str(3 * 2**29 + 2**26)
    assert env(two, "proxy") == {}
    named = pod(namespace, "named", notes={"epochkv.io/engine-container": "proxy", "epochkv.io/local": "1Gi"}, containers=containers)
    assert env(named, "proxy")["EPOCHKV_LOCAL_CAPACITY"] == str(2**30)
    assert env(named, "vllm").keys() == {"PYTHONPATH", "POD_IP"}
    large = pod(namespace, "large", pool="other", containers=containers, notes=GATED)
    assert container(large, "vllm")["resources"]["limits"]["memory"] == str(5 * 2**29)
    assert {volume["configMap"]["name"] for volume in large["spec"]["volumes"] if "configMap" in volume} == {"other-connection"}
    fenced = pod(namespace, "fenced", notes={"epochkv.io/fence": "true", **GATED}, containers=containers)
    assert large["spec"]["readinessGates"] == [{"conditionType": "epochkv.io/weights"}]
    assert "readinessGates" not in fenced["spec"], "its pool asks for no weights, so nobody would open it"
    assert env(fenced, "vllm")["EPOCHKV_FENCE"] == "1"
    assert not {"EPOCHKV_ATTACH", "EPOCHKV_LOCAL_CAPACITY"} & env(fenced, "vllm").keys()
    assert container(fenced, "vllm")["resources"]["limits"]["memory"] == "1536Mi"

    empty = pod(namespace, "empty", containers=[{"name": "vllm", **CONTAINER, "env": [{"name": "PYTHONPATH"}]}])
    assert env(empty, "vllm")["PYTHONPATH"] == "/epochkv"

    from_elsewhere = [{"configMapRef": {"name": "settings"}}]  # the kubelet puts in what it has of that name
    drawn = pod(namespace, "drawn", containers=[{"name": "vllm", **CONTAINER, "envFrom": from_elsewhere}])
    assert env(drawn, "vllm")["PYTHONPATH"] == "/epochkv:$(PYTHONPATH)"

    # Nothing of ours where nobody asked, or where somebody wrote it by hand.
    assert "initContainers" not in pod(namespace, "strange", pool=None)["spec"]
    by_hand = [{"name": "fence", "secret": {"secretName": "policy-fence"}}]
    assert "initContainers" not in pod(namespace, "by-hand", volumes=by_hand)["spec"]
    projected = [{"name": "fence", "projected": {"sources": [{"secret": {"name": "policy-fence"}}]}}]
    assert "initContainers" not in pod(namespace, "projected", volumes=projected)["spec"]
    assert {one["regarding"]["name"] for one in namespace.events("NotJoined")} <= {"plain-0", "plain-1"}


@pytest.mark.parametrize(
    ("notes", "spec", "why"),
    [
        ({"epochkv.io/local": "64 gigs"}, {}, 'epochkv.io/local is "64 gigs": it must be a size such as 64Gi'),
        ({"epochkv.io/local": "1"}, {}, "of 1Mi to 1Pi"),
        ({"epochkv.io/local": "2Pi"}, {}, "of 1Mi to 1Pi"),
        ({"epochkv.io/engine-container": "no"}, {}, 'is "no", and the pod has no such container: vllm'),
        ({"epochkv.io/fence": "yes"}, {}, 'epochkv.io/fence is "yes": it must be "true" or "false"'),
        ({}, has("env", BY_FIELD), "vllm has PYTHONPATH by valueFrom: give it a value"),
        ({}, has("env", {"name": "POD_NAME", "value": "me"}), "vllm has POD_NAME or POD_NAMESPACE, which is not of the pod"),
        ({}, has("env", {"name": "EPOCHKV_LOCAL_CAPACITY", "value": "1Gi"}), "say it in annotation epochkv.io/local"),
        ({}, has("volumeMounts", {"name": "a", "mountPath": "//epochkv/"}) | {"volumes": [EMPTY]}, "the pod has mount //epochkv/ already"),
        ({}, {"volumes": [{"name": "epochkv", "emptyDir": {}}]}, "the pod has volume epochkv already"),
        ({"epochkv.io/engines": "0"}, {}, 'epochkv.io/engines is "0": it must be a number of 1 to 64'),
        ({}, {"containers": [{"name": name, **CONTAINER} for name in ("vllm", "epochkv-connector")]}, "has container epochkv-connector"),
        ({}, {"os": {"name": "windows"}, "securityContext": {}, "containers": [{"name": "vllm", "image": "x"}]}, "the pod is for Windows"),
        ({}, {"nodeSelector": {"kubernetes.io/os": "windows"}}, "the pod is for Windows"),
    ],
)
def test_what_cannot_join_starts_without_us_and_says_why(
    policy: None, namespace: Namespace, operator: OperatorProcess, notes: dict[str, str], spec: dict[str, Any], why: str
) -> None:
    namespace.create_pool("policy", **POOL)
    joins(namespace, "first")
    made = pod(namespace, "wrong", notes=notes, **spec)
    assert why in made["metadata"]["annotations"]["epochkv.io/rejected"]
    assert "initContainers" not in made["spec"]
    event = not_joined(namespace, "wrong", operator)
    assert (event["regarding"]["kind"], event["type"]) == ("Pod", "Warning")
    assert why in event["note"]


def test_l1_is_on_top_of_all_memory_that_holds_for_the_engine(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    """In whole bytes, and of the pod as a whole, too."""
    namespace.create_pool("policy", local={"capacity": "1.1Mi"})
    made = joins(namespace, "first")
    l1 = 1_153_434  # 1,153,433.6
    assert env(made, "vllm")["EPOCHKV_LOCAL_CAPACITY"] == str(l1)
    given = {"limits": {"memory": "1.1Gi", "ephemeral-storage": "1Gi"}, "requests": {"memory": "1Gi"}}  # 1,181,116,006.4
    both = {"limits": {"memory": "3Gi", "cpu": "2"}, "requests": {"memory": "2Gi"}}
    many = pod(namespace, "many", containers=[{"name": "vllm", **CONTAINER, "resources": given}], notes={"epochkv.io/engines": "8"})
    assert container(many, "vllm")["resources"]["limits"]["memory"] == str(1_181_116_007 + 8 * l1)
    assert env(many, "vllm")["EPOCHKV_LOCAL_CAPACITY"] == str(l1)
    made = pod(namespace, "both", containers=[{"name": "vllm", **CONTAINER, "resources": given}], resources=both)
    assert container(made, "vllm")["resources"] == {
        "limits": {"memory": str(1_181_116_007 + l1), "ephemeral-storage": str(2**30 + 2**29)},
        "requests": {"memory": str(2**30 + l1), "ephemeral-storage": str(2**30 + 2**29)},
    }
    assert made["spec"]["resources"]["limits"] == {"memory": str(3 * 2**30 + l1), "cpu": "2"}
    assert made["spec"]["resources"]["requests"]["memory"] == str(2**31 + l1)


def test_a_limit_range_that_takes_the_engine_takes_the_rest(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    joins(namespace, "first")
    limit = {"type": "Container", "min": {"cpu": "2", "memory": "2Gi"}, "maxLimitRequestRatio": {"cpu": "1", "memory": "1"}}
    namespace.create("/api/v1/namespaces/{}/limitranges", {"metadata": {"name": "large"}, "spec": {"limits": [limit]}})
    large = {"cpu": "2", "memory": "4Gi"}
    resources = {"limits": {**large, "nvidia.com/gpu": "1"}, "requests": {**large, "nvidia.com/gpu": "1"}}
    little = {"name": "vllm", **CONTAINER, "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}}
    refused = {"metadata": {"name": "small"}, "spec": {"containers": [little], "securityContext": RESTRICTED}}
    path = PODS.format(namespace.name)

    def is_refused() -> bool:
        status, answer = namespace.plane.api.request("POST", f"{path}?dryRun=All", refused, timeout=15)
        return status == 403 and b"minimum" in answer

    eventually(is_refused, "the LimitRange counts")
    made = pod(namespace, "large", containers=[{"name": "vllm", **CONTAINER, "resources": resources}])
    assert made["metadata"]["annotations"]["epochkv.io/joined"] == "vllm"
    assert made["spec"]["initContainers"][0]["resources"] == {"limits": large, "requests": large}
    assert container(made, "vllm")["resources"]["limits"]["memory"] == str(2**32 + 2**26)


def test_where_the_platform_gives_ids_the_init_container_is_not_root(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    """A kubelet refuses a container that inherits 0 and has `runAsNonRoot`. Any other id is one that the platform lets the pod have."""
    namespace.create_pool("policy", **POOL)
    joins(namespace, "first")
    apply_policy(namespace.plane, security="platform")
    try:
        for given in ({"runAsUser": 1000}, {}, {"runAsUser": 0}):

            def asked(given: dict[str, int] = given) -> bool:
                made = pod(namespace, f"pod-{time.monotonic_ns()}", securityContext=given)
                security = made["spec"]["initContainers"][0]["securityContext"]
                return security["runAsNonRoot"] and security.get("runAsUser") == (65532 if given.get("runAsUser") == 0 else None)

            eventually(asked, f"an id beside {given}")
    finally:
        apply_policy(namespace.plane)


def test_without_the_policy_nothing_changes_and_an_event_says_so(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    joins(namespace, "first")
    delete_policy(namespace.plane)
    try:
        for attempt in range(30):
            made = pod(namespace, f"plain-{attempt}")
            if "initContainers" not in made["spec"]:
                break
            time.sleep(0.5)
        assert "initContainers" not in made["spec"]
        notes = eventually(
            lambda: [one["note"] for one in namespace.events("NotJoined") if one["regarding"]["name"] == made["metadata"]["name"]],
            lambda: f"an Event; log:\n{operator.tail()}",
        )
        assert "the cluster has no policy" in notes[0]
    finally:
        apply_policy(namespace.plane)
    joins(namespace, "again")


Whole = tuple[OperatorProcess, list[Namespace]]


@pytest.fixture
def whole(fresh_control_plane: ControlPlane, tmp_path: Path) -> Iterator[Whole]:
    """An operator of a whole cluster, which no other one may serve, and three namespaces."""
    install_crds(fresh_control_plane)
    apply_policy(fresh_control_plane)
    spaces = [Namespace.create_in(fresh_control_plane, f"allowed-{letter}") for letter in "abc"]
    with OperatorProcess(fresh_control_plane, spaces[0].name, tmp_path, watch_namespace=None) as operator:
        yield operator.wait_ready(), spaces


IN = {"epochkv.io/pool-namespace": "allowed-a"}
"""Annotation of pods that mean the pool of the first of them."""


def name_of(space: Namespace, part: str, pool: str = "policy") -> str:
    """What the copies are called that a pool of this namespace has in others."""
    return f"{pool}-{hashlib.sha256(json.dumps(f'{space.name}/{pool}').encode()).hexdigest()[:10]}-{part}"


def copies(space: Namespace, of: Namespace) -> tuple[Any, Any]:
    """ConfigMap and Secret of the pool of another namespace."""
    parts = (("configmaps", "connection"), ("secrets", "fence"))
    config, secret = (space.get(CHILDREN[kind], name_of(of, part)) for kind, part in parts)
    return config, secret


def has_copies(space: Namespace, of: Namespace) -> bool:
    return None not in copies(space, of)


def keys(space: Namespace, name: str = "policy-fence") -> dict[str, str]:
    """What the pool's Secret, or a copy of it, holds here."""
    found: dict[str, str] = (space.get(CHILDREN["secrets"], name) or {"data": {}})["data"]
    return found


def allowed(space: Namespace) -> tuple[str, str, str]:
    found = condition(space.status("policy"), "NamespacesAllowed")
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


def test_other_namespaces_join_while_the_pool_allows_it(whole: Whole, tmp_path: Path) -> None:
    operator, (home, by_name, by_label) = whole
    home.create_pool("policy", **POOL, allowedNamespaces={"names": [by_name.name]}, serve={"weights": "Converged"})
    eventually(lambda: has_copies(by_name, home), lambda: f"copies; log:\n{operator.tail()}")
    assert copies(by_label, home) == (None, None)
    old, copy = keys(home), name_of(home, "fence")
    assert keys(by_name, copy) == old
    made = joins(by_name, "guest", notes={**IN, **GATED})
    assert made["spec"]["readinessGates"] == [{"conditionType": "epochkv.io/weights"}]

    def gate() -> tuple[str, str]:
        found = condition((by_name.get(PODS, made["metadata"]["name"]) or {})["status"], "epochkv.io/weights")
        return found.get("status", ""), found.get("reason", "")

    secrets = [volume["secret"] for volume in made["spec"]["volumes"] if "secret" in volume]
    assert [(one["secretName"], one["optional"]) for one in secrets] == [(copy, True)], "which may be gone when it is mounted"
    configs = [volume["configMap"] for volume in made["spec"]["volumes"] if "configMap" in volume]
    assert [(one["name"], one["optional"]) for one in configs] == [(name_of(home, "connection"), True)]
    eventually(lambda: allowed(home)[:2] == ("True", "Allowed"), lambda: f"told: {allowed(home)}")

    with joined(mounted(home, tmp_path), "guest") as engine:  # as a member of the other namespace would report
        eventually(lambda: engine.epoch == 0, "joined")
        eventually(lambda: home.status("policy")["engines"].get("external") == 1, "counted")
        assert set(external(home)) == {"guest"}

    assert gate() == ("", ""), "it does not run yet"
    # Labels count, too, and lost copies come back.
    by_label.patch("/api/v1/namespaces", by_label.name, {"metadata": {"labels": {"rl": "yes"}}})
    home.patch_spec("policy", allowedNamespaces={"names": None, "selector": {"matchLabels": {"rl": "yes"}}})
    eventually(lambda: has_copies(by_label, home) and copies(by_name, home) == (None, None), lambda: f"moved; log:\n{operator.tail()}")
    eventually(lambda: gate() == ("True", "NotGated"), lambda: f"nobody else opens it: {gate()}; log:\n{operator.tail()}")
    by_label.delete(CHILDREN["configmaps"], name_of(home, "connection"))
    eventually(lambda: has_copies(by_label, home), lambda: f"put back; log:\n{operator.tail()}")
    home.patch_spec("policy", keys={"generation": 1})
    eventually(lambda: keys(home)["client.key"] != old["client.key"], "rotated")
    eventually(lambda: keys(by_label, copy)["client.key"] == keys(home)["client.key"], "handed on")
    home.patch_spec("policy", local=None, distributed={"external": {"masterAddress": "m:1"}})
    eventually(lambda: "local" not in copies(by_label, home)[0]["data"], "what the pool no longer has goes from the copy, too")


def test_a_pod_joins_the_pool_that_it_means_and_no_namesake(whole: Whole) -> None:
    """A tenant who may make pools in its own namespace, and lets everybody join."""
    operator, (home, guests, tenant) = whole
    for space, size in ((home, "64Mi"), (tenant, "32Mi")):
        space.create_pool("policy", local={"capacity": size}, allowedNamespaces={"names": [guests.name]})
    eventually(lambda: has_copies(guests, home) and has_copies(guests, tenant), lambda: f"both; log:\n{operator.tail()}")
    assert copies(guests, home)[0]["metadata"]["labels"]["epochkv.io/shared"] == "true"
    made = joins(guests, "meant", notes=IN)
    assert env(made, "vllm")["EPOCHKV_LOCAL_CAPACITY"] == str(2**26)
    assert {volume["secret"]["secretName"] for volume in made["spec"]["volumes"] if "secret" in volume} == {name_of(home, "fence")}
    assert keys(guests, name_of(home, "fence")) == keys(home) != keys(tenant)

    # A label alone means a pool of its own namespace, and none is there.
    lonely = pod(guests, "lonely")
    assert "initContainers" not in lonely["spec"]
    note = not_joined(guests, "lonely", operator)["note"]
    assert "namespace allowed-b has no such pool" in note
    assert "annotation epochkv.io/pool-namespace of the pod (allowed-a, allowed-c has one, and lets pods of allowed-b join)" in note
    guests.create_pool("policy", local={"capacity": "16Mi"})
    own = joins(guests, "own")
    assert env(own, "vllm")["EPOCHKV_LOCAL_CAPACITY"] == str(2**24)
    assert [volume["secret"]["secretName"] for volume in own["spec"]["volumes"] if "secret" in volume] == ["policy-fence"]
    eventually(lambda: allowed(home)[:2] == ("True", "Allowed"), "nobody makes room")

    # Not allowed there: it says which.
    wrong = pod(tenant, "wrong", notes=IN)
    assert "initContainers" not in wrong["spec"]
    (event,) = eventually(lambda: tenant.events("NotJoined"), lambda: f"an Event; log:\n{operator.tail()}")
    assert "KVCachePool policy of namespace allowed-a: it is not there, or does not let pods of allowed-c join" in event["note"]


@pytest.mark.parametrize("kind", ["configmaps", "secrets"])
def test_what_a_stranger_has_under_that_name_stays(whole: Whole, kind: str) -> None:
    operator, (home, other, _) = whole
    name = name_of(home, {"configmaps": "connection", "secrets": "fence"}[kind])
    label = {"app.kubernetes.io/managed-by": "epochkv-operator", "epochkv.io/pool": "policy"} if kind == "secrets" else {}
    stranger = other.create(CHILDREN[kind], {"metadata": {"name": name, "labels": label}})
    home.create_pool("policy", **POOL, allowedNamespaces={"names": [other.name]})
    eventually(lambda: allowed(home)[:2] == ("False", "NameTaken"), lambda: f"told: {allowed(home)}; log:\n{operator.tail()}")
    assert f"{other.name}/{name} is there and not of this pool: delete it" in allowed(home)[2]
    made = pod(other, "guest", notes=IN)
    assert "initContainers" not in made["spec"]
    home.patch_spec("policy", allowedNamespaces=None)
    eventually(lambda: not allowed(home)[0], "no condition without the field")
    eventually(lambda: not other.names("configmaps"), "nothing else of the pool is left")
    home.delete(POOLS, "policy")
    eventually(lambda: operator.logged("pool gone"), "gone")
    assert other.get(CHILDREN[kind], name) == stranger
    assert [one for one in copies(other, home) if one is not None] == [stranger]


def test_a_pool_that_went_while_no_operator_ran_leaves_no_copies(whole: Whole) -> None:
    operator, (home, first, second) = whole
    home.create_pool("policy", **POOL, allowedNamespaces={"names": [first.name, second.name, "nowhere"]})
    eventually(lambda: has_copies(first, home) and has_copies(second, home), lambda: f"copies; log:\n{operator.tail()}")
    eventually(lambda: allowed(home)[1] == "NamespaceNotFound", lambda: f"told: {allowed(home)}")
    assert "nowhere" in allowed(home)[2]
    before = first.versions() | second.versions()
    assert operator.terminate() == 0
    second.delete(CHILDREN["secrets"], name_of(home, "fence"))
    operator.start().wait_ready()
    eventually(lambda: has_copies(second, home), lambda: f"the Secret is back; log:\n{operator.tail()}")
    after = first.versions() | second.versions()
    assert {name for name in before if before[name] != after.get(name)} == {f"secrets/{name_of(home, 'fence')}"}
    assert operator.terminate() == 0
    home.delete(POOLS, "policy")
    eventually(lambda: home.pool("policy") is None, "gone")
    operator.start().wait_ready()
    for space in (first, second):
        eventually(lambda it=space: copies(it, home) == (None, None), "no copy is left")


def test_no_kubelet_makes_a_pod_ready_whose_gate_is_closed(plane: ControlPlane, namespace: Namespace) -> None:
    gate = "epochkv.io/weights"
    pod(namespace, "gated", pool=None, readinessGates=[{"conditionType": gate}])
    pod(namespace, "other", pool=None)

    def write(name: str, kind: str, status: bool, message: str = "") -> int:
        body = {"status": {"conditions": [{"type": kind, "status": str(status), "message": message}]}}
        place = f"{PODS.format(namespace.name)}/{name}/status"
        return int(plane.api.request("PATCH", place, body, "application/strategic-merge-patch+json")[0])

    def becomes_ready() -> int:
        write("gated", "Ready", False)
        return write("gated", "Ready", True)

    try:
        apply_policy(plane, "gate")
        eventually(lambda: becomes_ready() == 422, "the policy is in force")
        assert write("other", "Ready", True) == write("gated", "ContainersReady", True) == write("gated", gate, False) == 200
        assert becomes_ready() == 422
        assert write("gated", gate, True) == becomes_ready() == 200
        assert write("gated", gate, False) == write("gated", "Ready", True, "a kubelet has not seen that yet") == 200
    finally:
        delete_policy(plane, "gate")
