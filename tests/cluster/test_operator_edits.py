"""Status that somebody edits: what nobody proved is not believed, everything else is put back, and one Event says so."""

import time
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.protocol.pool import PoolRecord, Term
from epochkv_operator.hub.authority import KubernetesAuthority, Proofs
from epochkv_operator.kube.client import KubeClient
from epochkv_operator.kube.lease import LeaseHolder
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.kube.store import Store, indexed
from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine
from tests.cluster.operator_harness import ENGINES, POOLS, Namespace, OperatorProcess, becomes, condition, leading_operator
from tests.cluster.test_operator_secrets import ENGINE, POOL, keys_now, reader


def edit(space: Namespace, collection: str, name: str, **status: Any) -> None:
    space.patch(collection, name, {"status": status}, "/status")


def published(space: Namespace) -> list[str]:
    return [event["note"] for event in space.events("EpochPublished") if "epoch 99 " in event["note"]]


def joined(operator: OperatorProcess, space: Namespace, name: str = "engine-0") -> FenceEngine:
    return FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(space), name, credentials=reader(space))


@pytest.mark.parametrize("running", [True, False], ids=["while-it-runs", "while-none-runs"])
def test_an_epoch_that_somebody_wrote_is_proved_before_anybody_hears_of_it(namespace: Namespace, tmp_path: Path, running: bool) -> None:
    with leading_operator(namespace, tmp_path) as operator:
        namespace.create_pool("policy", **POOL)
        with joined(operator, namespace) as engine:
            eventually(lambda: engine.leased, "joined")
            namespace.bump("policy", 1)
            eventually(lambda: condition(namespace.status("policy"), "EpochConverged").get("status") == "True", "reported")
            proof = eventually(lambda: p if (p := namespace.status("policy").get("proof", "")).startswith("1:") else None, "proved")
            if not running:
                operator.terminate()
            engine.is_busy = True  # it goes on with epoch 1, and says so
            edit(namespace, POOLS, "policy", targetEpoch=99, epoch=99)
            if not running:
                operator.start().wait_ready()
            found = becomes(namespace.status, "policy", "EpochConverged", reason="Unproved")
            assert (found["status"], "1 is proved" in found["message"]) == ("False", True), found
            assert operator.metric("epochkv_pool_published_epoch") == 1
            assert (published(namespace), namespace.status("policy")["proof"]) == ([], proof)
            assert engine.adopted[-1] in (1, 99)
            engine.is_busy = False
            eventually(lambda: condition(namespace.status("policy"), "EpochConverged").get("status") == "True", "proved")
            assert engine.epoch == 99
            assert namespace.status("policy")["proof"].startswith("99:1:")
            eventually(lambda: len(published(namespace)) == 1, "said when it was true")


POOL_EDITS: list[dict[str, Any]] = [
    {"reset": {"completionTime": "2001-01-01T00:00:00Z", "durationMilliseconds": 1}},
    *({"reset": None}, {"reset": {"epoch": 500, "origin": "Trainer"}}, {"engines": {"total": 1000, "summary": "1000/1000"}}),
    *({"weights": [], "weightsSummary": "none"}, {"keys": {"generation": 9, "accepted": 9}}, {"observedGeneration": 77}),
    {"endpoints": {"hub": "tcp://somewhere.else:7700"}},
    {"conditions": [{"type": "Ready", "status": "True", "reason": "ISaySo", "lastTransitionTime": "2001-01-01T00:00:00Z", "message": ""}]},
    {"conditions": None, "externalEngines": None},
]


def test_every_other_field_is_put_back(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", resetEpoch=3, **POOL)
    namespace.create_engine("rollout", **ENGINE)

    def steady() -> dict[str, Any]:
        eventually(lambda: condition(namespace.engine_status("rollout"), "EpochCurrent"), "the engine is reported")
        status = namespace.status("policy")
        assert status["engines"]["total"] == 1
        assert "completionTime" in status["reset"]
        return status

    with joined(operator, namespace) as engine:
        eventually(lambda: engine.epoch == 3, "there")
        eventually(lambda: "completionTime" in namespace.status("policy").get("reset", {}), "published")
        eventually(lambda: (namespace.status("policy").get("engines") or {}).get("summary") == "1/1", "counted, at its epoch")
        eventually(lambda: namespace.status("policy").get("granting"), "granted")
        eventually(lambda: condition(namespace.status("policy"), "Ready").get("status") == "True", "ready")
        before = steady()

        def quiet() -> set[str] | None:
            names = told(namespace)
            time.sleep(1.0)
            return names if names == told(namespace) else None

        other = eventually(quiet, "every Event of the reset")
        for fields in POOL_EDITS:
            edit(namespace, POOLS, "policy", **fields)
            eventually(lambda: namespace.status("policy") == before, f"{fields} put back")
        for fields in ({"granting": None}, {"proof": None}, {"proof": "3:0:" + "0" * 32}):
            edit(namespace, POOLS, "policy", **fields)
            eventually(lambda: namespace.status("policy") == before, f"{fields} put back")
        edit(namespace, ENGINES, "rollout", epoch=50, readyReplicas=7, conditions=None)

        def restored(now: dict[str, Any]) -> bool:
            return "epoch" not in now and now["readyReplicas"] == 0 and bool(condition(now, "EpochCurrent"))

        eventually(lambda: restored(namespace.engine_status("rollout")), "the engine's put back")
        new = [event for event in events(namespace) if event["metadata"]["name"] not in other]
        assert [event for event in new if event["regarding"]["kind"] == "KVCachePool"] == []


def told(space: Namespace) -> set[str]:
    return {event["metadata"]["name"] for event in events(space)}


def events(space: Namespace) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = space.request("GET", f"/apis/events.k8s.io/v1/namespaces/{space.name}/events")["items"]
    return [event for event in items if event["regarding"]["kind"] in ("KVCachePool", "InferenceEngine")]


async def test_a_wiped_status_is_no_proof_that_nobody_was_granted_anything(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that believed it would publish the next epoch while engines still use the one before, under an older hub's grants."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.plane.kubeconfig))
    uid = str(namespace.create_pool("policy", **POOL)["metadata"]["uid"])

    client = await KubeClient.connect()
    try:
        store = Store(indexed)
        statuses = StatusWriter(client, store, lambda resource, obj: store.upsert(resource.kind, obj))
        lease = LeaseHolder(client, namespace.name, "lease", "me")
        term = await lease.acquire()
        first, next_one = (KubernetesAuthority(lease, statuses, Proofs("key")) for _ in range(2))
        assert await first.verify(Term(term.holder, term.transitions))
        first.register(uid, namespace.name, "policy", new=True)
        next_one.register(uid, namespace.name, "policy")
        assert await first.load(uid) == PoolRecord(), "whoever made the pool's keys knows"
        await first.record(uid, 1)
        await first.publish(uid, 1)
        assert await next_one.load(uid) == PoolRecord(1, 1, False), "and signs it"
        await first.note_granting(uid)
        for wiped in ({"granting": None}, {"granting": None, "proof": None}):
            edit(namespace, POOLS, "policy", **wiped)
            assert (await next_one.load(uid)).granting
        assert (await next_one.load(uid)).published == 0, "without its proof"
        stranger = KubernetesAuthority(lease, statuses, Proofs("another key"))
        stranger.register(uid, namespace.name, "policy")
        await first.publish(uid, 1)
        assert await stranger.load(uid) == PoolRecord(1, 0, True)
        assert await next_one.load(uid) == PoolRecord(1, 1, True)
    finally:
        await client.close()
