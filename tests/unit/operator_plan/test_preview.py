"""What a preview says of changes, their causes and the pods that they replace, without a cluster."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from epochkv_operator.cli.fields import ABSENT, differences, reverted, top_differences
from epochkv_operator.cli.preview import Outcome, Step, Subject, World, preview, replaced
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


def made(subject: Json, pool: Json | None) -> tuple[Json, ...]:
    """The live children of an object: what the operator makes for it."""
    world = World(after={("rl", "policy"): pool} if pool is not None else {})
    [outcome] = preview([Subject(None, subject)], world, CONTEXT)
    return tuple(copy.deepcopy(step.after) for step in outcome.steps if step.after is not None)


def changed(before: Json, after: Json, old_pool: Json | None = None, new_pool: Json | None = None) -> Outcome:
    old = before if before["kind"] == "KVCachePool" else old_pool
    new = after if after["kind"] == "KVCachePool" else new_pool
    children = made(before, old)
    world = World({("rl", "policy"): old} if old else {}, {("rl", "policy"): new} if new else {})
    [outcome] = preview([Subject(before, after, children)], world, CONTEXT)
    return outcome


def step(outcome: Outcome, kind: str, name: str) -> Step:
    return next(one for one in outcome.steps if one.key == (kind, "rl", name))


def test_nothing_changes_when_nothing_does() -> None:
    assert changed(engine(), engine(), pool(), pool()).steps == ()
    assert changed(pool(**MOONCAKE), pool(**MOONCAKE)).steps == ()


def test_more_replicas_replace_no_pod() -> None:
    outcome = changed(engine(), engine(replicas=6), pool(), pool())
    assert [str(change) for change in step(outcome, "Deployment", "rollout").changes] == ["spec.replicas: 4 -> 6"]
    assert outcome.rolls == 0


def test_fewer_replicas_with_a_new_image_replace_those_that_stay() -> None:
    outcome = changed(engine(), engine(replicas=3, image="b"), pool(), pool())
    found = step(outcome, "Deployment", "rollout")
    assert (found.rolls, found.at_once) == (3, "at most 1 at a time")
    assert set(found.causes) == {"spec.replicas", "spec.image"}


def test_no_pod_is_replaced_where_none_runs() -> None:
    assert changed(engine(replicas=0), engine(replicas=0, image="b"), pool(), pool()).rolls == 0


def test_a_master_is_replaced_all_at_once() -> None:
    before = pool(**MOONCAKE)
    after = copy.deepcopy(before)
    after["spec"]["distributed"]["mooncake"]["image"] = "registry.example/mooncake:2"
    outcome = changed(before, after)
    assert step(outcome, "Deployment", "policy-master").at_once == "all at once"
    assert outcome.rolls == 3, "the master and two stores"
    assert step(outcome, "StatefulSet", "policy-store").causes == ("spec.distributed.mooncake.image",)


def test_a_pool_that_gets_an_l2_restarts_its_engines_and_says_why() -> None:
    old, new = pool(local={"capacity": "1Gi"}), pool(local={"capacity": "1Gi"}, **MOONCAKE)
    outcome = changed(engine(), engine(), old, new)
    found = step(outcome, "Deployment", "rollout")
    assert (found.rolls, found.causes) == (4, ("spec.distributed of KVCachePool rl/policy",))
    paths = [change.path for change in found.changes]
    config = "kv_connector_extra_config.tracker"
    assert any(path.startswith("spec.template.spec.containers[engine].args[") and path.endswith(config) for path in paths), paths
    assert step(outcome, "NetworkPolicy", "rollout").verb == "create"
    lost = changed(new, old)
    assert {one.key[2] for one in lost.steps if one.verb == "delete"} == {"policy-master", "policy-store"}


def test_an_engine_before_its_new_pool() -> None:
    outcome = changed(engine(), engine(), None, pool())
    assert step(outcome, "Deployment", "rollout").causes == ("KVCachePool rl/policy is new",)
    assert outcome.rolls == 4


def test_pods_of_groups_are_counted() -> None:
    """What a LeaderWorkerSet replaces, as its fields say it."""
    spec: Json = {"replicas": 2, "leaderWorkerTemplate": {"size": 3, "image": "a"}, "rolloutStrategy": {"type": "RollingUpdate"}}
    before: Json = {"kind": "LeaderWorkerSet", "metadata": {"name": "rollout", "namespace": "rl"}, "spec": spec}
    after = copy.deepcopy(before)
    after["spec"]["leaderWorkerTemplate"]["image"] = "b"
    assert replaced(before, after) == (6, "at most 1 at a time")
    after["spec"]["replicas"] = 1
    assert replaced(before, after)[0] == 3
    assert replaced(before, {**before, "spec": {**spec, "replicas": 5}}) == (0, "")


def test_two_changes_that_need_each_other_are_both_causes() -> None:
    before = pool(**MOONCAKE)
    after = copy.deepcopy(before)
    etcd = {"backend": "Etcd", "etcd": {"endpoints": ["e:2379"]}}
    after["spec"]["distributed"]["mooncake"]["master"] = {"replicas": 3, "highAvailability": etcd}
    assert step(changed(before, after), "Deployment", "policy-master").causes == ("spec.distributed.mooncake.master",)


def test_resets_and_keys_are_noted_and_replace_nothing() -> None:
    outcome = changed(pool(local={"capacity": "1Gi"}), pool(local={"capacity": "1Gi"}, resetEpoch=3, keys={"generation": 1}))
    assert (outcome.steps, len(outcome.notes)) == ((), 2)


def test_a_stranger_of_a_wanted_name_is_a_problem() -> None:
    stranger = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "rollout", "namespace": "rl", "uid": "x"}}
    [outcome] = preview([Subject(None, engine(), (stranger,))], World(after={("rl", "policy"): pool()}), CONTEXT)
    assert outcome.problem is not None
    assert "would change nothing: NameConflict: ServiceAccount rl/rollout is not controlled" in outcome.problem


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"a": 1}, {"a": 2}, ["a: 1 -> 2"]),
        ({}, {"a": {"b": 1}}, ['a: {"b": 1} (new)']),
        ({"a": None}, {}, ["a: null (removed)"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]: 2 -> 3"]),
        ({"a": [1]}, {"a": [1, 3]}, ["a: [1] -> [1, 3]"]),
        ({"a": ["x", "y"]}, {"a": ["x", "--new", "y"]}, ["a[1]: --new (new)"]),
        ({"a": ["x", "y", "z"]}, {"a": ["x", "z"]}, ["a[1]: y (removed)"]),
        ({"a": ["x", '{"b": 1}']}, {"a": ["--n", "x", '{"b": 2}']}, ["a[0]: --n (new)", "a[2].b: 1 -> 2"]),
        ({"c": [{"name": "x", "v": 1}]}, {"c": [{"name": "y"}, {"name": "x", "v": 2}]}, ['c[y]: {"name": "y"} (new)', "c[x].v: 1 -> 2"]),
        ({"c": [{"name": "x"}]}, {"c": []}, ['c[x]: {"name": "x"} (removed)']),
        ({"a": '{"b": {"c": 1}}'}, {"a": '{"b": {"c": 2}}'}, ["a.b.c: 1 -> 2"]),
        ({"a": "{no json"}, {"a": "{none"}, ["a: {no json -> {none"]),
        ({"m": {"x.io/y": "1"}}, {"m": {"x.io/y": "2"}}, ["m[x.io/y]: 1 -> 2"]),
        ({"a": True}, {"a": 1.5}, ["a: true -> 1.5"]),
    ],
)
def test_differences_in_words(before: Json, after: Json, said: list[str]) -> None:
    assert [str(one) for one in differences(before, after)] == said


def test_each_difference_can_be_taken_back() -> None:
    before = {"a": {"b": 1, "c": [1]}, "gone": 1}
    after = {"a": {"b": 2, "c": [1, 2]}, "new": {"x": 1}}
    found = top_differences(before, after)
    assert [one.path for one in found] == ["a.b", "a.c", "new", "gone"]
    result = after
    for one in found:
        result = reverted(result, one)
    assert result == before
    assert after == {"a": {"b": 2, "c": [1, 2]}, "new": {"x": 1}}, "the original is left alone"
    assert found[3].after is ABSENT
