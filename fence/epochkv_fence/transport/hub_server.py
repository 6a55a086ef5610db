"""The hub of one authority: the pools' state machines, the leadership reads that serve them all, and what they ask to be done.

Everything runs in one event loop: bursts of messages (`router`), one timer for all that is due, and a task with a deadline
for every call to the authority or a store. A read that does not answer means no grants in that round; only a read that
answers "somebody else" makes this hub step down.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import zmq

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Authority, Origin, PoolRecord, Term
from epochkv_fence.hub import Hub
from epochkv_fence.messages import INSTANCE_BYTES, Message, Source
from epochkv_fence.pool import PoolConfig, PoolSnapshot
from epochkv_fence.store_admin import Removed, StoreAdmin, StoreAdminError
from epochkv_fence.transport.calls import Calls
from epochkv_fence.transport.keys import HubKeys, check_key
from epochkv_fence.transport.limits import POOL_BURST, POOL_RATE, Bucket
from epochkv_fence.transport.router import Lane, Router

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUND_GAP_SECONDS: Final = 0.005
MAX_SLEEP_SECONDS: Final = 1.0
FAILED_TURN_SECONDS: Final = 0.25
LOAD_RETRY_SECONDS: Final = 0.25
MAX_LOAD_RETRY_SECONDS: Final = 2.0
STOP_SECONDS: Final = 2.0
STORE_DEADLINE_SECONDS: Final = 8.0
CHANGE_SHARE: Final = 0.05
"""Changes other than of epochs are told so seldom that telling them takes no more than this share of the time: what is told
may look at every engine of a pool."""
MIN_CHANGE_GAP_SECONDS: Final = 0.02


class UnknownPool(KeyError):
    """The hub has no pool of this uid; `set_pool` first."""

    def __str__(self) -> str:
        return f"the hub has no pool with uid {self.args[0]!r}; call set_pool first"


class _Pool:
    """A pool's state machine and what its driver keeps beside it. A pool that is removed and set again is a new one."""

    def __init__(self, config: PoolConfig, instance: bytes) -> None:
        self.config = config
        self.hub = Hub(config, instance)
        self.bucket = Bucket.full(POOL_RATE, POOL_BURST, time.monotonic())
        self.told: tuple[int, int, bool] | None = None
        self.tell_at = -math.inf

    def epochs(self) -> tuple[int, int, bool]:
        """Changes of these are told at once."""
        return self.hub.target, self.hub.published, self.hub.term is not None


class HubServer:
    """All pools of one authority.

    Use from one event loop; nothing here is thread-safe. Nothing but `start` raises for reasons outside this process.

    Args:
        bind: such as `tcp://*:7700`; port 0 takes a free one (see `endpoint`).
        authority: durable records and the leadership read.
        on_change: called with a pool's uid when its snapshot has changed; many changes may come as one call.
        on_step_down: called when a leadership read shows that somebody else leads.
        authority_deadline_seconds: for every single call to the authority.
        stores: empties the stores of pools whose configuration says that it can (`store_admin`).
        store_deadline_seconds: for every single call to it.
    """

    def __init__(
        self,
        bind: str,
        keys: HubKeys,
        authority: Authority,
        *,
        on_change: Callable[[str], None] | None = None,
        on_step_down: Callable[[], None] | None = None,
        authority_deadline_seconds: float = 3.0,
        stores: StoreAdmin | None = None,
        store_deadline_seconds: float = STORE_DEADLINE_SECONDS,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self._bind = bind
        self._authority = authority
        self._stores = stores
        self._on_change = on_change or (lambda uid: None)
        self._on_step_down = on_step_down or (lambda: None)
        self._deadline = authority_deadline_seconds
        self._store_deadline = store_deadline_seconds
        self._calls = Calls(self.counters)
        self._pools: dict[str, _Pool] = {}
        self._lanes: dict[str, Lane] = {}
        self._changed: set[str] = set()
        self._term: Term | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._round_number = 0
        self._round_running = False
        self._round_began = -math.inf
        self._router = Router(keys, self, self.counters)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look_soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.endpoint = ""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind and begin.

        Raises:
            OSError: the address cannot be bound (zmq.ZMQError is one).
        """
        self._loop = asyncio.get_running_loop()
        try:
            self.endpoint = self._router.open(self._bind)
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"hub cannot listen on {self._bind}: {error.strerror}") from error
        self._look()

    async def stop(self) -> None:
        """Step down, end every task and close the socket; returns within seconds, also when the authority hangs."""
        self._abandon_term()
        self._loop = None
        for handle in (self._look_soon, self._timer):
            if handle is not None:
                handle.cancel()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        self._tasks.clear()
        self._router.close()

    # ------------------------------------------------------------------ pools

    def set_pool(self, config: PoolConfig) -> None:
        """Add a pool, or change the configuration of one (same uid). Two keys may be accepted while one is replaced.

        Raises:
            ValueError: a key is malformed or belongs to another pool.
        """
        for key in config.client_public_keys:
            check_key(f"client public key of pool {config.name!r}", key)
            owner = self._owner(key)
            if owner is not None and owner.config.uid != config.uid:
                raise ValueError(f"pool {config.name!r} has the client key of pool {owner.config.name!r}; give each pool its own key pair")
        pool = self._pools.get(config.uid)
        if pool is None:
            pool = self._pools[config.uid] = _Pool(config, self.instance)
            self._map_keys(pool, config)
            if self._term is not None:
                self._spawn(self._acquire(pool, self._term))
        elif pool.config != config:
            self._map_keys(pool, config)
            pool.config = config
            self._step(pool, ev.Configured(config))

    add_pool = set_pool

    def _map_keys(self, pool: _Pool, config: PoolConfig) -> None:
        self._unmap_keys(pool)
        for index, key in enumerate(config.client_public_keys):
            self._lanes.setdefault(key, Lane(pool, index, pool.bucket))

    def _unmap_keys(self, pool: _Pool) -> None:
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.pool is not pool}

    def _owner(self, key: str) -> _Pool | None:
        lane = self._lanes.get(key)
        return lane.pool if lane is not None and isinstance(lane.pool, _Pool) else None

    def remove_pool(self, uid: str) -> None:
        """Forget a pool: its clients are answered with an error and their leases run out. Unknown uids are ignored."""
        pool = self._pools.pop(uid, None)
        if pool is not None:
            self._unmap_keys(pool)
            pool.hub.step(ev.SteppedDown(), time.monotonic())
            self._changed.discard(uid)
            self._calls.forget(pool.config.name)

    def request(
        self,
        uid: str,
        epoch: int,
        *,
        fresh: bool = True,
        since: float | None = None,
        weights_version: str = "",
        weights_ready: bool = True,
    ) -> None:
        """`spec.resetEpoch` asks for `epoch`. Remembered while this hub does not lead; lower or repeated asks change nothing.

        Args:
            fresh: it was asked for just now (an edge that was watched). False: it may have been asked for long ago (found
                in a listing after a start or a gap), so that a boot's age says nothing about its weights.
            since: of a fresh one: it was asked for no earlier than this, on this process's monotonic clock; None: now.
            weights_version: `spec.weightsVersion`.
            weights_ready: False: there is a version, and `spec.weightsReady` is not equal to it yet. The same epoch asked
                for again with True lets boots use it.

        Raises:
            UnknownPool
        """
        now = time.monotonic()
        at = (now if since is None else min(since, now)) if fresh else None
        self._step(self._pool(uid), ev.Asked(epoch, at, Origin(Source.SPEC, weights_version), weights_ready))

    def observe(self, uid: str, record: PoolRecord) -> None:
        """The pool's durable record was seen, for example by a watch; however old, it never lowers anything.

        Raises:
            UnknownPool
        """
        self._step(self._pool(uid), ev.Observed(record))

    def snapshot(self, uid: str) -> PoolSnapshot:
        """The pool right now.

        Raises:
            UnknownPool
        """
        now = time.monotonic()
        shift = time.time() - now
        found = self._pool(uid).hub.snapshot(now)
        started, published = found.started_at, found.published_at
        return replace(
            found,
            started_at=None if started is None else started + shift,
            published_at=None if published is None else published + shift,
        )

    def _pool(self, uid: str) -> _Pool:
        try:
            return self._pools[uid]
        except KeyError:
            raise UnknownPool(uid) from None

    # ------------------------------------------------------------------ leadership

    @property
    def leading(self) -> bool:
        """Whether this hub believes that it leads."""
        return self._term is not None

    def lead(self, term: Term) -> None:
        """The write that acquired leadership in `term` has returned. The same term again changes nothing."""
        if term == self._term:
            return
        self._abandon_term()
        self._term = term
        for pool in self._pools.values():
            self._spawn(self._acquire(pool, term))

    def step_down(self) -> None:
        """Leadership was given up or lost: no grants, nothing published."""
        if self._term is not None:
            self._abandon_term()

    def _abandon_term(self) -> None:
        self._term = None
        for pool in self._pools.values():
            self._step(pool, ev.SteppedDown())

    async def _acquire(self, pool: _Pool, term: Term) -> None:
        """Read the pool's record, after the term was won, until it answers."""
        pause = LOAD_RETRY_SECONDS
        while self._current(pool) and self._term == term:
            record = await self._ask(pool, "load", partial(self._authority.load, pool.config.uid))
            if record is not None:
                if self._current(pool) and self._term == term:
                    self._step(pool, ev.Acquired(term, record))
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LOAD_RETRY_SECONDS)

    def _current(self, pool: _Pool) -> bool:
        return self._pools.get(pool.config.uid) is pool

    # ------------------------------------------------------------------ time and rounds

    def _look(self) -> None:
        """See to what is due, soon: many events may come as one look."""
        if self._look_soon is None and self._loop is not None:
            self._look_soon = self._loop.call_soon(self._look_now)

    def _look_now(self) -> None:
        if self._look_soon is not None:
            self._look_soon.cancel()
            self._look_soon = None
        if self._loop is None:
            return
        now = time.monotonic()
        try:
            due = self._turn(now)
        except Exception:
            self.counters["turns_failed"] += 1
            logger.exception("the hub's turn failed")
            due = now + FAILED_TURN_SECONDS
        when = self._loop.time() + max(0.0, due - now)
        if self._timer is not None:
            if self._timer.when() <= when and not self._timer.cancelled():
                return  # it comes earlier, and looks again
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._look_now()

    def _turn(self, now: float) -> float:
        """Everything that is due; returns when to look again (at the latest: what happens looks again by itself)."""
        pools = list(self._pools.values())
        for pool in pools:
            if now >= pool.hub.tick_at():
                self._act(pool, ev.Tick())
        due = min((pool.hub.tick_at() for pool in pools), default=math.inf)
        due = min(due, self._tell_changes(now))
        if not self._round_running and self._term is not None:
            round_due = min((pool.hub.round_at(now) for pool in pools), default=math.inf)
            round_due = max(round_due, self._round_began + ROUND_GAP_SECONDS)
            if round_due <= now:
                self._round_running = True
                self._round_began = now
                self._spawn(self._round(self._term))
            else:
                due = min(due, round_due)
        return min(due, now + MAX_SLEEP_SECONDS)

    async def _round(self, term: Term) -> None:
        """Collect and evaluate; read leadership once, for all pools; then grant and publish."""
        try:
            if self._term != term:
                return
            self._round_number += 1
            number = self._round_number
            pools = list(self._pools.values())
            for pool in pools:
                self._act(pool, ev.RoundBegan(number))
            pools = [pool for pool in pools if pool.hub.round_open]
            if not pools:
                return
            leads = await self._ask(None, "verify", partial(self._authority.verify, term))
            if self._term != term:
                return
            if leads is False:
                logger.warning("another hub leads now; stepping down from %s", term)
                self._abandon_term()
                self._on_step_down()
                return
            for pool in pools:
                if self._current(pool):
                    self._act(pool, ev.RoundVerified(number) if leads else ev.RoundDropped(number))
        finally:
            self._round_running = False
            self._look()

    # ------------------------------------------------------------------ effects

    def _step(self, pool: _Pool, event: ev.Event) -> None:
        self._act(pool, event)
        self._look()

    def _act(self, pool: _Pool, event: ev.Event) -> None:
        for action in pool.hub.step(event, time.monotonic()):
            if type(action) is ev.Send:
                self._router.send(action.peer, action.message)
            else:
                self._do(pool, action)

    def _do(self, pool: _Pool, action: ev.Action) -> None:
        uid = pool.config.uid
        match action:
            case ev.Send(peer, message):
                self._router.send(peer, message)
            case ev.Record(epoch, origin):
                write = partial(self._authority.record, uid, epoch, origin)
                self._spawn(self._write(pool, "record", write, ev.Recorded(epoch), ev.RecordFailed(epoch)))
            case ev.Publish(epoch):
                write = partial(self._authority.publish, uid, epoch)
                self._spawn(self._write(pool, "publish", write, ev.Published(epoch), ev.PublishFailed(epoch)))
            case ev.NoteGranting():
                write = partial(self._authority.note_granting, uid)
                self._spawn(self._write(pool, "note", write, ev.Noted(), ev.NoteFailed()))
            case ev.Wipe(epoch, before):
                self._spawn(self._empty(pool, "wipe", before, partial(ev.Wiped, epoch), ev.WipeFailed(epoch)))
            case ev.Sweep(below):
                self._spawn(self._empty(pool, "sweep", None, partial(ev.Swept, below), ev.SweepFailed(below)))
            case ev.Changed():
                self._changed.add(uid)

    async def _ask(self, pool: _Pool | None, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        name = pool.config.name if pool is not None else "leadership"
        return await self._calls.call(name, what, self._deadline, call)

    async def _write(self, pool: _Pool, what: str, write: Callable[[], Awaitable[None]], done: ev.Event, failed: ev.Event) -> None:
        async def answer() -> bool:
            await write()
            return True

        answered = await self._ask(pool, what, answer)
        if self._current(pool):
            self._step(pool, done if answered else failed)

    async def _empty(
        self, pool: _Pool, what: str, force_before: float | None, done: Callable[[int, int | None], ev.Event], failed: ev.Event
    ) -> None:
        """Have the store's admin remove everything: also what is being read, but then only before `force_before`."""

        async def remove() -> Removed:
            if self._stores is None:
                raise StoreAdminError("this hub was started without access to any store's admin endpoint")
            if force_before is None:
                return await self._stores.remove_all(pool.config.uid, force=False)
            return await self._stores.remove_all(pool.config.uid, force=True, before=force_before)

        removed = await self._calls.call(pool.config.name, what, self._store_deadline, remove)
        if self._current(pool):
            self._step(pool, failed if removed is None else done(removed.keys, removed.num_bytes))

    def _tell_changes(self, now: float) -> float:
        """Tell what changed, if it may be told now; returns when to tell the rest."""
        due = math.inf
        for uid in list(self._changed):
            pool = self._pools[uid]
            epochs = pool.epochs()
            if epochs == pool.told and now < pool.tell_at:
                due = min(due, pool.tell_at)
                continue
            self._changed.discard(uid)
            pool.told = epochs
            began = time.monotonic()
            try:
                self._on_change(uid)
            except Exception:
                logger.exception("on_change failed for pool %s", uid)
            ended = time.monotonic()
            pool.tell_at = ended + max(MIN_CHANGE_GAP_SECONDS, (ended - began) / CHANGE_SHARE)
        return due

    # ------------------------------------------------------------------ what the router calls

    def lane(self, key: str) -> Lane | None:
        """Which pool a client's key speaks for."""
        return self._lanes.get(key)

    def take(self, lane: Lane, peer: bytes, message: Message) -> None:
        """A message of a client."""
        assert isinstance(lane.pool, _Pool)
        self._act(lane.pool, ev.Heard(peer, message, lane.key_index))

    def burst_done(self) -> None:
        """A burst of messages has been taken."""
        self._look_now()

    # ------------------------------------------------------------------ helpers

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.counters["tasks_failed"] += 1
            logger.error("a task of the hub failed", exc_info=task.exception())
