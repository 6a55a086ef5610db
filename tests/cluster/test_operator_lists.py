"""How often the operator lists, and what it does about events that its watches lost."""

from pathlib import Path
from typing import Any

import pytest

from epochkv_operator.kube.resources import CHILDREN as KINDS
from epochkv_operator.kube.resources import ENGINES, PODS, PRIMARY
from hack.waiting import eventually
from tests.cluster.fault_proxy import NO_ANSWER, SHOW, WATCH, Fault, FaultProxy
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, condition
from tests.cluster.operator_harness import ENGINES as ENGINES_PATH

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}}
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}}


def test_each_kind_is_read_once_at_start_and_not_again(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    own = [resource.path(namespace.name) for resource in PRIMARY]
    paths = [*own, *(resource.path(namespace.name) for resource in (*KINDS, PODS))]
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig, resync_seconds=2) as operator:
        operator.wait_ready()
        eventually(lambda: min(proxy.requests[SHOW, path] for path in own) >= 4, "three rounds", 60)
        assert condition(namespace.engine_status("rollout"), "PoolBound")["status"] == "True"
        assert {path: proxy.requests["GET", path] for path in paths} == dict.fromkeys(paths, 1)
        assert operator.metric("epochkv_operator_missed_objects_total") == 0


@pytest.mark.slow  # patience by patience; the other tests of this file have watches that lose objects
def test_watches_that_do_not_start_hold_a_new_leader_up_once(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """Every kind is waited for at the same time; what is deleted meanwhile is not waited for."""
    with OperatorProcess(namespace.plane, namespace.name, tmp_path / "first") as operator:
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        namespace.create_engine("gone", **ENGINE)
        for name in ("rollout", "gone"):
            eventually(lambda name=name: namespace.get(CHILDREN["services"], name), "children", 60)
    proxy.decide = lambda method, path: Fault(NO_ANSWER) if method == "GET" and path in ("/api/v1", "/apis") else None
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        eventually(lambda: bool(proxy.faults), "kopf asks what there is", 60)
        namespace.delete(ENGINES_PATH, "gone")
        operator.wait_ready()  # which allows for one patience, and not for one of each kind with objects
        namespace.create_engine("late", **ENGINE)
        proxy.decide = lambda method, path: None
        eventually(lambda: namespace.get(CHILDREN["deployments"], "late"), "engine found", 60)


def test_what_a_watch_does_not_show_is_found_by_a_list(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """kopf's watch hangs, and never says a word: of engines that come, and of engines that go."""
    proxy.decide = lambda method, path: Fault(0) if method == WATCH and path == ENGINES.path(namespace.name) else None
    namespace.create_pool("policy", **POOL)
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig, resync_seconds=2) as operator:
        operator.wait_ready()
        eventually(lambda: bool(proxy.faults), "a watch that hangs")
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "engine found", 60)
        namespace.delete(ENGINES_PATH, "rollout")
        gone = 'epochkv_operator_reconciles_total{kind="InferenceEngine",result="gone"}'
        eventually(lambda: gone in operator.http("/metrics")[1], "engine forgotten", 60)
        assert operator.metric("epochkv_operator_missed_objects_total") >= 1
        assert proxy.requests["GET", PODS.path(namespace.name)] == 1, "what the watches brought is not read again"


def test_a_watch_whose_version_has_expired_begins_anew(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """The API server says so by an HTTP status, not in the stream. What came and went in the gap is found; nothing ends."""
    path = ENGINES.path(namespace.name)
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("gone", **ENGINE)
        eventually(lambda: namespace.get(CHILDREN["deployments"], "gone"), "an engine", 60)
        gap = True

        def decide(method: str, asked: str) -> Fault | None:
            nonlocal gap
            if (method, asked) != (WATCH, path) or (Fault(410) in {fault for _, _, fault in proxy.faults}):
                return None
            return Fault(503) if gap else Fault(410)

        proxy.decide = decide
        assert proxy.cut_watches(expired=False) > 0
        eventually(lambda: bool(proxy.faults), "the engines' watch is away")
        namespace.delete(ENGINES_PATH, "gone")
        namespace.create_engine("come", **ENGINE)
        gap = False
        eventually(lambda: (WATCH, path, Fault(410)) in proxy.faults, "an HTTP 410", 60)
        eventually(lambda: namespace.get(CHILDREN["deployments"], "come"), "engine found", 60)
        gone = 'epochkv_operator_reconciles_total{kind="InferenceEngine",result="gone"}'
        eventually(lambda: gone in operator.http("/metrics")[1], "engine forgotten", 60)
        namespace.create_engine("later", **ENGINE)
        eventually(lambda: namespace.get(CHILDREN["deployments"], "later"), "the watch goes on", 60)
        assert operator.process.popen.poll() is None
        assert operator.metric("epochkv_operator_missed_objects_total") == 0, "the watch brought it, no list"
