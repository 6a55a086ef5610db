"""The hub of one authority: the pools' state machines, the leadership reads that serve them all, and what they ask to be done.

Everything runs in one event loop: bursts of messages (`router`) and one timer for all that is due. Every call to the authority or
a store is a task with a deadline. A read that does not answer means no grants in that round; only a read that
answers "somebody else" makes this hub step down. A pool whose step fails is tried again, and harms no other pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import zmq

from epochkv_fence.hub import events as ev
from epochkv_fence.net.calls import Calls
from epochkv_fence.net.changes import Changes
from epochkv_fence.net.keys import HubKeys, check_key
from epochkv_fence.net.router import Lane, Router
from epochkv_fence.net.served import ServedPool
from epochkv_fence.protocol.authority import Authority, Origin, PoolRecord, Term
from epochkv_fence.protocol.messages import Message, Source
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot
from epochkv_fence.stores.admin import Removed, StoreAdmin, StoreAdminError

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUND_GAP_SECONDS: Final = 0.005
MAX_SLEEP_SECONDS: Final = 1.0
FAILED_TURN_SECONDS: Final = 0.25
LOAD_RETRY_SECONDS: Final = 0.25
MAX_LOAD_RETRY_SECONDS: Final = 2.0
STOP_SECONDS: Final = 2.0
STORE_DEADLINE_SECONDS: Final = 8.0
QUIET_SECONDS: Final = 10.0
"""Between two stack traces of one pool: whoever makes its steps fail may do so without end."""


class UnknownPool(KeyError):
    """The hub has no pool of this uid; `set_pool` first."""

    def __str__(self) -> str:
        return f"the hub has no pool with uid {self.args[0]!r}; call set_pool first"


class HubServer:
    """All pools of one authority.

    Use from one event loop; nothing here is thread-safe. Nothing but `start` raises for reasons outside this process.

    Args:
        bind: such as `tcp://*:7700`; port 0 takes a free one (see `endpoint`).
        authority: durable records and the leadership read.
        on_change: called with a pool's uid when its snapshot has changed; many changes may come as one call.
        on_step_down: called when a leadership read shows that this process does not lead any more.
        why_deposed: says why, for the log.
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
        why_deposed: Callable[[], str] = lambda: "another hub leads now",
        authority_deadline_seconds: float = 3.0,
        stores: StoreAdmin | None = None,
        store_deadline_seconds: float = STORE_DEADLINE_SECONDS,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._bind = bind
        self._authority = authority
        self._stores = stores
        self._changes = Changes(on_change or (lambda uid: None))
        self._on_step_down = on_step_down or (lambda: None)
        self._why_deposed = why_deposed
        self._deadline = authority_deadline_seconds
        self._store_deadline = store_deadline_seconds
        self._calls = Calls(self.counters)
        self._pools: dict[str, ServedPool] = {}
        self._lanes: dict[str, Lane] = {}
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
            pool = self._pools[config.uid] = ServedPool(config)
            self._map_keys(pool, config)
            if self._term is not None:
                self._spawn(self._acquire(pool, self._term))
        elif pool.config != config:
            self._map_keys(pool, config)
            pool.config = config
            self._step(pool, ev.Configured(config))

    def _map_keys(self, pool: ServedPool, config: PoolConfig) -> None:
        self._unmap_keys(pool)
        for index, key in enumerate(config.client_public_keys):
            self._lanes.setdefault(key, pool.lane(index))

    def _unmap_keys(self, pool: ServedPool) -> None:
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.pool is not pool}

    def _owner(self, key: str) -> ServedPool | None:
        lane = self._lanes.get(key)
        return lane.pool if lane is not None and isinstance(lane.pool, ServedPool) else None

    def remove_pool(self, uid: str) -> None:
        """Forget a pool: its clients are answered with an error and their leases run out. Unknown uids are ignored."""
        pool = self._pools.pop(uid, None)
        if pool is not None:
            self._unmap_keys(pool)
            self._act(pool, ev.SteppedDown())
            self._changes.forget(uid)
            self._calls.forget(pool.config.name)

    def request(self, uid: str, epoch: int) -> None:
        """`spec.resetEpoch` asks for `epoch`. Remembered while this hub does not lead; lower or repeated asks change nothing.

        Raises:
            UnknownPool
        """
        self._step(self._pool(uid), ev.Asked(epoch, Origin(Source.SPEC)))

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

    def _pool(self, uid: str) -> ServedPool:
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

    async def _acquire(self, pool: ServedPool, term: Term) -> None:
        """Read the pool's record, after the term was won, until it answers."""
        pause = LOAD_RETRY_SECONDS
        while self._current(pool) and self._term == term:
            record = await self._ask(pool, "load", partial(self._authority.load, pool.config.uid))
            if record is not None and self._current(pool) and self._term == term and self._step(pool, ev.Acquired(term, record)):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LOAD_RETRY_SECONDS)

    def _current(self, pool: ServedPool) -> bool:
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
        due = min((self._tick(pool, now) for pool in pools), default=math.inf)
        due = min(due, self._changes.tell(self._epochs, now))
        if not self._round_running and self._term is not None:
            round_due = min((self._guard(pool, partial(pool.round_at, now), math.inf) for pool in pools), default=math.inf)
            round_due = max(round_due, self._round_began + ROUND_GAP_SECONDS)
            if round_due <= now:
                self._round_running = True
                self._round_began = now
                self._spawn(self._round(self._term))
            else:
                due = min(due, round_due)
        return min(due, now + MAX_SLEEP_SECONDS)

    def _tick(self, pool: ServedPool, now: float) -> float:
        """What is due of one pool; returns when its next tick is."""
        due = self._guard(pool, pool.tick_at, now + FAILED_TURN_SECONDS)
        if now < due:
            return due
        if not self._act(pool, ev.Tick()):
            pool.failed_until = now + FAILED_TURN_SECONDS
        return self._guard(pool, pool.tick_at, now + FAILED_TURN_SECONDS)

    def _epochs(self, uid: str) -> tuple[int, int, bool]:
        hub = self._pools[uid].hub
        return hub.target, hub.published, hub.term is not None

    async def _round(self, term: Term) -> None:
        """Collect and evaluate; read leadership once, for all pools; then grant and publish."""
        begun: list[ServedPool] = []
        self._round_number += 1
        number = self._round_number
        try:
            if self._term != term:
                return
            now = time.monotonic()
            begun = [pool for pool in self._pools.values() if now >= pool.failed_until]
            for pool in begun:
                self._act_in_round(pool, ev.RoundBegan(number))
            if not any(pool.hub.round_open for pool in begun):
                return
            leads = await self._ask(None, "verify", partial(self._authority.verify, term))
            if self._term != term:
                return
            if leads is False:
                logger.warning("%s; stepping down from %s", self._why_deposed(), term)
                self._abandon_term()
                self._on_step_down()
                return
            for pool in begun if leads else ():
                if self._current(pool):
                    self._act_in_round(pool, ev.RoundVerified(number))
        finally:
            self._round_running = False
            for pool in begun:  # nothing, for those whose round is over
                self._act(pool, ev.RoundDropped(number))
            self._look()

    # ------------------------------------------------------------------ effects

    def _step(self, pool: ServedPool, event: ev.Event) -> bool:
        stepped = self._act(pool, event)
        self._look()
        return stepped

    def _act(self, pool: ServedPool, event: ev.Event) -> bool:
        """Step one pool and do what it asks for; never raises. Returns whether all of that worked."""
        try:
            for action in pool.hub.step(event, time.monotonic()):
                if type(action) is ev.Send:
                    self._router.send(action.peer, action.message)
                else:
                    self._do(pool, action)
        except Exception:
            self._step_failed(pool)
            return False
        return True

    def _act_in_round(self, pool: ServedPool, event: ev.Event) -> None:
        if not self._act(pool, event):
            pool.failed_until = time.monotonic() + FAILED_TURN_SECONDS

    def _guard(self, pool: ServedPool, look: Callable[[], float], otherwise: float) -> float:
        """What `look` finds out about a pool; never raises."""
        try:
            return look()
        except Exception:
            self._step_failed(pool)
            return otherwise

    def _step_failed(self, pool: ServedPool) -> None:
        self.counters["steps_failed"] += 1
        now = time.monotonic()
        if now >= pool.quiet_until:
            pool.quiet_until = now + QUIET_SECONDS
            logger.exception("pool %s: the hub failed to take a step, and tries again; other pools go on", pool.config.name)

    def _do(self, pool: ServedPool, action: ev.Action) -> None:
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
            case ev.NoteLabels(labels):
                write = partial(self._authority.note_labels, uid, labels)
                self._spawn(self._write(pool, "note labels", write, ev.LabelsNoted(labels), ev.LabelsNoteFailed(labels)))
            case ev.Wipe(epoch):
                self._spawn(self._empty(pool, "wipe", partial(ev.Wiped, epoch), ev.WipeFailed(epoch)))
            case ev.Sweep(below):
                self._spawn(self._empty(pool, "sweep", partial(ev.Swept, below), ev.SweepFailed(below)))
            case ev.Changed():
                self._changes.add(uid)

    async def _ask(self, pool: ServedPool | None, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        name = pool.config.name if pool is not None else "leadership"
        return await self._calls.call(name, what, self._deadline, call)

    async def _write(self, pool: ServedPool, what: str, write: Callable[[], Awaitable[None]], done: ev.Event, failed: ev.Event) -> None:
        async def answer() -> bool:
            await write()
            return True

        answered = await self._ask(pool, what, answer)
        if self._current(pool) and not (answered and self._step(pool, done)):
            self._step(pool, failed)

    async def _empty(self, pool: ServedPool, what: str, done: Callable[[int, int | None], ev.Event], failed: ev.Event) -> None:
        """Have the store's admin remove everything that nobody reads."""

        async def remove() -> Removed:
            if self._stores is None:
                raise StoreAdminError("this hub was started without access to any store's admin endpoint")
            return await self._stores.remove_all(pool.config.uid)

        removed = await self._calls.call(pool.config.name, what, self._store_deadline, remove)
        if self._current(pool) and (removed is None or not self._step(pool, done(removed.keys, removed.num_bytes))):
            self._step(pool, failed)

    # ------------------------------------------------------------------ what the router calls

    def lane(self, key: str) -> Lane | None:
        """Which pool a client's key speaks for."""
        return self._lanes.get(key)

    def cost(self, lane: Lane, message: Message) -> float:
        """What a message takes from its pool's costs."""
        assert isinstance(lane.pool, ServedPool)
        return lane.pool.cost(message)

    def take(self, lane: Lane, peer: bytes, message: Message) -> None:
        """A message of a client."""
        assert isinstance(lane.pool, ServedPool)
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
