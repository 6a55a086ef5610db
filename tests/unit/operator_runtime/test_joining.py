"""Copies of a pool for namespaces that it allows, by the requests that they cost; and what is said of pods with a pool's label."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_operator.control import joining
from epochkv_operator.control.joining import Copies
from epochkv_operator.control.reconcile import PodReconciler, PoolReconciler
from epochkv_operator.control.runtime import Operator
from epochkv_operator.hub.service import HubSnapshot
from epochkv_operator.keys import FenceSecrets, made
from epochkv_operator.kube.client import Conflict, Forbidden, KubeClient, NotFound
from epochkv_operator.kube.resources import PODS, ObjectRef, Resource
from epochkv_operator.kube.store import Key, Store, indexed, pool_key
from epochkv_operator.settings import Settings
from tests.support.planning import CONTEXT, pool

Json = dict[str, Any]
KEY = pool_key("rl", "policy")
KEYS = made("h" * 40, 0)


class ApiServer(KubeClient):
    """Namespaces and what is in them; every write is kept."""

    def __init__(self, *namespaces: str) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.namespaces = set(namespaces)
        self.asked: list[str] = []
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
        for (kind, *_), obj in self.server.objects.items():
            if kind == "ConfigMap":
                self.store.upsert(kind, obj)
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
    rig.store.remove("ConfigMap", rig.server.objects.pop(("ConfigMap", "team", config["metadata"]["name"])))
    assert rig.keep() == ["GET Secret team", "DELETE Secret team"], "somebody has deleted the ConfigMap"
    rig.keep("team")
    assert rig.keep() == ["PUT ConfigMap team", "GET Secret team", "DELETE Secret team", "DELETE ConfigMap team"]
    assert rig.server.objects == {}


def test_a_namespace_that_is_not_there_is_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    rig = Rig("team")
    assert "POST ConfigMap nowhere" in rig.keep("nowhere", "team")
    assert rig.problem() == ("NamespaceNotFound", "there is no namespace nowhere")
    assert [rig.keep("nowhere", "team") for _ in range(3)] == [[], [], []]
    assert rig.problem() == ("NamespaceNotFound", "there is no namespace nowhere")
    clock[0] += joining.CHECK_SECONDS
    rig.server.namespaces.add("nowhere")
    assert "POST ConfigMap nowhere" in rig.keep("nowhere", "team")
    assert rig.problem() is None


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


class Gates(ApiServer):
    opened: list[str]

    async def patch_condition(self, ref: ObjectRef, condition: Json) -> Json:
        assert (condition["status"], condition["reason"]) == ("True", "NotGated")
        if ref.name.startswith("stray") and ref.name != "stray-8":
            raise NotFound(404, "NotFound", "", "PATCH")
        self.opened.append(ref.name)
        return gated(ref.name, ref.namespace, condition, version="9")


def gated(name: str, namespace: str, gate: Json, version: str = "1") -> Json:
    kind, made = "epochkv.io/weights", pod(name, 0.0)
    told = {"spec": {"readinessGates": [{"conditionType": kind}]}, "status": {"conditions": [{"type": kind, **gate}]}}
    return {**made, **told, "metadata": {**made["metadata"], "namespace": namespace, "resourceVersion": version}}


@pytest.mark.parametrize("taken", [False, True], ids=["keys", "no keys"])
def test_gates_open_where_the_pool_lets_nobody_join_any_more(taken: bool) -> None:
    """A copy that is lost does not say that."""
    server, settings = Gates("rl", "team"), Settings(namespace="epochkv-system")
    operator = Operator(settings)
    store, operator.queue = operator.store, SimpleNamespace(add_after=lambda *_: None)  # type: ignore[assignment]
    if taken:
        server.objects["Secret", "rl", "policy-fence"] = {"metadata": {}}
    closed = {"status": "False", "lastTransitionTime": "2026-01-01T00:00:00+00:00"}
    for name in ("team", "other"):
        operator.observed(PODS, "ADDED", gated(f"of-{name}", name, closed))

    async def nothing(*_: object) -> tuple[None, None]:
        return None, None

    async def report(obj: Json, compute: Callable[[Json], Json]) -> None:
        compute(obj)

    around: tuple[Any, ...] = (SimpleNamespace(bring_about=nothing), SimpleNamespace(report=report), FenceSecrets(server, "h" * 40))
    asked: tuple[Any, ...] = (lambda *_, **__: HubSnapshot(), server, lambda *_: None, frozenset, lambda _: "")
    leads: Any = SimpleNamespace(leaderless=lambda _: False)
    pools = PoolReconciler(settings, store, *around, *asked, leads, Copies(server, store, settings), operator.strays)

    def opened(version: int, *allowed: str) -> list[str]:
        server.opened = []
        spec = {"local": {"capacity": "1Gi"}, "allowedNamespaces": {"names": list(allowed)}, "serve": {"weights": "Converged"}}
        metadata = {"name": "policy", "namespace": "rl", "uid": "u", "resourceVersion": str(version), "generation": 1}
        store.upsert("KVCachePool", {"apiVersion": "epochkv.io/v1alpha1", "kind": "KVCachePool", "metadata": metadata, "spec": spec})
        asyncio.run(pools.reconcile(KEY))
        return sorted(server.opened)

    assert opened(1, "team") == ["of-other"]
    lost = store.every("ConfigMap")
    assert bool(lost) is not taken
    for config in lost:
        store.remove("ConfigMap", server.objects.pop(("ConfigMap", "team", config["metadata"]["name"])))
    assert opened(2, "team") == []
    for number in range(9):
        stray = gated(f"stray-{number}", "team", closed)
        operator.observed(PODS, "ADDED", stray)
        operator.observed(PODS, "DELETED", {**stray, "metadata": {**stray["metadata"], "resourceVersion": "2"}})
    assert opened(3, "team") == ["stray-8"], "the others are gone"
    assert opened(4, "elsewhere") == ["of-team"]


def test_a_list_that_nobody_has_looked_at_has_no_result() -> None:
    rig = Rig("team")
    rig.keep("team")
    assert rig.copies.told(KEY, rig.pool) is not None
    assert rig.copies.told(KEY, pool({"allowedNamespaces": {"names": ["other"]}, "local": {"capacity": "1Gi"}})) is None


def pod(name: str, ready_seconds: float, **notes: str) -> Json:
    since = (datetime.now(UTC) - timedelta(seconds=ready_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "kind": "Pod",
        "metadata": {
            **{"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1", "labels": {"epochkv.io/pool": "policy"}},
            "annotations": {"epochkv.io/joined": "vllm", "epochkv.io/pool-namespace": "rl", **notes},
        },
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": since}]},
    }


@pytest.mark.parametrize(
    ("ready_seconds", "heard", "complete", "said", "woken"),
    [
        (45.0, [], True, ["NotReporting"], 0),
        (45.0, [("one", "team")], True, [], 0),
        (45.0, [("one", "other"), ("two", "team")], True, ["NotReporting"], 0),
        (45.0, [], False, [], 2),
        (5.0, [], True, [], 2),
    ],
    ids=["silent", "reports", "others report", "new hub", "just ready"],
)
def test_a_pod_that_joined_and_never_reports_is_named_once(
    ready_seconds: float, heard: list[tuple[str, str]], complete: bool, said: list[str], woken: int
) -> None:
    store, told, woke = Store(indexed), [], list[float]()
    owner = {"metadata": {"name": "policy", "namespace": "rl", "uid": "u", "resourceVersion": "1"}, "spec": {"reset": {"leaseSeconds": 30}}}
    store.upsert("KVCachePool", owner)
    store.upsert("Pod", pod("one", ready_seconds))
    engines = [SimpleNamespace(pod=name, namespace=namespace) for name, namespace in heard]
    view = SimpleNamespace(engines=engines, complete=complete)

    class Reporter:
        def tell(self, obj: Json, *, reason: str, action: str, note: str, warning: bool) -> None:
            assert "kubectl logs one -c vllm" in note
            assert not warning, "a pod of a larger engine has none of its own"
            told.append(reason)

    asked = SimpleNamespace(view=view, incomplete_seconds=0.0 if complete else 20.0)
    pods = PodReconciler(store, Reporter(), lambda *_: asked, lambda _, delay: woke.append(delay))  # type: ignore[arg-type]
    for _ in range(2):
        asyncio.run(pods.reconcile(Key("Pod", "team", "one")))
    assert told == said
    assert len(woke) == woken
    assert all(15 < delay <= 30 for delay in woke), "a thousand pods that ask each second leave the hub no time"
