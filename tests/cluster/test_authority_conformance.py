"""The common suite of all authorities, against the pool object and the Lease of a real API server."""

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import Authority, AuthorityError, PoolRecord, Term
from epochkv_operator.hub.authority import KubernetesAuthority, Proofs, record_of
from epochkv_operator.kube.client import KubeClient
from epochkv_operator.kube.lease import LeaseHolder, new_identity
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.kube.store import Store, indexed
from epochkv_operator.metrics import REGISTRY
from hack.cluster.controlplane import ControlPlane
from tests.cluster.operator_harness import POOLS, Namespace
from tests.support.authority import Authorities, AuthorityConformance

_numbers = itertools.count()
PROOFS = Proofs("the hub's secret key")


@pytest.fixture(scope="module")
def space(plane: ControlPlane) -> Namespace:
    return Namespace.create_in(plane, "conformance")


class Operators:
    """Operator processes one after the other, each with a client, a store and a Lease identity of its own."""

    def __init__(self, space: Namespace, stack: AsyncExitStack) -> None:
        self.space = space
        self.name = f"policy-{next(_numbers)}"
        self.uid = str(space.create_pool(self.name, local={"capacity": "64Mi"})["metadata"]["uid"])
        self.leases: list[LeaseHolder] = []
        self._stack = stack

    async def take_over(self) -> tuple[Authority, Term]:
        if self.leases:
            await self.leases[-1].release()
        client = await KubeClient.connect()
        self._stack.push_async_callback(client.close)
        lease = LeaseHolder(client, self.space.name, f"lease-{self.name}", new_identity())
        term = await lease.acquire()
        self.leases.append(lease)
        store = Store(indexed)
        statuses = StatusWriter(client, store, lambda resource, obj: store.upsert(resource.kind, obj))
        # Two dozen writers get in each other's way, and the last of them may wait for all others; on a busy machine that takes long.
        authority = KubernetesAuthority(lease, statuses, PROOFS, deadline_seconds=60.0)
        authority.register(self.uid, self.space.name, self.name, new=True)
        return authority, Term(term.holder, term.transitions)


def conflicts() -> float:
    """Status writes that the API server refused because the object had changed."""
    return REGISTRY.get_sample_value("epochkv_operator_api_requests_total", {"verb": "PATCH", "code": "409"}) or 0.0


class TestKubernetesAuthority(AuthorityConformance):
    """`status` by compare-and-swap, leadership by a Lease."""

    @pytest.fixture(autouse=True)
    def _space(self, space: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KUBECONFIG", str(space.plane.kubeconfig))
        self.space = space

    @asynccontextmanager
    async def authorities(self) -> AsyncIterator[Authorities]:
        async with AsyncExitStack() as stack:
            operators = Operators(self.space, stack)
            yield operators
            self.space.delete(POOLS, operators.name)

    async def test_the_record_is_what_kubectl_shows(self) -> None:
        async with self.fresh() as world:
            assert isinstance(world, Operators)
            authority, _ = await world.take_over()
            await authority.record(world.uid, 3, Source.TRAINER)
            await authority.publish(world.uid, 3)
            await authority.note_labels(world.uid, {bytes(16): "step-7", b"\xff" * 16: "step-8"})
            assert self.space.status(world.name) == {
                "observedGeneration": -1,  # of a pool that no reconciler has looked at
                "targetEpoch": 3,
                "epoch": 3,
                "proof": PROOFS.of(world.uid, 3, False),
                "reset": {"epoch": 3, "origin": "Trainer"},
                "weightsLabels": [{"id": "0" * 32, "label": "step-7"}, {"id": "f" * 32, "label": "step-8"}],
            }
            # What the status said about the reset before does not stay beside the next one.
            times = {"startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:01Z", "durationMilliseconds": 9}
            self.space.patch(POOLS, world.name, {"status": {"reset": times}}, "/status")
            await authority.record(world.uid, 4, Source.SPEC)
            assert self.space.status(world.name)["reset"] == {"epoch": 4, "origin": "Spec"}

    async def test_the_same_through_a_conflict(self) -> None:
        """The field-by-field write, which somebody else's write to the object forces, says the same as the whole one."""
        async with self.fresh() as world:
            assert isinstance(world, Operators)
            authority, _ = await world.take_over()
            await authority.load(world.uid)  # from here on it knows a state, which is always the one before
            before, labels = conflicts(), dict[bytes, str]()
            for epoch, source in ((1, Source.TRAINER), (2, Source.ENGINE), (3, Source.TRAINER)):
                self.space.patch(POOLS, world.name, {"metadata": {"annotations": {"somebody": f"writes {epoch}"}}})
                await authority.record(world.uid, epoch, source)
                assert await authority.load(world.uid) == PoolRecord(epoch, epoch - 1, False, source, labels)
                self.space.patch(POOLS, world.name, {"metadata": {"annotations": {"somebody": f"writes {epoch} again"}}})
                await authority.publish(world.uid, epoch)
                self.space.patch(POOLS, world.name, {"metadata": {"annotations": {"somebody": f"writes {epoch} once more"}}})
                labels |= {bytes([epoch]) * 16: f"step-{epoch}"}
                await authority.note_labels(world.uid, {bytes([epoch]) * 16: f"step-{epoch}"})
                assert self.space.status(world.name)["epoch"] == epoch
                assert len(self.space.status(world.name)["weightsLabels"]) == epoch
            assert conflicts() == before + 9

    async def test_an_epoch_that_is_not_recorded_is_not_published(self) -> None:
        """A status that lost its target (a restored etcd) gets it back by `record`, with its origin."""
        async with self.fresh() as world:
            authority, _ = await world.take_over()
            with pytest.raises(AuthorityError, match="epoch 3 cannot be published: 0 is recorded"):
                await authority.publish(world.uid, 3)
            assert await authority.load(world.uid) == PoolRecord()

    async def test_a_namesake_is_another_pool(self) -> None:
        async with self.fresh() as world:
            assert isinstance(world, Operators)
            authority, _ = await world.take_over()
            await authority.record(world.uid, 3, Source.SPEC)
            self.space.delete(POOLS, world.name)
            body = {"apiVersion": "epochkv.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": world.name}}
            recreated = self.space.create(POOLS, {**body, "spec": {"local": {"capacity": "64Mi"}}})
            with pytest.raises(AuthorityError):
                await authority.publish(world.uid, 3)
            assert record_of(self.space.get(POOLS, world.name) or {}) == PoolRecord()
            assert recreated["metadata"]["uid"] != world.uid


def test_an_origin_of_a_newer_operator_is_unknown_not_wrong() -> None:
    status = {"targetEpoch": 4, "epoch": 4, "reset": {"epoch": 4, "origin": "Oracle"}}
    assert record_of({"status": status}) == PoolRecord(4, 4)
    older = {"targetEpoch": 5, "epoch": 4, "reset": {"epoch": 4, "origin": "Trainer"}}
    assert record_of({"status": older}) == PoolRecord(5, 4)
