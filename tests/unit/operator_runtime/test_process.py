"""The process around the reconcilers: the hub's thread, what kopf is told, listeners, logs, metrics, plans carried out, Events."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest

from epochkv_fence import common
from epochkv_fence.common import LoopThread
from epochkv_fence.net import gate, server
from epochkv_fence.protocol.pool import Term
from epochkv_operator.api.resources import DEPLOYMENTS, POOLS, Resource
from epochkv_operator.control.driver import kopf_settings
from epochkv_operator.control.executor import Executor
from epochkv_operator.control.leader import Leader, WriteThroughCache
from epochkv_operator.control.reporter import Reporter
from epochkv_operator.control.runtime import Operator, Probes
from epochkv_operator.control.worker import WorkQueue
from epochkv_operator.kube import lease
from epochkv_operator.kube.client import Conflict, Invalid, Json, KubeClient, NotFound, Unavailable
from epochkv_operator.kube.lease import LeaseHolder, LeaseLost
from epochkv_operator.kube.status import EventRecorder
from epochkv_operator.kube.store import Key, Store, engine_key, indexed, pool_key
from epochkv_operator.metrics import HUB_FAULTS, REGISTRY, count_messages
from epochkv_operator.planning.context import Observed
from epochkv_operator.planning.plan import plan_pool
from epochkv_operator.settings import Settings
from hack.loopback import free_ports, has_ipv6
from hack.observe.catalog import catalog
from tests.support.planning import CONTEXT, one, pool


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test", 5.0)
    yield thread
    thread.stop()
    assert "test" not in {one.name for one in threading.enumerate()}


def pool_at(version: int) -> Json:
    return {"metadata": {"uid": "u", "name": "p", "namespace": "a", "resourceVersion": str(version)}}


def test_a_loop_that_stands_still_is_an_error_in_time(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "CALL_SECONDS", 0.1)
    late: list[str] = []
    thread.post(time.sleep, 1.0)
    with pytest.raises(TimeoutError):
        thread.call(late.append, "done anyway")
    monkeypatch.undo()
    assert thread.call(lambda: late) == [], "a call that nobody waits for has not been made"


def test_the_hub_knows_its_own_writes_before_the_stores_owner_does() -> None:
    store, told = Store(indexed), []
    cache = WriteThroughCache(store, lambda kind, obj: told.append((kind, obj)))
    store.upsert("KVCachePool", pool_at(3))
    assert cache.by_uid("KVCachePool", "u") == pool_at(3)
    cache.upsert("KVCachePool", pool_at(5))
    assert cache.by_uid("KVCachePool", "u") == pool_at(5)
    cache.upsert("KVCachePool", pool_at(4))  # an answer that comes late
    assert cache.by_uid("KVCachePool", "u") == pool_at(5)
    for kind, obj in told:
        store.upsert(kind, obj)
    store.upsert("KVCachePool", pool_at(9))
    assert cache.by_uid("KVCachePool", "u") == pool_at(9)
    store.remove("KVCachePool", pool_at(9))
    assert cache.by_uid("KVCachePool", "u") is None, "kept although the store had caught up"


def test_without_leadership_nothing_is_written() -> None:
    client = KubeClient.__new__(KubeClient)
    client.deadline_seconds, client.may_not_write = 1.0, lambda: "the Lease was last renewed 11.0 s ago"
    for verb in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(Unavailable, match="last renewed"):
            asyncio.run(client.request(verb, "/api/v1/namespaces/a/pods"))


class OneLease(KubeClient):
    """An API server with one Lease. The answers to writes are lost while `silent`; the writes are done."""

    def __init__(self) -> None:
        self.lease: Json = {"metadata": {"resourceVersion": "1"}, "spec": {}}
        self.silent = 0

    async def get(self, *_: Any) -> Json:
        return self.lease

    async def replace(self, resource: Resource, namespace: str, body: Json, deadline_seconds: float | None = None) -> Json:
        version = self.lease["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise Conflict(409, "Conflict", "", "PUT")
        self.lease = {**body, "metadata": {"resourceVersion": f"{int(version) + 1}"}}
        self.silent -= 1
        if self.silent >= 0:
            raise Unavailable(0, "Timeout", "no answer within 10 s", "PUT")
        return self.lease


async def test_a_lease_is_ours_and_is_given_back_over_writes_without_an_answer() -> None:
    server = OneLease()
    holder = LeaseHolder(server, "a", "lease", "me", duration_seconds=3600)
    holder.renew_seconds, server.silent = 0.01, 1
    async with asyncio.timeout(60):
        assert await holder.acquire() == Term("me", 2)
        server.silent = 1
        with pytest.raises(Unavailable):
            await holder._renew(1.0)  # its process is told to end meanwhile
        await holder.release()
    assert server.lease["spec"]["holderIdentity"] == ""


async def test_who_labels_a_lease_does_not_renew_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OneLease()
    holder = LeaseHolder(server, "a", "lease", "me", duration_seconds=15)
    monkeypatch.setattr("epochkv_operator.kube.lease.time.monotonic", clock := Mock(return_value=0.0))
    for clock.return_value, renewed, taken in ((0, "a", None), (10, "b", None), (20, "b", None), (26, "b", Term("me", 8))):
        held = {"holderIdentity": "another", "leaseTransitions": 7, "renewTime": renewed}
        server.lease = {"metadata": {"resourceVersion": str(clock.return_value)}, "spec": held}
        assert await holder._try_acquire() == taken


async def test_a_standby_that_hears_nothing_connects_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has the CA that it began with. A refusal is an answer. A machine that was suspended does not lead."""
    server = OneLease()
    answers = [Unavailable(500, "", "", "GET"), Unavailable(0, "", "", "GET"), server.lease]
    connect = AsyncMock(return_value=server)
    monkeypatch.setattr(KubeClient, "connect", connect)
    monkeypatch.setattr(server, "get", AsyncMock(side_effect=answers))
    monkeypatch.setattr(server, "close", AsyncMock())
    monkeypatch.setattr(lease, "SILENT_SECONDS", 0.0)
    leader = Leader(Settings("a", lease_duration_seconds=1), "me", Store(indexed), print, print, print)
    async with asyncio.timeout(60):
        await leader.acquire()
        monkeypatch.setattr(common.lease_clock, "_set_back", 0.0)
        monkeypatch.setattr(common.lease_clock, "ahead", common.lease_clock.ahead + 3600)
        assert "last renewed 3600" in (leader.not_leading() or "")
        with pytest.raises(LeaseLost):
            await leader.hold()
        await leader.close()
    assert connect.await_count == 2


def test_kopf_tries_again_for_as_long_as_it_is_refused() -> None:
    backoffs = kopf_settings().networking.error_backoffs
    assert not isinstance(backoffs, float)
    seconds = list(islice(backoffs, 2000))
    assert len(seconds) == 2000, "an hour of them is not enough"
    assert all(0 < value <= 2 for value in seconds)
    assert list(islice(backoffs, 3)) == [0.2, 0.5, 1.0], "each request begins with the short ones"


@pytest.mark.parametrize(
    ("labels", "notes", "left"),
    [({"epochkv.io/engine": "rollout"}, {}, engine_key("a", "rollout")), ({}, {"epochkv.io/pool-namespace": "b"}, pool_key("a", "policy"))],
)
def test_what_an_object_leaves_is_looked_at(labels: Json, notes: Json, left: Key) -> None:
    """It loses an engine's label, or means a pool of another namespace."""
    operator, pool_label = Operator(Settings("epochkv-system")), {"epochkv.io/pool": "policy"}
    for version, changed in enumerate(({"labels": pool_label | labels}, {"labels": pool_label, "annotations": notes}), 1):
        metadata = {"uid": "u", "name": "rollout", "namespace": "a", "resourceVersion": str(version), **changed}
        operator.queue = WorkQueue()
        operator.observed(DEPLOYMENTS, "MODIFIED", {"metadata": metadata})
    assert left in {asyncio.run(operator.queue.get()) for _ in range(len(operator.queue))}


def test_an_edit_does_not_wait_for_a_hub_that_does_not_answer() -> None:
    operator = Operator(Settings("epochkv-system"))
    operator._leader = Mock(port=Mock(side_effect=TimeoutError))
    operator.observed(POOLS, "MODIFIED", pool_at(3))
    assert asyncio.run(operator.queue.get()) == pool_key("a", "p")


async def answers(probes: Probes, binds: tuple[str, str], urls: list[str]) -> list[int]:
    await probes.serve(*binds)
    try:
        async with aiohttp.ClientSession() as session:
            return [(await session.get(url)).status for url in urls]
    finally:
        await probes.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_probes_and_metrics_are_answered_on_both_families() -> None:
    first, second = free_ports(2)
    binds = Settings.probe_bind.replace("8080", str(first)), Settings.metrics_bind.replace("9090", str(second))
    urls = [f"http://{host}:{where}" for host in ("127.0.0.1", "[::1]") for where in (f"{first}/livez", f"{second}/metrics")]
    assert asyncio.run(answers(Probes(), binds, urls)) == [200] * 4
    binds = f"[::1]:{first}", f"[::1]:{second}"
    assert asyncio.run(answers(Probes(), binds, urls[2:])) == [200] * 2


SCRIPT = """
import structlog
from epochkv_operator import logs

logs.configure("{format}", "info")

def work():
    root_secret = "very" + "secret"
    raise ValueError("broken")

try:
    work()
except ValueError:
    structlog.get_logger("x").exception("operator ends")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variable(log_format: str) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("{format}", log_format)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert all(text in done.stdout for text in ("operator ends", "in work", "ValueError: broken")), done.stdout
    assert "verysecret" not in done.stdout + done.stderr


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/metrics.md"


def test_every_metric_that_the_documentation_speaks_of_exists() -> None:
    pattern = r"(?<![\w:])(?:vllm:epochkv|epochkv_(?:operator|hub|pool))_\w*[a-z]\b(?!\*)"
    known = {name for series, metric in catalog().items() for name in (series, metric.name)}
    spoken = {(path.name, name) for path in (ROOT / "docs").rglob("*.md") for name in re.findall(pattern, path.read_text())}
    assert len(spoken) > 60
    assert {(page, name) for page, name in spoken if name not in known} == set()


def sample(outcome: str) -> float | None:
    return REGISTRY.get_sample_value("epochkv_hub_messages_total", {"outcome": outcome})


def test_what_a_hub_counts_only_grows_whatever_hub_comes_after() -> None:
    before, known, counters = sample("pool_step_failed") or 0.0, Counter[str](), Counter(pool_step_failed=2, received=7)
    for more in (0, 3, 0):
        counters["pool_step_failed"] += more
        count_messages(counters, known)
        known = counters.copy()
    assert sample("pool_step_failed") == before + 5
    count_messages(Counter(pool_step_failed=1), Counter())
    assert sample("pool_step_failed") == before + 6
    assert (sample("received") or 0) >= 7


def test_every_failure_that_the_hub_counts_is_on_the_page_and_there_from_the_start() -> None:
    text = "".join(Path(str(module.__file__)).read_text() for module in (gate, server))
    counted = set(re.findall(r'counters\["(\w+_failed|unencodable)"\]', text))
    documented = set(re.findall(r"^\| `(\w+_failed|unencodable)` \|", PAGE.read_text(), re.MULTILINE))
    assert counted == documented == set(HUB_FAULTS)
    assert all(sample(outcome) is not None for outcome in HUB_FAULTS)


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


def test_a_plan_that_fails_is_told_and_tried_again_and_holds_up_nothing_else() -> None:
    error = KeyError("privileged")
    problem, again = asyncio.run(Executor(Client(None), Store(indexed)).bring_about("pool", Observed(), Mock(side_effect=error)))
    assert (problem and problem.reason, again) == ("PlanFailed", error)


class Deployments(Client):
    """Applies as the API server does: what nobody takes away stays, its own defaults, too."""

    def __init__(self, live: Json) -> None:
        super().__init__(LIVES)
        self.strategy = live["spec"]["strategy"] | {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}

    def written(self, body: Json) -> Json:
        strategy = {name: value for name, value in (self.strategy | body["spec"]["strategy"]).items() if value is not None}
        if strategy["type"] == "Recreate" and "rollingUpdate" in strategy:
            raise Invalid(422, "Invalid", "spec.strategy.rollingUpdate: Forbidden", "PATCH")
        self.strategy = strategy
        return {}

    async def request(self, verb: str, path: str, *, body: Any = None, **_: Any) -> Json:
        self.annotations = body["metadata"]["annotations"]
        return self.written(body) | {"metadata": {"managedFields": []}}

    async def apply(self, resource: Resource, namespace: str, body: Json) -> Json:
        if resource.kind == "Deployment":
            self.written(body)
        return await super().apply(resource, namespace, body)


def test_masters_that_elect_nobody_any_more_are_replaced_at_once() -> None:
    elected = plan_pool(pool("ha"), Observed(), CONTEXT).apply
    live = [{**obj, "metadata": {**obj["metadata"], "uid": obj["kind"], "resourceVersion": "8"}} for obj in elected]
    client, store = Deployments(one(live, "Deployment")), Store(indexed)
    for obj in live:
        store.upsert(obj["kind"], obj)
    executor = Executor(client, store)
    done = executor.bring_about("pool", Observed(live), lambda seen: plan_pool(pool("l1-l2"), seen, CONTEXT))
    assert asyncio.run(done) == (None, None)
    assert client.strategy == {"type": "Recreate"}
    assert client.annotations == {"epochkv.io/applied-hash": None}, "cut off between the two, it still differs"


class Quota(Client):
    async def apply(self, resource: Resource, namespace: str, body: Json) -> Json:
        if resource.kind == "Deployment":
            raise Invalid(422, "Invalid", "exceeded quota", "PATCH")
        return await super().apply(resource, namespace, body)

    async def delete(self, resource: Resource, *_: Any) -> None:
        self.applied.append("deleted")


@pytest.mark.parametrize("live", [(), plan_pool(pool("l1-l2"), Observed(), CONTEXT).apply], ids=["new", "replaces"])
def test_a_workload_that_is_refused_holds_up_others_where_it_replaces_something(live: tuple[Json, ...]) -> None:
    client, seen = Quota(LIVES), Observed([{**obj, "metadata": {**obj["metadata"], "uid": obj["kind"]}} for obj in live])
    done = Executor(client, Store(indexed)).bring_about("pool", seen, lambda seen: plan_pool(pool("ha"), seen, CONTEXT))
    problem, _ = asyncio.run(done)
    assert (problem and problem.reason, "deleted" in client.applied) == ("ApplyRefused", False)
    assert ("policy-store" in client.applied) is (not live)


A, B = "aa" * 16, "bb" * 16


class ApiServer:
    """One object whose status is written, and the Events about it."""

    def __init__(self, obj: Any) -> None:
        self.obj, self.notes = obj, list[tuple[str, str]]()

    async def update(self, ref: object, decide: Callable[[Any], Any]) -> Any:
        self.obj["status"] = {**self.obj.get("status", {}), **(decide(self.obj) or {})}
        return self.obj

    def emit(self, obj: Any, *, warning: bool, reason: str, action: str, note: str) -> None:
        self.notes.append((reason, note))


def test_a_label_that_weights_had_not_is_an_event() -> None:
    metadata = {"namespace": "rl", "name": "policy", "uid": "u-1"}
    server = ApiServer({"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": metadata})
    reporter = Reporter(server, server)  # type: ignore[arg-type]

    def labelled(held: str, **labels: str) -> list[tuple[str, str]]:
        """The hub has written these, and the operator reports who holds what."""
        server.notes.clear()
        given = [{"id": {"a": A, "b": B}[name], "label": label} for name, label in labels.items()]
        server.obj["status"] = {**server.obj.get("status", {}), "weightsLabels": given}
        asyncio.run(reporter.report(server.obj, lambda obj: {**obj["status"], "weights": [{"id": held, "engines": 1}]}))
        return list(server.notes)

    assert labelled(A, a="step-0") == [], "nobody knows what was before"
    assert labelled(A, a="step-0") == []
    assert labelled(A, a="step-1") == [("WeightsRelabelled", "aaaaaaaa (step-1): engines held these weights before, as step-0")]
    moved = "bbbbbbbb (step-1): until now step-1 was the label of weights aaaaaaaa"
    assert labelled(B, a="step-1", b="step-1") == [("WeightsRelabelled", moved)]
    assert labelled(B, a="step-1", b="step-1") == []


def test_an_event_of_a_long_name_and_in_any_script_is_taken() -> None:
    """As the API server judges: the name is one of DNS, of at most 253 characters, and the note has at most 1,024 bytes."""
    posted: list[Json] = []

    class Server(KubeClient):
        async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
            posted.append(body)
            raise asyncio.CancelledError

    events = EventRecorder(Server.__new__(Server), "operator")
    about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": f"{'x' * 229}.{'y' * 23}", "uid": "u"}}
    events.emit(about, warning=True, reason="NotJoined", action="Join", note="重み" * 400)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(events.run())
    [event] = posted
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", event["metadata"]["name"])
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["note"].encode()) <= 1024
    assert event["note"] in "重み" * 400
