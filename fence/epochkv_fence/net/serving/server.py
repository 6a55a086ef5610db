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
from collections.abc import Callable
from typing import Final

import zmq

from epochkv_fence.hub import events as ev
from epochkv_fence.net.gate.router import Client, Receiver, Router
from epochkv_fence.net.keys import KeyPair
from epochkv_fence.net.serving.alarm import Alarm
from epochkv_fence.net.serving.changes import Changes
from epochkv_fence.net.serving.effects import Effects
from epochkv_fence.net.serving.pools import Pools, ServedPool
from epochkv_fence.protocol.authority import Authority, PoolRecord, Term
from epochkv_fence.protocol.messages import Message, Source
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot
from epochkv_fence.stores.admin import StoreAdmin

logger = logging.getLogger(__name__)

ROUND_GAP_SECONDS: Final = 0.005
MAX_SLEEP_SECONDS: Final = 1.0
LOAD_RETRY_SECONDS: Final = 0.25
MAX_LOAD_RETRY_SECONDS: Final = 2.0
STORE_DEADLINE_SECONDS: Final = 8.0


class HubServer:
    """All pools of one authority.

    Use from one event loop; nothing here is thread-safe. Nothing but `start` raises for reasons outside this process. What asks for
    a pool that this hub does not have raises `UnknownPool`.

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
        self._changes = Changes(on_change or (lambda uid: None))
        self._on_step_down = on_step_down or (lambda: None)
        self._why_deposed = why_deposed
        self._pools = Pools()
        self._term: Term | None = None
        self._round_number = 0
        self._round_running = False
        self._round_began = -math.inf
        self._effects = Effects(authority, authority_deadline_seconds, stores, store_deadline_seconds, self.counters, self._answer)
        self._alarm = Alarm(self._turn, self.counters)
        self.receiver = Receiver(self._pools.client, self._hear, self._alarm.now)
        self._router = Router(keys, self.receiver, self.counters)
        self.endpoint = ""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind and begin.

        Raises:
            OSError: the address cannot be bound (zmq.ZMQError is one).
        """
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
        """Add a pool, or change the configuration of one (same uid). Two keys may be accepted while one is replaced.

        Raises:
            ValueError: a key is malformed or belongs to another pool.
        """
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
            self._changes.forget(uid)
            self._effects.forget(pool)

    def request(self, uid: str, epoch: int) -> None:
        """`spec.resetEpoch` asks for `epoch`. Remembered while this hub does not lead; lower or repeated asks change nothing."""
        self._step(self._pools[uid], ev.Asked(epoch, Source.SPEC))

    def observe(self, uid: str, record: PoolRecord) -> None:
        """The pool's durable record was seen, for example by a watch; however old, it never lowers anything."""
        self._step(self._pools[uid], ev.Observed(record))

    def snapshot(self, uid: str) -> PoolSnapshot:
        """The pool right now."""
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
        due = min(due, self._changes.tell(lambda uid: self._pools[uid].epochs(), now))
        if not self._round_running and self._term is not None:
            round_due = min((pool.round_at(self.counters, now) for pool in self._pools), default=math.inf)
            round_due = max(round_due, self._round_began + ROUND_GAP_SECONDS)
            if round_due <= now:
                self._round_running = True
                self._round_began = now
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
                if type(action) is ev.Send:
                    self._router.send(action.peer, action.message)
                elif type(action) is ev.Changed:
                    self._changes.add(pool.config.uid)
                else:
                    self._effects.do(pool, action)
        except Exception:
            pool.failed(self.counters)
            return False
        return True
