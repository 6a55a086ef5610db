"""Engines on a real API server, with the real Deployment controller: how they are replaced, and which tiers they lack.

No node runs the pods; the tests write what a kubelet would.
"""

import contextlib
from typing import Any

from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, ENGINES, Namespace, OperatorProcess, condition

Json = dict[str, Any]
PODS = "/api/v1/namespaces/{}/pods"
ENGINE: Json = {"model": {"name": "tiny"}, "replicas": 3}
OURS = "?labelSelector=app.kubernetes.io/managed-by%3Depochkv-operator"


def pods_of(space: Namespace) -> list[Json]:
    """Pods that are not going, oldest first."""
    items = space.request("GET", PODS.format(space.name) + OURS)["items"]
    return sorted(
        (pod for pod in items if not pod["metadata"].get("deletionTimestamp")),
        key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]),
    )


def report(space: Namespace, pod: Json, *, ready: bool = False, waiting: Json | None = None) -> None:
    """As a kubelet does."""
    state = {"waiting": waiting} if waiting else {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    container = {"name": "engine", "image": "i:1", "imageID": "", "ready": ready, "restartCount": 0, "state": state}
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running" if ready else "Pending", "conditions": [condition], "containerStatuses": [container]}
    space.patch(PODS, pod["metadata"]["name"], {"status": status}, "/status")


def progress(space: Namespace, name: str = "rollout") -> tuple[str, str]:
    found = condition(space.engine_status(name), "Progressing")
    return found.get("status", ""), found.get("reason", "")


def serve(space: Namespace) -> None:
    """Have every living pod ready that is not; one that is gone since it was listed is left out."""
    for pod in pods_of(space):
        if pod["status"]["phase"] != "Failed" and not any(
            item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions", [])
        ):
            with contextlib.suppress(AssertionError):
                report(space, pod, ready=True)


def test_a_rollout_from_its_start_to_its_end(namespace: Namespace, operator: OperatorProcess) -> None:
    """Told by the real Deployment controller: new pods one by one, one that cannot be pulled, the way back."""
    namespace.create_engine("rollout", **ENGINE, updateStrategy={"maxUnavailable": "34%", "maxSurge": 1}, image="a:1")
    eventually(lambda: len(pods_of(namespace)) == 3, "pods")
    eventually(lambda: progress(namespace) == ("True", "RollingOut"), "under way")
    strategy = (namespace.get(CHILDREN["deployments"], "rollout") or {})["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "34%", "maxSurge": 1}}
    eventually(lambda: serve(namespace) or progress(namespace) == ("True", "RolledOut"), "over")
    assert condition(namespace.engine_status("rollout"), "Ready")["status"] == "True"

    # A pod that is lost is no rollout.
    first = pods_of(namespace)[0]
    report(namespace, first)
    eventually(lambda: condition(namespace.engine_status("rollout"), "Available").get("status") == "False", "not available")
    assert progress(namespace) == ("True", "RolledOut")
    report(namespace, first, ready=True)

    # One that its node evicts stays beside the pod that takes its place, and nothing waits for it.
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    namespace.patch(PODS, first["metadata"]["name"], {"status": evicted}, "/status")
    eventually(lambda: len(pods_of(namespace)) == 4, "the evicted pod, and one in its place")
    told = "3 of 3 replicas of the engine are ready; pods that ended and were not deleted: 1 Evicted (the last: The node was low on"

    def counted() -> bool:
        serve(namespace)
        return str(condition(namespace.engine_status("rollout"), "Available").get("message")).startswith(told)

    eventually(counted, "counted")
    namespace.delete(PODS, first["metadata"]["name"])
    eventually(lambda: len(pods_of(namespace)) == 3, "deleted")

    namespace.patch(ENGINES, "rollout", {"spec": {"image": "missing:2"}})
    eventually(lambda: progress(namespace) == ("True", "RollingOut"), "under way")

    def new() -> list[Json]:
        return [pod for pod in pods_of(namespace) if pod["spec"]["containers"][0]["image"] == "missing:2"]

    eventually(lambda: len(new()) == 2, "one that is added, and one in the place of a third of the old ones")
    eventually(lambda: len(pods_of(namespace)) == 4, "one more than asked for")
    report(namespace, new()[0], waiting={"reason": "ImagePullBackOff", "message": "missing:2 not found"})
    eventually(lambda: progress(namespace) == ("False", "ImagePullFailed"), "stalled")
    counts = "2 of 3 replicas run the current spec, 2 an older one; pod rollout-"

    def said() -> str | None:
        text = condition(namespace.engine_status("rollout"), "Progressing")["message"]
        return text if text.startswith(counts) else None

    assert eventually(said, "counts").endswith("missing:2 not found")

    namespace.patch(ENGINES, "rollout", {"spec": {"image": "a:1"}})
    eventually(lambda: serve(namespace) or progress(namespace) == ("True", "RolledOut"), "back")
    assert not new()


MAMBA = "no tier is used: KV cache group 1 (MambaSpec) cannot be restored block by block"


def usable(space: Namespace) -> list[tuple[str, str]]:
    """Status and reason of `TiersUsable`, of the engine and of its pool."""
    found = [condition(status, "TiersUsable") for status in (space.engine_status("rollout"), space.status("policy"))]
    return [(each.get("status", ""), each.get("reason", "")) for each in found]


def test_an_engine_that_lacks_tiers_says_so_until_it_has_them(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", local={"capacity": "64Mi"}, reset={"leaseSeconds": 5})
    namespace.create_engine("rollout", poolRef={"name": "policy"}, model={"name": "tiny"})
    secret = eventually(lambda: namespace.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
    [found] = eventually(lambda: pods_of(namespace), "a pod")
    pod = found["metadata"]["name"]
    eventually(lambda: usable(namespace)[0] == ("Unknown", "NotReporting"), "nobody has said")
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", client_keys(secret), "rollout", pod=pod) as engine:
        eventually(lambda: usable(namespace) == [("True", "Usable")] * 2, "heard")
        assert namespace.events("Usable") == [], "that it came up is no news"
        assert not namespace.status("policy").get("externalEngines"), "it has an InferenceEngine"
        assert operator.metric("epochkv_pool_tiers_off_engines") == 0
        engine.lacks = ("LayoutUnsupported", MAMBA)
        engine.agent.poke()
        eventually(lambda: usable(namespace) == [("False", "LayoutUnsupported")] * 2, "told")
        for status in (namespace.engine_status("rollout"), namespace.status("policy")):
            assert condition(status, "TiersUsable")["message"] == f"{pod}: {MAMBA}"
        eventually(
            lambda: {event["regarding"]["kind"] for event in namespace.events("LayoutUnsupported")} == {"InferenceEngine", "KVCachePool"},
            lambda: f"an Event about each: {namespace.events('LayoutUnsupported')}",
        )
        assert {event["type"] for event in namespace.events("LayoutUnsupported")} == {"Warning"}
        assert operator.metric("epochkv_pool_tiers_off_engines") == 1
        assert condition(namespace.status("policy"), "Ready")["status"] == "True", "it serves correctly"
        engine.lacks = ("", "")
        engine.agent.poke()
        eventually(lambda: usable(namespace) == [("True", "Usable")] * 2, "told")
        eventually(lambda: namespace.events("Usable"), "an Event")
