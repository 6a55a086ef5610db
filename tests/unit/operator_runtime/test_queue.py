"""The work queue and the store: what must hold for any order of events."""

import asyncio
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.api.resources import POOLS, ObjectRef, Resource
from epochkv_operator.control.worker import LANES, Worker, WorkQueue
from epochkv_operator.kube.client import Conflict, Invalid, KubeClient, Unavailable
from epochkv_operator.kube.status import ObjectGone, StatusWriter
from epochkv_operator.kube.store import Key, Store, engine_key, engines_of, indexed, only_epochs_differ, pool_key, slim


def obj(name: str, uid: str, version: int, namespace: str = "a") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}}


async def test_a_key_added_twice_is_served_once_and_added_in_work_is_served_again() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("x")
    queue.add("x")
    queue.add("y")
    assert await queue.get() == "x"
    queue.add("x")  # its worker may have read before this change
    assert await queue.get() == "y"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.02)  # never two workers on one key
    queue.done("x")
    assert await queue.get() == "x"
    queue.done("x")
    queue.done("y")
    queue.add("engine")
    queue.add("pool")
    queue.sort(lambda key: key != "pool")
    assert (await queue.get(), len(queue)) == ("pool", 1)


async def test_failures_back_off_by_key_and_doubling_and_success_forgets() -> None:
    queue: WorkQueue[str] = WorkQueue()
    delays = []
    for _ in range(10):
        queue.add("x")
        await queue.get()
        delays.append(queue.retry("x"))
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    queue.add("x")
    await queue.get()
    queue.add("x")  # news
    assert queue.retry("x") == 1.0
    queue.add("x")
    await queue.get()
    queue.done("x")
    for asked, waits in ((7.0, 7.0), (86_400.0, 60.0)):  # a server's Retry-After wins, up to a minute
        queue.add("x")
        await queue.get()
        assert queue.retry("x", at_least_seconds=asked) == waits
    queue.close()


async def test_of_two_delays_the_shorter_counts_and_add_overtakes_both() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("x", 30.0)
    queue.add_after("x", 0.01)
    queue.add_after("x", 60.0)
    assert await asyncio.wait_for(queue.get(), 5) == "x"
    queue.done("x")
    queue.add_after("y", 30.0)
    queue.add("y")
    assert await asyncio.wait_for(queue.get(), 5) == "y"
    queue.done("y")
    queue.close()


async def test_a_long_queue_is_not_stuck_while_it_moves() -> None:
    now = [100.0]
    queue: WorkQueue[str] = WorkQueue(lambda: now[0])
    now[0] += 100
    assert queue.stuck_seconds() == 0.0
    for key in "abc":
        queue.add(key)
    assert queue.stuck_seconds() == 0.0, "it was empty until now"
    for _ in range(2):
        now[0] += 40
        assert queue.stuck_seconds() == 40.0
        queue.done(await queue.get())
    assert queue.oldest_age_seconds() == 80.0
    assert queue.stuck_seconds() == 0.0
    await queue.get()
    now[0] += 50
    assert queue.stuck_seconds() == 50.0, "in work for so long"
    assert queue.oldest_age_seconds() == 130.0
    queue.retry("c", 1000.0)
    now[0] += 50
    assert queue.stuck_seconds() == queue.oldest_age_seconds() == 0.0, "waits out its backoff"
    queue.close()


def test_a_list_removes_what_vanished_but_not_what_is_newer_than_it() -> None:
    store = Store(indexed)
    store.upsert("Pod", obj("gone", "u1", 3))
    store.upsert("Pod", obj("kept", "u2", 4))
    store.upsert("Pod", obj("newer", "u3", 12))
    vanished = store.retain("Pod", {"u2"}, 10)
    assert [item["metadata"]["name"] for item in vanished] == ["gone"]
    assert [item["metadata"]["name"] for item in store.every("Pod")] == ["kept", "newer"]
    assert store.get("Pod", "a", "gone") is None
    assert store.get("Pod", "a", "newer") is not None


def test_behind_is_who_is_not_known_or_was_last_seen_in_an_older_state() -> None:
    store = Store(indexed)
    store.upsert("Pod", obj("old", "u1", 3))
    store.upsert("Pod", obj("same", "u2", 4))
    store.upsert("Pod", obj("newer", "u3", 12))
    store.upsert("Pod", obj("deleted", "u4", 5))
    store.remove("Pod", obj("deleted", "u4", 8))
    assert store.behind("Pod", {"u1": 4, "u2": 4, "u3": 4, "u4": 5, "unknown": 1}) == 2
    assert store.behind("Pod", {"u1": 3, "u2": 4, "u4": 9}) == 1, "who is there again after what we took for its end"


def test_a_late_event_of_a_deleted_namesake_does_not_hide_the_new_object() -> None:
    store = Store(indexed)
    store.upsert("Pod", obj("p", "new", 20))
    store.upsert("Pod", obj("p", "old", 9))
    assert store.get("Pod", "a", "p") == obj("p", "new", 20)
    store.remove("Pod", obj("p", "old", 10))
    assert store.get("Pod", "a", "p") == obj("p", "new", 20)


class Changing(KubeClient):
    """An API server on which somebody writes between all that is asked. What is written and read has the newest spec."""

    def __init__(self) -> None:
        self.version = 7

    def newest(self) -> dict[str, Any]:
        self.version += 1
        return {**obj("p", "u", self.version), "spec": {"resetEpoch": self.version}, "status": {"targetEpoch": 3}}

    async def patch_status(self, *_: Any) -> dict[str, Any]:
        raise Conflict(409, "Conflict", "it changed", "PATCH")

    async def patch_status_fields(self, *_: Any) -> dict[str, Any]:
        return self.newest()

    async def get(self, *_: Any) -> dict[str, Any]:
        return self.newest()


def test_what_the_answer_to_a_write_shows_first_is_looked_at() -> None:
    """The watch shows nothing new then: a spec that changed meanwhile would wait for the next look."""
    store, looked_at = Store(indexed), list[str]()

    def news(resource: Resource, found: dict[str, Any]) -> None:
        if store.upsert(resource.kind, found):
            looked_at.append(found["metadata"]["resourceVersion"])

    client = Changing()
    store.upsert(POOLS.kind, obj("p", "u", 7))
    statuses = StatusWriter(client, store, news)
    answer = asyncio.run(statuses.update(ObjectRef(POOLS, "a", "p", "u"), lambda _: {"targetEpoch": 4}, depends_on=["targetEpoch"]))
    assert answer["metadata"]["resourceVersion"] == looked_at[-1] == "9"


@given(st.permutations(range(1, 8)), st.integers(0, 7))
def test_any_order_of_events_ends_at_the_newest_state(order: list[int], deleted_at: int) -> None:
    """Versions 1..7 of one object in any order; version `deleted_at` (if any) and all later ones are a deletion at that version."""
    store = Store(indexed)
    for version in order:
        if version == deleted_at:
            store.remove("Pod", obj("p", "u", version))
        elif not deleted_at or version < deleted_at:
            store.upsert("Pod", obj("p", "u", version))
    expected = None if deleted_at else obj("p", "u", 7)
    assert store.get("Pod", "a", "p") == expected


Step = tuple[str, str, str | None, str]


@given(st.lists(st.tuples(st.sampled_from("uvw"), st.sampled_from("ab"), st.sampled_from([None, "x", "y"]), st.sampled_from("sdl"))))
def test_what_is_looked_up_is_what_a_look_at_everything_finds(steps: list[Step]) -> None:
    """Objects whose label changes, that move, vanish and come back: seen, deleted or listed."""
    store, there = Store(indexed), {}
    for version, (uid, namespace, pool, how) in enumerate(steps, 1):
        body = obj(uid, uid + namespace, version, namespace)
        body["metadata"]["labels"] = {POOL_LABEL: pool} if pool else {}
        if how == "d":
            store.remove("Pod", body)
            there.pop(body["metadata"]["uid"], None)
        elif how == "s":
            store.upsert("Pod", body)
            there[body["metadata"]["uid"]] = body
        else:
            store.upsert("Pod", body)
            store.retain("Pod", {body["metadata"]["uid"]}, version, namespace)
            there = {key: other for key, other in there.items() if other["metadata"]["namespace"] != namespace}
            there[body["metadata"]["uid"]] = body
        for place, value in product("ab", "xy"):
            found = {item["metadata"]["uid"] for item in store.found("Pod", place, POOL_LABEL, value)}
            held = {key: item["metadata"] for key, item in there.items() if item["metadata"]["namespace"] == place}
            assert found == {key for key, metadata in held.items() if metadata["labels"].get(POOL_LABEL) == value}


def test_engines_are_found_by_the_pool_that_they_refer_to_now() -> None:
    store = Store(indexed)
    for version, pool in enumerate(("p", "q", "q"), 1):
        store.upsert("InferenceEngine", {**obj("e", "u1", version), "spec": {"poolRef": {"name": pool}}})
    store.upsert("InferenceEngine", {**obj("f", "u2", 9), "spec": {}})
    assert engines_of(store, "a", "p") == []
    assert [engine_key("a", item["metadata"]["name"]) for item in engines_of(store, "a", "q")] == [engine_key("a", "e")]
    assert engines_of(store, "b", "q") == []


def test_managed_fields_are_dropped_but_an_autoscalers_claim_is_remembered() -> None:
    body = obj("d", "u", 1)
    body["metadata"]["managedFields"] = [
        {"manager": "kube-controller-manager", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    ]
    assert slim("Deployment", body) == {**obj("d", "u", 1), "x-scaled-by-others": True}
    body["metadata"]["managedFields"] = [{"manager": "epochkv-operator", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
    assert slim("Deployment", body) == obj("d", "u", 1)


def test_what_is_kept_of_pods_and_config_maps() -> None:
    pod, notes = obj("p", "u", 1), {"epochkv.io/joined": "vllm"}
    pod["metadata"]["annotations"] = notes | {"example/note": "x" * 2**17}
    assert slim("Pod", pod)["metadata"]["annotations"] == notes
    for name, mounted in (("policy-fence", True), ("policy-tokens", False)):
        labels, volumes = {POOL_LABEL: "policy"}, [{"projected": {"sources": [{"secret": {"name": name}}]}}]
        mounting = {"metadata": {**pod["metadata"], "labels": labels}, "spec": {"volumes": volumes}}
        assert slim("Pod", mounting).get("x-mounts-keys", False) is mounted
    config = {**obj("c", "u", 1), "data": {"file": "x" * 2**15}}
    assert slim("ConfigMap", config) == config
    assert slim("ConfigMap", {**config, "data": {"file": "x" * 2**20}})["data"] == {}


@pytest.mark.parametrize(
    ("change", "only_epochs"),
    [
        ({}, True),
        ({"status": {"epoch": 8}}, True),
        ({"spec": {"resetEpoch": 8, "local": {"capacity": "1Gi"}}}, True),
        ({"spec": {"resetEpoch": 7, "local": {"capacity": "2Gi"}}}, False),
        ({"spec": {"resetEpoch": 7}}, False),
        ({"metadata": {"annotations": {"epochkv.io/look-again": "1"}}}, False),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, False),
        ({"metadata": {"resourceVersion": "9", "generation": 4}}, True),
    ],
)
def test_engines_wait_only_for_what_they_are_not_made_of(change: dict[str, Any], only_epochs: bool) -> None:
    spec = {"resetEpoch": 7, "local": {"capacity": "1Gi"}}
    before: dict[str, Any] = {"metadata": {"name": "p", "resourceVersion": "8"}, "spec": spec, "status": {}}
    after = {**before, **change, "metadata": {**before["metadata"], **change.get("metadata", {})}}
    assert only_epochs_differ(before, after) == only_epochs


# ----------------------------------------------------------------------------------------------------------- workers
HEALTHY, GONE, BROKEN = (pool_key("default", name) for name in ("healthy", "gone", "broken"))


async def test_healthy_objects_are_rechecked_failed_ones_tried_again_and_gone_ones_forgotten() -> None:
    """A key that stayed for ever after its object would make the operator slower with every engine that comes and goes."""
    seen, done, queue = Counter[Key](), asyncio.Event(), WorkQueue[Key]()

    async def reconcile(key: Key) -> None:
        seen[key] += 1
        if seen[HEALTHY] == 4:
            done.set()
        if key == GONE:
            raise ObjectGone(f"{key} is gone")
        if key == BROKEN and seen[key] < 3:
            raise Invalid(422, "Invalid", "not yet", "PATCH")

    task = asyncio.create_task(Worker(queue, {HEALTHY.kind: reconcile}, {HEALTHY.kind: 0.2}).run())
    for key in (GONE, BROKEN, HEALTHY):
        queue.add(key)
    async with asyncio.timeout(20):
        await done.wait()
    task.cancel()
    assert (seen[HEALTHY], seen[GONE], seen[BROKEN] >= 3) == (4, 1, True)


async def test_keys_that_need_no_request_leave_others_their_turn() -> None:
    """A thousand of them in a row: whoever shares the loop is served in between."""
    served, seen = [], []

    async def reconcile(key: Key) -> None:
        served.append(key)

    queue: WorkQueue[Key] = WorkQueue()
    worker = Worker(queue, {engine_key("a", "b").kind: reconcile}, {})
    for number in range(1000):
        queue.add(engine_key("a", str(number)))
    workers = asyncio.gather(*(worker.run() for _ in range(4)))
    async with asyncio.timeout(20):
        while len(served) < 1000:
            seen.append(len(served))
            await asyncio.sleep(0)
    workers.cancel()
    assert max(after - before for before, after in pairwise(seen)) <= 4


async def test_when_an_outage_is_over_nobody_waits_out_a_backoff() -> None:
    """Eight tries are behind the key, so the next one would come after a quarter of a minute."""
    tries, done, queue = list[float](), asyncio.Event(), WorkQueue[Key]()

    async def reconcile(key: Key) -> None:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) <= 8:
            raise Unavailable(503, "ServiceUnavailable", "not now", "PATCH")
        done.set()

    worker = asyncio.create_task(Worker(queue, {HEALTHY.kind: reconcile}, {}).run())
    queue.add(HEALTHY)
    async with asyncio.timeout(60):
        while len(tries) < 8:
            queue.add(HEALTHY)  # as events of its objects would
            await asyncio.sleep(0.01)
        queue.hurry()
        began = asyncio.get_running_loop().time()
        await done.wait()
    worker.cancel()
    assert tries[-1] - began < 10


async def test_a_namespace_whose_requests_hang_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its webhooks do. However many of its objects wait, some of them are tried at a time, and then all."""
    monkeypatch.setattr("epochkv_operator.control.worker.SLOW_SECONDS", 0.05)
    tries, ends, seen, done, queue = list[Key](), asyncio.Event(), asyncio.Queue[int](), asyncio.Event(), WorkQueue[Key]()

    async def reconcile(key: Key) -> None:
        if key == HEALTHY:
            return seen.put_nowait(len(tries))
        tries.append(key)
        await ends.wait()
        if len(tries) == 40:
            done.set()

    for key in (*(pool_key("hanging", str(number)) for number in range(40)), HEALTHY):
        queue.add(key)
    worker = Worker(queue, {HEALTHY.kind: reconcile}, {})
    workers = asyncio.gather(worker.run(), worker.run())
    async with asyncio.timeout(20):
        assert await seen.get() <= 2 * LANES
        ends.set()
        await done.wait()
    workers.cancel()
