"""Engines that lack tiers, as the real operator shows them: on the InferenceEngine, on its pool, and in an Event."""

from __future__ import annotations

from typing import Any

from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, condition

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 5}}
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}, "replicas": 1}
MAMBA = "no tier is used: KV cache group 1 (MambaSpec) cannot be restored block by block"


def said(space: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """`TiersUsable` of the engine and of the pool."""
    return condition(space.engine_status("rollout"), "TiersUsable"), condition(space.status("policy"), "TiersUsable")


def reasons(space: Namespace) -> list[tuple[str, str]]:
    return [(found.get("status", ""), found.get("reason", "")) for found in said(space)]


def pod_of(space: Namespace) -> str | None:
    """The name of the engine's only pod; no kubelet runs it, so a stand-in reports in its name."""
    pods = space.request("GET", f"/api/v1/namespaces/{space.name}/pods?labelSelector=epochkv.io/engine%3Drollout")["items"]
    return pods[0]["metadata"]["name"] if len(pods) == 1 else None


def test_an_engine_that_lacks_tiers_says_so_until_it_has_them(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    secret = eventually(lambda: namespace.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
    pod = eventually(lambda: pod_of(namespace), f"a pod; log:\n{operator.tail()}")
    eventually(lambda: reasons(namespace)[0] == ("Unknown", "NotReporting"), f"nobody has said; log:\n{operator.tail()}")
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", client_keys(secret), "rollout", pod=pod) as engine:
        eventually(lambda: reasons(namespace) == [("True", "Usable")] * 2, f"heard; log:\n{operator.tail()}")
        assert namespace.events("Usable") == [], "that it came up is no news"
        assert not namespace.status("policy").get("externalEngines"), "it has an InferenceEngine"
        assert operator.metric("epochkv_pool_tiers_off_engines") == 0
        engine.lacks = ("LayoutUnsupported", MAMBA)
        engine.agent.poke()
        eventually(lambda: reasons(namespace) == [("False", "LayoutUnsupported")] * 2, f"told; log:\n{operator.tail()}")
        assert [found["message"] for found in said(namespace)] == [f"{pod}: {MAMBA}"] * 2
        eventually(
            lambda: {event["regarding"]["kind"] for event in namespace.events("LayoutUnsupported")} == {"InferenceEngine", "KVCachePool"},
            "an Event about each",
        )
        assert {event["type"] for event in namespace.events("LayoutUnsupported")} == {"Warning"}
        assert operator.metric("epochkv_pool_tiers_off_engines") == 1
        assert condition(namespace.status("policy"), "Ready")["status"] == "True", "it serves correctly"
        engine.lacks = ("", "")
        engine.agent.poke()
        eventually(lambda: reasons(namespace) == [("True", "Usable")] * 2, f"told; log:\n{operator.tail()}")
        eventually(lambda: namespace.events("Usable"), "an Event")
