"""One operator process: take the Lease, start the parts in order, end when any of them ends.

Order matters twice. Starting: Lease, then the watches until they have shown everything, then hub and workers, so that nothing is
written without leadership and nothing is decided on an empty store. Ending: writers first, then the hub, then the
Lease is given back, and only then kopf is left alone with its own shutdown.
"""

import asyncio
import contextlib
import gc
import itertools
import signal
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from aiohttp import web
from kubernetes.aio.config import ConfigException
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from epochkv_fence.common import end
from epochkv_operator import metrics
from epochkv_operator.api.base import has_gate
from epochkv_operator.api.resources import ENGINES, PODS, POOLS, PRIMARY, Resource
from epochkv_operator.control import driver
from epochkv_operator.control.executor import Executor
from epochkv_operator.control.joining import Copies
from epochkv_operator.control.leader import HubProxy, Leader, watch_lag
from epochkv_operator.control.reconcile import EngineReconciler, PodReconciler, PoolReconciler, blind, now
from epochkv_operator.control.reporter import Reporter, unready
from epochkv_operator.control.worker import Worker, WorkQueue
from epochkv_operator.hub.masters import Elections
from epochkv_operator.hub.service import OPEN_SECONDS, HubFailed, HubService
from epochkv_operator.keys import FenceSecrets, HubSecret
from epochkv_operator.kube.client import ApiError, Json, KubeClient
from epochkv_operator.kube.lease import LeaseLost, new_identity
from epochkv_operator.kube.status import EventRecorder, ObjectGone, StatusWriter
from epochkv_operator.kube.store import Key, Store, affected, engine_key, engines_of, home, indexed, key_of, only_epochs_differ
from epochkv_operator.kube.watch import Watches
from epochkv_operator.metrics import REGISTRY
from epochkv_operator.settings import HUB_SECRET, Settings

#: Returns what is wrong, or None.
Check = Callable[[], str | None]


class Probes:
    """Checks by name; `serve` binds two small HTTP servers."""

    def __init__(self) -> None:
        self.live: dict[str, Check] = {}
        self.ready: dict[str, Check] = {}
        self.before_metrics: Callable[[], None] = lambda: None
        self._runners: list[web.AppRunner] = []

    async def serve(self, probe_bind: str, metrics_bind: str) -> None:
        """Bind and answer until `close`. Raises `OSError`: a port is taken."""
        probe_app = web.Application()
        probe_app.router.add_get("/livez", lambda _: self._answer(self.live))
        probe_app.router.add_get("/readyz", lambda _: self._answer(self.ready))
        metrics_app = web.Application()
        metrics_app.router.add_get("/metrics", self._metrics)
        for app, bind in ((probe_app, probe_bind), (metrics_app, metrics_bind)):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            host, port = bind.rsplit(":", 1)
            await web.TCPSite(runner, None if host == "*" else host.strip("[]"), int(port)).start()
            self._runners.append(runner)

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        self.before_metrics()
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @staticmethod
    async def _answer(checks: dict[str, Check]) -> web.Response:
        results = {name: check() for name, check in checks.items()}
        lines = [f"[{'-' if problem else '+'}] {name}: {problem or 'ok'}" for name, problem in results.items()]
        return web.Response(text="\n".join(lines) + "\n", status=503 if any(results.values()) else 200)


log = structlog.get_logger(__name__)
ENGINES_SECONDS = 1.0
"""Engines of a pool are looked at this long after its epoch moved. Most resets are through by then, and none competes with the statuses
of many engines."""
LOOK_AGAIN_SECONDS = 10.0
"""Over which all objects are looked at when the cluster serves another kind."""
REFUSED_SECONDS = 10.0
"""API servers that start refuse lists for a moment."""
STUCK_SECONDS = 120.0
"""Twice the deadline of a reconcile."""


class Operator:
    """The parts and their wiring. `main` is the whole life of the process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.identity = new_identity()
        self.store = Store(indexed)
        self.queue: WorkQueue[Key] = WorkQueue()
        self.strays: dict[Key, list[Json]] = defaultdict(list)
        self.probes = Probes()
        self._stop = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._leader: Leader | None = None
        self._watches: Watches | None = None

    async def main(self) -> int:
        """Run until SIGTERM, SIGINT or a failure, and say in the log what it was. Returns the exit status."""
        try:
            return await self._run()
        except (OSError, HubFailed, ConfigException) as error:
            log.error("operator cannot start or go on", reason=f"{type(error).__name__}: {error}")
            return 1
        except Exception:
            log.exception("unexpected error, the operator ends")
            return 1

    async def _run(self) -> int:
        self._catch_signals()
        watches = self.settings.watch_namespaces or "all namespaces"
        log.info("operator starts", identity=self.identity, namespace=self.settings.namespace, watches=watches)
        self._add_probes()
        await self.probes.serve(self.settings.probe_bind, self.settings.metrics_bind)
        leader = self._leader = Leader(self.settings, self.identity, self.store, self._take, self._wake, self.queue.hurry)
        client: KubeClient | None = None
        try:
            if not await self._unless_stopped(leader.acquire()):
                return 0
            client = await KubeClient.connect()  # only now: the API server's CA may change while this process stands by
            client.may_not_write = leader.not_leading
            return await self._lead(client, leader)
        finally:
            await leader.close()
            metrics.LEADER.set(0)
            await end(self._tasks, 2.0)  # kopf: it writes nothing, so the Lease need not wait for it
            await self.probes.close()
            if client is not None:
                await client.close()

    async def _lead(self, client: KubeClient, leader: Leader) -> int:
        """From the Lease on: returns the exit status."""
        metrics.LEADER.set(1)
        self._start("lease", leader.hold())
        self._start("lag", watch_lag("main"))
        scopes, period = self.settings.scopes, self.settings.resync_seconds
        watches = self._watches = Watches(client, self.store, self.observed, self._gone, self._look_at_all, scopes, period)
        events = EventRecorder(client, self.identity)
        self._start("events", events.run())
        reporter = Reporter(StatusWriter(client, self.store, self._take), events)
        refused = asyncio.create_task(self._tell_refused(client, watches, reporter))
        kopf_task: asyncio.Task[None] | None = None
        try:
            try:
                begun = await self._unless_stopped(watches.begin(), *self._tasks)
            finally:
                await end([refused], 2.0)
            if begun:
                self._start("watches", watches.run())
                started = asyncio.Event()
                kopf_task = self._start("kopf", driver.drive(self.observed, watches.soon, client, self.settings, started))
                await self._unless_stopped(started.wait(), *self._tasks)
                self._catch_signals()  # kopf has put its own handlers in their place
                await self._unless_stopped(self._prepare(client, leader, watches, events, reporter), *self._tasks)
            return await self._wait_for_the_end()
        finally:
            await end([task for task in self._tasks if task is not kopf_task], 3.0)
            self.queue.close()
            await leader.close_hub()

    async def _tell_refused(self, client: KubeClient, watches: Watches, reporter: Reporter) -> None:
        """Until the watches have begun: objects say which list they wait for that this operator has no right to."""
        while True:
            await asyncio.sleep(REFUSED_SECONDS)
            for resource, scope in itertools.product(PRIMARY, self.settings.scopes):
                with contextlib.suppress(ApiError, ObjectGone):  # what it may not list or write here, the log says
                    async for page, _ in client.pages(resource, scope):
                        for obj in page:
                            if problem := blind(watches.refused(obj["metadata"]["namespace"])):
                                await reporter.report(obj, partial(unready, reason=problem.reason, message=problem.message, now=now()))

    async def _prepare(self, client: KubeClient, leader: Leader, watches: Watches, events: EventRecorder, reporter: Reporter) -> None:
        secret = HubSecret(client, events, self.settings.namespace, HUB_SECRET)
        keys = await secret.obtain()
        await watches.complete()
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it for garbage, again and again, would hold up both loops
        hub = await leader.serve(keys)
        executor = Executor(client, self.store)
        secrets = FenceSecrets(client, keys.public)
        lists = (watches.served, watches.refused, watches.unseen)
        given = (self.settings, self.store, executor, reporter, secrets, hub, client, self.queue.add_after, *lists)
        elections = Elections(self.store, self.queue.add)
        pools = PoolReconciler(*given, elections, Copies(client, self.store, self.settings), self.strays)
        engines, pods = EngineReconciler(*given), PodReconciler(self.store, reporter, secrets, hub, self.queue.add_after, watches.unseen)
        # Pools often: a deleted Secret has no watch that would tell. Engines rarely: whatever they are made from is watched.
        period = 2 * self.settings.resync_seconds
        recheck = {POOLS.kind: min(60.0, period), ENGINES.kind: period}
        worker = Worker(self.queue, {POOLS.kind: pools.reconcile, ENGINES.kind: engines.reconcile, PODS.kind: pods.reconcile}, recheck)
        self._start("hub", leader.watch_hub())
        self._start("elections", elections.watch())
        self._start("lists", watches.compare())
        self._start("hub-secret", secret.guard(keys))
        self.queue.sort(lambda key: key.kind != POOLS.kind)  # until then the hub rejects their clients
        for number in range(self.settings.workers):
            self._start(f"worker-{number}", worker.run())

    def observed(self, resource: Resource, event_type: str | None, obj: Json) -> None:
        """`watch.Seen`: an object seen by a watch or a list."""
        if event_type == "DELETED":
            if self.store.remove(resource.kind, obj):
                self._gone(resource, obj)
            return
        self._take(resource, obj)

    def _gone(self, resource: Resource, obj: Json) -> None:
        """It was deleted; or it is a pod that has lost the label by which we watch it, and whose gate we have to leave open."""
        if has_gate(obj) and (meant := home(obj)) is not None:
            self.strays[meant].append(obj)
        self._enqueue(resource, obj)

    @property
    def _hub(self) -> HubProxy | None:
        return self._leader.port if self._leader is not None else None

    def _take(self, resource: Resource, obj: Json) -> None:
        """A state of an object, from a watch, a listing or an answer: if it is newer, remember it and look at what it affects."""
        hub = self._hub if resource is POOLS else None
        if hub is not None:
            # The fast path: an epoch that was asked for does not wait in the queue. Nor does it wait for the store, which may know
            # this state from the answer to a write.
            hub.seen(obj)
        before = self.store.by_uid(resource.kind, obj["metadata"]["uid"])
        if not self.store.upsert(resource.kind, obj):
            return
        delay, engines = 0.0, 0.0
        if resource is POOLS:
            with contextlib.suppress(TimeoutError):  # nobody brings this state again
                delay = OPEN_SECONDS if hub is not None and hub(HubService.resetting, obj["metadata"]["uid"]) else 0.0
            engines = ENGINES_SECONDS if before is not None and only_epochs_differ(before, obj) else delay
        elif before is not None and (before["metadata"].get("labels") != obj["metadata"].get("labels") or home(before) != home(obj)):
            self._enqueue(resource, before)  # whose it was
        self._enqueue(resource, obj, delay, engines)

    def _enqueue(self, resource: Resource, obj: Json, delay_seconds: float = 0.0, engines_seconds: float = 0.0) -> None:
        """Look at what the object affects. While the hub is at a reset, after a delay: it wakes the key when it is through."""
        for key in affected(self.store, resource.kind, obj):
            of_pool = resource is POOLS and key.kind == ENGINES.kind
            gate = OPEN_SECONDS if key.kind == POOLS.kind and has_gate(obj) else 0.0  # a rollout changes many pods at once
            self.queue.add_after(key, engines_seconds if of_pool else max(delay_seconds, gate))

    def _look_at_all(self) -> None:
        """The cluster serves other kinds than before, so any object may want others; or lets us list others."""
        for resource in PRIMARY:
            objects = self.store.every(resource.kind)
            for index, obj in enumerate(objects):
                self.queue.add_after(key_of(resource.kind, obj), LOOK_AGAIN_SECONDS * index / len(objects))

    def _wake(self, pool: Key, delay_seconds: float) -> None:
        """The hub has news about a pool; its engines report epochs, too, and follow when it has come to rest."""
        self.queue.add_after(pool, delay_seconds)
        for engine in engines_of(self.store, pool.namespace, pool.name):
            self.queue.add_after(engine_key(pool.namespace, engine["metadata"]["name"]), max(delay_seconds, ENGINES_SECONDS))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = name
        return task

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any], *parts: asyncio.Task[None]) -> bool:
        """Run `work`; False when the process was told to stop, or one of the `parts` ended, first. Errors of `work` are raised."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((task, stop, *parts), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            await end([task, stop], 2.0)

    async def _wait_for_the_end(self) -> int:
        """Until a signal (0) or until any part ends, which none ever should (1)."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((stop, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        ended = [task for task in self._tasks if task.done()]
        for task in ended:
            error = None if task.cancelled() else task.exception()
            reason = f"{type(error).__name__}: {error}" if error else "it returned"
            trace = None if isinstance(error, LeaseLost | ApiError) else error
            log.error("component exited", component=self._tasks[task], reason=reason, exc_info=trace)
        if not ended:
            log.info("shutting down on signal")
        return 1 if ended else 0

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _add_probes(self) -> None:
        def queue() -> str | None:
            seconds = self.queue.stuck_seconds()
            return f"nothing was reconciled for {seconds:.0f} s, and {len(self.queue)} keys wait" if seconds > STUCK_SECONDS else None

        def lists() -> str | None:
            age = self._watches.oldest_list_seconds() if self._watches is not None else 0.0
            return f"the list of a kind was last tried {age:.0f} s ago" if age > 3 * self.settings.resync_seconds + 60 else None

        def leading() -> str | None:
            return None if self._leader is not None and self._leader.listening else "standby: this replica does not hold the Lease"

        def gauges() -> None:
            metrics.QUEUE_DEPTH.set(len(self.queue))
            metrics.QUEUE_OLDEST.set(self.queue.oldest_age_seconds())
            if (hub := self._hub) is not None:
                hub(HubService.export_metrics)

        self.probes.live = {"queue": queue, "lists": lists, "hub": lambda: self._leader.hung() if self._leader is not None else None}
        self.probes.ready = {"leading": leading}
        self.probes.before_metrics = gauges
