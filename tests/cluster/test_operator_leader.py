"""The Lease and the hub while everything else in the process stands still, on a real API server."""

import asyncio
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from epochkv_fence.net.keys import generate_keypair
from epochkv_operator.api import parse_pool
from epochkv_operator.api.resources import CONFIGMAPS
from epochkv_operator.control.leader import Leader
from epochkv_operator.hub.service import HubService
from epochkv_operator.kube.client import KubeClient, Unavailable
from epochkv_operator.kube.lease import LeaseLost, new_identity
from epochkv_operator.kube.store import Store, indexed
from epochkv_operator.planning.context import KeysView
from epochkv_operator.settings import Settings
from hack.cluster.controlplane import ControlPlane
from hack.loopback import free_port
from hack.waiting import poll
from tests.cluster.fence_engines import Service
from tests.cluster.operator_harness import CHILDREN, LEASES, Namespace


def leader_of(namespace: Namespace, seconds: int = 3) -> Leader:
    bind = f"tcp://127.0.0.1:{free_port()}"
    settings = Settings(namespace.name, lease_duration_seconds=seconds, hub_bind=bind)
    return Leader(settings, new_identity(), Store(indexed), lambda *_: None, lambda *_: None, lambda: None)


@pytest.fixture(autouse=True)
def _kubeconfig(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))


async def test_the_lease_is_renewed_while_the_main_loop_stands_still(namespace: Namespace) -> None:
    leader = leader_of(namespace)
    try:
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        port = await leader.serve(generate_keypair())
        time.sleep(10.0)  # noqa: ASYNC251 - three times the Lease's duration, and no other task of this loop runs
        assert leader.not_leading() is None
        assert port(HubService.snapshot, "nobody").view is None
        assert leader.hung() is None
        await asyncio.sleep(0)
        assert not holding.done()
    finally:
        await leader.close_hub()
        await leader.close()


async def test_who_has_lost_the_lease_may_not_write_and_serves_no_hub(namespace: Namespace) -> None:
    leader = leader_of(namespace)
    assert "does not hold" in (leader.not_leading() or "")
    try:
        await leader.acquire()
        assert leader.not_leading() is None
        await leader.serve(generate_keypair())
        path = f"{LEASES.format(namespace.name)}/epochkv-operator"
        lease = namespace.request("GET", path)
        lease["spec"] |= {"holderIdentity": "another", "leaseTransitions": 7}
        namespace.request("PUT", path, lease)
        with pytest.raises(LeaseLost, match="another"):
            await leader.hold()
        assert not leader.listening
    finally:
        await leader.close()


async def test_the_hub_writes_nothing_once_the_lease_was_not_renewed_in_time(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a freeze. The Lease still names us, so a look at it does not tell."""
    namespace.create_pool("policy", resetEpoch=1, local={"capacity": "64Mi"})
    pool = parse_pool(namespace.pool("policy"))

    leader = leader_of(namespace)
    try:
        await leader.acquire()
        port = await leader.serve(generate_keypair())
        while leader.not_leading() is None:  # noqa: ASYNC110 - nobody renews it
            await asyncio.sleep(0.1)
        port(HubService.ensure, pool, (generate_keypair().public,), KeysView(0))
        assert not await asyncio.to_thread(poll, lambda: namespace.status("policy").keys() - {"observedGeneration"}, 4.0)
        assert any("NotLeading" in record.getMessage() for record in caplog.records), "it did not try"
    finally:
        await leader.close_hub()
        await leader.close()


def test_a_write_whose_connection_comes_too_late_is_not_sent(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshake takes so long that another one leads by then."""
    asked, go_on = threading.Event(), threading.Event()
    api_port = urlsplit(namespace.plane.url).port

    def choose() -> int | None:
        asked.set()
        go_on.wait(30)
        return api_port

    async def scenario(endpoint: str) -> None:
        kubeconfig = tmp_path / "slow.kubeconfig"
        kubeconfig.write_text(namespace.plane.kubeconfig.read_text().replace(namespace.plane.url, endpoint.replace("tcp", "https")))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        client = await KubeClient.connect()
        try:
            body = {"metadata": {"name": "late"}, "apiVersion": "v1", "kind": "ConfigMap"}
            writing = asyncio.create_task(client.create(CONFIGMAPS, namespace.name, body))
            assert await asyncio.to_thread(asked.wait, 30)
            client.may_not_write = lambda: "another one leads"
            go_on.set()
            with pytest.raises(Unavailable, match="another one leads"):
                await writing
            client.may_not_write = lambda: None
            await client.create(CONFIGMAPS, namespace.name, {**body, "metadata": {"name": "in-time"}})
        finally:
            await client.close()

    with Service(choose) as relay:
        asyncio.run(scenario(relay.endpoint))
    assert namespace.get(CHILDREN["configmaps"], "late") is None
    assert namespace.get(CHILDREN["configmaps"], "in-time") is not None
