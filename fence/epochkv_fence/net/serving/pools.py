"""The pools that a hub serves: for each its state machine, the keys and limits of its clients, and the care for steps that fail."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from epochkv_fence.hub.machine import Hub
from epochkv_fence.net.gate.fairness import PoolQueue
from epochkv_fence.net.gate.limits import BOOTS_PER_COST, COST_BURST, COST_RATE, POOL_BURST, POOL_RATE, Bucket
from epochkv_fence.net.gate.router import Client
from epochkv_fence.net.keys import check_key
from epochkv_fence.protocol.messages import Bump, Label, Message, Status
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot

logger = logging.getLogger(__name__)

FAILED_STEP_SECONDS: Final = 0.25
QUIET_SECONDS: Final = 10.0
"""Between two stack traces of one pool: whoever makes its steps fail may do so without end."""


class ServedPool:
    """A pool's state machine and what its driver keeps beside it. A pool that is removed and set again is a new one.

    Attributes:
        bucket, costs, queue: see `router.LimitedPool`.
        failed_until: a tick or round of it failed; the next one comes not before.
        quiet_until: its next failure's stack trace comes not before.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.hub = Hub(config)
        self.bucket = Bucket.full(POOL_RATE, POOL_BURST, now := time.monotonic())
        self.costs = Bucket.full(COST_RATE, COST_BURST, now)
        self.queue = PoolQueue()
        self.failed_until = -math.inf
        self.quiet_until = -math.inf

    def cost(self, message: Message) -> float:
        """What taking this message takes from `costs`."""
        return 1.0 + len(self.hub.state.boots.known) / BOOTS_PER_COST if isinstance(message, Bump | Label | Status) else 0.0

    def snapshot(self) -> PoolSnapshot:
        """The pool right now, in Unix seconds."""
        now = time.monotonic()
        shift = time.time() - now
        found = self.hub.snapshot(now)

        def unix(at: float | None) -> float | None:
            return None if at is None else at + shift

        return replace(
            found,
            started_at=unix(found.started_at),
            behind_since=unix(found.behind_since),
            published_at=unix(found.published_at),
        )

    def epochs(self) -> tuple[int, int, bool]:
        """What the hub's owner is told at once when it changes."""
        return self.hub.target, self.hub.published, self.hub.term is not None

    # ------------------------------------------------------------------ what is due, whatever fails

    def tick_at(self, counters: Counter[str], now: float) -> float:
        return self._due(self.hub.tick_at, counters, now + FAILED_STEP_SECONDS)

    def round_at(self, counters: Counter[str], now: float) -> float:
        return self._due(lambda: self.hub.round_at(now), counters, math.inf)

    def _due(self, look: Callable[[], float], counters: Counter[str], otherwise: float) -> float:
        try:
            return max(look(), self.failed_until)
        except Exception:
            self.failed(counters)
            return otherwise

    def failed(self, counters: Counter[str]) -> None:
        """A step raised what is being handled: count it, and log it now and then."""
        counters["steps_failed"] += 1
        now = time.monotonic()
        if now >= self.quiet_until:
            self.quiet_until = now + QUIET_SECONDS
            logger.exception("pool %s: the hub failed to take a step, and tries again; other pools go on", self.config.name)

    def back_off(self) -> None:
        """A tick or round of it failed, so the next one waits."""
        self.failed_until = time.monotonic() + FAILED_STEP_SECONDS


class UnknownPool(KeyError):
    """The hub has no pool of this uid; `set_pool` first."""

    def __str__(self) -> str:
        return f"the hub has no pool with uid {self.args[0]!r}; call set_pool first"


class Pools:
    """All pools of one hub. Whoever iterates may add and remove pools meanwhile."""

    def __init__(self) -> None:
        self._pools: dict[str, ServedPool] = {}
        self._clients: dict[str, Client] = {}

    def __iter__(self) -> Iterator[ServedPool]:
        return iter(list(self._pools.values()))

    def __getitem__(self, uid: str) -> ServedPool:
        try:
            return self._pools[uid]
        except KeyError:
            raise UnknownPool(uid) from None

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
