"""Carrying out a plan, against a client that notes what it is told."""

import asyncio
from typing import Any

import pytest

from epochkv_operator.control.executor import Executor
from epochkv_operator.kube.client import KubeClient, NotFound
from epochkv_operator.kube.resources import Resource
from epochkv_operator.kube.store import Store, indexed
from epochkv_operator.planning.context import Observed
from epochkv_operator.planning.plan import plan_pool
from tests.support.planning import CONTEXT, pool

Json = dict[str, Any]
LIVES = {"metadata": {"name": "policy", "namespace": "rl", "uid": pool().metadata.uid}}


class Client(KubeClient):
    """Answers for the pool alone."""

    def __init__(self, owner: Json | None) -> None:
        self.owner = owner
        self.applied: list[str] = []

    async def get(self, resource: Resource, *_: Any) -> Json:
        if resource.kind != "KVCachePool" or self.owner is None:
            raise NotFound(404, "NotFound", "", "GET")
        return self.owner

    async def apply(self, resource: Resource, namespace: str, body: Json) -> Json:
        self.applied.append(body["metadata"]["name"])
        return {**body, "metadata": {**body["metadata"], "uid": "child", "resourceVersion": "9"}}


@pytest.mark.parametrize(
    ("owner", "applied"),
    [
        (LIVES, ["policy-connection"]),
        ({"metadata": {**LIVES["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}, []),
        ({"metadata": {**LIVES["metadata"], "uid": "of-the-next-one"}}, []),
        (None, []),
    ],
    ids=["lives", "goes", "namesake", "gone"],
)
def test_owner_references_are_given_back_for_an_owner_that_stays(owner: Json | None, applied: list[str]) -> None:
    """The garbage collector takes them away when a pool is deleted with `--cascade=orphan`, and its events may come first."""
    wanted = pool("l1")
    [child] = plan_pool(wanted, Observed(), CONTEXT).apply
    orphan = {**child, "metadata": {**child["metadata"], "ownerReferences": [], "uid": "child", "resourceVersion": "8"}}
    client, store = Client(owner), Store(indexed)
    store.upsert("ConfigMap", orphan)
    executor = Executor(client, store)
    done = executor.bring_about("pool", Observed([orphan]), lambda seen: plan_pool(wanted, seen, CONTEXT))
    assert asyncio.run(done) == (None, None)
    assert client.applied == applied
