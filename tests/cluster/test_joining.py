"""Pods that join a pool by a label: what the chart's admission policy does to them, and what the operator keeps for other namespaces."""

from __future__ import annotations

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
KINDS = {"MutatingAdmissionPolicy": "mutatingadmissionpolicies", "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings"}
SERVED = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
RESTRICTED = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER = {"image": "vllm", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
BY_FIELD = {"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
GATED = {"epochkv.io/weights-gate": "true"}
GPU = {"limits": {"nvidia.com/gpu": "1", "memory": "1.5Gi"}}


def rendered(plane: ControlPlane, *values: str) -> list[dict[str, Any]]:
    """The policy of the chart and its binding."""
    command = [str(plane.helm), "template", "epochkv", str(ROOT / "charts/epochkv"), "--show-only=templates/join.yaml"]
    flags = [f"--api-versions={SERVED}", *(part for value in values for part in ("--set", value))]
    text = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=True).stdout
    return list(yaml.safe_load_all(text))


def apply_policy(plane: ControlPlane) -> None:
    for obj in rendered(plane):
        plane.api.apply(f"{ADMISSION}{KINDS[obj['kind']]}/{obj['metadata']['name']}", obj)


def delete_policy(plane: ControlPlane) -> None:
    for obj in rendered(plane):
        plane.api.request("DELETE", f"{ADMISSION}{KINDS[obj['kind']]}/{obj['metadata']['name']}", None, timeout=15)


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


def test_a_label_is_all_that_a_pod_needs(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.request(
        "PATCH",
        f"/api/v1/namespaces/{namespace.name}",
        {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
        "application/merge-patch+json",
    )
    namespace.create_pool("policy", **POOL)
    namespace.create_pool("other", **POOL | {"local": {"capacity": "1Gi"}}, serve={"weights": "Converged"})
    made = joins(namespace, "plain")
    (init,) = made["spec"]["initContainers"]
    assert init["image"].startswith("epochkv/connector:")
    assert {volume["name"] for volume in made["spec"]["volumes"]} >= {"epochkv", "epochkv-connection", "epochkv-fence"}
    assert {mount["mountPath"] for mount in container(made, "vllm")["volumeMounts"]} >= {
        "/epochkv",
        "/etc/epochkv/connection",
        "/etc/epochkv/fence",
    }
    assert env(made, "vllm").items() >= {"PYTHONPATH": "/epochkv", "EPOCHKV_ATTACH": "1"}.items()
    assert env(made, "vllm")["EPOCHKV_CONFIG"] == "/etc/epochkv/connection/connection.json"

    # The container that asks for an accelerator; what the pod has already stays, L1 comes on top.
    given = [{"name": "PYTHONPATH", "value": "/mine"}, {"name": "POD_NAME", "value": "me"}]
    containers = [{"name": "proxy", **CONTAINER}, {"name": "vllm", **CONTAINER, "resources": GPU, "env": given}]
    download, models = {"name": "download", **CONTAINER}, {"name": "models", "emptyDir": {}}
    two = pod(namespace, "two", containers=containers, initContainers=[download], volumes=[models])
    assert two["metadata"]["annotations"] == {"epochkv.io/joined": "vllm"}
    assert [one["name"] for one in two["spec"]["initContainers"]] == ["epochkv-connector", "download"]
    assert env(two, "vllm").items() >= {"PYTHONPATH": "/epochkv:/mine", "POD_NAME": "me"}.items()
    assert container(two, "vllm")["resources"]["limits"]["memory"] == str(3 * 2**29 + 2**26)
    assert env(two, "proxy") == {}
    named = pod(namespace, "named", notes={"epochkv.io/engine-container": "proxy", "epochkv.io/local": "1Gi"}, containers=containers)
    assert env(named, "proxy")["EPOCHKV_LOCAL_CAPACITY"] == "1Gi"
    assert env(named, "vllm").keys() == {"PYTHONPATH", "POD_NAME"}
    large = pod(namespace, "large", pool="other", containers=containers, notes=GATED)
    assert container(large, "vllm")["resources"]["limits"]["memory"] == str(5 * 2**29)
    assert {volume["configMap"]["name"] for volume in large["spec"]["volumes"] if "configMap" in volume} == {"other-connection"}
    fenced = pod(namespace, "fenced", notes={"epochkv.io/fence": "true", **GATED}, containers=containers)
    assert large["spec"]["readinessGates"] == [{"conditionType": "epochkv.io/weights"}]
    assert "readinessGates" not in fenced["spec"], "its pool asks for no weights, so nobody would open it"
    assert env(fenced, "vllm")["EPOCHKV_FENCE"] == "1"
    assert "EPOCHKV_ATTACH" not in env(fenced, "vllm")
    assert container(fenced, "vllm")["resources"]["limits"]["memory"] == str(3 * 2**29)

    empty = pod(namespace, "empty", containers=[{"name": "vllm", **CONTAINER, "env": [{"name": "PYTHONPATH"}]}])
    assert env(empty, "vllm")["PYTHONPATH"] == "/epochkv"

    # Nothing of ours where nobody asked, or where somebody wrote it by hand.
    assert "initContainers" not in pod(namespace, "strange", pool=None)["spec"]
    by_hand = [{"name": "fence", "secret": {"secretName": "policy-fence"}}]
    assert "initContainers" not in pod(namespace, "by-hand", volumes=by_hand)["spec"]
    assert {one["regarding"]["name"] for one in namespace.events("NotJoined")} <= {"plain-0", "plain-1"}


@pytest.mark.parametrize(
    ("notes", "spec", "why"),
    [
        ({"epochkv.io/local": "64 gigs"}, {}, 'epochkv.io/local is "64 gigs": it must be a size such as 64Gi'),
        ({"epochkv.io/local": "1"}, {}, "of at least 1Mi"),
        ({"epochkv.io/engine-container": "no"}, {}, 'is "no", and the pod has no such container: vllm'),
        ({"epochkv.io/fence": "yes"}, {}, 'epochkv.io/fence is "yes": it must be "true" or "false"'),
        (
            {},
            {"containers": [{"name": "vllm", **CONTAINER, "env": [BY_FIELD]}]},
            "container vllm has PYTHONPATH by valueFrom: give it a value",
        ),
        ({}, {"volumes": [{"name": "epochkv", "emptyDir": {}}]}, "the pod has volume epochkv already"),
        ({}, {"os": {"name": "windows"}, "securityContext": {}, "containers": [{"name": "vllm", "image": "x"}]}, "the pod is for Windows"),
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
    event = eventually(
        lambda: next((one for one in namespace.events("NotJoined") if one["regarding"]["name"] == "wrong"), None),
        lambda: f"an Event; log:\n{operator.tail()}",
    )
    assert (event["regarding"]["kind"], event["type"]) == ("Pod", "Warning")
    assert why in event["note"]


def test_a_pod_of_a_namespace_that_is_not_allowed_starts_untouched(policy: None, namespace: Namespace, operator: OperatorProcess) -> None:
    made = pod(namespace, "lonely")
    assert "initContainers" not in made["spec"]
    assert not {note for note in made["metadata"].get("annotations", {}) if note.startswith("epochkv.io/")}
    (event,) = eventually(lambda: namespace.events("NotJoined"), f"an Event; log:\n{operator.tail()}")
    assert f"namespace {namespace.name} has no such pool" in event["note"]
    assert "spec.allowedNamespaces" in event["note"]


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


def test_the_policy_of_an_operator_that_serves_some_namespaces(plane: ControlPlane) -> None:
    objects = {(obj["kind"], obj["metadata"]["name"]): obj for obj in rendered(plane, "watchNamespaces={a,b}", "join.enabled=true")}
    names = ("epochkv-join-default", "epochkv-join-default-shared")
    assert set(objects) == {(kind, name) for kind in KINDS for name in names}
    admission = objects["MutatingAdmissionPolicy", names[0]]
    assert admission["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"][0]["values"] == ["a", "b"]
    pinned = rendered(plane, "defaults.connectorImage=registry.example/c@sha256:0")[0]["spec"]["mutations"][0]["jsonPatch"]["expression"]
    assert "image: 'registry.example/c@sha256:0'" in pinned
    for value in (True, False):
        [gated] = [one for one in rendered(plane, f"serve.gates={value}".lower())[0]["spec"]["variables"] if one["name"] == "gated"]
        assert gated["expression"].startswith(f"{value} &&".lower())


Whole = tuple[OperatorProcess, list[Namespace]]


@pytest.fixture
def whole(fresh_control_plane: ControlPlane, tmp_path: Path) -> Iterator[Whole]:
    """An operator of a whole cluster, which no other one may serve, and three namespaces."""
    install_crds(fresh_control_plane)
    apply_policy(fresh_control_plane)
    spaces = [Namespace.create_in(fresh_control_plane, f"allowed-{letter}") for letter in "abc"]
    with OperatorProcess(fresh_control_plane, spaces[0].name, tmp_path, watch_namespace=None) as operator:
        yield operator.wait_ready(), spaces


def has_copies(space: Namespace, name: str = "policy") -> bool:
    found = [space.get(CHILDREN[kind], f"{name}-{part}") for kind, part in (("configmaps", "connection"), ("secrets", "fence"))]
    assert len({obj is None for obj in found}) == 1 or None in found
    return None not in found


def keys(space: Namespace) -> dict[str, str]:
    """What the pool's Secret, or a copy of it, holds here."""
    found: dict[str, str] = (space.get(CHILDREN["secrets"], "policy-fence") or {"data": {}})["data"]
    return found


def allowed(space: Namespace) -> tuple[str, str, str]:
    found = condition(space.status("policy"), "NamespacesAllowed")
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


def test_other_namespaces_join_while_the_pool_allows_it(whole: Whole, tmp_path: Path) -> None:
    operator, (home, by_name, by_label) = whole
    home.create_pool("policy", **POOL, allowedNamespaces={"names": [by_name.name]}, serve={"weights": "Converged"})
    eventually(lambda: has_copies(by_name), lambda: f"copies; log:\n{operator.tail()}")
    assert not has_copies(by_label)
    old = keys(home)
    assert keys(by_name) == old
    made = joins(by_name, "guest", notes=GATED)
    assert made["spec"]["readinessGates"] == [{"conditionType": "epochkv.io/weights"}]

    def gate() -> tuple[str, str]:
        found = condition((by_name.get(PODS, made["metadata"]["name"]) or {})["status"], "epochkv.io/weights")
        return found.get("status", ""), found.get("reason", "")

    assert {volume["secret"]["secretName"] for volume in made["spec"]["volumes"] if "secret" in volume} == {"policy-fence"}
    eventually(lambda: allowed(home)[:2] == ("True", "Allowed"), lambda: f"told: {allowed(home)}")

    with joined(mounted(home, tmp_path), "guest") as engine:  # as a member of the other namespace would report
        eventually(lambda: engine.epoch == 0, "joined")
        eventually(lambda: home.status("policy")["engines"].get("external") == 1, "counted")
        assert set(external(home)) == {"guest"}

    assert gate() == ("", ""), "it does not run yet"
    # Labels count, too, and lost copies come back.
    labels = {"metadata": {"labels": {"rl": "yes"}}}
    by_label.request("PATCH", f"/api/v1/namespaces/{by_label.name}", labels, "application/merge-patch+json")
    home.patch_spec("policy", allowedNamespaces={"names": None, "selector": {"matchLabels": {"rl": "yes"}}})
    eventually(lambda: has_copies(by_label) and not has_copies(by_name), lambda: f"moved; log:\n{operator.tail()}")
    eventually(lambda: gate() == ("True", "NotGated"), lambda: f"nobody else opens it: {gate()}; log:\n{operator.tail()}")
    assert by_name.get(CHILDREN["secrets"], "policy-fence") is None
    by_label.delete(CHILDREN["configmaps"], "policy-connection")
    eventually(lambda: has_copies(by_label), lambda: f"put back; log:\n{operator.tail()}")
    home.patch_spec("policy", keys={"generation": 1})
    eventually(lambda: keys(home)["client.key"] != old["client.key"], "rotated")
    eventually(lambda: keys(by_label)["client.key"] == keys(home)["client.key"], "handed on")

    # A pool of that name of its own: the guest makes room, and comes back when it is gone.
    by_label.create_pool("policy", **POOL)
    eventually(lambda: allowed(home)[1] == "NameTaken", lambda: f"told: {allowed(home)}; log:\n{operator.tail()}")
    eventually(
        lambda: (by_label.get(CHILDREN["configmaps"], "policy-connection") or {"metadata": {}})["metadata"].get("ownerReferences"),
        lambda: f"its own; log:\n{operator.tail()}",
        90,
    )
    assert keys(by_label)["root.secret"] != keys(home)["root.secret"]
    home.patch_spec("policy", allowedNamespaces=None)
    eventually(lambda: not allowed(home)[0], "no condition without the field")
    assert has_copies(by_label), "it is that pool's own now"


def test_a_pool_that_went_while_no_operator_ran_leaves_no_copies(whole: Whole) -> None:
    operator, (home, first, second) = whole
    home.create_pool("policy", **POOL, allowedNamespaces={"names": [first.name, second.name, "nowhere"]})
    eventually(lambda: has_copies(first) and has_copies(second), lambda: f"copies; log:\n{operator.tail()}")
    eventually(lambda: allowed(home)[1] == "NamespaceNotFound", lambda: f"told: {allowed(home)}")
    assert "nowhere" in allowed(home)[2]
    before = first.versions() | second.versions()
    assert operator.terminate() == 0
    second.delete(CHILDREN["secrets"], "policy-fence")
    operator.start().wait_ready()
    eventually(lambda: has_copies(second), lambda: f"the Secret is back; log:\n{operator.tail()}")
    after = first.versions() | second.versions()
    assert {name for name in before if before[name] != after.get(name)} == {"secrets/policy-fence"}
    assert operator.terminate() == 0
    home.delete(POOLS, "policy")
    eventually(lambda: home.pool("policy") is None, "gone")
    operator.start().wait_ready()
    for space in (first, second):
        eventually(lambda it=space: not it.names("configmaps") and it.get(CHILDREN["secrets"], "policy-fence") is None, "no copy is left")
