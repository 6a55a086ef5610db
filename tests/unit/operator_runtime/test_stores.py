"""Which admin ports belong to a pool: those of its own live masters, and of nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from epochkv_operator.hub.service import master_urls
from epochkv_operator.kube.store import Store, indexed

Json = dict[str, Any]
MOONCAKE = {"distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}}}}


def pool(spec: Json, name: str = "policy") -> Json:
    return {"metadata": {"name": name, "namespace": "rl", "uid": f"uid-{name}", "resourceVersion": "1"}, "spec": spec}


def pod(name: str, address: str | None, *, ready: bool = True, of: str = "policy", component: str = "master", **extra: Any) -> Json:
    labels = {"epochkv.io/pool": of, "app.kubernetes.io/component": component}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]} | ({"podIP": address} if address else {})
    metadata = {"name": name, "namespace": "rl", "uid": name, "resourceVersion": "1", "labels": labels}
    return {"metadata": metadata | extra.get("metadata", {}), "status": status | extra.get("status", {})}


def urls(spec: Json, *pods: Json) -> list[str]:
    store = Store(indexed)
    store.upsert("KVCachePool", pool(spec))
    for item in pods:
        store.upsert("Pod", item)
    return master_urls(store, "uid-policy")


def test_the_ready_master_comes_first() -> None:
    found = urls(MOONCAKE, pod("a", "10.0.0.1", ready=False), pod("b", "10.0.0.2"), pod("c", "fd00::3"))
    assert found == ["http://10.0.0.2:9003", "http://[fd00::3]:9003", "http://10.0.0.1:9003"]


@pytest.mark.parametrize(
    "other",
    [
        pod("a", "10.0.0.1", of="other"),
        pod("a", "10.0.0.1", component="store"),
        pod("a", "10.0.0.1", metadata={"namespace": "elsewhere"}),
        pod("a", "10.0.0.1", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        pod("a", "10.0.0.1", status={"phase": "Failed"}),
        pod("a", None),
        pod("a", "evil.example:80/x?"),
    ],
    ids=["other-pool", "store", "other-namespace", "going", "ended", "no-address", "no-ip"],
)
def test_what_is_not_a_live_master_of_the_pool_is_left_alone(other: Json) -> None:
    assert urls(MOONCAKE, other) == []


@pytest.mark.parametrize("spec", [{"distributed": {"external": {"masterAddress": "m:1"}}}, {"local": {"capacity": "1Gi"}}])
def test_a_store_of_somebody_else_is_never_named(spec: Json) -> None:
    assert urls(spec, pod("a", "10.0.0.1")) == []


def test_a_pool_that_is_gone_has_none() -> None:
    assert master_urls(Store(indexed), "uid-policy") == []
