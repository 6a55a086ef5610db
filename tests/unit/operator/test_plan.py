"""Plans: what is applied, deleted or left alone, and why; and what holds for every spec that is accepted."""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from epochkv_operator.api import KVCachePool
from epochkv_operator.planning.context import Observed
from epochkv_operator.planning.plan import Plan, plan_engine, plan_pool
from tests.support.api.corpus import CASES
from tests.support.planning import CONTEXT, ENGINE_SPECS, POOL_SPECS, containers, engine, one, pool

Json = dict[str, Any]
ANOTHER = "99999999-0000-4000-8000-000000000009"
STORE = "spec.template.spec.containers[store]."


def served(objects: tuple[Json, ...] | list[Json]) -> list[Json]:
    """What an API server makes of applied objects: identity, and defaults that nobody asked for."""
    live = json.loads(json.dumps(objects))  # which share nothing
    for number, obj in enumerate(live):
        obj["metadata"] |= {"uid": f"child-{number}", "resourceVersion": "1", "generation": 1}
        obj["status"] = {"observedGeneration": 1}
        if "template" in obj.get("spec", {}):
            obj["spec"]["template"]["spec"] |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst"}
            for container in containers(obj):
                container["terminationMessagePath"] = "/dev/termination-log"
        if obj["kind"] == "Service":
            obj["spec"].setdefault("clusterIP", "10.96.0.7")
    return live


def settle_pool(spec: Json | str = "l1-l2") -> list[Json]:
    return served(plan_pool(pool(spec), Observed(), CONTEXT).apply)


def names(objects: tuple[Json, ...]) -> set[str]:
    return {f"{obj['kind']}/{obj['metadata']['name']}" for obj in objects}


@pytest.mark.parametrize(
    ("kind", "name", "damage", "where"),
    [
        ("Deployment", "policy-master", lambda obj: obj["spec"].update(replicas=5), "spec.replicas"),
        ("Deployment", "policy-master", lambda obj: containers(obj)[0].update(image="x"), "spec.template.spec.containers[master].image"),
        ("StatefulSet", "policy-store", lambda obj: containers(obj)[0]["env"].pop(3), STORE + "env["),
        ("ConfigMap", "policy-connection", lambda obj: obj["data"].clear(), "data.connection.json"),
        ("NetworkPolicy", "policy-master", lambda obj: obj["spec"]["ingress"].append({}), "spec.ingress"),
        ("NetworkPolicy", "policy-master", lambda obj: obj["spec"]["podSelector"]["matchLabels"].update(x="y"), "spec.podSelector.match"),
        ("NetworkPolicy", "policy-master", lambda obj: obj["spec"]["ingress"][0]["from"][0].update(namespaceSelector={}), "spec.ingress["),
        ("Service", "policy-master", lambda obj: obj["spec"]["selector"].update(x="y"), "spec.selector.x was"),
        ("Service", "policy-master", lambda obj: obj["metadata"]["labels"].pop("epochkv.io/pool"), "metadata.labels.epochkv.io/pool"),
        (
            "StatefulSet",
            "policy-store",
            lambda obj: containers(obj)[0]["resources"]["limits"].update(memory="1Gi"),
            STORE + "resources.limits.memory",
        ),
    ],
)
def test_what_somebody_else_changed_is_put_back(kind: str, name: str, damage: Any, where: str) -> None:
    live = settle_pool()
    damage(one(live, kind, name))
    plan = plan_pool(pool(), Observed(live), CONTEXT)
    assert names(plan.apply) == {f"{kind}/{name}"}
    assert plan.details[0].startswith(f"apply {kind} rl/{name}: {where}")
    assert plan.details[0].endswith("was changed by somebody else")


def test_what_others_add_is_left_alone() -> None:
    live = settle_pool()
    store = one(live, "StatefulSet", "policy-store")
    store["metadata"]["annotations"]["somebody/else"] = "1"
    store["spec"]["template"]["spec"]["containers"].append({"name": "injected", "image": "mesh:1"})
    containers(store)[0]["resources"]["limits"]["memory"] = "621805568"  # 593Mi as another writer puts it
    assert plan_pool(pool(), Observed(live), CONTEXT) == Plan()


def test_a_count_that_an_autoscaler_owns_is_left_alone() -> None:
    live = settle_pool()
    one(live, "StatefulSet", "policy-store")["spec"]["replicas"] = 5
    one(live, "StatefulSet", "policy-store")["x-scaled-by-others"] = True
    assert plan_pool(pool(), Observed(live), CONTEXT) == Plan()
    changed = copy.deepcopy(POOL_SPECS["l1-l2"])
    changed["distributed"]["mooncake"]["store"]["segmentSize"] = "512Mi"
    assert "replicas" not in one(list(plan_pool(pool(changed), Observed(live), CONTEXT).apply), "StatefulSet")["spec"]


def test_what_the_api_server_writes_otherwise_in_a_template_is_no_change() -> None:
    size: Json = {"name": "SIZE", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": 1}}}
    mounts = [{"name": "tmp", "mountPath": at, "readOnly": False} for at in ("/a", "/b")]
    sidecar = {"name": "sidecar", "env": [size], "resources": {"requests": {"cpu": 0.5}}, "volumeMounts": mounts}
    wanted = engine({**ENGINE_SPECS["minimal"], "template": {"spec": {"containers": [sidecar]}}})
    live = served(plan_engine(wanted, pool(), Observed(), CONTEXT).apply)
    made = containers(one(live, "Deployment"))[1]
    made["resources"]["requests"]["cpu"], made["env"][0]["valueFrom"]["resourceFieldRef"]["divisor"] = "500m", "1"
    made["volumeMounts"] = [{"name": "tmp", "mountPath": at} for at in ("/a", "/b")]
    assert plan_engine(wanted, pool(), Observed(live), CONTEXT) == Plan()


def test_what_the_spec_no_longer_wants_is_deleted() -> None:
    live = settle_pool()
    plan = plan_pool(pool({"local": {"capacity": "1Gi"}}), Observed(live), CONTEXT)
    assert names(plan.apply) == {"ConfigMap/policy-connection"}
    assert names(plan.delete) == names(tuple(live)) - {"ConfigMap/policy-connection"}
    assert sum("the spec has no use for it any more" in detail for detail in plan.details) == len(plan.delete)
    going = [{**obj, "metadata": {**obj["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}} for obj in live]
    assert plan_pool(pool({"local": {"capacity": "1Gi"}}), Observed(going), CONTEXT).delete == ()


def test_only_own_objects_are_deleted() -> None:
    """Not another owner's, not a Secret, not one without owner."""
    surplus = one(settle_pool(), "Service", "policy-store")
    meta = surplus["metadata"]
    other_uid = {**meta, "ownerReferences": [{**meta["ownerReferences"][0], "uid": "other"}]}
    candidates = [
        {**surplus, "metadata": other_uid},
        {**surplus, "metadata": {key: value for key, value in meta.items() if key != "ownerReferences"}},
        {**surplus, "kind": "Secret", "metadata": {**meta, "name": "policy-fence"}},
    ]
    connection = settle_pool("l1")
    for candidate in candidates:
        assert plan_pool(pool("l1"), Observed([*connection, candidate]), CONTEXT) == Plan()


def test_an_owner_that_is_being_deleted_needs_nothing() -> None:
    gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert plan_pool(pool("l1-l2", **gone), Observed(), CONTEXT) == Plan()
    assert plan_engine(engine(**gone), pool(), Observed(), CONTEXT) == Plan()


FOREIGN = {"kind": "Service", "metadata": {"name": "rollout", "namespace": "rl"}}


@pytest.mark.parametrize(
    ("plan_of", "says"),
    [
        # An engine named like a pool's master must not take its objects over.
        (
            lambda: plan_engine(engine(name="policy-master"), pool(), Observed(settle_pool()), CONTEXT),
            "NetworkPolicy rl/policy-master belongs to KVCachePool policy: rename one of the two",
        ),
        (lambda: plan_pool(pool(uid=ANOTHER), Observed(settle_pool()), CONTEXT), "belongs to a deleted KVCachePool of the same name"),
        (lambda: plan_engine(engine(), pool(), Observed([FOREIGN]), CONTEXT), "is not controlled by this operator"),
    ],
    ids=["two-owners", "namesake", "nobodys"],
)
def test_what_is_somebody_elses_is_not_taken_over(plan_of: Callable[[], Plan], says: str) -> None:
    plan = plan_of()
    assert (plan.apply, plan.delete) == ((), ())
    assert plan.problem is not None
    assert plan.problem.reason == "NameConflict"
    assert says in plan.problem.message


@pytest.mark.parametrize(
    "plan_of",
    [lambda seen: plan_pool(pool(uid=ANOTHER), seen, CONTEXT), lambda seen: plan_engine(engine(uid=ANOTHER), pool(), seen, CONTEXT)],
    ids=["pool", "engine"],
)
def test_what_a_deleted_namesake_left_behind_is_taken_over(plan_of: Callable[[Observed], Plan]) -> None:
    """`kubectl delete --cascade=orphan` takes the owner away and nothing else."""
    left = settle_pool() + served(plan_engine(engine(), pool(), Observed(), CONTEXT).apply)
    for obj in left:
        del obj["metadata"]["ownerReferences"]
    assert plan_of(Observed(left)) == plan_of(Observed())._replace(details=plan_of(Observed(left)).details), "with the owner of now"
    for obj in left:
        obj["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "somebody"
    assert plan_of(Observed(left)).apply == ()


KINDS = replace(CONTEXT, served=frozenset({"LeaderWorkerSet"}))
POOLS, ENGINES = ([case.spec for case in CASES if case.kind == kind and case.says is None] for kind in ("KVCachePool", "InferenceEngine"))


def by_name(objects: Iterable[Json]) -> dict[str, Json]:
    return {f"{obj['kind']}/{obj['metadata']['name']}": obj for obj in objects}


@pytest.mark.parametrize(("number", "change"), list(enumerate(pairwise([*POOLS, POOLS[0]]))))
def test_every_accepted_pool_becomes_the_next_one_in_one_plan(number: int, change: tuple[Json, Json]) -> None:
    """With every accepted engine in turn."""
    before, wanted = map(pool, change)
    user = engine({"poolRef": {"name": "policy"}, **(ENGINES[number % len(ENGINES)] or {})})

    def plans(of: KVCachePool, live: Iterable[Json]) -> tuple[Plan, Plan]:
        seen = Observed(list(live))
        return plan_pool(of, seen, KINDS), plan_engine(user, of, seen, KINDS)

    live = by_name(served([obj for plan in plans(before, ()) for obj in plan.apply]))
    for plan in plans(wanted, live.values()):
        live |= by_name(served(plan.apply))
        for gone in by_name(plan.delete):
            del live[gone]
    first = plans(wanted, ())
    assert [plan.problem for plan in first] == [None, None]
    assert live.keys() == by_name(first[0].apply + first[1].apply).keys()
    assert plans(wanted, live.values()) == (Plan(), Plan())
