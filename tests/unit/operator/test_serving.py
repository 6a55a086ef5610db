"""What each case of `spec.serve` comes to: gates, times of another look, the pool's condition, and what is made of it in pods."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from epochkv_fence.protocol.messages import ASLEEP
from epochkv_fence.protocol.pool import EngineView, WeightsView
from epochkv_operator.api.base import Serve
from epochkv_operator.kube.store import Store, affected, indexed, slim
from epochkv_operator.planning.conditions import engine_health, pool_conditions
from epochkv_operator.planning.context import Context, HubView, Observed, Serving
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.serving import Life, lives_of, serving
from epochkv_operator.planning.status import pool_status
from tests.support.planning import CONTEXT, engine, one, pool
from tests.unit.operator.cluster_state import NOW, POLICY, engine_children, pool_children, rank

Json = dict[str, Any]
BASE, STEP_1, STEP_2 = ("0" * 32, "1" * 32, "2" * 32)
CONVERGED, STRICT = Serve(weights="Converged"), Serve(weights="Converged", strict=True)
LEASE, CLOCK = 30.0, 5000.0
GATE = "epochkv.io/weights"


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def gated(
    name: str,
    gate: str | None = None,
    *,
    since: float = 500.0,
    up: float | None = 900.0,
    ran: float | None = None,
    node: float = 0.0,
    of: Sequence[EngineView] | None = None,
) -> Json:
    """A pod: what its gate says, since when and of which engines (by default `holds(name, ...)`), since when its containers are ready, and
    its engine's container is in another life.

    `node`: by so much its node's clock is ahead.
    """
    of = [holds(name, None)] if of is None else of
    conditions = [{"type": "Ready", "status": "True" if gate == "True" and up is not None else "False"}]
    conditions.append({"type": "ContainersReady", "status": str(up is not None), "lastTransitionTime": ago(up or 0.0)})
    if gate is not None:
        reason = "Holds" if gate == "True" else "OtherWeights"
        text = f"said then; engine instances {named(*of)}" if of else "said then"
        times = {"lastProbeTime": ago(since), "lastTransitionTime": ago(since)}
        conditions.append({"type": GATE, "status": gate, "reason": reason, "message": text, **times})
    container = {"name": "engine", "state": {"running": {"startedAt": ago((ran or 1000.0) - node)}}}
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-{name}", "labels": {"epochkv.io/engine": "rollout"}}
    spec, status = {"readinessGates": [{"conditionType": GATE}]}, {"conditions": conditions, "containerStatuses": [container]}
    return {"kind": "Pod", "metadata": metadata, "x-ran": ran, "x-up": up, "spec": spec, "status": status}


def holds(pod: str, weights: str | None, *, age: float = 990.0, since: float = 900.0, **more: Any) -> EngineView:
    more.setdefault("instance", f"{pod}@{age}/{more.get('rank', 0)}".encode())
    return rank(pod, weights=weights, age_seconds=age, weights_since=since, **more)


def named(*views: EngineView) -> str:
    return ", ".join(sorted(view.instance.hex() for view in views))


def look(pods: Sequence[Json], engines: Sequence[EngineView] | None, serve: Serve = CONVERGED, **more: Any) -> Serving:
    """`before`: by fingerprint."""
    held = {view.weights.hex() for view in engines or () if view.weights is not None}
    labels = {STEP_1: "step-1", **more.pop("labels", {})}
    groups = [WeightsView(bytes.fromhex(weights), labels.get(weights, ""), 1, 0.0) for weights in sorted(held)]
    lives: dict[str, Life] = {}
    for pod in pods:
        uid, up = pod["metadata"]["uid"], pod.get("x-up")
        known = {uid: Life("another")} if pod.get("x-ran") else {}
        for life in lives_of([pod], known, CLOCK - (pod.get("x-ran") or 0.0)).values():
            lives[uid] = life._replace(ready=None if up is None else CLOCK - up)
    lives |= more.pop("lives", {})
    before = {("rl", kind): weights for kind, weights in more.pop("before", {"": STEP_1}).items()}
    facts = {name: more.pop(name) for name in ("complete",) if name in more}
    names = {bytes.fromhex(weights): label for weights, label in labels.items() if label}
    hub = HubView(7, 7, engines, labels=names, weights=groups, **facts) if engines is not None else None
    found = serving(pods, "rl", serve, more.pop("overrides", {}), hub, before, lives, LEASE, more.pop("now", NOW), CLOCK, **more)
    assert found is not None
    return found


def turns(found: Serving) -> dict[str, tuple[str, str]]:
    return {turn.pod["metadata"]["name"]: (turn.condition["status"], turn.condition["reason"]) for turn in found.turns}


def test_when_the_life_of_a_container_before_was_over() -> None:
    """An engine may be heard of before its container is seen to run, and one of a pod that had the name before a new one."""
    waits, first, second, gone, bare = gated("a"), gated("a"), gated("a", ran=20.0), gated("a"), gated("a")
    del bare["status"]["containerStatuses"]
    waits["status"]["containerStatuses"][0]["state"] = {"waiting": {}}
    gone["status"] = {"phase": "Failed"}
    known: dict[str, Life] = {}
    for seconds, pod, over in ((0, bare, 0), (1, first, 0), (5, waits, 5), (6, second, 5), (9, second, 5), (10, first, 10)):
        known = lives_of([pod], known, seconds)
        assert known["uid-a"].over == over
    assert lives_of([gone], known, 11) == {}
    assert lives_of([gated("a", "True")], {}, 12)["uid-a"].over is None, "a new operator takes out nobody who serves"


def test_since_when_containers_are_ready() -> None:
    """As this operator has seen it: a kubelet's clock may be hours ahead. An end that nobody saw counts, too."""
    known: dict[str, Life] = {}
    steps = ((0, {}, 0), (1, {}, 0), (2, {"up": None}, None), (3, {}, 3), (4, {"ran": 1.0}, 4), (5, {"ran": 1.0}, 4))
    for seconds, pod, ready in steps:
        known = lives_of([gated("a", **pod)], known, seconds)
        assert known["uid-a"].ready == ready


def test_who_asks_for_nothing_is_not_looked_at() -> None:
    plain = {**gated("a"), "spec": {}}
    assert serving([plain], "rl", Serve(), {}, HubView(7, 7), {}, {}, LEASE, NOW, CLOCK) is None
    for gone in ({"metadata": {**gated("a")["metadata"], "deletionTimestamp": ago(1.0)}}, {"status": {"phase": "Failed"}}):
        assert turns(look([{**gated("a"), **gone}], [holds("a", STEP_1)])) == {}
    # A pod that still has the gate must not wait for ever.
    assert turns(look([gated("a")], [holds("a", BASE)], Serve())) == {"a": ("True", "NotGated")}


OLD, NEW, DEAD = holds("b", BASE), holds("b", BASE, age=20.0, since=5.0), holds("b", STEP_1, silent_seconds=22.0)
PUSHED, WRITING = holds("d", STEP_2, since=5.0, pushed=True), holds("d", None, stats={"weights_updating": 1.0})
TWO: tuple[Json, Json] = {"engine": "vllm:1", "instance": b"1"}, {"engine": "vllm:2", "instance": b"2"}


@pytest.mark.parametrize(
    ("pod", "views", "serve", "expected"),
    [
        (gated("b", "True"), [holds("b", STEP_1)], CONVERGED, None),
        (gated("b"), [holds("b", STEP_1)], CONVERGED, ("True", "Holds")),
        (gated("b"), [OLD], CONVERGED, ("False", "OtherWeights")),
        (gated("b", "False"), [OLD], CONVERGED, None),
        (gated("b", "True"), [OLD], CONVERGED, ("False", "OtherWeights")),
        # It took others just now, after those that serve came: a push that goes on.
        (gated("b", "True"), [holds("b", STEP_2, since=5.0)], CONVERGED, None),
        (gated("b", "False"), [holds("b", STEP_2, since=5.0)], CONVERGED, None),
        # Started again in place, with and without a report since; the instance before it lives on for a lease.
        (gated("b", "True", ran=21.0, up=8.0), [NEW], CONVERGED, ("False", "OtherWeights")),
        (gated("b", "True", ran=21.0, up=None), [], CONVERGED, ("False", "Starting")),
        (gated("b", "True", ran=21.0, up=None), [DEAD], CONVERGED, ("False", "Starting")),
        (gated("b", "True", ran=21.0, up=8.0), [DEAD, NEW], CONVERGED, ("False", "OtherWeights")),
        (gated("b", "False", ran=21.0, up=8.0), [msgspec.structs.replace(DEAD, **TWO[0])], CONVERGED, None),
        (gated("b", "False", ran=21.0, up=8.0, node=20.0), [holds("b", STEP_1, age=9.0, since=5.0)], CONVERGED, ("True", "Holds")),
        (gated("b", "True", node=600.0), [], STRICT, ("False", "Unknown")),
        (gated("b", "True", ran=21.0, up=8.0), [holds("b", STEP_1, age=20.0, since=5.0)], CONVERGED, ("True", "Holds")),
        # Nobody can tell.
        (gated("b", "False"), [], CONVERGED, ("True", "FailedOpen")),
        (gated("b", "True"), [], STRICT, ("False", "Unknown")),
        (gated("b", up=10.0), [], CONVERGED, None),
        (gated("b", up=None), [], CONVERGED, None),
        (gated("b", "False"), [holds("b", None, since=40.0)], CONVERGED, ("True", "FailedOpen")),
        (gated("b", "False"), [holds("b", None, since=20.0)], CONVERGED, None),
        (gated("b", "False", up=10.0), [holds("b", None, since=40.0)], CONVERGED, None),
        (gated("b", "False", up=None), [holds("b", None, since=40.0)], CONVERGED, None),
        (gated("b", "False"), [holds("b", None, since=40.0, stats={"weights_updating": 1.0})], CONVERGED, None),
        # Every rank counts.
        (gated("b"), [holds("b", STEP_1), holds("b", STEP_1, rank=1)], CONVERGED, ("True", "Holds")),
        (gated("b"), [holds("b", STEP_1), holds("b", BASE, rank=1)], CONVERGED, ("False", "OtherWeights")),
        (gated("b"), [holds("b", STEP_1), holds("b", None, rank=1, since=5.0)], CONVERGED, None),
        # Two servers in one container.
        (gated("b"), [holds("b", BASE, **TWO[0]), holds("b", STEP_1, **TWO[1])], CONVERGED, ("False", "OtherWeights")),
        (gated("b"), [holds("b", STEP_1, **TWO[0]), holds("b", STEP_1, **TWO[1])], CONVERGED, ("True", "Holds")),
        # Named by label or digits.
        (gated("b"), [holds("b", STEP_1)], Serve(weights="step-1"), ("True", "Holds")),
        (gated("b"), [OLD], Serve(weights="step-1"), ("False", "OtherWeights")),
        (gated("b"), [OLD], Serve(weights=BASE[:8]), ("True", "Holds")),
        (gated("b", "True"), [holds("b", STEP_2, since=5.0)], Serve(weights="step-1"), ("False", "OtherWeights")),
        # Nobody holds what is named.
        (gated("b"), [OLD], Serve(weights="step-9"), None),
        (gated("b", "True"), [OLD], Serve(weights="step-9"), None),
        (gated("b", "True"), [OLD], Serve(weights="step-9", strict=True), ("False", "OtherWeights")),
        (gated("b", "True", ran=21.0, up=8.0), [NEW], Serve(weights="step-9"), ("False", "OtherWeights")),
    ],
)  # fmt: skip
def test_one_pod_beside_three(pod: Json, views: list[EngineView], serve: Serve, expected: tuple[str, str] | None) -> None:
    others = ("a", "c", "d")
    found = look([pod, *(gated(name, "True") for name in others)], [*(holds(name, STEP_1) for name in others), *views], serve)
    assert turns(found).get("b") == expected
    assert "b" not in found.stays


@pytest.mark.parametrize(
    ("pod", "views", "facts", "expected", "wait"),
    [
        (gated("b", "False"), None, {"away_seconds": 10.0}, None, 20.0),
        (gated("b", "False"), None, {"away_seconds": 30.0}, ("True", "FailedOpen"), None),
        (gated("b", up=11.0), [], {}, None, 19.0),
        (gated("b"), [], {"complete": False}, None, None),
        (gated("b", "True"), [holds("b", STEP_2, since=20.0)], {}, None, 40.0),
        (gated("b", "True"), [holds("b", STEP_2, since=70.0), PUSHED], {}, None, 55.0),  # others are taking them, one after the other
        (gated("b", "True"), [holds("b", STEP_2, since=70.0), WRITING], {}, None, 60.0),
        (gated("b", "True"), [holds("b", STEP_2, since=70.0), holds("d", BASE, since=5.0)], {}, ("False", "OtherWeights"), None),
    ],
)  # fmt: skip
def test_what_lasts_too_long(pod: Json, views: list[EngineView] | None, facts: Json, expected: object, wait: float | None) -> None:
    others = [holds(name, STEP_1) for name in ("a", "c")]
    found = look([pod, gated("a", "True"), gated("c", "True")], None if views is None else [*others, *views], **facts)
    assert turns(found).get("b") == expected
    assert found.look_again == (pytest.approx(wait, abs=0.2) if wait is not None else None)


@pytest.mark.parametrize(
    ("held", "before", "over", "expected"),
    [
        ([STEP_1, STEP_1, STEP_2], None, False, STEP_1),
        ([STEP_1, BASE], STEP_1, False, STEP_1),
        ([STEP_1, BASE], STEP_1, True, STEP_1),
        ([STEP_1, STEP_1, BASE, BASE, BASE], STEP_1, False, STEP_1),  # a scale-up
        ([STEP_1, BASE, BASE, BASE], STEP_1, True, STEP_1),  # most were started again
        ([STEP_2 + "p", BASE, BASE, BASE], STEP_1, False, STEP_2),
        ([STEP_2 + "p", STEP_1 + "p", BASE, BASE], None, False, STEP_2),
        ([STEP_1, STEP_2], STEP_1, False, STEP_1),
        ([STEP_1, STEP_2 + "p"], STEP_1, False, STEP_1),
        ([STEP_1, STEP_2 + "p"], STEP_1, True, STEP_2),  # a push missed one of two
        ([STEP_2 + "p", STEP_2 + "p", STEP_1], STEP_1, False, STEP_2),
        ([STEP_2 + "p", STEP_2, STEP_1], STEP_1, False, STEP_1),
        ([BASE], STEP_1, False, BASE),
        ([STEP_2 + "p", BASE], STEP_1, False, STEP_2),
        ([STEP_2, BASE], STEP_1, False, None),
        ([STEP_1, STEP_2 + "p", STEP_2 + "p", BASE + "p", BASE + "p"], STEP_1, False, STEP_2),
        (["writes", "writes", BASE, BASE, BASE], STEP_1, False, STEP_1),  # a push to all but those that were started again
        (["writes", "writes", BASE + "p"], STEP_1, False, STEP_1),  # which one of them missed before
        ([STEP_2 + "p", "writes", "writes", BASE, BASE], STEP_1, False, STEP_2),
        (["writes"], STEP_1, False, STEP_1),
        (["sleeps", BASE], STEP_1, True, STEP_1),
        ([STEP_2 + "p", "sleeps"], STEP_1, True, STEP_2),
        (["sleeps", STEP_2 + "p"], STEP_1, True, STEP_2),
        (["writes", "old", "old"], STEP_1, False, STEP_1),  # two that missed what serves, and miss this one
        (["writes", STEP_2 + "p", STEP_2 + "p"], STEP_1, False, STEP_2),  # a push that comes to its end
        ([STEP_2 + "p", "writes", "old", "old"], STEP_1, False, STEP_2),
        ([STEP_1 + "p", "sleeps", "sleeps", BASE + "p", BASE + "p"], STEP_1, True, STEP_1),  # one of three that wake up
        (["slept", BASE], STEP_1, True, BASE),  # it never held what serves
        (["hangs", BASE], STEP_1, True, BASE),
        (["unknown", BASE], STEP_1, False, STEP_1),
        (["unknown", BASE], STEP_1, True, BASE),
    ],
)
def test_what_serves(held: list[str], before: str | None, over: bool, expected: str | None) -> None:
    """`over`: the last push to the kind. Engines of another one differ all the time."""
    since = 100.0 if over else 5.0
    views = [
        holds(f"p{number}", weights[:32], pushed=weights.endswith("p"), since=since + number)
        if weights not in STATES
        else msgspec.structs.replace(holds(f"p{number}", None, since=since + number), **STATES[weights])
        for number, weights in enumerate(held)
    ]
    known = {("rl", ""): before} if before else {}
    assert look([], views, before={"": before} if before else {}).weights == ({("rl", ""): expected} if expected else {})
    assert look([], views, before={"": before} if before else {}, complete=False).weights == known, "it does not know everybody yet"


STATES: dict[str, Json] = {
    "writes": {"stats": {"weights_updating": 1.0}},
    "hangs": {"stats": {"weights_updating": 1.0}, "weights_since": 600.0},
    "sleeps": {"weights_note": ASLEEP, "pushed": True},
    "slept": {"weights_note": ASLEEP},
    "unknown": {"pushed": True},
    "old": {"weights": bytes.fromhex(BASE), "pushed": True, "weights_since": 300.0},
}


def test_the_instance_before_does_not_vote() -> None:
    views = [holds("a", STEP_1), holds("a", STEP_2, age=20.0, pushed=True), holds("b", STEP_1), holds("c", STEP_2, pushed=True)]
    assert look([], views).weights == {("rl", ""): STEP_2}
    dead = [holds("b", STEP_1, silent_seconds=22.0, **TWO[0]), holds("b", BASE, age=9.0, **TWO[1])]
    assert look([gated("b", ran=21.0)], dead).weights == {("rl", ""): BASE}, "a container's earlier life neither"
    # Outside of Kubernetes, engines may have one name.
    views = [holds("", weights, instance=bytes([number]), pushed=True) for number, weights in enumerate((STEP_1, STEP_2, STEP_2))]
    assert look([], views).weights == {("rl", ""): STEP_2}


@pytest.mark.parametrize(
    ("pushed", "more", "expected"),
    [
        (True, {}, None),
        (False, {}, BASE),  # nobody was ever pushed to: what pods start with is what serves
        (True, {"weights": STEP_2, "pushed": True}, STEP_2),
        (True, {"weights": STEP_2}, STEP_2),  # of the same label
        (True, {"weights": STEP_1, "labels": {}}, STEP_1),
        (True, {"namespace": "guest"}, None),
        (True, {"namespace": "guest", "fingerprint": "old"}, STEP_1),  # a guest that was started again
    ],
)
def test_a_rollout_that_changes_the_fingerprint(pushed: bool, more: Json, expected: str | None) -> None:
    labels = {STEP_1: "", **more.pop("labels", {STEP_1: "step-1", STEP_2: "step-1"})}
    new, pod = holds("b", more.pop("weights", BASE), since=5.0, **{"namespace": "rl", "fingerprint": "new", **more}), gated("b")
    pod["metadata"]["namespace"] = new.namespace
    views = [holds("a", STEP_1, fingerprint="old", pushed=pushed), new]
    canary = holds("c", None, fingerprint="old", pushed=True, weights_note=ASLEEP)
    found = look([gated("a", "True"), pod], [*views, canary], before={"old": STEP_1}, labels=labels)
    away = [msgspec.structs.replace(views[0], weights=None, weights_since=5.0, stats={"weights_updating": 1.0}), new]
    found_then = look([gated("a", "True"), pod], away, before={"old": STEP_1}, labels=labels)
    assert found.weights == {("rl", "old"): STEP_1} | ({(new.namespace, new.fingerprint): expected} if expected else {})
    assert found_then.weights == found.weights, "while it takes weights, too"
    if expected is None:
        assert (turns(found), found.look_again) == ({}, pytest.approx(55.0))
        assert turns(look([pod], [views[0], msgspec.structs.replace(new, weights_since=61.0)])) == {"b": ("True", "FailedOpen")}


def test_guests_do_not_decide_for_others() -> None:
    guest = gated("a")
    guest["metadata"] |= {"namespace": "guest", "uid": "uid-guest"}
    guests = [holds(name, BASE, namespace="guest", pushed=True) for name in "abc"]
    outside = [holds("", STEP_2, namespace="desk", instance=bytes([number]), pushed=True) for number in range(2)]
    found = look([gated("a", "True"), guest], [holds("a", STEP_1, namespace="rl"), *guests])
    assert found.weights == {("rl", ""): STEP_1, ("guest", ""): BASE}
    assert turns(found) == {"a": ("True", "Holds")}, "the guest's"
    assert look([gated("a")], [holds("a", STEP_1), *outside]).weights == {("rl", ""): STEP_2}
    # Nor are they pods of an engine that they name by its label.
    theirs = [gated(name, "True") for name in "cdefgh"]
    for pod in theirs:
        pod["metadata"] |= {"namespace": "guest"}
    good = [*(holds(name, STEP_1, namespace="guest") for name in "cdefgh"), *ELSEWHERE]
    assert look([gated("a", "True"), gated("b", "True"), *theirs], [OLD, holds("a", BASE), *good]).stays == ("a",)
    assert look(theirs, good, Serve(), overrides={"rollout": Serve(weights="step-9", strict=True)}).held == ()


def test_without_a_majority_gates_open_once_a_push_is_over() -> None:
    pods, views = [gated("a"), gated("b", "False")], [holds("a", STEP_2, since=5.0), holds("b", BASE, since=50.0)]
    old = [msgspec.structs.replace(view, weights_since=61.0) for view in views]
    assert (turns(look(pods, views, before={})), look(pods, views, before={}).look_again) == ({}, 10.0)
    assert turns(look(pods, old, before={}, complete=False)) == {}
    assert turns(look(pods, old, before={})) == dict.fromkeys("ab", ("True", "FailedOpen"))
    assert turns(look(pods, old, STRICT, before={})) == dict.fromkeys("ab", ("False", "Unknown"))


ELSEWHERE = [holds(f"elsewhere-{number}", STEP_1) for number in range(5)]


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_an_operator_that_takes_over_closes_what_was_started_meanwhile(ahead: float) -> None:
    """It has seen no container end. With the right weights, the pod stays, and its gate names the new instance, once."""
    pods, others = [gated(name, "True") for name in "ab"], [holds("a", STEP_1), *ELSEWHERE]
    now = NOW + timedelta(seconds=ahead)
    assert turns(look(pods, [*others, NEW], now=now)) == {"b": ("False", "OtherWeights")}
    assert turns(look(pods, [*others, holds("b", None, age=20.0, since=5.0)], now=now)) == {"b": ("False", "Starting")}
    assert turns(look(pods, others, now=now, complete=False)) == {}, "not heard of yet"
    right = holds("b", STEP_1, age=20.0, since=5.0)
    [turn] = look(pods, [*others, right], now=now).turns
    assert (turn.condition["status"], turn.condition["reason"], turn.group) == ("True", "Holds", ""), "nobody waits for it"
    assert turn.condition["message"] == f"its engines hold the weights that serve; engine instances {named(right)}"
    assert turn.condition["lastTransitionTime"] == ago(500.0)
    pods[1]["status"]["conditions"][-1] = turn.condition
    assert turns(look(pods, [*others, right], now=now)) == {}


def test_half_of_a_service_stays_when_all_were_started_again() -> None:
    """While no operator ran, and the kubelet found their gates True."""
    pods, new = [gated(name, "True") for name in "abcd"], [holds(name, BASE, age=20.0, since=5.0) for name in "abcd"]
    silent = [msgspec.structs.replace(view, weights=None) for view in new]
    for serve in (CONVERGED, Serve(weights="step-1"), Serve(weights="step-9")):
        found = look(pods, [*new, *ELSEWHERE], serve)
        assert (found.stays, turns(found)) == (("a", "b"), dict.fromkeys("cd", ("False", "OtherWeights")))
        assert {turn.group for turn in found.turns} == {"rl/rollout"}
    found = look(pods, [*silent, *ELSEWHERE])
    assert (found.stays, turns(found)) == (("a", "b"), dict.fromkeys("cd", ("False", "Starting")))
    alone = look(pods[:1], silent[:1])
    assert (alone.stays, alone.look_again) == (("a",), 25.0), "nobody can tell then what it holds"
    assert [turn.group for turn in look(pods, [*new, *ELSEWHERE], STRICT).turns] == [""] * 4, "each for itself"
    # Those that are not ready are in no Service.
    down = [gated(name, "True", up=None) for name in "abcd"]
    assert turns(look(down, [*new, *ELSEWHERE])) == dict.fromkeys("abcd", ("False", "OtherWeights"))


def test_a_gate_names_the_instances_that_it_is_about() -> None:
    ranks = [holds("b", STEP_1, rank=number) for number in range(3)]
    alike, whole, others = gated("a", "True"), gated("b", "True", of=ranks), [holds("a", STEP_1), *ELSEWHERE]
    assert turns(look([alike, whole], [*others, *ranks[1:]])) == {}, "one that is silent"
    again = holds("b", BASE, rank=2, age=20.0, since=5.0)
    assert turns(look([alike, whole], [*others, *ranks[:2], again])) == {"b": ("False", "OtherWeights")}
    [turn] = look([alike, gated("b", "True", of=ranks[:2])], [*others, *ranks]).turns
    assert turn.condition["message"].endswith(f"; engine instances {named(*ranks)}")
    # One that names nobody says nothing of who is new.
    bare = gated("b", "True", of=[])
    assert turns(look([alike, bare], [*others, holds("b", STEP_2, since=5.0)])) == {}
    [turn] = look([alike, bare], [*others, ranks[0]]).turns
    assert turn.condition["message"].endswith(f"; engine instances {named(ranks[0])}")


def test_a_gate_that_was_written_in_the_life_that_goes_on() -> None:
    """Nobody has reported in it, so the gate names nobody; a hub that has just begun to lead knows no more."""
    pod = gated("b", "True", ran=100.0, up=None, of=[])
    assert turns(look([pod], [], complete=False)) == {"b": ("False", "Starting")}
    before = Life("now", over=CLOCK - 100.0, gate=gated("b", "False")["status"]["conditions"][-1])
    assert turns(look([pod], [], complete=False, lives={"uid-b": before})) == {}


def test_half_of_a_service_stays() -> None:
    """Of five pods that are ready but for the gate, two hold what serves; the rest hold what came before, and one is not ready."""
    pods = [gated(name, "True") for name in "abcd"] + [gated("e"), gated("f", "True", up=None)]
    views = [holds("a", STEP_1), holds("b", STEP_1), *(holds(name, BASE) for name in "cd"), holds("e", BASE), holds("f", BASE)]
    views += [holds(f"elsewhere-{number}", STEP_1) for number in range(4)]
    found = look(pods, views)
    assert found.stays == ("c",)
    assert turns(found) == dict.fromkeys("def", ("False", "OtherWeights"))
    assert not look(pods, views, STRICT).stays
    late = gated("c", "True")  # its gate is True, and the kubelet has not seen that yet
    late["status"]["conditions"][0]["status"] = "False"
    assert look([pod if pod["metadata"]["name"] != "c" else late for pod in pods], views).stays == ("d",)
    # Another Service is no help, nor another pod without a controller.
    bare = [msgspec.structs.replace(view, engine="") for view in views]
    pods = [{**pod, "metadata": {**pod["metadata"], "labels": {}}} for pod in pods]
    assert look(pods, bare).stays == ("c", "d")
    alone = [gated("a", "True"), {**gated("c", "True"), "metadata": {**gated("c")["metadata"], "labels": {"epochkv.io/engine": "other"}}}]
    assert look(alone, views).stays == ("c",)
    assert turns(look(alone, views, overrides={"other": Serve()})) == {"c": ("True", "NotGated")}


def test_ranks_on_other_nodes_count_for_the_first_pod() -> None:
    worker = {**gated("w-0-1"), "spec": {}}
    worker["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = "1"
    views = [holds("w-0", STEP_1), holds("w-0-1", BASE, rank=1), holds("a", STEP_1)]
    assert turns(look([gated("w-0"), worker, gated("a", "True")], views)) == {"w-0": ("False", "OtherWeights")}
    worker["spec"] = gated("w")["spec"]  # it joined by its label, with the gate
    assert turns(look([gated("w-0", "True"), worker], [holds("w-0", STEP_1)])) == {"w-0-1": ("True", "NotGated")}


def test_a_time_is_kept_while_the_status_stays() -> None:
    [turn] = look([gated("a", "False", since=400.0), gated("b", "True")], [holds("b", STEP_1)], STRICT).turns
    assert (turn.condition["reason"], turn.condition["lastTransitionTime"]) == ("Unknown", "2026-03-01T11:53:20Z")
    assert turn.condition["lastProbeTime"] == "2026-03-01T12:00:00Z"
    by_hand = gated("a")
    by_hand["status"]["conditions"].append({"type": GATE, "status": "True"})
    [turn] = look([by_hand], [holds("a", STEP_1)]).turns
    assert turn.condition["lastTransitionTime"] == "2026-03-01T12:00:00Z"


@pytest.mark.parametrize(
    ("found", "status", "reason", "text"),
    [
        (look([gated("a", "True"), gated("b")], [holds("a", STEP_1), holds("b", BASE)]), "True", "Gating",
         "pods serve that hold 11111111 (step-1); out of their Services: b (00000000)"),
        (look([gated("a", "True"), gated("b", "True")], [holds("a", BASE), holds("b", BASE), *(holds(f"x{n}", STEP_1) for n in range(3))]),
         "True", "Gating", "pods serve that hold 11111111 (step-1); out of their Services: b (00000000); "
         "they stay, so that half of the pods serve: a"),
        (look([gated("a", "True")], [holds("a", BASE)], Serve(weights="step-9")), "False", "NotHeld", "no live engine holds step-9"),
        (look([gated("a")], []), "False", "NotReporting", "for longer than a lease, no engine has reported of a; they serve"),
        (look([gated("a")], [], STRICT), "False", "NotReporting", "reported of a; spec.serve.strict keeps them out of their Services"),
        (look([gated("a")], [holds("a", None)]), "False", "WeightsUnknown", "the weights are not known of a; they serve"),
        (look([gated("a"), gated("b")], [holds("a", STEP_2), holds("b", BASE)], before={}), "False", "NoMajority", "a, b"),
        (replace(look([gated("a")], []), forbidden="pods/status"), "False", "Forbidden", "serve.gates=true"),
    ],
)  # fmt: skip
def test_the_condition(found: Serving, status: str, reason: str, text: str) -> None:
    seen = Observed(pool_children(), (), HubView(7, 7), serving=found)
    [condition] = [each for each in pool_conditions(POLICY, seen) if each.type == "ServingGate"]
    assert (condition.status, condition.reason) == (status, reason)
    assert text in condition.message
    away = pool_conditions(POLICY, replace(seen, hub=None))
    assert [each.status for each in away if each.type == "ServingGate" and reason != "Forbidden"] in (["Unknown"], [])


def test_what_serves_is_remembered() -> None:
    spaces = [f"rl-{number:03}" for number in range(256)]
    seen = Observed(pool_children(), (), HubView(7, 7), serving=Serving(weights={(space, "f"): STEP_1 for space in spaces}))
    served = [{"namespace": space, "fingerprint": "f", "id": STEP_1} for space in spaces]
    assert pool_status(POLICY, seen, CONTEXT, {}, NOW)["servedWeights"] == served
    assert "servedWeights" not in pool_status(POLICY, replace(seen, serving=None), CONTEXT, {}, NOW)


def test_a_hub_that_does_not_know_everybody_yet_changes_no_condition() -> None:
    seen = Observed(pool_children(), (), HubView(7, 7), serving=look([gated("a")], []))
    before = pool_status(POLICY, seen, CONTEXT, {}, NOW)
    new = replace(seen, hub=HubView(7, 7, complete=False), serving=look([gated("a")], [], complete=False, before={}))
    assert pool_status(POLICY, new, CONTEXT, before, NOW) == before


def test_only_pods_that_are_asked_for_have_the_gate() -> None:
    def gates(context: Context = CONTEXT, **specs: Json) -> Any:
        spec = {"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, **specs.get("engine", {})}
        wanted = desired_engine(engine(spec), pool({"local": {"capacity": "1Gi"}, **specs.get("pool", {})}), context)
        return one(wanted, "Deployment")["spec"]["template"]["spec"].get("readinessGates")

    ours, theirs = {"conditionType": GATE}, {"conditionType": "example/own"}
    assert gates() is None
    assert gates(pool={"serve": {"weights": "Converged"}}) == [ours]
    assert gates(replace(CONTEXT, settings=replace(CONTEXT.settings, gates=False)), pool={"serve": {"weights": "Converged"}}) is None, (
        "the operator may not open it"
    )
    assert gates(pool={"serve": {"weights": "Converged"}}, engine={"serve": {}}) is None
    template = {"serve": {"weights": "step-1"}, "template": {"spec": {"readinessGates": [theirs]}}}
    assert gates(engine=template) == [theirs, ours]


def test_the_store_remembers_the_gate_and_the_pool_follows_its_pods() -> None:
    pod = gated("a")
    pod["metadata"]["labels"] |= {"epochkv.io/pool": "policy", "app.kubernetes.io/managed-by": "epochkv-operator"}
    kept = slim("Pod", pod)
    assert "spec" not in kept
    for known in (pod, kept):
        assert [key.kind for key in affected(Store(indexed), "Pod", known)] == ["InferenceEngine", "KVCachePool"]
    assert [key.kind for key in affected(Store(indexed), "Pod", {**pod, "spec": {}})] == ["InferenceEngine"]


def test_an_engine_says_that_a_gate_keeps_a_pod_out() -> None:
    said = 'the status of pod readiness gate "epochkv.io/weights" is not "True", but False'
    status = {"conditions": [{"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady", "message": said}]}
    pods = [{**gated("a"), "status": {**status, "containerStatuses": [{"name": "engine", "ready": True}]}}]
    pods[0]["metadata"]["labels"]["app.kubernetes.io/component"] = "engine"
    found = engine_health(engine(), Observed(engine_children({"replicas": 1, "updatedReplicas": 1}, 1), pods))
    assert (found.reason, found.message.endswith(f"pod a runs, and is kept out of its Service: {said}")) == ("Starting", True)
