"""A hub on its socket: one state machine per pool, stepped on one event loop, and the effects that they ask for."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import zmq

from epochkv_fence.common import SayOnce, Seldom, end
from epochkv_fence.hub.machine import Hub
from epochkv_fence.mooncake_admin import StoreAdmin, StoreAdminError
from epochkv_fence.net.gate import INSTANCES_PER_COST, Client, PoolLimits, Router
from epochkv_fence.net.keys import KeyPair, check_key
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Bump, Label, Message, Source, Status
from epochkv_fence.protocol.pool import Authority, AuthorityError, PoolConfig, PoolRecord, PoolSnapshot, Term

logger = logging.getLogger(__name__)

FAILED_TURN_SECONDS: Final = 0.25


@dataclass(eq=False)
class Alarm:
    """Takes a turn when one is due, and when something happened."""

    _turn: Callable[[float], float]
    """Does what is due by a time of the monotonic clock; returns when the next turn is due."""
    _counters: Counter[str]
    _loop: asyncio.AbstractEventLoop | None = None
    _soon: asyncio.Handle | None = None
    _timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self._loop = None
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()

    def soon(self) -> None:
        """Something happened. The turn comes a little later, so that many events may share one."""
        if self._soon is None and self._loop is not None:
            self._soon = self._loop.call_soon(self.now)

    def now(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._loop is None:
            return
        now = time.monotonic()
        try:
            due = self._turn(now)
        except Exception:
            self._counters["loop_failed"] += 1
            logger.exception("an iteration of the hub's loop failed")
            due = now + FAILED_TURN_SECONDS
        when = self._loop.time() + max(0.0, due - now)
        if self._timer is not None:
            if self._timer.when() <= when and not self._timer.cancelled():
                return  # it comes earlier, and looks again
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self.now()


# ----------------------------------------------------------------------------------------------------------------------
# The pools that a hub serves: for each its state machine, the keys and limits of its clients, and the care for steps that fail.


CHANGE_SHARE: Final = 0.05
"""Reporting changes other than of epochs takes no more than this share of the time. Who hears of it may read every engine."""
MIN_CHANGE_GAP_SECONDS: Final = 0.02
FAILED_STEP_SECONDS: Final = 0.25
QUIET_SECONDS: Final = 10.0
"""Between two stack traces of one pool: whoever makes its steps fail may do so without end."""


class ServedPool(PoolLimits):
    """A pool's state machine and what its driver keeps beside it. A pool that is removed and set again is a new one.

    Attributes:
        say: logs which of the calls for it fail.
        changed: its snapshot has, and the hub's owner has not heard of it.
        failed_until: a tick or round of it failed; the next one comes not before.
    """

    def __init__(self, config: PoolConfig) -> None:
        super().__init__()
        self.config = config
        self.hub = Hub(config)
        self.say = SayOnce(logger, first="")
        self.changed = False
        self._reported: object = None
        self._report_at = -math.inf
        self.failed_until = -math.inf
        self._traces = Seldom(logger, QUIET_SECONDS)

    def cost(self, message: Message) -> float:
        return 1.0 + len(self.hub.state.instances.known) / INSTANCES_PER_COST if isinstance(message, Bump | Label | Status) else 0.0

    def snapshot(self) -> PoolSnapshot:
        """The pool right now, in Unix seconds."""
        now = time.monotonic()
        shift = time.time() - now
        found = self.hub.snapshot(now)
        times = {name: getattr(found, name) for name in ("started_at", "behind_since", "published_at")}
        return replace(found, **{name: at + shift for name, at in times.items() if at is not None})

    def report(self, on_change: Callable[[str], None], now: float) -> float:
        """Report a change: at once when an epoch did, else so seldom that it costs little. Returns when to report it."""
        if not self.changed:
            return math.inf
        record = self.hub.state.record
        epochs = record.target, record.published, self.hub.state.leading
        if epochs == self._reported and now < self._report_at:
            return self._report_at
        self.changed, self._reported = False, epochs
        began = time.monotonic()
        try:
            on_change(self.config.uid)
        except Exception:
            logger.exception("on_change failed for pool %s", self.config.uid)
        ended = time.monotonic()
        self._report_at = ended + max(MIN_CHANGE_GAP_SECONDS, (ended - began) / CHANGE_SHARE)
        return math.inf

    # ------------------------------------------------------------------ what is due, whatever fails

    def tick_at(self, counters: Counter[str], now: float) -> float:
        return self._due(self.hub.tick_at, counters, now + FAILED_STEP_SECONDS)

    def round_at(self, counters: Counter[str], now: float) -> float:
        return self._due(lambda: self.hub.round_at(now), counters, math.inf)

    def _due(self, when: Callable[[], float], counters: Counter[str], otherwise: float) -> float:
        try:
            return max(when(), self.failed_until)
        except Exception:
            self.failed(counters)
            return otherwise

    def failed(self, counters: Counter[str]) -> None:
        """A step raised what is being handled: count it, and log it now and then."""
        counters["pool_step_failed"] += 1
        self._traces("", logging.ERROR, "pool %s: the hub failed to take a step, and tries again", self.config.name, exc_info=True)

    def back_off(self) -> None:
        """A tick or round of it failed, so the next one waits."""
        self.failed_until = time.monotonic() + FAILED_STEP_SECONDS


class Pools:
    """All pools of one hub. Whoever iterates may add and remove pools meanwhile."""

    def __init__(self) -> None:
        self._pools: dict[str, ServedPool] = {}
        self._clients: dict[str, Client] = {}

    def __iter__(self) -> Iterator[ServedPool]:
        return iter(list(self._pools.values()))

    def __getitem__(self, uid: str) -> ServedPool:
        return self._pools[uid]

    def __contains__(self, pool: ServedPool) -> bool:
        """The hub still serves this pool. One that was removed and set again is another pool."""
        return self._pools.get(pool.config.uid) is pool

    def client(self, key: str) -> Client | None:
        return self._clients.get(key)

    def put(self, config: PoolConfig) -> tuple[ServedPool, PoolConfig | None]:
        """Add a pool, or give it another configuration. Returns the pool, and its configuration before; None: it is new.

        Raises:
            ValueError: a key is malformed or belongs to another pool.
        """
        for key in config.client_public_keys:
            check_key(f"client public key of pool {config.name!r}", key)
            owner = client.pool if (client := self._clients.get(key)) is not None else None
            if isinstance(owner, ServedPool) and owner.config.uid != config.uid:
                raise ValueError(f"pool {config.name!r} has the client key of pool {owner.config.name!r}; give each pool its own key pair")
        pool = self._pools.get(config.uid)
        before = pool.config if pool is not None else None
        if pool is None:
            pool = self._pools[config.uid] = ServedPool(config)
        if before != config:
            self._forget_keys(pool)
            for index, key in enumerate(config.client_public_keys):
                self._clients.setdefault(key, Client(pool, index))
            pool.config = config
        return pool, before

    def remove(self, uid: str) -> ServedPool | None:
        """Forget a pool; None: the hub has none of this uid."""
        pool = self._pools.pop(uid, None)
        if pool is not None:
            self._forget_keys(pool)
        return pool

    def _forget_keys(self, pool: ServedPool) -> None:
        self._clients = {key: client for key, client in self._clients.items() if client.pool is not pool}


# ----------------------------------------------------------------------------------------------------------------------
# What the state machines of pools ask a hub to do outside of it: calls to the authority and to stores.
#
# Every call is a task with a deadline, and its answer goes back to the state machine as an event. None ever raises. The log says
# only when a call stops or starts to work.


T = TypeVar("T")

STOP_SECONDS: Final = 2.0
WRITES: Final[dict[type[ev.Call], str]] = {
    ev.RecordTarget: "record_target",
    ev.Publish: "publish_epoch",
    ev.NoteGranting: "record_granting",
    ev.NoteLabels: "record_labels",
}
"""What counters and the log call them."""


@dataclass(eq=False)
class Effects:
    """Makes the calls, and counts those that fail."""

    _authority: Authority
    _deadline: float
    _stores: StoreAdmin | None
    """None: this hub reaches no store."""
    _store_deadline: float
    _counters: Counter[str]
    _answer: Callable[[ServedPool, ev.Event], bool]
    """Gives an answer to a pool's state machine; returns False if that failed."""
    _say: SayOnce = field(default_factory=lambda: SayOnce(logger, first=""))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def do(self, pool: ServedPool, call: ev.Call) -> None:
        """Make this call; its `Done` goes to the pool's state machine."""
        if isinstance(call, ev.RemoveAll):
            what, seconds = "sweep" if call.sweep else "wipe", self._store_deadline
        else:
            what, seconds = WRITES[type(call)], self._deadline
        removed = await self._call(pool.say, pool.config.name, what, seconds, lambda: self._made(pool.config.uid, call))
        if removed is None or not self._answer(pool, ev.Done(call, True, removed)):
            self._answer(pool, ev.Done(call, False))

    async def _made(self, uid: str, call: ev.Call) -> tuple[int, int | None]:
        """Make the call; returns how many keys and bytes it removed."""
        match call:
            case ev.RecordTarget(epoch, origin):
                await self._authority.record(uid, epoch, origin)
            case ev.Publish(epoch):
                await self._authority.publish(uid, epoch)
            case ev.NoteGranting():
                await self._authority.note_granting(uid)
            case ev.NoteLabels(labels, held):
                await self._authority.note_labels(uid, labels, held)
            case ev.RemoveAll():
                if self._stores is None:
                    raise StoreAdminError("this hub was started without access to any store's admin endpoint")
                return await self._stores.remove_all(uid)
        return 0, None

    async def load(self, pool: ServedPool) -> PoolRecord | None:
        """The pool's record; None: no answer."""
        return await self._call(pool.say, pool.config.name, "load", self._deadline, partial(self._authority.load, pool.config.uid))

    async def verify(self, term: Term) -> bool | None:
        """The leadership read; None: no answer."""
        return await self._call(self._say, "leadership", "verify", self._deadline, partial(self._authority.verify, term))

    async def _call(self, say: SayOnce, name: str, what: str, seconds: float, call: Callable[[], Awaitable[T]]) -> T | None:
        """What `call` answered; None when it failed or gave no answer in time: it may still take effect.

        Args:
            say: logs only what changes.
            name: of the pool, for the log.
            what: the kind of call, as counters name it.
            seconds: the deadline.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await call()
        except Exception as error:
            known = isinstance(error, (AuthorityError, StoreAdminError, TimeoutError, OSError))
            reason = f"no answer within {seconds} s" if isinstance(error, TimeoutError) else str(error) if known else repr(error)
            self._counters[f"{what}_failed"] += 1
            state, level = ("failed", logging.WARNING) if known else (reason, logging.ERROR)
            say(what, state, level, "%s: %s failed: %s; trying again", name, what.replace("_", " "), reason)
            return None
        say(what, "", logging.INFO, "%s: %s works again", name, what.replace("_", " "))
        return answer

    # ------------------------------------------------------------------ tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this beside everything else, until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._counters["tasks_failed"] += 1
            logger.error("a task of the hub failed", exc_info=task.exception())

    async def stop(self) -> None:
        """End every task within seconds, even if the authority hangs."""
        await end([task for task in self._tasks if task is not asyncio.current_task()], STOP_SECONDS)


# ----------------------------------------------------------------------------------------------------------------------
# The hub of one authority: the pools' state machines, the leadership reads that serve them all, and what they ask to be done.
#
# Everything runs in one event loop: bursts of messages (`gate`) and one timer for all that is due. Every call to the authority or
# a store is a task with a deadline. A read that does not answer means no grants in that round; only a read that
# answers "somebody else" makes this hub step down. A pool whose step fails is tried again, and harms no other pool.


ROUND_GAP_SECONDS: Final = 0.005
MAX_SLEEP_SECONDS: Final = 1.0
LOAD_RETRY_SECONDS: Final = 0.25
MAX_LOAD_RETRY_SECONDS: Final = 2.0
STORE_DEADLINE_SECONDS: Final = 8.0


class HubServer:
    """All pools of one authority.

    Use from one event loop; nothing here is thread-safe. Nothing but `start` raises for reasons outside this process. What asks for
    a pool that this hub does not have raises `KeyError`.

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
        keys: KeyPair,
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
        self._on_change = on_change or (lambda uid: None)
        self._on_step_down = on_step_down or (lambda: None)
        self._why_deposed = why_deposed
        self._pools = Pools()
        self._term: Term | None = None
        self._round_number = 0
        self._round_running = False
        self._round_after = -math.inf
        self._effects = Effects(authority, authority_deadline_seconds, stores, store_deadline_seconds, self.counters, self._answer)
        self._alarm = Alarm(self._turn, self.counters)
        self._router = Router(keys, self.counters, self._pools.client, self._hear, self._alarm.now)
        self.endpoint = ""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind and begin. Raises `OSError`: the address cannot be bound (zmq.ZMQError is one)."""
        self._alarm.start()
        try:
            self.endpoint = self._router.open(self._bind)
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"hub cannot listen on {self._bind}: {error.strerror}") from error
        self._alarm.soon()

    async def stop(self) -> None:
        """Step down, end every task and close the socket; returns within seconds, also when the authority hangs."""
        self._abandon_term()
        self._alarm.stop()
        await self._effects.stop()
        self._router.close()

    # ------------------------------------------------------------------ pools

    def set_pool(self, config: PoolConfig) -> None:
        """Add a pool, or change the configuration of one (same uid). Raises as `Pools.put`."""
        pool, before = self._pools.put(config)
        if before is not None and before != config:
            self._step(pool, ev.Configured(config))
        elif before is None and self._term is not None:
            self._effects.spawn(self._acquire(pool, self._term))

    def remove_pool(self, uid: str) -> None:
        """Forget a pool: its clients are answered with an error and their leases run out. Unknown uids are ignored."""
        pool = self._pools.remove(uid)
        if pool is not None:
            self._act(pool, ev.SteppedDown())

    def request(self, uid: str, epoch: int) -> None:
        """`spec.resetEpoch` asks for `epoch`. Remembered while this hub does not lead; lower or repeated asks change nothing."""
        self._step(self._pools[uid], ev.Asked(epoch, Source.SPEC))

    def observe(self, uid: str, record: PoolRecord) -> None:
        """The pool's durable record was seen, for example by a watch; however old, it never lowers anything."""
        self._step(self._pools[uid], ev.Observed(record))

    def snapshot(self, uid: str) -> PoolSnapshot:
        return self._pools[uid].snapshot()

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
        for pool in self._pools:
            self._effects.spawn(self._acquire(pool, term))

    def _abandon_term(self) -> None:
        self._term = None
        for pool in self._pools:
            self._step(pool, ev.SteppedDown())

    async def _acquire(self, pool: ServedPool, term: Term) -> None:
        """Read the pool's record, after the term was won, until it answers."""
        pause = LOAD_RETRY_SECONDS
        while pool in self._pools and self._term == term:
            record = await self._effects.load(pool)
            if record is not None and pool in self._pools and self._term == term and self._step(pool, ev.Acquired(term, record)):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LOAD_RETRY_SECONDS)

    # ------------------------------------------------------------------ time and rounds

    def _turn(self, now: float) -> float:
        """Everything that is due; returns when to look again (at the latest: what happens looks again by itself)."""
        due = min((self._tick(pool, now) for pool in self._pools), default=math.inf)
        due = min([due, *(pool.report(self._on_change, now) for pool in self._pools)])
        if not self._round_running and self._term is not None:
            round_due = min((pool.round_at(self.counters, now) for pool in self._pools), default=math.inf)
            round_due = max(round_due, self._round_after)
            if round_due <= now:
                self._round_running = True
                self._round_after = now + ROUND_GAP_SECONDS
                self._effects.spawn(self._round(self._term))
            else:
                due = min(due, round_due)
        return min(due, now + MAX_SLEEP_SECONDS)

    def _tick(self, pool: ServedPool, now: float) -> float:
        """What is due of one pool; returns when its next tick is."""
        due = pool.tick_at(self.counters, now)
        if now < due:
            return due
        if not self._act(pool, ev.Tick()):
            pool.back_off()
        return pool.tick_at(self.counters, now)

    async def _round(self, term: Term) -> None:
        """Collect and evaluate; read leadership once, for all pools; then grant and publish."""
        begun: list[ServedPool] = []
        self._round_number += 1
        number = self._round_number
        try:
            if self._term != term:
                return
            now = time.monotonic()
            begun = [pool for pool in self._pools if now >= pool.failed_until]
            for pool in begun:
                if not self._act(pool, ev.RoundBegan(number)):
                    pool.back_off()
            if not any(pool.hub.round_open for pool in begun):
                return
            leads = await self._effects.verify(term)
            if leads is None:
                self._round_after = time.monotonic() + ev.RETRY_SECONDS
            if self._term != term:
                return
            if leads is False:
                logger.warning("%s; stepping down from %s", self._why_deposed(), term)
                self._abandon_term()
                self._on_step_down()
                return
            for pool in begun if leads else ():
                if pool in self._pools and not self._act(pool, ev.RoundVerified(number)):
                    pool.back_off()
        finally:
            self._round_running = False
            for pool in begun:  # nothing, for those whose round is over
                self._act(pool, ev.RoundDropped(number))
            self._alarm.soon()

    # ------------------------------------------------------------------ steps

    def _answer(self, pool: ServedPool, event: ev.Event) -> bool:
        return pool in self._pools and self._step(pool, event)

    def _step(self, pool: ServedPool, event: ev.Event) -> bool:
        stepped = self._act(pool, event)
        self._alarm.soon()
        return stepped

    def _hear(self, client: Client, peer: bytes, message: Message) -> None:
        assert isinstance(client.pool, ServedPool)
        self._act(client.pool, ev.Heard(peer, message, client.key_index))

    def _act(self, pool: ServedPool, event: ev.Event) -> bool:
        """Step one pool and do what it asks for; never raises. Returns whether all of that worked."""
        try:
            for action in pool.hub.step(event, time.monotonic()):
                if isinstance(action, ev.Send):
                    self._router.send(action.peer, action.message)
                elif isinstance(action, ev.Changed):
                    pool.changed = True
                else:
                    self._effects.spawn(self._effects.do(pool, action))
        except Exception:
            pool.failed(self.counters)
            return False
        return True
