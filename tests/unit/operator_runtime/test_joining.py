"""Copies of a pool for namespaces that it allows, by the requests that they cost; and what is said of pods with a pool's label."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from epochkv_operator.api.resources import PODS, POOLS, ObjectRef, Resource
from epochkv_operator.control import joining, reconcile
from epochkv_operator.control.joining import Copies
from epochkv_operator.control.reconcile import PodReconciler, PoolReconciler
from epochkv_operator.control.runtime import Operator
from epochkv_operator.hub.service import HubService, HubSnapshot
from epochkv_operator.keys import FenceSecrets, made
from epochkv_operator.kube.client import Conflict, Forbidden, Invalid, KubeClient, NotFound, Unavailable
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import Key, Store, indexed, pool_key
from epochkv_operator.planning.context import Serving, Turn
from epochkv_operator.settings import Settings
from tests.support.planning import CONTEXT, pool

Json = dict[str, Any]
KEY = pool_key("rl", "policy")
KEYS = made("h" * 40, 0)
GOING = {7: "2026-01-01T00:00:00Z"}
CLOSES = [("last", "False", "c"), ("waits", "False", "a"), ("closes", "False", "b"), ("strict", "False", "")]


class ApiServer(KubeClient):
    """Namespaces and what is in them; every write is kept."""

    def __init__(self, *namespaces: str) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.namespaces = set(namespaces)
        self.asked: list[str] = []
        self.refused: set[str] = set()
        self.version = 0

    def _stored(self, resource: Resource, body: Json, uid: str) -> Json:
        self.version += 1
        kept = {**body, "metadata": {**body["metadata"], "uid": uid, "resourceVersion": str(self.version)}}
        self.objects[resource.kind, body["metadata"]["namespace"], body["metadata"]["name"]] = kept
        return kept

    async def get(self, resource: Resource, namespace: str | None, name: str, deadline_seconds: float | None = None) -> Json:
        self.asked.append(f"GET {resource.kind} {namespace}")
        if (found := self.objects.get((resource.kind, namespace or "", name))) is None:
            raise NotFound(404, "NotFound", "", "GET")
        return found

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        self.asked.append(f"POST {resource.kind} {namespace}")
        if namespace not in self.namespaces:
            raise NotFound(404, "NotFound", f'namespaces "{namespace}" not found', "POST")
        return self._stored(resource, body, f"uid-{self.version}")

    async def replace(self, resource: Resource, namespace: str, body: Json, deadline_seconds: float | None = None) -> Json:
        self.asked.append(f"PUT {resource.kind} {namespace}")
        live = self.objects[resource.kind, namespace, body["metadata"]["name"]]["metadata"]
        if any(live[field] != body["metadata"].get(field) for field in ("uid", "resourceVersion")):
            raise Conflict(409, "Conflict", "", "PUT")
        return self._stored(resource, body, live["uid"])

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        self.asked.append(f"DELETE {resource.kind} {namespace}")
        assert self.objects.pop((resource.kind, namespace, name))["metadata"]["uid"] == uid

    async def patch_condition(self, ref: ObjectRef, condition: Json) -> Json:
        if ref.name.startswith("gone"):
            raise NotFound(404, "NotFound", "", "PATCH")
        if ref.name in self.refused:
            raise Invalid(422, "Invalid", "", "PATCH")
        self.asked.append(f"{condition['reason']} {ref.name}")
        if ref.name == "no right":
            raise Forbidden(403, "Forbidden", "", "PATCH")
        if ref.name == "mute":
            raise Unavailable(0, "Timeout", "no answer", "PATCH")
        return gated(ref.name, ref.namespace, condition, version="9")


class Rig:
    def __init__(self, *namespaces: str) -> None:
        self.server, self.store = ApiServer(*namespaces), Store(indexed)
        self.copies = Copies(self.server, self.store, Settings(namespace="epochkv-system"))

    def keep(self, *allowed: str, capacity: str = "1Gi") -> list[str]:
        """What a look asks the API server."""
        self.server.asked.clear()
        names = {"allowedNamespaces": {"names": list(allowed)}} if allowed else {}
        self.pool = pool({"local": {"capacity": capacity}, **names})
        assert asyncio.run(self.copies.keep(KEY, self.pool, KEYS, CONTEXT)) is None
        return list(self.server.asked)

    def problem(self) -> tuple[str, str] | None:
        told = self.copies.told(KEY, self.pool)
        assert told is not None
        return None if told.problem is None else (told.problem.reason, told.problem.message)


def test_the_secret_is_there_before_pods_join_and_until_none_does() -> None:
    rig = Rig("team")
    asked = rig.keep("team")
    assert [one for one in asked if "GET" not in one] == ["POST ConfigMap team", "POST Secret team", "PUT ConfigMap team"]
    assert rig.keep("team") == []
    assert rig.keep("team", capacity="2Gi") == ["GET Secret team", "GET ConfigMap team", "PUT ConfigMap team"]
    (config,) = (obj for (kind, *_), obj in rig.server.objects.items() if kind == "ConfigMap")
    assert config["data"]["local"] == str(2**31)
    assert "app.kubernetes.io/instance" not in config["metadata"]["labels"], "Argo CD would prune it"
    rig.store.remove("ConfigMap", rig.server.objects.pop(("ConfigMap", "team", config["metadata"]["name"])))
    assert rig.keep() == ["GET Secret team", "DELETE Secret team"], "somebody has deleted the ConfigMap"
    rig.keep("team")
    assert rig.keep() == ["PUT ConfigMap team", "GET Secret team", "DELETE Secret team", "DELETE ConfigMap team"]
    assert rig.server.objects == {}


@pytest.mark.parametrize("reason", [None, "NamespacesNotListed"])
def test_a_selector_leaves_out_its_own_and_a_list_that_fails_withdraws_nothing(reason: str | None) -> None:
    rig: Any = Rig("team", "rl", "ends")
    rig.pool = pool({"local": {"capacity": "1Gi"}, "allowedNamespaces": {"selector": {"matchLabels": {"rl": "yes"}}}})
    there = [{"metadata": {"name": name, "deletionTimestamp": ends}} for name, ends in (("team", None), ("rl", None), ("ends", GOING[7]))]
    answers = [(there, "1"), Unavailable(0, "Timeout", "no answer", "GET")]
    for rig.server.list in (AsyncMock(return_value=answers[0]), *([AsyncMock(side_effect=answers[1])] if reason else [])):
        rig.copies._matched.clear()
        asyncio.run(rig.copies.keep(KEY, rig.pool, KEYS, CONTEXT))
        assert {namespace for _, namespace, _ in rig.server.objects} == {"team"}
    assert rig.problem() == (reason and (reason, "no answer"))


@pytest.mark.parametrize("hangs", [False, True], ids=["it is not there", "its webhook hangs"])
def test_a_namespace_that_takes_no_copy_is_asked_once_in_a_while(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    rig = Rig("team")
    create, problem = rig.server.create, ("NamespaceNotFound", "there is no namespace nowhere")

    async def hanging(resource: Resource, namespace: str, body: Json) -> Json:
        try:
            return await create(resource, namespace, body)
        except NotFound:
            clock[0] += 10.0
            raise Unavailable(0, "Timeout", "no answer", "POST") from None

    if hangs:
        problem = "WriteFailed", "nowhere: no answer"
        monkeypatch.setattr(rig.server, "create", hanging)
    assert "POST ConfigMap nowhere" in rig.keep("nowhere", "team")
    assert rig.problem() == problem
    assert [rig.keep("nowhere", "team") for _ in range(3)] == [[], [], []]
    assert rig.problem() == problem
    clock[0] += joining.CHECK_SECONDS
    rig.server.namespaces.add("nowhere")
    assert ("POST ConfigMap nowhere" in rig.keep("nowhere", "team"), rig.problem()) == (True, None)
    other = pool({"allowedNamespaces": {"names": ["other"]}, "local": {"capacity": "1Gi"}})
    assert rig.copies.told(KEY, other) is None, "nobody has looked at this list"


def test_a_namespace_that_refuses_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of one namespace forbids to delete there."""
    rig = Rig("guarded", "left", "team")
    rig.keep("guarded", "left")
    refusal, delete = Forbidden(403, "Forbidden", "denied", "DELETE"), rig.server.delete

    async def guarded(resource: Resource, namespace: str, name: str, uid: str) -> None:
        if namespace == "guarded":
            raise refusal
        await delete(resource, namespace, name, uid)

    monkeypatch.setattr(rig.server, "delete", guarded)
    kept = rig.copies.keep(KEY, pool({"local": {"capacity": "1Gi"}, "allowedNamespaces": {"names": ["team"]}}), KEYS, CONTEXT)
    assert asyncio.run(kept) is refusal
    assert {namespace for _, namespace, _ in rig.server.objects} == {"guarded", "team"}


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(name: str, ready_seconds: float, namespace: str = "team", version: str = "1") -> Json:
    metadata: Json = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": version}
    metadata |= {"labels": {"epochkv.io/pool": "policy"}, "annotations": {"epochkv.io/joined": "vllm", "epochkv.io/pool-namespace": "rl"}}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": ago(ready_seconds)}
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": "Running", "conditions": [ready]}}


def gated(name: str, namespace: str, gate: Json, version: str = "1") -> Json:
    spec, status = {"readinessGates": [{"conditionType": gate["type"]}]}, {"conditions": [gate]}
    return {**pod(name, 0.0, namespace, version), "spec": spec, "status": status}


def test_gates_open_where_the_pool_lets_nobody_join_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it has no keys does not say so, nor that a copy is lost, nor that it was never seen. A gate or a status that cannot be written
    holds up nothing else, and what the status would say of served weights is remembered."""
    server, settings = ApiServer("rl", "team"), Settings(namespace="epochkv-system")
    operator, wake, unseen, statuses, before = Operator(settings), Mock(), set[str](), list[Json](), list[object]()
    store, operator.queue, judge, served = operator.store, Mock(), cast(Any, reconcile).serving, {("rl", "fp"): "w"}
    monkeypatch.setattr(reconcile, "serving", lambda *given: before.append(given[5]) or replace(judge(*given), weights=served))
    closed = {"type": "epochkv.io/weights", "status": "False", "lastTransitionTime": ago(60.0)}
    for name in ("team", "other"):
        operator.observed(PODS, "ADDED", gated(f"of-{name}", name, closed))
    executor = Mock(bring_about=AsyncMock(return_value=(None, None)))

    def refuse(obj: Json, do: Callable[[Json], Json]) -> None:
        statuses.append(do(obj))
        raise Forbidden(403, "Forbidden", "the status may not be written", "PATCH")

    reporter = Mock(report=AsyncMock(side_effect=refuse))
    hub = Mock(side_effect=lambda method, *_, **__: () if method is HubService.forget else HubSnapshot())
    given = (settings, store, executor, reporter, FenceSecrets(server, "h" * 40), hub, server, wake, frozenset, Mock(return_value="why"))
    pools = PoolReconciler(*given, unseen, Mock(**{"leaderless.return_value": False}), Copies(server, store, settings), operator.strays)

    def opened(version: int, *allowed: str) -> list[str]:
        """Without a namespace that is allowed, the pool is gone; at 7, somebody else's finalizer holds it."""
        server.asked.clear()
        spec = {"local": {"capacity": "1Gi"}, "allowedNamespaces": {"names": list(allowed)}, "serve": {"weights": "Converged"}}
        about = {"name": "policy", "namespace": "rl", "uid": "u", "resourceVersion": str(version), "deletionTimestamp": GOING.get(version)}
        found = {"apiVersion": "epochkv.io/v1alpha1", "kind": "KVCachePool", "metadata": about, "spec": spec}
        operator.observed(POOLS, "DELETED" if version == 5 else "MODIFIED", found)
        with contextlib.suppress(ObjectGone, Invalid, Forbidden):
            asyncio.run(pools.reconcile(KEY))
        return [one for one in server.asked if "of-" in one]

    server.objects["Secret", "rl", "policy-fence"] = {"metadata": {}}
    assert opened(1, "team") == ["NotGated of-other"]
    assert Key("Pod", "team", "of-team") in [call.args[0] for call in wake.mock_calls], "it may have joined another pool"
    server.objects.clear()
    assert opened(2, "team") == []
    (config,) = store.every("ConfigMap")
    store.remove("ConfigMap", server.objects.pop(("ConfigMap", "team", config["metadata"]["name"])))
    assert (opened(3, "team"), before[::2]) == ([], [{}, served, served])
    for name in (*(f"gone-{number}" for number in range(8)), "of-nobody", "of-refused"):
        operator.observed(PODS, "ADDED", gated(name, "team", closed))
        operator.observed(PODS, "DELETED", gated(name, "team", closed, "2"))
    server.refused = {"of-refused", "of-team"}
    assert opened(4, "team") == ["NotGated of-nobody"], "it has lost its label"
    unseen.add("rl")
    assert (opened(5), server.asked) == ([], [])
    assert (opened(6, "team"), statuses[-1]["conditions"][0]["reason"], statuses[-1].get("observedGeneration")) == ([], "ReadForbidden", 1)
    unseen.clear()
    assert (opened(7), "DELETE Secret team" in server.asked) == ([], True)
    store.remove("ConfigMap", store.every("ConfigMap")[0])
    server.refused = {"of-team"}
    assert opened(8, "elsewhere") == ["NotGated of-refused"]
    opens = [("of-team", "True", "a"), ("of-team", "True", ""), *((str(number), "True", "b") for number in range(8))]
    gates = [*[("no right", "True", "c")] * 40, *[("mute", "True", "d")] * 40, *CLOSES, *opens]
    turns = [Turn(pod(name, 0.0, group), {**closed, "status": status, "reason": status}, group) for name, status, group in gates]
    assert isinstance(asyncio.run(pools._turn(KEY, "u", Serving(turns=tuple(turns)))), Unavailable)
    found = [*server.asked[-26:], Key("Pod", "b", "7") in {call.args[0] for call in wake.mock_calls}]  # answers may bring other news
    assert found == [*["True no right"] * 8, *["True mute"] * 8, *map("True {}".format, range(8)), "False closes", "False strict", True]


def pending(seconds: float, name: str, namespace: str, waiting: str = "PodInitializing") -> Json:
    """It joined this pool, and waits for this reason."""
    made = pod("one", 0.0)
    made["metadata"] |= {"creationTimestamp": ago(seconds), "labels": {"epochkv.io/pool": name}}
    made["metadata"]["annotations"]["epochkv.io/pool-namespace"] = namespace
    init = {"name": "epochkv-connector", "image": "epochkv/connector:1", "state": {"waiting": {"reason": waiting}}}
    return {**made, "status": {"phase": "Pending", "initContainerStatuses": [init]}}


AHEAD = partial(pod, "one", -3600.0)  # ready in an hour, says its kubelet's clock
SILENT = "NotReporting: .*kubectl logs one -c vllm"


@pytest.mark.parametrize(
    ("made", "seconds", "heard", "complete", "said"),
    [
        (AHEAD, 45.0, [], True, SILENT),
        (AHEAD, 45.0, [("one", "team")], True, None),
        (AHEAD, 45.0, [("one", "other"), ("two", "team")], True, SILENT),
        (AHEAD, 45.0, [], False, ""),
        (AHEAD, 5.0, [], True, ""),
        (partial(pending, 130.0, "gone", "team"), 0.0, [], True, "NotStarting: .* KVCachePool gone, which is gone"),
        (partial(pending, 130.0, "refused", "team"), 0.0, [], True, "NotStarting: .* KVCachePool refused, which has no keys: quota"),
        (partial(pending, 130.0, "gone", "rl", "ImagePullBackOff"), 0.0, [], True, "NotStarting: pod one cannot pull epochkv/connector:1"),
        (partial(pending, 130.0, "gone", "rl"), 0.0, [], True, ""),
        (partial(pending, 110.0, "gone", "team"), 0.0, [], True, ""),
    ],
    ids=["silent", "reports", "others report", "new hub", "just ready", "pool gone", "no keys", "no image", "guest", "just made"],
)
def test_a_pod_that_joined_and_does_not_start_or_report_is_named_once(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], Json], seconds: float, heard: list[Any], complete: bool, said: str | None
) -> None:
    """`seconds` after it was seen to be ready. `said`: None where there is nothing to say, and empty as long as nobody can tell."""
    monkeypatch.setattr(time, "monotonic", clock := Mock(return_value=100.0))
    store, reporter, unseen, wake = Store(indexed), Mock(), {"team"}, Mock(side_effect=lambda *_: unseen.clear())
    for place in (("rl", "policy"), ("team", "refused")):
        metadata = {"namespace": place[0], "name": place[1], "uid": place[1], "resourceVersion": "1"}
        store.upsert("KVCachePool", {"metadata": metadata, "spec": {"reset": {"leaseSeconds": 30}}})
    view = SimpleNamespace(engines=[SimpleNamespace(pod=name, namespace=namespace) for name, namespace in heard], complete=complete)
    hub = Mock(return_value=SimpleNamespace(view=view, incomplete_seconds=0.0 if complete else 20.0))
    store.upsert("Pod", made())
    pods = PodReconciler(store, reporter, Mock(**{"of.return_value.refusal": "quota"}), hub, wake, unseen)
    for passed in (0.0, 0.0, seconds):
        clock.return_value += passed
        asyncio.run(pods.reconcile(Key("Pod", "team", "one")))
    told = [call.kwargs for call in reporter.tell.mock_calls]
    assert [bool(re.match(said or "-", f"{about['reason']}: {about['note']}")) for about in told] == [True] * bool(said)
    assert all(about["warning"] is not (said == SILENT) for about in told), "a pod of a larger engine has no engine of its own"
    woke = [call.args[1] for call in wake.mock_calls]
    assert len(woke) == (3 if said == "" else 1 + bool(seconds)), "of a namespace that is not seen nobody can tell"
    assert all(15 < delay <= 30 for delay in woke[1:]), "a thousand pods that ask each second leave the hub no time"
    metadata = {"namespace": "rl", "name": "policy", "uid": "made again", "resourceVersion": "2"}
    store.upsert("KVCachePool", {"metadata": metadata, "spec": {"reset": {"leaseSeconds": 30}}})
    view.engines.clear()
    asyncio.run(pods.reconcile(Key("Pod", "team", "one")))
    assert said is not None or reporter.tell.mock_calls[0].kwargs["reason"] == "NotReporting", "it joined the pool before"
