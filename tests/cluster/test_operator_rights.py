"""Each right that the chart grants is needed, and no other: an operator begins with none, and is given only what it was refused.

So each right of the chart was missing once and its request failed, which the API server's audit log shows. A right of the chart that
nothing ever asked for would be left over.
"""

import base64
import hashlib
import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from epochkv_operator.api.resources import OPTIONAL
from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, ROOT, Namespace, OperatorProcess, condition, install_crds

HOME, TEAM = "epochkv-system", "team-a"
ACCOUNT = f"system:serviceaccount:{HOME}:epochkv-operator"
REFUSED = re.compile(r'cannot (\w+) resource "([\w/]+)" in API group "([\w.]*)" in the namespace "([\w-]+)"')
L2 = {"mooncake": {"store": {"replicas": 1, "segmentSize": "64Mi"}}}
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "distributed": L2, "reset": {"leaseSeconds": 2}}
OPTIONAL_KINDS = {(resource.group, resource.plural) for resource in OPTIONAL}
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/{}"
MARK = "edited-by-a-person"


class Right(NamedTuple):
    """One verb on one resource in one namespace."""

    namespace: str
    group: str
    resource: str
    verb: str


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[ControlPlane]:
    flags = ["--enable-admission-plugins=OwnerReferencesPermissionEnforcement"]  # as on OpenShift
    with ControlPlane(tmp_path / "cp", binaries=build(), audited=ACCOUNT, api_server_flags=flags) as plane:
        install_crds(plane)
        yield plane


def chart_rights(plane: ControlPlane) -> set[Right]:
    """What the chart grants an operator that serves one namespace beside its own. Left out: what `helm test` is granted, and kinds of other
    projects, which this API server does not serve, so that nothing but a list of them is ever asked."""
    command = [str(plane.helm), "template", "epochkv", str(ROOT / "charts" / "epochkv"), "-n", HOME]
    flags = ["--set", "crds.install=false", "--set", f"watchNamespaces={{{TEAM}}}"]
    rendered = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=True).stdout
    objects = [obj for obj in yaml.safe_load_all(rendered) if obj and "helm.sh/hook" not in (obj["metadata"].get("annotations") or {})]
    roles = [obj for obj in objects if obj["kind"] in ("Role", "ClusterRole")]
    assert {role["kind"] for role in roles} == {"Role"}
    return {
        Right(role["metadata"]["namespace"], group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if verb == "list" or (group, resource) not in OPTIONAL_KINDS
    }


class Rights:
    """What the operator may do: nothing, and then whatever it was refused."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._read = 0
        self.granted: set[Right] = set()
        subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": ACCOUNT}
        for namespace in (HOME, TEAM):
            ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "grown"}
            body = {"metadata": {"name": "grown"}, "roleRef": ref, "subjects": [subject]}
            Namespace(plane, namespace).request("POST", RBAC.format(namespace, "rolebindings"), body)

    def refused(self) -> set[Right]:
        """What was refused since the last look."""
        lines = self._plane.audit_log.read_text().splitlines() if self._plane.audit_log.exists() else []
        new, self._read = lines[self._read :], len(lines)
        found = set()
        for line in new:
            event = json.loads(line)
            status, ref = event.get("responseStatus") or {}, event.get("objectRef") or {}
            if status.get("code") != 403:
                continue
            if match := REFUSED.search(status.get("message", "")):  # it names what was missed: an apply that creates is a patch
                verb, resource, group, namespace = match.groups()
                found.add(Right(namespace, group, resource, verb))
            elif "an ownerRef on a resource you can't delete" in status.get("message", ""):
                found.add(Right(ref["namespace"], ref.get("apiGroup", ""), ref["resource"], "delete"))
            elif event["verb"] == "list" and ref.get("namespace"):  # a list of metadata alone is audited without the message
                found.add(Right(ref["namespace"], ref.get("apiGroup", ""), ref["resource"], "list"))
        return found

    def grow(self) -> None:
        new = self.refused() - self.granted
        self.granted |= new
        for namespace in {right.namespace for right in new}:
            here = [right for right in sorted(self.granted) if right.namespace == namespace]
            rules = [{"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]} for right in here]
            body = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "grown"}, "rules": rules}
            self._plane.api.apply(RBAC.format(namespace, "roles/grown"), body)


def overtaken(space: Namespace, rights: Rights) -> bool:
    """Somebody writes to the engine all the time: a status write of the operator comes too late, and it reads the engine again."""
    for number in range(4):
        space.patch(ENGINES, "rollout", {"spec": {"replicas": 1 + number % 2}})
        space.patch(ENGINES, "rollout", {"metadata": {"annotations": {"number": str(number)}}})
    return Right(TEAM, "epochkv.io", "inferenceengines", "get") in rights.granted


def nudge(space: Namespace, number: int) -> None:
    """Now and then, have the operator look again: its backoffs are not waited out."""
    for collection, name in ((POOLS, "policy"), (ENGINES, "rollout")):
        if number % 4 == 0:
            path, body = f"{collection.format(space.name)}/{name}", {"metadata": {"annotations": {"looked": str(number)}}}
            status, answer = space.plane.api.request("PATCH", path, body, "application/merge-patch+json", 15)
            assert status in (200, 404), f"PATCH {path}: {status} {answer!r}"  # it may not be there


def break_hub_secret(space: Namespace) -> Any:
    """Put garbage into the hub's Secret; what it held."""
    hub = space.get(CHILDREN["secrets"], "epochkv-hub")
    assert hub is not None
    space.delete(CHILDREN["secrets"], "epochkv-hub")
    space.create(CHILDREN["secrets"], {"metadata": {"name": "epochkv-hub"}, "stringData": {"hub.key": MARK}})
    return hub["data"]


@pytest.mark.slow  # `test_chart_upgrade.py` works with the chart's rights and no others; the unit tests compare the chart with the table
@pytest.mark.timeout(600)
def test_the_chart_grants_what_is_refused_without_it_and_nothing_else(audited: ControlPlane, tmp_path: Path) -> None:
    home, team = Namespace.create_in(audited, HOME), Namespace.create_in(audited, TEAM)
    wanted = chart_rights(audited)
    rights = Rights(audited)
    config = audited.kubeconfig_for(ACCOUNT, ("system:serviceaccounts", "system:authenticated"))
    flags: dict[str, Any] = {"watch_namespace": TEAM, "kubeconfig": config, "resync_seconds": 5}
    with OperatorProcess(audited, HOME, tmp_path, **flags) as operator:
        looks = itertools.count(1)

        def until(done: Callable[[], Any], what: str) -> Any:
            def look() -> Any:
                rights.grow()
                nudge(team, next(looks))
                return done()

            return eventually(look, f"{what}", 120, 0.3)

        until(lambda: operator.http("/readyz")[0] == 200, "leads")
        team.create_pool("policy", resetEpoch=1, **POOL)
        team.create_engine("rollout", poolRef={"name": "policy"}, model={"name": "tiny"})
        until(lambda: team.status("policy").get("epoch") == 1, "published")
        until(lambda: condition(team.engine_status("rollout"), "EpochCurrent") and len(team.names("networkpolicies")) == 4, "made")
        until(lambda: overtaken(team, rights), "a status write that was overtaken")
        labels = {"epochkv.io/pool": "policy", "app.kubernetes.io/managed-by": "epochkv-operator"}
        gate: Any = {"readinessGates": [{"conditionType": "epochkv.io/weights"}], "containers": [{"name": "engine", "image": "i"}]}
        team.create("/api/v1/namespaces/{}/pods", {"metadata": {"name": "joined", "labels": labels}, "spec": gate})
        until(lambda: condition((team.get("/api/v1/namespaces/{}/pods", "joined") or {})["status"], "epochkv.io/weights"), "a gate")
        team.patch(CHILDREN["serviceaccounts"], "rollout", {"metadata": {"ownerReferences": None}})
        until(lambda: (team.get(CHILDREN["serviceaccounts"], "rollout") or {})["metadata"].get("ownerReferences"), "the owner given back")
        team.patch_spec("policy", keys={"generation": 1})
        until(lambda: team.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "keys rotated")
        team.patch_spec("policy", distributed=None)
        until(lambda: not team.names("statefulsets") | team.names("networkpolicies"), "pruned")

        secrets = CHILDREN["secrets"]
        data = {"root.secret": base64.b64encode(MARK.encode()).decode()}
        team.patch(secrets, "policy-fence", {"data": data})
        until(lambda: team.get(secrets, "policy-fence")["data"] != data and team.events("SecretRestored"), "restored")  # type: ignore[index]
        orphan = team.get(secrets, "policy-fence")
        assert orphan is not None
        team.delete(POOLS, "policy")
        until(lambda: team.get(secrets, "policy-fence") is None, "gone with its pool")
        team.create(secrets, {"metadata": {"name": "policy-fence", "labels": orphan["metadata"]["labels"]}, "data": orphan["data"]})
        team.create_pool("policy", local={"capacity": "64Mi"})
        key = orphan["data"]["client.key"]
        until(lambda: (s := team.get(secrets, "policy-fence")) and s["data"]["client.key"] != key, "the orphan replaced")

        left = {"epochkv.io/pool": "gone", "epochkv.io/shared": "true", "app.kubernetes.io/managed-by": "epochkv-operator"}
        name = f"gone-{hashlib.sha256(json.dumps('elsewhere/gone').encode()).hexdigest()[:10]}-connection"
        copy = {"name": name, "labels": left, "annotations": {"epochkv.io/pool-namespace": "elsewhere"}}
        team.create(CHILDREN["configmaps"], {"metadata": copy})
        until(lambda: team.get(CHILDREN["configmaps"], name) is None, "what a pool shared went with it")

        hub = break_hub_secret(home)
        until(lambda: (home.get(secrets, "epochkv-hub") or {}).get("data") == hub, "the hub's Secret restored")
        until(lambda: home.events("SecretRestored") or Right(HOME, "events.k8s.io", "events", "create") in rights.granted, "told")
        assert operator.process.alive()
        assert sorted(rights.granted - wanted) == [], "needed, and not granted by the chart"
        assert sorted(wanted - rights.granted) == [], "granted by the chart, and never missed"
