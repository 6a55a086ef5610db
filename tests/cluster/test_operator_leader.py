"""The Lease and the hub while everything else in the process stands still, on a real API server."""

from __future__ import annotations

import asyncio
import time

import pytest

from epochkv_fence.net import generate_keypair
from epochkv_operator.control.leader import Leader
from epochkv_operator.kube.lease import LeaseLost, new_identity
from epochkv_operator.kube.store import Store
from epochkv_operator.kube.work_keys import indexed
from epochkv_operator.settings import Settings
from hack.cluster.controlplane import ControlPlane
from hack.loopback import free_port
from tests.cluster.operator_harness import Namespace

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/{}"


def leader_of(namespace: Namespace, name: str, seconds: int = 3) -> Leader:
    bind = f"tcp://127.0.0.1:{free_port()}"
    settings = Settings(namespace.name, lease_name=name, lease_duration_seconds=seconds, hub_bind=bind)
    return Leader(settings, new_identity(), Store(indexed), lambda *_: None, lambda *_: None, lambda: None)


@pytest.fixture(autouse=True)
def _kubeconfig(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))


def test_the_lease_is_renewed_while_the_main_loop_stands_still(namespace: Namespace) -> None:
    async def scenario() -> None:
        leader = leader_of(namespace, "still")
        try:
            await leader.acquire()
            holding = asyncio.create_task(leader.hold())
            port = await leader.serve(generate_keypair())
            time.sleep(10.0)  # noqa: ASYNC251 - three times the Lease's duration, and no other task of this loop runs
            assert leader.not_leading() is None
            assert port.look("nobody").view is None
            assert leader.hung() is None
            await asyncio.sleep(0)
            assert not holding.done()
        finally:
            await leader.close_hub()
            await leader.close()

    asyncio.run(scenario())


def test_who_has_lost_the_lease_may_not_write_and_serves_no_hub(namespace: Namespace) -> None:
    async def scenario() -> None:
        leader = leader_of(namespace, "lost")
        assert "does not hold" in (leader.not_leading() or "")
        try:
            await leader.acquire()
            assert leader.not_leading() is None
            await leader.serve(generate_keypair())
            path = LEASES.format(namespace.name, "lost")
            lease = namespace.request("GET", path)
            lease["spec"] |= {"holderIdentity": "another", "leaseTransitions": 7}
            namespace.request("PUT", path, lease)
            with pytest.raises(LeaseLost, match="another"):
                await leader.hold()
            assert not leader.listening
        finally:
            await leader.close()

    asyncio.run(scenario())
