"""What `epochkv plan` foretells of changes and the pods that they replace, without a cluster."""

import copy
from dataclasses import replace
from typing import Any

from epochkv_operator.preview import Outcome, Subject, outcomes
from tests.support.planning import CONTEXT

Json = dict[str, Any]
MOONCAKE: Json = {"distributed": {"mooncake": {"store": {"segmentSize": "256Mi", "replicas": 2}}}}


def obj(kind: str, name: str, spec: Json) -> Json:
    return {
        "apiVersion": "epochkv.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "rl", "uid": f"uid-{name}"},
        "spec": spec,
    }


def pool(**spec: Any) -> Json:
    return obj("KVCachePool", "policy", spec or {"local": {"capacity": "1Gi"}})


def engine(**spec: Any) -> Json:
    return obj("InferenceEngine", "rollout", {"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, "replicas": 4, **spec})


def changed(before: Json | None, after: Json, old_pool: Json | None = None, new_pool: Json | None = None) -> Outcome:
    pools = [{("rl", "policy"): one} if one is not None else {} for one in (old_pool, new_pool)]
    context = replace(CONTEXT, served=frozenset({"LeaderWorkerSet"}))
    [outcome] = outcomes([Subject(before, after, "f.yaml")], pools[0], pools[1], context)
    return outcome


def step(outcome: Outcome, name: str) -> str:
    (found,) = [detail for detail in outcome.details if detail.split(": ")[0].endswith(name)]
    return found


def test_fewer_replicas_with_a_new_image_replace_those_that_stay() -> None:
    outcome = changed(engine(), engine(replicas=3, image="b"), pool(), pool())
    said = "what the operator wants has changed: spec.replicas, spec.template.spec.containers[engine].image"
    assert outcome.details == (f"apply Deployment rl/rollout: {said}; replaces 3 pods, at most 1 at a time",)
    assert changed(engine(replicas=0), engine(replicas=0, image="b"), pool(), pool()).pods == 0


def test_a_master_is_replaced_all_at_once() -> None:
    after = copy.deepcopy(pool(**MOONCAKE))
    after["spec"]["distributed"]["mooncake"]["image"] = "registry.example/mooncake:2"
    outcome = changed(pool(**MOONCAKE), after)
    assert step(outcome, "Deployment rl/policy-master").endswith("; replaces 1 pod, all at once")
    assert outcome.pods == 3, "the master and two stores"


def test_a_pool_that_gets_an_l2_restarts_its_engines() -> None:
    old, new = pool(local={"capacity": "1Gi"}), pool(local={"capacity": "1Gi"}, **MOONCAKE)
    outcome = changed(engine(), engine(), old, new)
    assert outcome.pods == 4
    assert "connection-hash" in step(outcome, "Deployment rl/rollout")
    assert step(outcome, "NetworkPolicy rl/rollout").endswith("it does not exist")
    lost = changed(new, old)
    assert step(lost, "Deployment rl/policy-master") == "delete Deployment rl/policy-master: the spec has no use for it any more"
    assert changed(engine(), engine(), None, pool()).pods == 4, "an engine before its new pool"


def test_pods_of_groups_are_counted() -> None:
    spread = engine(replicas=2, parallelism={"tensor": 3, "nodes": 3})
    assert changed(spread, {**spread, "spec": {**spread["spec"], "image": "b"}}, pool(), pool()).pods == 6
    assert changed(spread, {**spread, "spec": {**spread["spec"], "replicas": 5}}, pool(), pool()).pods == 0
