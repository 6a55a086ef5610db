"""The operator behind an API server that refuses."""

from pathlib import Path
from typing import Any

import pytest

from epochkv_operator.api.resources import CHILDREN as KINDS
from epochkv_operator.api.resources import ENGINES, PODS, PRIMARY
from hack.waiting import eventually
from tests.cluster.fault_proxy import NO_ANSWER, SHOW, WATCH, Fault, FaultProxy, is_write
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, becomes, condition, leading_operator
from tests.cluster.operator_harness import ENGINES as ENGINES_PATH

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 1}}  # the next life waits for as long
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}, "replicas": 2}


def settled(space: Namespace, epoch: int) -> bool:
    """Everything is made, reported and published."""
    expected = {kind: {"rollout"} for kind in ("deployments", "services", "serviceaccounts", "poddisruptionbudgets")}
    expected |= {"configmaps": {"policy-connection"}, "secrets": {"policy-fence", "epochkv-hub"}}
    pool, engine = space.status("policy"), space.engine_status("rollout")
    return (
        all(space.names(kind) == names for kind, names in expected.items())
        and (pool.get("targetEpoch"), pool.get("epoch")) == (epoch, epoch)
        and condition(pool, "Ready").get("reason") == "Ready"
        and condition(engine, "PoolBound").get("status") == "True"
        and condition(engine, "Ready").get("reason") == "Starting"  # no kubelet here
    )


def test_work_is_done_once_a_storm_is_over(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """Every write is carried out and answered with 500 for a while: when a pool and its engine are new, and again for an epoch."""
    fault = Fault(500, carried_out=True)
    with leading_operator(namespace, tmp_path, kubeconfig=proxy.kubeconfig) as operator:

        def storm(method: str, path: str) -> Fault | None:
            return fault if is_write(method, path) else None

        proxy.decide = storm
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: len(proxy.faults) >= 6, "the storm hits")
        proxy.decide = lambda method, path: None
        eventually(lambda: settled(namespace, 0), "all is well after the storm", 60)

        hit = len(proxy.faults)
        proxy.decide = storm
        namespace.bump("policy", 1)
        eventually(lambda: len(proxy.faults) >= hit + 3, "the storm hits the reset")
        proxy.decide = lambda method, path: None
        eventually(lambda: settled(namespace, 1), "published after the storm", 60)
        assert operator.http("/livez")[0] == 200
        assert all(found == fault for _, _, found in proxy.faults)


def test_one_object_that_cannot_be_written_holds_up_nothing_else(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """As a webhook for one kind would: all other objects are made, and the first status says what is missing."""
    with leading_operator(namespace, tmp_path, kubeconfig=proxy.kubeconfig):
        proxy.decide = lambda method, path: Fault(NO_ANSWER) if is_write(method, path) and "/serviceaccounts/" in path else None
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: namespace.names("deployments") == {"rollout"}, "the Deployment")
        ready = becomes(namespace.engine_status, "rollout", "Ready", reason="ApplyFailed")
        assert "ServiceAccount rollout" in ready["message"]
        assert namespace.names("serviceaccounts") == set()
        proxy.decide = lambda method, path: None
        eventually(lambda: settled(namespace, 0), "all is well afterwards", 60)


# ------------------------------------------- how often it lists, and what it does about events that its watches lost
def test_each_kind_is_read_once_at_start_and_not_again(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    own = [resource.path(namespace.name) for resource in PRIMARY]
    paths = [*own, *(resource.path(namespace.name) for resource in (*KINDS, PODS))]
    with leading_operator(namespace, tmp_path, kubeconfig=proxy.kubeconfig, resync_seconds=2) as operator:
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
    with leading_operator(namespace, tmp_path, kubeconfig=proxy.kubeconfig, resync_seconds=2) as operator:
        eventually(lambda: bool(proxy.faults), "a watch that hangs")
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "engine found", 60)
        namespace.delete(ENGINES_PATH, "rollout")
        gone = 'epochkv_operator_reconciles_total{kind="InferenceEngine",result="gone"}'
        eventually(lambda: gone in operator.http("/metrics")[1], "engine forgotten", 60)
        assert operator.metric("epochkv_operator_missed_objects_total") >= 1
        assert proxy.requests["GET", PODS.path(namespace.name)] == 1, "what the watches brought is not read again"


def test_a_watch_whose_version_has_expired_begins_anew(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """The API server says so by an HTTP status, not in the stream, and 404 before. What came and went in the gap is found; nothing ends."""
    path = ENGINES.path(namespace.name)
    with leading_operator(namespace, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("gone", **ENGINE)
        eventually(lambda: namespace.get(CHILDREN["deployments"], "gone"), "an engine", 60)
        gap = True

        def decide(method: str, asked: str) -> Fault | None:
            nonlocal gap
            if (method, asked) != (WATCH, path) or (Fault(410) in {fault for _, _, fault in proxy.faults}):
                return None
            return Fault(404) if gap else Fault(410)

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
