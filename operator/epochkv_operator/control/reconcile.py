"""Reconciling a KVCachePool (its Secret, its place in the hub, its objects, its status, the gates of its pods, copies of its keys) and an
InferenceEngine (its objects around the pool it refers to, its status).

No reset is driven here. `spec.resetEpoch` is handed to the hub (`hub/service.py`), which records the epoch (`hub/authority.py`)
and follows it until it is published (`epochkv_fence/hub/machine.py`).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import structlog

from epochkv_fence.net.keys import generate_keypair
from epochkv_operator import metrics
from epochkv_operator.api import InferenceEngine, InvalidObject, KVCachePool, parse_engine, parse_pool
from epochkv_operator.api.base import ENGINE_LABEL, POOL_LABEL
from epochkv_operator.api.resources import CHILDREN, OPTIONAL, PODS, POOLS, ref_of
from epochkv_operator.control.executor import Executor
from epochkv_operator.control.joining import START_SECONDS, Copies, explain, held_up, silent
from epochkv_operator.control.leader import HubProxy
from epochkv_operator.control.reporter import Reporter, unready
from epochkv_operator.hub.masters import Elections
from epochkv_operator.hub.service import HubService, HubSnapshot
from epochkv_operator.keys import FenceKeys, FenceSecrets, PoolKeys, SecretConflict
from epochkv_operator.kube.client import ApiError, Conflict, Forbidden, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import BY_HOME, Key, Store, affected, engine_key, engines_of, home, key_of, pool_of
from epochkv_operator.planning.context import Context, HubView, KeysView, Observed, Problem, Serving, Turn
from epochkv_operator.planning.engine import workload_of
from epochkv_operator.planning.plan import plan_engine, plan_pool
from epochkv_operator.planning.serving import ANYTHING, JOINED, Kind, Life, lives_of, serve_of, serving
from epochkv_operator.planning.status import engine_status, pool_status
from epochkv_operator.planning.workload import is_ready
from epochkv_operator.settings import Settings


def observe(store: Store, namespace: str, label: str, value: str, hub: HubView | None = None, problem: Problem | None = None) -> Observed:
    """Everything in a namespace that carries a label of the operator."""
    children = [obj for resource in (*CHILDREN, *OPTIONAL) for obj in store.found(resource.kind, namespace, label, value)]
    return Observed(tuple(children), tuple(store.found(PODS.kind, namespace, label, value)), hub, problem)


def now() -> datetime:
    return datetime.now(UTC)


def blind(refused: str) -> Problem | None:
    """What is known of the objects may be old: the operator was `refused` a list."""
    text = f"{refused}: what is said here may be old. epochkv doctor names each right that the operator lacks, and the fix"
    return Problem("ReadForbidden", text) if refused else None


log = structlog.get_logger(__name__)
#: How often it is looked whether anybody still uses the older of two client keys.
OLD_KEY_SECONDS = 1.0
#: Between two looks at gates that no news asks for.
GATES_SECONDS = 0.5
GATES_AT_ONCE = 8


@dataclass(eq=False)
class _Reconciler(ABC):
    """Brings objects of one kind to what they should be. `wake`: look at a key after a delay; `served`: kinds of other projects that there
    are; `refused`: what this operator may not list, of what objects of a namespace are judged by; `unseen`: where it never could."""

    settings: Settings
    store: Store
    executor: Executor
    reporter: Reporter
    secrets: FenceSecrets
    hub: HubProxy
    client: KubeClient
    wake: Callable[[Key, float], None]
    served: Callable[[], frozenset[str]]
    refused: Callable[[str], str]
    unseen: Container[str | None]

    async def reconcile(self, key: Key) -> None:
        """Raises what another try may solve."""
        obj = self.store.get(key.kind, key.namespace, key.name)
        problem = blind(self.refused(key.namespace)) if key.namespace in self.unseen else None
        if obj is None or obj["metadata"].get("deletionTimestamp"):  # whosever finalizer still holds it
            if problem is not None:
                return
            self.reporter.forget(key)
            await self._forget(key)
            raise ObjectGone(f"{key} is gone")
        try:
            if problem is None:
                await self._reconcile(key, obj)
        except InvalidObject as error:
            # Of an engine, it may be the pool: one that cannot be read is not a missing one, so nothing is changed until it can.
            problem = Problem("InvalidSpec", str(error))
        if problem is not None:
            await self.reporter.report(obj, partial(unready, reason=problem.reason, message=problem.message, now=now()))

    @abstractmethod
    async def _forget(self, key: Key) -> None:
        """The object is gone or going: drop what is held for it."""

    @abstractmethod
    async def _reconcile(self, key: Key, obj: Json) -> None:
        """The object is there and is not being deleted."""


@dataclass(eq=False)
class PoolReconciler(_Reconciler):
    elections: Elections
    copies: Copies
    strays: dict[Key, list[Json]]
    """By the pool that they meant: pods that are gone, or have lost its label."""
    _away: dict[str, float] = field(default_factory=dict)
    """By uid of a pool that no hub leads: since when (monotonic)."""
    _forbidden: dict[str, str] = field(default_factory=dict)
    """By uid of a pool: why gates could not be written."""
    _lives: dict[str, dict[str, Life]] = field(default_factory=dict)
    """By uid of a pool: of the containers behind its gates."""
    _served: dict[str, Mapping[Kind, str]] = field(default_factory=dict)
    """By uid of a pool whose status could not be written: what it would say of `servedWeights`."""

    async def _reconcile(self, key: Key, obj: Json) -> None:
        pool = parse_pool(obj)
        keys, problem, failed = await self._keys(key, obj)
        errors: list[Exception | None] = [failed]
        if keys is not None:
            keys, trouble, failed = await self._serve(key, obj, pool, keys)
            problem = problem or trouble
            errors.append(failed)
        context = Context(self.settings, keys.revision if keys is not None else "", self.served())
        children = observe(self.store, key.namespace, POOL_LABEL, key.name)
        refused, again = await self.executor.bring_about(str(key), children, lambda seen: plan_pool(pool, seen, context))
        problem = problem or refused or blind(self.refused(key.namespace))
        errors.insert(0, again)  # of our own mistakes, the log has the traceback
        shared = self.copies.told(key, pool)
        snapshot, found = HubSnapshot(), None

        def compute(newest: Json) -> Json:
            nonlocal snapshot, found
            status, snapshot = newest.get("status") or {}, self.hub(HubService.snapshot, pool.metadata.uid, newest)
            seen = observe(self.store, key.namespace, POOL_LABEL, key.name, snapshot.view, problem)
            found = self._gates(key, pool, seen, status)
            seen = replace(seen, serving=found, leaderless=self.elections.leaderless(pool.metadata.uid), shared=shared)
            return pool_status(pool, seen, context, status, now()) if snapshot.known or keys is None else status

        try:
            await self.reporter.report(obj, compute)
            self._served.pop(pool.metadata.uid, None)
        except ApiError as error:  # gates and keys do not wait for it
            errors.append(error)
            self._served[pool.metadata.uid] = found.weights if found is not None else {}
        if found is not None:
            errors.append(await self._turn(key, pool.metadata.uid, found))
        errors.append(await self.copies.keep(key, pool, keys, context))
        if self.copies.told(key, pool) != shared:
            self.wake(key, 0.0)  # the condition says so
        errors.append(await self._open(key, [pod for pod in self._guests(key) if self.copies.left(key, pod)]))
        if not snapshot.known and keys is not None:
            return  # a new hub is about to read the pool's record, and wakes this pool then; until then it would look leaderless
        for seconds in (snapshot.incomplete_seconds, snapshot.overdue_seconds):  # what is not known by the first is gone
            if seconds > 0:
                self.wake(key, seconds)
        if (again := next(filter(None, errors), None)) is not None:
            raise again

    def _gates(self, key: Key, pool: KVCachePool, seen: Observed, status: Json) -> Serving | None:
        """What the gates of the pool's pods should be, those of other namespaces, too."""
        uid, namespace = pool.metadata.uid, pool.metadata.namespace
        pods = [*seen.pods, *(pod for pod in self._guests(key) if not self.copies.left(key, pod))]
        for one in {one for pod in pods for one in affected(self.store, PODS.kind, pod)} if uid not in self._lives else ():
            self.wake(one, GATES_SECONDS)  # pods may have joined another pool of this name
        own = {engine["metadata"]["name"]: engine["spec"].get("serve") for engine in engines_of(self.store, namespace, pool.metadata.name)}
        overrides = {name: serve_of(serve) for name, serve in own.items() if serve}
        if seen.hub is not None:
            self._away.pop(uid, None)
        clock = time.monotonic()
        away = 0.0 if seen.hub is not None else clock - self._away.setdefault(uid, clock)
        stored = {(one["namespace"], one["fingerprint"]): one["id"] for one in status.get("servedWeights") or ()}
        lives = self._lives[uid] = lives_of(pods, self._lives.get(uid, {}), clock)
        default, lease = pool.spec.serve or ANYTHING, float(pool.spec.reset.lease_seconds)
        found = serving(pods, namespace, default, overrides, seen.hub, self._served.get(uid, stored), lives, lease, now(), clock, away)
        forbidden = self._forbidden.get(uid, "") if self.settings.gates else "the chart's value serve.gates is false"
        return found and replace(found, forbidden=forbidden)

    async def _turn(self, key: Key, uid: str, found: Serving) -> ApiError | None:
        """Write the gates. First those that open: what others make room for has to be there. Returns the error to try again on."""
        if found.look_again is not None:
            self.wake(key, max(found.look_again, GATES_SECONDS))
        failed = await self._write([turn for turn in found.turns if turn.opens])
        without = {turn.group for turn, _ in failed} - {""}
        failed += await self._write([turn for turn in found.turns if not turn.opens and turn.group not in without])
        errors = [error for _, error in failed]
        refused = next((error.message for error in errors if isinstance(error, Forbidden)), "")
        if refused != self._forbidden.get(uid, ""):
            self._forbidden[uid] = refused
            self.wake(key, GATES_SECONDS)  # the condition says so
        if any(isinstance(error, Conflict | NotFound) for error in errors):
            self.wake(key, GATES_SECONDS)  # the pod is gone, or about to be seen anew
        return next((error for error in errors if not isinstance(error, Conflict | Forbidden | NotFound)), None)

    async def _write(self, turns: Sequence[Turn]) -> list[tuple[Turn, ApiError]]:
        """Some at a time. One that fails holds up no other. A namespace that forbids so many in a row, or does not answer them, is not
        asked again. Returns those that fail, and why."""
        answers, refusals = list[ApiError | None](), dict[str, list[ApiError]]()
        for start in range(0, len(turns), GATES_AT_ONCE):
            answers += await asyncio.gather(*(self._write_gate(turn, refusals) for turn in turns[start : start + GATES_AT_ONCE]))
        return [(turn, error) for turn, error in zip(turns, answers, strict=True) if error is not None]

    async def _write_gate(self, turn: Turn, refusals: dict[str, list[ApiError]]) -> ApiError | None:
        ref = ref_of(turn.pod)
        if len(refused := refusals.setdefault(ref.namespace, [])) >= GATES_AT_ONCE:
            return refused[0]
        try:
            answer = await self.client.patch_condition(ref, turn.condition)
        except ApiError as error:
            refused += [error] if isinstance(error, Forbidden) or not error.status else []
            return error
        refused.clear()  # it was one pod that was forbidden, such as by a policy
        if home(answer) is not None and self.store.upsert(PODS.kind, answer):  # else nobody would tell us when it goes
            for key in affected(self.store, PODS.kind, answer):
                self.wake(key, GATES_SECONDS)  # it may show what a kubelet has changed, and the watch would show nothing new
        metrics.API_WRITES.labels(kind=PODS.kind, operation="gate").inc()
        log.info("gate written", pod=f"{ref.namespace}/{ref.name}", status=turn.condition["status"], reason=turn.condition["reason"])
        return None

    async def _forget(self, key: Key) -> None:
        failed = await self._open(key, [*self.store.found(PODS.kind, key.namespace, POOL_LABEL, key.name), *self._guests(key)])
        self.secrets.forget(key.namespace, key.name)
        for uid in self.hub(HubService.forget, key.namespace, key.name):
            for known in (self._away, self._forbidden, self._lives, self._served):
                known.pop(uid, None)
            log.info("pool gone", object=str(key), uid=uid)
        await self.copies.withdraw(key)
        if failed is not None:
            raise failed

    def _guests(self, key: Key) -> list[Json]:
        """Pods of other namespaces that mean this pool."""
        return self.store.found(PODS.kind, "", BY_HOME, f"{key.namespace}/{key.name}")

    async def _open(self, key: Key, pods: Sequence[Json]) -> ApiError | None:
        """Open the gates of pods whose pool is gone or lets them join no more, and of strays: nobody else does. Returns the error to try
        again on."""
        tried = tuple(strays := self.strays.get(key, []))
        found = serving([*pods, *tried], key.namespace, ANYTHING, {}, None, {}, {}, 0.0, now(), time.monotonic())
        failed = await self._write(found.turns if found is not None else ())
        left = [turn.pod for turn, error in failed if not isinstance(error, Conflict | NotFound)]
        strays[:] = [pod for pod in strays if pod in left or pod not in tried]
        return next((error for _, error in failed if not isinstance(error, Forbidden | NotFound)), None)

    async def _keys(self, key: Key, obj: Json) -> tuple[FenceKeys | None, Problem | None, ApiError | None]:
        """The pool's keys, what to tell the user where there are none, and the error to try again on."""
        uid = obj["metadata"]["uid"]
        before = self.secrets.of(uid).keys
        try:
            keys, note = await self.secrets.ensure(obj)
            if note:
                self.reporter.tell(obj, reason="SecretRestored", action="Secret", note=note)
            return keys, None, None
        except SecretConflict as error:
            return None, Problem("SecretConflict", str(error)), None
        except ApiError as error:
            known = self.secrets.of(uid)
            if known.keys is not None and error.status:  # rights that are being changed, or a KMS that is away, do not make them wrong
                return known.keys, None, error
            if known.refusal is None:
                raise
            return None, Problem("SecretRefused", known.refusal), error
        finally:
            if before is None:  # engines wait for this, or for the news that there is something to wait for
                for engine in engines_of(self.store, key.namespace, key.name):
                    self.wake(engine_key(key.namespace, engine["metadata"]["name"]), 0.0)

    async def _serve(self, key: Key, obj: Json, pool: KVCachePool, keys: FenceKeys) -> tuple[FenceKeys, Problem | None, ApiError | None]:
        """Have the hub serve the pool, and take the next step of replacing its client key, if one is due. Returns as `_keys`."""
        uid, generation = pool.metadata.uid, pool.spec.keys.generation
        due, known = keys.previous is None and keys.generation < generation, self.secrets.of(uid)
        if due:
            known.drawn = known.drawn or generate_keypair()

        def serve(now: FenceKeys) -> None:
            self.hub(HubService.ensure, pool, known.accepted, KeysView(now.generation, len(now.accepted)), new=known.new)

        # The new key before anybody can have it: an engine that reads the Secret the moment it changes must not be refused.
        serve(keys)
        try:
            if due:
                keys = await self.secrets.rotate(obj, generation)
            elif keys.previous is not None and self.hub(HubService.old_key_idle_seconds, uid) >= pool.spec.reset.fence_timeout_seconds:
                keys = await self.secrets.retire(obj)
        except ApiError as error:
            refused = Problem("SecretRefused", f"the pool's keys cannot be replaced: {error.message}")
            return keys, refused if isinstance(error, Forbidden | Invalid) else None, error
        serve(keys)
        if keys.previous is not None:
            self.wake(key, OLD_KEY_SECONDS)
        return keys, None, None


#: The pool wakes its engines when it has keys; this is for the case that it was not looked at yet.
WAIT_FOR_KEYS_SECONDS = 1.0
PROBLEM_SECONDS = 60.0  # after which an engine with one is looked at again: no watch shows that somebody else's object goes
POOL_WAIT_SECONDS = 5.0
"""For how long a new engine waits for its pool. Without one it starts alone, and starts again when the pool comes."""


@dataclass(eq=False)
class EngineReconciler(_Reconciler):
    _new: dict[Key, float] = field(default_factory=dict)
    _alone: set[Key] = field(default_factory=set)
    """Engines that were made without the keys of their pool."""

    async def _forget(self, key: Key) -> None:
        self._new.pop(key, None)
        self._alone.discard(key)

    async def _reconcile(self, key: Key, obj: Json) -> None:
        name = pool_of(obj)
        pool_obj = await self._pool(key.namespace, name) if name else None
        engine, pool = parse_engine(obj), parse_pool(pool_obj) if pool_obj is not None else None
        known = self.secrets.of(pool.metadata.uid) if pool is not None else PoolKeys()
        held = known.keys is None and (not known.conflict or (self._runs(key, engine) and key not in self._alone))
        if pool is not None and held:
            # Without the pool's keys a new engine would start twice, or wait for a volume, and one that runs would be rolled.
            if known.refusal is None:
                self.wake(key, WAIT_FOR_KEYS_SECONDS)
            else:
                await self._report(key, obj, engine, pool, _not_ready(pool, known.refusal))
            return
        if pool is None and name and (left := self._hold(key, engine)) > 0:
            self.wake(key, left)
            missing = f"KVCachePool {key.namespace}/{name} does not exist yet"
            text = f"{missing}: pods start when it does, or without it {POOL_WAIT_SECONDS:g} s after the engine"
            await self._report(key, obj, engine, None, Problem("WaitingForPool", text))
            return
        (self._alone.add if known.keys is None else self._alone.discard)(key)
        context = Context(self.settings, known.keys.revision if known.keys is not None else "", self.served())
        children = observe(self.store, key.namespace, ENGINE_LABEL, key.name)
        problem, again = await self.executor.bring_about(str(key), children, lambda seen: plan_engine(engine, pool, seen, context))
        if pool is not None and known.refusal is not None:
            problem = problem or _not_ready(pool, known.refusal)
        snapshot = await self._report(key, obj, engine, pool, problem)
        if not snapshot.known:
            return  # a new hub is about to read the pool's record, and wakes this engine then
        if snapshot.incomplete_seconds > 0:
            self.wake(key, snapshot.incomplete_seconds)  # what is not known by then is gone
        if again is not None:
            raise again
        if problem is not None:
            self.wake(key, PROBLEM_SECONDS)

    def _hold(self, key: Key, engine: InferenceEngine) -> float:
        """Seconds that an engine which has no pods yet may still wait for its pool."""
        now = time.monotonic()
        return 0.0 if self._runs(key, engine) else self._new.setdefault(key, now) + POOL_WAIT_SECONDS - now

    def _runs(self, key: Key, engine: InferenceEngine) -> bool:
        kind, name = workload_of(engine)
        return self.store.get(kind, key.namespace, name) is not None

    async def _pool(self, namespace: str, name: str) -> Json | None:
        """The pool, asked for at the API server before it counts as missing. One that is being deleted is missing.

        Events of pools and engines overtake each other, and an engine that is first made without its pool starts twice.
        """
        try:
            found = self.store.get(POOLS.kind, namespace, name) or await self.client.get(POOLS, namespace, name)
        except NotFound:
            return None
        return None if found["metadata"].get("deletionTimestamp") else found

    async def _report(self, key: Key, obj: Json, engine: InferenceEngine, pool: KVCachePool | None, problem: Problem | None) -> HubSnapshot:
        """Write the status, unless the hub does not know the pool yet; what the hub knows."""
        snapshot = HubSnapshot()

        def compute(newest: Json) -> Json:
            nonlocal snapshot
            status = newest.get("status") or {}
            snapshot = self.hub(HubService.snapshot, pool.metadata.uid) if pool is not None else snapshot
            seen = observe(self.store, key.namespace, ENGINE_LABEL, key.name, snapshot.view, problem or blind(self.refused(key.namespace)))
            return engine_status(engine, pool, seen, status, now()) if snapshot.known else status

        await self.reporter.report(obj, compute)
        return snapshot


@dataclass(eq=False)
class PodReconciler:
    """Says on pods with a pool's label why they did not join it, do not start, or that none of their engines reports; once for a pool."""

    store: Store
    reporter: Reporter
    secrets: FenceSecrets
    hub: HubProxy
    wake: Callable[[Key, float], None]
    unseen: Container[str | None]
    _told: dict[Key, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    """By name: the uids of the pod and of its pool, and what was said of it. Nothing more is, unless it has not started."""
    _ready_since: dict[Key, float] = field(default_factory=dict)
    """By our clock (monotonic): a kubelet's may be another."""

    async def reconcile(self, key: Key) -> None:
        pod = self.store.get(key.kind, key.namespace, key.name)
        if pod is None or not is_ready(pod):
            self._ready_since.pop(key, None)
        if pod is None:
            self._told.pop(key, None)
            raise ObjectGone(f"{key} is gone")
        (before, said), uids, meant = self._told.get(key, ((), "")), self._uids(pod), home(pod)
        if meant is None or (before == uids and said != "NotStarting"):
            return
        if meant.namespace in self.unseen or key.namespace in self.unseen:
            self.wake(key, START_SECONDS)  # nobody else looks at it when the right is back
            return
        pool = self.store.get(*meant)
        if why := explain(pod, self.store):
            self._tell(pod, "NotJoined", why)
        elif JOINED not in (pod["metadata"].get("annotations") or {}):
            return
        elif is_ready(pod) and pool is not None:
            self._ask(key, pod, pool)
        elif pod["status"].get("phase") == "Pending" and before != uids:
            self._wait(key, pod, meant, pool)

    def _wait(self, key: Key, pod: Json, meant: Key, pool: Json | None) -> None:
        """Whether the pod waits for something of ours, when it has had the time to start."""
        age = (now() - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])).total_seconds()
        refusal = self.secrets.of(pool["metadata"]["uid"]).refusal if pool is not None else None
        if age >= START_SECONDS and (why := held_up(pod, meant, pool, refusal)):
            self._tell(pod, "NotStarting", why)
        else:
            self.wake(key, max(START_SECONDS - age, START_SECONDS / 4))

    def _ask(self, key: Key, pod: Json, pool: Json) -> None:
        """Whether the hub has heard of an engine of this pod, when it has had the time to."""
        lease = float(pool["spec"]["reset"]["leaseSeconds"])
        ready_seconds = time.monotonic() - self._ready_since.setdefault(key, time.monotonic())
        if ready_seconds < lease:
            self.wake(key, lease - ready_seconds)
            return
        snapshot = self.hub(HubService.snapshot, pool["metadata"]["uid"])
        view = snapshot.view
        if view is None or not view.complete:
            self.wake(key, snapshot.incomplete_seconds or lease)  # not sooner: the hub looks at all engines for each pod that asks
        elif any(engine.pod == key.name and engine.namespace in ("", key.namespace) for engine in view.engines):
            self._told[key] = self._uids(pod), ""
        else:
            self._tell(pod, "NotReporting", silent(pod, lease), warning=False)

    def _tell(self, pod: Json, reason: str, note: str, *, warning: bool = True) -> None:
        key = key_of(pod["kind"], pod)
        if self.reporter.tell(pod, reason=reason, action="Join", note=note, warning=warning):
            self._told[key] = self._uids(pod), reason
        else:
            self.wake(key, START_SECONDS)

    def _uids(self, pod: Json) -> tuple[str, ...]:
        meant = home(pod)
        return tuple(one["metadata"]["uid"] for one in (pod, self.store.get(*meant) if meant is not None else None) if one is not None)


def _not_ready(pool: KVCachePool, refusal: str) -> Problem:
    return Problem("PoolNotReady", f"KVCachePool {pool.metadata.name} has no keys: {refusal}")
