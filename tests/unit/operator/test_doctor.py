"""What `epochkv doctor` makes of objects of a cluster. Pure: objects as the API server gives them, and its time."""

from __future__ import annotations

import base64
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from epochkv_fence.doctor.finding import Finding, Level
from epochkv_fence.doctor.looking import NoHub, is_inside
from epochkv_fence.net import generate_keypair
from epochkv_operator.api.generate import ENGINE, POOL, manifest
from epochkv_operator.doctor.access import judge_access
from epochkv_operator.doctor.cluster import gathered, judge_our_clock
from epochkv_operator.doctor.conditions import ago, judge_object, judge_tiers
from epochkv_operator.doctor.definitions import judge_definition
from epochkv_operator.doctor.hubs import fold, judge_hub
from epochkv_operator.doctor.network import judge_hub_policies, judge_pool_policies, judge_probe
from epochkv_operator.doctor.objects import judge_pairs, judge_pod
from epochkv_operator.doctor.operators import Operator, image_tag, judge_deployment, judge_lease, judge_offset
from epochkv_operator.doctor.secrets import judge_connection, judge_hub_secret, judge_secret
from epochkv_operator.doctor.versions import judge_images, judge_operators
from epochkv_operator.kube.resources import rights

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
Json = dict[str, Any]


def before(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def levels(found: list[Finding]) -> list[str]:
    return [finding.level.value for finding in found]


def pool(name: str = "policy", **fields: Any) -> Json:
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-{name}", "generation": 1, "creationTimestamp": before(3600)}
    return {"kind": "KVCachePool", "metadata": metadata, "spec": {}, "status": {}, **fields}


def engine(name: str = "rollout", pool: str | None = "policy", **spec: Any) -> Json:
    reference = {"poolRef": {"name": pool}} if pool else {}
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-{name}", "generation": 1, "creationTimestamp": before(3600)}
    return {"kind": "InferenceEngine", "metadata": metadata, "spec": {**reference, **spec}, "status": {}}


def condition(kind: str, status: str, reason: str, seconds: float = 3600.0) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": f"message of {reason}", "lastTransitionTime": before(seconds)}


# ------------------------------------------------------------------------------------------------------------ definitions


def installed(name: str, status: str = "True") -> Json:
    crd = copy.deepcopy(manifest(POOL if name == "pool" else ENGINE))
    crd["status"] = {"conditions": [{"type": kind, "status": status, "message": "why"} for kind in ("NamesAccepted", "Established")]}
    return crd


def test_crds_of_this_version_and_of_another() -> None:
    assert levels(judge_definition(POOL, installed("pool"))) == ["ok"]
    assert levels(judge_definition(POOL, None)) == ["wrong"]
    assert levels(judge_definition(POOL, installed("pool", "False"))) == ["wrong"]
    old = installed("engine")
    schema = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del schema["properties"]["replicas"]
    (found,) = judge_definition(ENGINE, old)
    assert (found.level, "spec.replicas" in found.text) == (Level.WRONG, True)
    assert found.fix == "epochkv-operator crds | kubectl apply --server-side --force-conflicts -f -"
    (found,) = judge_definition(ENGINE, old, "9.9.9")
    assert (found.level, "epochkv[operator]==9.9.9" in found.fix) == (Level.UNKNOWN, True), "this command cannot judge it"
    ruled = installed("pool")
    ruled["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"].pop()
    assert levels(judge_definition(POOL, ruled)) == ["wrong"]


# -------------------------------------------------------------------------------------------------------------- operators


def deployment(ready: int = 2, replicas: int = 2, image: str = "reg:5000/epochkv/operator:0.1.0", *args: str) -> Json:
    container = {"name": "operator", "image": image, "args": ["run", *args]}
    labels = {"app.kubernetes.io/instance": "kv", "app.kubernetes.io/managed-by": "Helm"}
    template = {"metadata": {"labels": {"app": "op"}}, "spec": {"serviceAccountName": "op", "containers": [container]}}
    return {
        "metadata": {"name": "epochkv-operator", "namespace": "home", "labels": labels},
        "spec": {"replicas": replicas, "template": template},
        "status": {"readyReplicas": ready},
    }


def lease(holder: str = "pod-1_abc", written: float = 2.0, offset: float = 0.4) -> Json:
    renewed = (NOW - timedelta(seconds=written - offset)).isoformat().replace("+00:00", "Z")
    metadata = {"name": "epochkv-operator", "namespace": "home", "managedFields": [{"time": before(500)}, {"time": before(written)}]}
    return {"metadata": metadata, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed}}


def operator(*args: str, leases: tuple[Json, ...] = ()) -> Operator:
    return Operator("home", deployment(2, 2, "reg:5000/epochkv/operator:0.1.0", *args), leases)


def test_what_a_deployment_says_of_its_operator() -> None:
    made = operator("--watch-namespace=a", "--watch-namespace=b", "--lease-name=other")
    assert (made.scopes, made.lease_name, made.version, made.release) == (("a", "b"), "other", "0.1.0", "kv")
    assert made.service_account == "system:serviceaccount:home:op"
    deployed = "$(helm -n home list --deployed --no-headers -f '^kv$' | awk '{print $3}')"
    assert made.restored == f"helm -n home get manifest kv --revision {deployed} | kubectl apply -n home -f -"
    assert operator().scopes == (None,)
    assert [levels(judge_deployment(Operator("home", deployment(ready)))) for ready in (2, 1, 0)] == [["ok"], ["warning"], ["wrong"]]
    assert levels(judge_deployment(Operator("home", deployment(0, 0)))) == ["wrong"]


@pytest.mark.parametrize(
    ("image", "tag"),
    [("a/b:1", "1"), ("reg:5000/a/b", ""), ("reg:5000/a/b:2@sha256:ab", "2"), ("b", ""), ("a/b@sha256:ab", ""), ("", "")],
)
def test_tags_of_images(image: str, tag: str) -> None:
    assert image_tag(image) == tag


def test_a_lease_is_judged_by_one_clock() -> None:
    assert levels(judge_lease(operator(leases=(lease(),)), NOW)) == ["ok"]
    assert levels(judge_lease(operator(leases=(lease(offset=-900.0),)), NOW)) == ["ok"], "its own clock does not count"
    assert "has not renewed it for 40 s" in judge_lease(operator(leases=(lease(written=40.0),)), NOW)[0].text
    assert levels(judge_lease(operator(leases=(lease(written=40.0),)), NOW)) == ["wrong"]
    assert levels(judge_lease(operator(leases=(lease(holder=""),)), NOW)) == ["wrong"]
    assert levels(judge_lease(operator(), NOW)) == ["wrong"]
    assert levels(judge_offset(operator(leases=(lease(),)))) == ["ok"]
    (found,) = judge_offset(operator(leases=(lease(offset=-900.0),)))
    assert (found.level, "900 s behind" in found.text, "the fence is not" in found.text) == (Level.WARNING, True, True)
    assert judge_our_clock(NOW, NOW + timedelta(seconds=5)) == []
    assert levels(judge_our_clock(NOW, NOW - timedelta(seconds=500))) == ["warning"]


def test_rights_that_are_missing_are_named() -> None:
    needed = rights("home", ("a",), "epochkv-operator", "epochkv-hub")
    assert levels(judge_access(operator(), [], len(needed))) == ["ok"]
    missing = [right for right in needed if right.verb == "update"]
    (found,) = judge_access(operator(), missing, len(needed))
    assert found.level is Level.WRONG
    assert "update secrets in a, update leases.coordination.k8s.io epochkv-operator in home" in found.text
    everywhere = {str(right) for right in rights("home", (None,), "epochkv-operator", "epochkv-hub")}
    assert {"list leases.coordination.k8s.io epochkv-operator", "patch kvcachepools.epochkv.io/status"} <= everywhere
    assert not any(right.verb == "list" and right.resource == "leases" for right in needed), "no canary where it does not watch"


# ---------------------------------------------------------------------------------------------------------------- secrets

HUB, CLIENT = generate_keypair(), generate_keypair()
GOOD = {"hub.pub": HUB.public, "client.pub": CLIENT.public, "client.key": CLIENT.secret, "root.secret": "ab" * 32, "generation": "1"}


def secret(*, uid: str = "uid-policy", changed: dict[str, str | None] | None = None) -> Json:
    content = {key: value for key, value in {**GOOD, **(changed or {})}.items() if value}
    data = {key: base64.b64encode(value.encode()).decode() for key, value in content.items()}
    return {"metadata": {"namespace": "rl", "name": "policy-fence", "ownerReferences": [{"uid": uid}]}, "data": data}


def keyed(generation: int = 1, known: int | None = 1) -> Json:
    return pool(spec={"keys": {"generation": generation}}, status={"keys": {"generation": known}} if known is not None else {})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"client.key": generate_keypair().secret}, "client.pub and client.key do not fit"),
        ({"hub.pub": generate_keypair().public}, "hub.pub is not the key of the hub"),
        ({"root.secret": "ab"}, "root.secret is not 64 hex digits"),
        ({"root.secret": None}, "root.secret missing"),
        ({"generation": "2"}, "generation is 2, and spec.keys.generation asks for 1"),
        ({"generation": "0"}, "the hub has taken 1 already"),
        ({"generation": "x"}, "no number"),
        ({"previous.pub": "short"}, "previous.pub is not a CURVE key"),
    ],
)
def test_a_secret_whose_fields_disagree(changed: dict[str, str | None], text: str) -> None:
    assert levels(judge_secret(keyed(), secret(), {HUB.public})) == ["ok"]
    (found,) = judge_secret(keyed(), secret(changed=changed), {HUB.public})
    assert (found.level, text in found.text) == (Level.WRONG, True), found.text
    assert not any(value in found.text for value in (CLIENT.secret, HUB.secret, GOOD["root.secret"]))
    assert found.fix.startswith("kubectl -n rl delete secret policy-fence")


def test_a_secret_that_is_missing_or_of_a_namesake_and_the_hubs() -> None:
    assert levels(judge_secret(keyed(), None, set())) == ["wrong"]
    assert "deleted namesake" in judge_secret(keyed(), secret(uid="uid-old"), set())[0].text
    assert levels(judge_secret(keyed(2), secret(), set())) == ["ok"], "a rotation that is asked for is no disagreement"
    hub = {"data": {"hub.pub": secret()["data"]["hub.pub"], "hub.key": base64.b64encode(HUB.secret.encode()).decode()}}
    assert levels(judge_hub_secret(operator(), hub)) == ["ok"]
    hub["data"]["hub.key"] = secret()["data"]["client.key"]
    assert [levels(judge_hub_secret(operator(), one)) for one in (hub, None)] == [["wrong"], ["wrong"]]


def test_the_connection_that_engines_are_given() -> None:
    def config(uid: str = "uid-policy", endpoint: str = "tcp://hub:7700") -> Json:
        return {"data": {"connection.json": f'{{"pool": {{"uid": "{uid}"}}, "hub": {{"endpoint": "{endpoint}"}}}}'}}

    made = pool(status={"endpoints": {"hub": "tcp://hub:7700"}})
    assert levels(judge_connection(made, config())) == ["ok"]
    for wrong in (None, config(uid="other"), config(endpoint="tcp://old:7700"), {"data": {"connection.json": "["}}):
        assert levels(judge_connection(made, wrong)) == ["wrong"]


# ------------------------------------------------------------------------------------------------- conditions, pods, pairs


def test_conditions_say_since_when_and_what_mends_them() -> None:
    made = pool(status={"conditions": [condition("EpochConverged", "True", "Published")], "observedGeneration": 1})
    assert levels(judge_object(made, NOW)) == ["ok"]
    bad = [condition("Ready", "False", "WaitingForEngines"), condition("EpochConverged", "False", "WaitingForEngines", 200.0)]
    made["status"]["conditions"] = bad
    (found,) = judge_object(made, NOW)
    assert (found.level, found.text) == (
        Level.WRONG,
        "EpochConverged=False for 3m20s (WaitingForEngines): message of WaitingForEngines",
    ), "and Ready, which repeats it, is not told"
    assert found.fix.startswith("kubectl -n rl get kvp policy -o jsonpath='{.status.reset.laggards}'")
    made["status"]["conditions"] = [condition("EpochConverged", "False", "WaitingForEngines", 20.0)]
    assert levels(judge_object(made, NOW)) == ["warning"], "it may be under way"
    made["status"]["conditions"] = [condition("Reclaimed", "False", "WipeFailed"), condition("WeightsConverged", "False", "Diverged")]
    assert levels(judge_object(made, NOW)) == ["warning", "wrong"], "one costs memory, one engine missed a push"
    made["status"]["conditions"] = [condition("Drained", "False", "CarriedRequests", 60.0)]
    assert levels(judge_object(made, NOW)) == ["ok"], "requests of before a reset run to their end"
    made["status"] |= {"conditions": [condition("EpochConverged", "True", "Published")], "observedGeneration": 0}
    assert levels(judge_object(made, NOW)) == ["warning"]
    assert levels(judge_object(pool(), NOW)) == ["wrong"], "no operator has looked at it"
    made["status"]["conditions"] = [condition("EpochConverged", "False", "LaterReason")]
    assert "kubectl -n rl describe kvp policy" in [found.fix for found in judge_object(made, NOW)]


def test_tiers_that_are_not_used() -> None:
    def judged(status: str, reason: str) -> list[str]:
        made = engine()
        made["status"] = {"conditions": [condition("TiersUsable", status, reason)]}
        return levels(judge_tiers(made, NOW))

    assert [judged("True", "Usable"), judged("False", "L1Only"), judged("False", "TiersBroken")] == [["ok"], ["warning"], ["wrong"]]
    assert judged("Unknown", "NotReporting") == ["warning"]
    assert judge_tiers(pool(), NOW) == []


@pytest.mark.parametrize(("seconds", "text"), [(4, "4s"), (192, "3m12s"), (18420, "5h07m"), (183600, "2d3h")])
def test_how_long(seconds: float, text: str) -> None:
    assert ago(before(seconds), NOW) == text


def pod(labels: Json, status: Json, seconds: float = 60.0) -> Json:
    return {"metadata": {"name": "p", "namespace": "rl", "labels": labels, "creationTimestamp": before(seconds)}, "status": status}


def test_pods_that_cannot_run() -> None:
    waiting = {"name": "master", "image": "no/such:1", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}
    (pulls,) = judge_pod(pod({"epochkv.io/pool": "policy", "app.kubernetes.io/component": "master"}, {"containerStatuses": [waiting]}), NOW)
    assert (pulls.level, "no/such:1" in pulls.text, pulls.about) == (Level.WRONG, True, "master of pool policy in rl")
    assert pulls.fix.startswith("kubectl -n rl patch kvp policy --type=merge")
    unplaced = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]}
    (placed,) = judge_pod(pod({"epochkv.io/engine": "rollout"}, unplaced), NOW)
    assert ("0/3 nodes" in placed.text, placed.fix) == (True, "kubectl -n rl describe pod p")
    assert levels(judge_pod(pod({}, {"conditions": [{"type": "Ready", "status": "True"}]}), NOW)) == ["ok"]
    assert levels(judge_pod(pod({}, {"phase": "Pending"}), NOW)) == ["warning"]
    assert levels(judge_pod(pod({}, {"phase": "Pending"}, 3600.0), NOW)) == ["wrong"]


def test_pools_and_engines_belong_together() -> None:
    assert levels(judge_pairs([pool()], [engine(), engine("alone", None)])) == ["ok"]
    assert "1 names none on purpose" in judge_pairs([pool()], [engine(), engine("alone", None)])[0].text
    (found,) = judge_pairs([pool()], [engine(), engine("astray", "nowhere")])
    assert (found.level, found.about) == (Level.WRONG, "engine rl/astray")
    assert levels(judge_pairs([pool()], [])) == ["warning"]
    assert levels(judge_pairs([pool()], [engine(replicas=0)])) == ["warning"]
    joined = pool(status={"engines": {"total": 3}})
    assert levels(judge_pairs([joined], [])) == ["ok"], "engines that a trainer started count"
    elsewhere = pool()
    elsewhere["metadata"]["namespace"] = "other"
    assert "one of that name is in other" in judge_pairs([elsewhere], [engine()])[0].text


# ------------------------------------------------------------------------------------------------ hub, network, versions


def test_a_hub_that_does_not_answer() -> None:
    refused = judge_hub(pool(), NoHub("tcp://hub:7700", "open", "it refuses our key", "key"))
    assert (levels(refused), refused[0].fix.split(" && ")[0]) == (["wrong"], "kubectl -n rl delete secret policy-fence")
    silent = judge_hub(pool(), NoHub("tcp://hub:7700", "silent", "no answer"))
    assert "networkpolicies" in silent[0].fix
    assert is_inside("epochkv-hub.home.svc")
    assert is_inside("epochkv-hub.home.svc.cluster.local")
    assert not is_inside("hub.example.com")


def test_many_lines_of_one_kind_become_one() -> None:
    unknown = [Finding("hub", Level.UNKNOWN, "inside", "fix", f"pool rl/{number}") for number in range(3)]
    wrong = Finding("hub", Level.WRONG, "bad", "", "pool rl/x")
    assert [(one.about, one.level) for one in fold([*unknown, wrong])] == [
        *(("pool rl/x", Level.WRONG), ("pool rl/0 and 2 more", Level.UNKNOWN))
    ]
    well = [Finding("hub", Level.OK, "answers", "", f"pool {number}") for number in range(3)]
    assert [one.text for one in gathered([*well, wrong], "hub", "{} pools answer")] == ["3 pools answer", "bad"]
    assert [one.about for one in gathered(well[:1], "hub", "{} pools answer")] == ["pool 0"]


def policy(name: str, ports: list[Json] | None, labels: Json, sources: list[Json] | None = None) -> Json:
    rule: Json = {**({"ports": ports} if ports is not None else {}), **({"from": sources} if sources else {})}
    spec = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": [rule]}
    return {"metadata": {"name": name, "namespace": "home"}, "spec": spec}


def test_policies_around_the_hub_add_up() -> None:
    ours, closed = policy("ours", [{"port": 7700}], {"app": "op"}), policy("closed", [{"port": 1}], {"app": "op"})
    assert levels(judge_hub_policies(operator(), [])) == ["ok"]
    assert levels(judge_hub_policies(operator(), [ours, closed])) == ["ok"]
    assert levels(judge_hub_policies(operator(), [closed])) == ["wrong"]
    assert levels(judge_hub_policies(operator(), [policy("other", [{"port": 1}], {"app": "db"})])) == ["ok"]
    ranged = policy("range", [{"port": 7000, "endPort": 8000}], {}, [{"podSelector": {}}])
    assert "from places that its `from` names" in judge_hub_policies(operator(), [ranged])[0].text
    denies = {"metadata": {"name": "deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
    assert levels(judge_hub_policies(operator(), [denies])) == ["wrong"]


def test_policies_of_pools() -> None:
    made, names = pool(spec={"distributed": {"mooncake": {}}}), {("rl", "policy-master"), ("rl", "policy-store"), ("rl", "rollout")}
    assert levels(judge_pool_policies(made, [engine()], names)) == ["ok"]
    (found,) = judge_pool_policies(made, [engine()], names - {("rl", "policy-store")})
    assert (found.level, found.text.endswith("policy-store")) == (Level.WRONG, True)
    open_to_all = pool(spec={"distributed": {"mooncake": {}}, "networkPolicy": {"mode": "Disabled"}})
    assert levels(judge_pool_policies(open_to_all, [], set())) == ["warning"]
    assert judge_pool_policies(pool(), [engine()], set()) == [], "without a store there is nothing to close"
    assert [judge_probe("pool", "master", taken).level for taken in (True, False)] == [Level.WARNING, Level.OK]


def test_images_of_another_version_than_the_operators() -> None:
    def run(component: str, image: str) -> Json:
        labels = {"app.kubernetes.io/component": component}
        return {
            "metadata": {"name": "p", "namespace": "rl", "labels": labels},
            "spec": {"containers": [{"name": component, "image": image}]},
        }

    well = [run("engine", "epochkv/engine:0.1.0"), run("master", "mine/mooncake:7"), run("store", "reg:5000/epochkv/store:0.1.0")]
    assert levels(judge_images([operator()], well)) == ["ok"]
    (found,) = judge_images([operator()], [*well, run("store", "epochkv/store:0.0.9")])
    assert (found.level, "epochkv/store:0.0.9, and the operator is 0.1.0" in found.text) == (Level.WARNING, True)
    old = Operator("home", deployment(2, 2, "epochkv/operator:0.0.1"))
    assert levels(list(judge_operators([old]))) == ["warning"]
