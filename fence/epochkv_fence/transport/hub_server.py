"""The hub of one authority: a ROUTER socket, the pools' state machines, and the leadership reads that serve them all.

One asyncio task receives, one drives time and rounds; every call to the authority is a task of its own with a deadline.
A read that does not answer means no grants in that round; only a read that answers "somebody else" makes this hub step
down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Authority, AuthorityError, PoolRecord, Term
from epochkv_fence.hub import Hub
from epochkv_fence.messages import MAX_MESSAGE_BYTES, Error, Message, Refusal, WireError, decode, encode
from epochkv_fence.pool import PoolConfig, PoolSnapshot
from epochkv_fence.transport.keys import HubKeys, check_key

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUND_GAP_SECONDS: Final = 0.005
MAX_SLEEP_SECONDS: Final = 1.0
LOAD_RETRY_SECONDS: Final = 0.25
MAX_LOAD_RETRY_SECONDS: Final = 2.0
RECEIVE_BURST: Final = 64
STOP_SECONDS: Final = 2.0
ZAP_DOMAIN: Final = "epochkv"
NO_POOL: Final = "your key speaks for no pool of this hub"


class UnknownPool(KeyError):
    """The hub has no pool of this uid; `set_pool` first."""

    def __str__(self) -> str:
        return f"the hub has no pool with uid {self.args[0]!r}; call set_pool first"


class _Pool:
    """A pool's state machine and what its driver keeps beside it. A pool that is removed and set again is a new one."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.hub = Hub(config)


class HubServer:
    """All pools of one authority.

    Use from one event loop; nothing here is thread-safe. Nothing but `start` raises for reasons outside this process.

    Args:
        bind: such as `tcp://*:7700`; port 0 takes a free one (see `endpoint`).
        authority: durable records and the leadership read.
        on_change: called with a pool's uid when its snapshot has changed; many changes may come as one call.
        on_step_down: called when a leadership read shows that somebody else leads.
        authority_deadline_seconds: for every single call to the authority.
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
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._bind = bind
        self._keys = keys
        self._authority = authority
        self._on_change = on_change or (lambda uid: None)
        self._on_step_down = on_step_down or (lambda: None)
        self._deadline = authority_deadline_seconds
        self._pools: dict[str, _Pool] = {}
        self._by_key: dict[str, _Pool] = {}
        self._changed: set[str] = set()
        self._term: Term | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._round_number = 0
        self._round_running = False
        self._round_began = -math.inf
        self._said: dict[tuple[str, str], str] = {}
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self.endpoint = ""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind and begin.

        Raises:
            OSError: the address cannot be bound (zmq.ZMQError is one).
        """
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)
        self._authenticator.start()
        try:
            self._socket = self._open(self._context)
            self._socket.bind(self._bind)
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"hub cannot listen on {self._bind}: {error.strerror}") from error
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        self.endpoint = bytes(bound).rstrip(b"\0").decode().replace("0.0.0.0", "127.0.0.1")
        self._spawn(self._receive())
        self._spawn(self._drive())

    def _open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """Peers are named by the socket, never by the peer: with names of their own choice and handover, a client of one
        pool could take over the connection of another pool's engine."""
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = 4 * MAX_MESSAGE_BYTES  # what is between this and the limit is answered, what is above is cut off
        router.backlog = 1024
        router.tcp_keepalive = 1  # and no ZMTP heartbeats: see AgentThread
        router.tcp_keepalive_idle = 10
        router.tcp_keepalive_intvl = 5
        router.tcp_keepalive_cnt = 3
        router.tcp_maxrt = 15_000
        router.zap_domain = ZAP_DOMAIN.encode()
        router.curve_server = 1
        router.curve_publickey = self._keys.public.encode()
        router.curve_secretkey = self._keys.secret.encode()
        return router

    async def stop(self) -> None:
        """Step down, end every task and close the socket; returns within seconds, also when the authority hangs."""
        self._abandon_term()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        self._tasks.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = self._socket = self._authenticator = None

    # ------------------------------------------------------------------ pools

    def set_pool(self, config: PoolConfig) -> None:
        """Add a pool, or change the configuration of one (same uid). Two keys may be accepted while one is replaced.

        Raises:
            ValueError: a key is malformed or belongs to another pool.
        """
        for key in config.client_public_keys:
            check_key(f"client public key of pool {config.name!r}", key)
            owner = self._by_key.get(key)
            if owner is not None and owner.config.uid != config.uid:
                raise ValueError(f"pool {config.name!r} has the client key of pool {owner.config.name!r}; give each pool its own key pair")
        pool = self._pools.get(config.uid)
        if pool is None:
            pool = self._pools[config.uid] = _Pool(config)
            self._map_keys(pool, config)
            if self._term is not None:
                self._spawn(self._acquire(pool, self._term))
        elif pool.config != config:
            self._map_keys(pool, config)
            pool.config = config
            self._step(pool, ev.Configured(config))

    add_pool = set_pool

    def _map_keys(self, pool: _Pool, config: PoolConfig) -> None:
        self._by_key = {key: owner for key, owner in self._by_key.items() if owner is not pool}
        self._by_key.update(dict.fromkeys(config.client_public_keys, pool))

    def remove_pool(self, uid: str) -> None:
        """Forget a pool: its clients are answered with an error and their leases run out. Unknown uids are ignored."""
        pool = self._pools.pop(uid, None)
        if pool is not None:
            self._by_key = {key: owner for key, owner in self._by_key.items() if owner is not pool}
            pool.hub.step(ev.SteppedDown(), time.monotonic())
            self._changed.discard(uid)

    def request(self, uid: str, epoch: int, *, fresh: bool = True) -> None:
        """`spec.resetEpoch` asks for `epoch`. Remembered while this hub does not lead; lower or repeated asks change nothing.

        Args:
            fresh: it was asked for just now (an edge that was watched). False: it may have been asked for long ago (found
                in a listing after a start or a gap), so that a boot's age says nothing about its weights.

        Raises:
            UnknownPool
        """
        self._step(self._pool(uid), ev.Asked(epoch, time.monotonic() if fresh else None))

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
            record = await self._call(pool, "load", partial(self._authority.load, pool.config.uid))
            if record is not None:
                if self._current(pool) and self._term == term:
                    self._step(pool, ev.Acquired(term, record))
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LOAD_RETRY_SECONDS)

    def _current(self, pool: _Pool) -> bool:
        return self._pools.get(pool.config.uid) is pool

    # ------------------------------------------------------------------ time and rounds

    async def _drive(self) -> None:
        while True:
            self._wake.clear()
            try:
                due = self._turn(time.monotonic())
            except Exception:
                self.counters["turns_failed"] += 1
                logger.exception("the hub's turn failed")
                due = time.monotonic() + ROUND_GAP_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):  # wait_for can swallow a cancellation
                    await self._wake.wait()

    def _turn(self, now: float) -> float:
        """Everything that is due; returns when to look again (at the latest: `_wake` comes first for what happens)."""
        pools = list(self._pools.values())
        for pool in pools:
            if now >= pool.hub.tick_at():
                self._step(pool, ev.Tick())
        self._tell_changes()
        due = min((pool.hub.tick_at() for pool in pools), default=math.inf)
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
                self._step(pool, ev.RoundBegan(number))
            pools = [pool for pool in pools if pool.hub.round_open]
            if not pools:
                return
            leads = await self._call(None, "verify", partial(self._authority.verify, term))
            if self._term != term:
                return
            if leads is False:
                logger.warning("another hub leads now; stepping down from %s", term)
                self._abandon_term()
                self._on_step_down()
                return
            for pool in pools:
                if self._current(pool):
                    self._step(pool, ev.RoundVerified(number) if leads else ev.RoundDropped(number))
        finally:
            self._round_running = False
            self._wake.set()

    # ------------------------------------------------------------------ effects

    def _step(self, pool: _Pool, event: ev.Event) -> None:
        for action in pool.hub.step(event, time.monotonic()):
            self._do(pool, action)
        self._wake.set()

    def _do(self, pool: _Pool, action: ev.Action) -> None:
        uid = pool.config.uid
        match action:
            case ev.Send(peer, message):
                self._send(peer, message)
            case ev.Record(epoch, origin):
                write = partial(self._authority.record, uid, epoch, origin)
                self._spawn(self._write(pool, "record", write, ev.Recorded(epoch), ev.RecordFailed(epoch)))
            case ev.Publish(epoch):
                write = partial(self._authority.publish, uid, epoch)
                self._spawn(self._write(pool, "publish", write, ev.Published(epoch), ev.PublishFailed(epoch)))
            case ev.NoteGranting():
                write = partial(self._authority.note_granting, uid)
                self._spawn(self._write(pool, "note", write, ev.Noted(), ev.NoteFailed()))
            case ev.Changed():
                self._changed.add(uid)

    async def _write(self, pool: _Pool, what: str, write: Callable[[], Awaitable[None]], done: ev.Event, failed: ev.Event) -> None:
        async def answer() -> bool:
            await write()
            return True

        answered = await self._call(pool, what, answer)
        if self._current(pool):
            self._step(pool, done if answered else failed)

    async def _call(self, pool: _Pool | None, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """One call to the authority, with the deadline; None when it gave no answer."""
        name = pool.config.name if pool is not None else "leadership"
        try:
            async with asyncio.timeout(self._deadline):
                answer = await call()
        except (AuthorityError, TimeoutError, OSError) as error:
            self.counters[f"{what}_failed"] += 1
            reason = f"no answer within {self._deadline} s" if isinstance(error, TimeoutError) else str(error)
            self._say(name, what, "failed", logging.WARNING, f"authority: {what} failed: {reason}; trying again")
            return None
        except Exception as error:
            self.counters[f"{what}_failed"] += 1
            self._say(name, what, repr(error), logging.ERROR, f"authority: {what} failed: {error!r}; trying again")
            return None
        self._say(name, what, "", logging.INFO, f"authority: {what} works again")
        return answer

    def _tell_changes(self) -> None:
        changed, self._changed = self._changed, set()
        for uid in changed:
            try:
                self._on_change(uid)
            except Exception:
                logger.exception("on_change failed for pool %s", uid)

    # ------------------------------------------------------------------ socket

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP: is this the client key of a pool? (The name is pyzmq's credentials-provider interface.)"""
        known = key.decode("ascii") in self._by_key
        self.counters["connections_accepted" if known else "connections_refused"] += 1
        return known

    async def _receive(self) -> None:
        taken = 0
        while True:
            assert self._socket is not None
            frames: Sequence[zmq.Frame] = await self._socket.recv_multipart(copy=False)
            try:
                self._take(frames)
            except Exception:
                self.counters["take_failed"] += 1
                logger.exception("a message could not be handled")
            taken += 1
            if taken % RECEIVE_BURST == 0:
                await asyncio.sleep(0)  # a flood must not keep time and rounds from running

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        peer = bytes(frames[0].buffer)
        pool = self._by_key.get(_user_id(frames[-1]))
        if pool is None:  # its key was accepted when it connected, and is not any more
            self.counters["refused_pool"] += 1
            self._send(peer, Error(Refusal.POOL, NO_POOL))
            return
        try:
            message = decode([bytes(frame.buffer) for frame in frames[1:]])
        except WireError as error:
            self.counters[f"refused_{error.code.value}"] += 1
            self._send(peer, Error(error.code, error.text[:1024]))
            return
        self.counters["received"] += 1
        self._step(pool, ev.Heard(peer, message))

    def _send(self, peer: bytes, message: Message) -> None:
        if self._socket is None:
            return
        try:
            sent = self._socket.send_multipart([peer, *encode(message)])
            if isinstance(sent, asyncio.Future) and not sent.done():
                sent.add_done_callback(_swallow)
        except (zmq.ZMQError, WireError) as error:  # a peer that is gone loses its message
            self.counters["unsent"] += 1
            logger.debug("cannot send to a peer: %s", error)

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

    def _say(self, name: str, topic: str, state: str, level: int, text: str) -> None:
        """Log once per change of state of a topic."""
        previous = self._said.get((name, topic), "")
        if previous != state:
            self._said[name, topic] = state
            logger.log(level, "%s: %s", name, text)


def _user_id(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except (zmq.ZMQError, KeyError):
        return ""


def _swallow(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
