"""The hub's writes on the real API server: what they depend on is compared, what they do not depend on cannot hold them up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from epochkv_operator.kube.client import Invalid, KubeClient
from epochkv_operator.kube.resources import ref_of
from hack.cluster.controlplane import ControlPlane
from tests.cluster.operator_harness import POOLS, Namespace

L1 = {"local": {"capacity": "64Mi"}}


@pytest.fixture(scope="module")
def space(plane: ControlPlane) -> Namespace:
    return Namespace.create_in(plane, "status-writes")


@pytest.fixture
def pool(space: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A pool at target 3, published 2."""
    monkeypatch.setenv("KUBECONFIG", str(space.plane.kubeconfig))
    space.create_pool("policy", **L1)
    found = space.get(POOLS, "policy")
    assert found is not None
    run(lambda client: client.patch_status(ref_of(found), found["metadata"]["resourceVersion"], {"targetEpoch": 3, "epoch": 2}))
    yield found
    space.delete(POOLS, "policy")


def run(work: Callable[[KubeClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        client = await KubeClient.connect()
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_field_that_has_changed_refuses_the_write(space: Namespace, pool: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        run(lambda client: client.patch_status_fields(ref_of(pool), {"targetEpoch": 2, "epoch": 2}, {"epoch": 3}))
    assert space.status("policy")["epoch"] == 2


def test_a_namesake_is_left_alone(space: Namespace, pool: dict[str, Any]) -> None:
    namesake = ref_of(pool)._replace(uid="another-life")
    with pytest.raises(Invalid):
        run(lambda client: client.patch_status_fields(namesake, {"targetEpoch": 3}, {"targetEpoch": 9}))
    assert space.status("policy")["targetEpoch"] == 3


def test_a_field_that_was_absent_and_is_there_now_refuses_the_write(space: Namespace, pool: dict[str, Any]) -> None:
    ref, absent = ref_of(pool), {"targetEpoch": 3, "granting": None}
    run(lambda client: client.patch_status_fields(ref, absent, {"granting": True}))
    with pytest.raises(Invalid):
        run(lambda client: client.patch_status_fields(ref, absent, {"epoch": 3}))
    assert space.status("policy")["epoch"] == 2
