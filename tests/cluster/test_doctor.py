"""`epochkv doctor` against a real API server, a real operator and a real hub: well at first, then with one real fault after the other.

The chart is installed as it is, but no kubelet runs its pods: a process stands in for the operator's, with the chart's service account,
and pods are told that they run.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_fence.net.keys import KeyPair, generate_keypair
from epochkv_fence.version import VERSION
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.chart_releases import Release
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, ROOT, Namespace, condition
from tests.cluster.test_operator_reconcile import make_pods_ready

HOME = "doctor"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvcachepools.epochkv.io"
ROLE = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{HOME}/roles"
PODS = f"/api/v1/namespaces/{HOME}/pods"
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}}
VERSIONS = {"epochkv": VERSION, "vllm": "0.32.0", "mooncake": "0.3.13.post1"}
ACCOUNT = f"system:serviceaccount:{HOME}:epochkv-operator"


class World:
    """A namespace with everything: the chart, an operator, a pool, an engine that reports."""

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self.plane = plane
        self.release = Release(plane, "epochkv", HOME, directory)
        self.release.install("crds.install=false", f"watchNamespaces={{{HOME}}}")
        self.space = self.release.space
        self.operator = self.release.operator()
        self.engine: FenceEngine

    def paste(self, command: str) -> None:
        """Run a command as a person would, with our kubectl, Helm and commands."""
        folders = (self.plane.kubectl.parent, self.plane.helm.parent, Path(sys.executable).parent)
        path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
        env = {**os.environ, "PATH": path, "KUBECONFIG": str(self.plane.kubeconfig)}
        shell = ["bash", "-c", f"set -o pipefail; {command}"]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60, env=env, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"

    def settle(self) -> None:
        """Every pod is told that it runs, until all conditions of pool and engine are as they should be."""

        def well() -> bool:
            make_pods_ready(self.space)
            found = [self.space.status("policy"), self.space.engine_status("rollout")]
            conditions = [one for status in found for one in status.get("conditions") or ()]
            return len(conditions) > 6 and all(one["status"] == "True" for one in conditions)

        eventually(well, f"all is well; log:\n{self.operator.tail()}", 60)

    def renew(self) -> None:
        """A new pod for the engine, in whose name the stand-in reports again, until all is well."""
        old = self.engine_pod()
        self.space.request("DELETE", f"{PODS}/{old}", {"gracePeriodSeconds": 0})
        self.engine.__exit__()
        self.join()

    def join(self) -> None:
        secret = eventually(lambda: self.space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
        pod = eventually(self.engine_pod, f"a pod; log:\n{self.operator.tail()}")
        self.engine = FenceEngine(f"tcp://127.0.0.1:{self.operator.hub_port}", client_keys(secret), "rollout", pod=pod, versions=VERSIONS)
        self.engine.__enter__()
        self.settle()

    def engine_pod(self) -> str:
        items = self.space.request("GET", f"{PODS}?labelSelector=epochkv.io/engine%3Drollout")["items"]
        alive = [item["metadata"]["name"] for item in items if "deletionTimestamp" not in item["metadata"]]
        return str(alive[0]) if len(alive) == 1 else ""

    def doctor(self, *arguments: str, kubeconfig: Path | None = None) -> tuple[int, list[dict[str, str]]]:
        """Exit status and findings."""
        scope = arguments or ("-n", HOME, "--operator-namespace", HOME)
        command = [sys.executable, "-m", "epochkv_fence.cli", "doctor", "-o", "json", *scope]
        environ = {**os.environ, "KUBECONFIG": str(kubeconfig or self.plane.kubeconfig)}
        environ.pop("EPOCHKV_CONFIG", None)
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environ, check=False)
        assert done.stdout, done.stderr
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)["findings"]

    def __enter__(self) -> World:
        self.operator.start().wait_ready()
        self.space.create_pool("policy", **POOL)
        self.space.create_engine("rollout", **ENGINE)
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.__exit__()
        self.operator.__exit__()


@pytest.fixture(scope="module")
def world(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(plane, tmp_path_factory.mktemp("doctor")) as made:
        yield made


def of(findings: list[dict[str, str]], check: str, level: str) -> list[dict[str, str]]:
    return [one for one in findings if (one["check"], one["level"]) == (check, level)]


def only(findings: list[dict[str, str]], check: str, level: str) -> dict[str, str]:
    (found,) = of(findings, check, level)
    return found


def test_what_is_well_is_said_in_one_line_each(world: World) -> None:
    status, findings = world.doctor()
    assert [one for one in findings if one["level"] != "ok"] == []
    assert status == 0
    said = {one["check"]: one["text"] for one in findings}
    assert set(said) == {"cluster", "crds", "rbac", "lease", "hub", "conditions"}
    assert "answers in" in said["hub"]
    assert "renewed" in said["lease"]


def test_the_command_line_reaches_the_hub_as_the_page_says(world: World, tmp_path: Path) -> None:
    section = (ROOT / "docs/reference/cli.md").read_text().partition("## From outside of a cluster")[2]
    script = section.split("```")[3]  # the block before it is of a cluster with a kubelet
    world.paste(f"cd {tmp_path}; NAMESPACE={HOME} POOL=policy HUB=127.0.0.1:{world.operator.hub_port}{script}")


def take_rights_away(space: Namespace) -> None:
    """`delete` of workloads, and `get` of Secrets; returns when that is in force."""
    role = space.request("GET", f"{ROLE}/epochkv-operator")
    for rule in role["rules"]:
        if rule["apiGroups"] == ["apps"]:
            rule["verbs"].remove("delete")
        if rule["resources"] == ["secrets"]:
            rule["verbs"].remove("get")
    space.request("PUT", f"{ROLE}/epochkv-operator", role)
    wanted = {"namespace": HOME, "verb": "get", "resource": "secrets", "name": "lonely-fence"}
    spec = {"user": ACCOUNT, "resourceAttributes": wanted}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}

    def refused() -> bool:
        answer = space.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return not answer["status"]["allowed"]

    eventually(refused, "the rights are gone")


def make_faults(world: World, pod: str) -> tuple[Any, KeyPair]:
    """One of each kind, all at once. Returns what the Secret of the pool `lonely` held, and the client key pair that it has then."""
    space = world.space
    crd = space.request("GET", CRD)
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["networkPolicy"]
    space.request("PUT", CRD, crd)
    waiting = {"name": "engine", "image": "no/such:image", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
    pulled = {"conditions": [], "phase": "Pending", "containerStatuses": [{**waiting, "ready": False, "restartCount": 0, "imageID": ""}]}
    space.request("PATCH", f"{PODS}/{pod}/status", {"status": pulled}, "application/merge-patch+json")
    space.create_pool("lonely", **POOL)
    space.create_engine("astray", poolRef={"name": "nowhere"}, model={"name": "tiny"})
    world.engine.lacks = ("LayoutUnsupported", "no tier is used: group 1 cannot be restored")
    world.engine.agent.poke()
    for status in (lambda: space.engine_status("rollout"), lambda: space.status("policy")):
        eventually(lambda look=status: condition(look(), "TiersUsable").get("status") == "False", "told")

    def events() -> set[tuple[str, str]]:
        return {(event["regarding"]["kind"], event["type"]) for event in space.events("LayoutUnsupported")}

    eventually(lambda: events() == {("InferenceEngine", "Warning"), ("KVCachePool", "Warning")}, "an Event about each")
    eventually(lambda: condition(space.status("lonely"), "Ready").get("status") == "True", f"lonely; log:\n{world.operator.tail()}")
    eventually(lambda: space.engine_status("astray").get("conditions"), f"astray; log:\n{world.operator.tail()}")
    take_rights_away(space)  # the operator cannot read what is edited below
    good, other = space.get(CHILDREN["secrets"], "lonely-fence"), generate_keypair()
    edited = {"client.pub": other.public, "client.key": other.secret}
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in edited.items()}
    space.patch(CHILDREN["secrets"], "lonely-fence", {"data": encoded})
    return good, other


def test_each_fault_is_named_with_what_mends_it(world: World) -> None:
    space, pod = world.space, world.engine_pod()
    good, other = make_faults(world, pod)
    status, findings = world.doctor()
    assert status == 1
    old = only(findings, "crds", "wrong")
    assert old["about"] == "kvcachepools.epochkv.io"
    rights = only(findings, "rbac", "wrong")
    assert f"delete deployments.apps in {HOME}, delete statefulsets.apps in {HOME}, get secrets in {HOME}" in rights["text"]
    assert "lacks 3 of" in rights["text"]
    told = {(one["about"], one["text"].partition(" for ")[0]): one["text"] for one in findings if one["check"] == "conditions"}
    assert "no/such:image" in told[f"engine {HOME}/rollout", "Available=False"]
    assert "PoolNotFound" in told[f"engine {HOME}/astray", "PoolBound=False"]
    assert "LayoutUnsupported" in told[f"engine {HOME}/rollout", "TiersUsable=False"]
    assert "LayoutUnsupported" in told[f"pool {HOME}/policy", "TiersUsable=False"]
    refused = only(findings, "hub", "wrong")
    assert (refused["about"], "key" in refused["text"]) == (f"pool {HOME}/lonely", True)
    assert [one["about"] for one in of(findings, "hub", "ok")] == [f"pool {HOME}/policy"]
    assert other.secret not in json.dumps(findings)

    for found in (refused, old, rights):
        world.paste(found["fix"])
    eventually(lambda: (space.get(CHILDREN["secrets"], "lonely-fence") or {}).get("data") == good["data"], "the Secret is as it was")
    space.delete(POOLS, "lonely")
    space.delete(ENGINES, "astray")
    world.engine.lacks = ("", "")
    world.engine.agent.poke()
    world.renew()
    eventually(lambda: space.names("deployments") == {"rollout"}, "the others are gone")
    status, findings = world.doctor()
    assert [one for one in findings if one["level"] != "ok"] == []


def test_who_may_not_look_is_told_so_check_by_check(world: World) -> None:
    config = world.plane.kubeconfig_for("somebody", ("system:authenticated",))
    status, findings = world.doctor(kubeconfig=config)
    assert (status, of(findings, "cluster", "ok") != [], {one["level"] for one in findings}) == (2, True, {"ok", "unknown"})
    assert {one["check"] for one in findings if one["level"] == "unknown"} == {"crds", "operator", "hub", "conditions"}
    assert all("somebody" in one["text"] for one in of(findings, "conditions", "unknown"))
    status, findings = world.doctor(kubeconfig=world.release.kubeconfig("epochkv-operator"))
    assert of(findings, "rbac", "ok"), "the operator may ask for itself"
    assert only(findings, "lease", "ok")


def test_a_cluster_that_does_not_answer_holds_up_nobody(world: World, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = yaml.safe_load(world.plane.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{mute.getsockname()[1]}"
        (tmp_path / "mute").write_text(yaml.safe_dump(config))
        status, findings = world.doctor(kubeconfig=tmp_path / "mute")
    assert (status, {one["level"] for one in findings}) == (2, {"unknown"})
    status, findings = world.doctor(kubeconfig=tmp_path / "none")
    assert (status, {one["level"] for one in findings}) == (2, {"unknown"})
