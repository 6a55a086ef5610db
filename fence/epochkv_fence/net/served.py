"""A pool as the hub's driver has it: its state machine, and the limits and the line of its clients."""

from __future__ import annotations

import math
import time

from epochkv_fence.hub.machine import Hub
from epochkv_fence.net.fairness import Line
from epochkv_fence.net.limits import BOOTS_PER_COST, COST_BURST, COST_RATE, POOL_BURST, POOL_RATE, Bucket
from epochkv_fence.net.router import Lane
from epochkv_fence.protocol.messages import Bump, Label, Message, Status
from epochkv_fence.protocol.pool import PoolConfig


class ServedPool:
    """A pool's state machine and what its driver keeps beside it. A pool that is removed and set again is a new one.

    Attributes:
        bucket, costs, line: see `router.Lane`.
        failed_until: a tick or round of it failed; the next one comes not before.
        quiet_until: its next failure's stack trace comes not before.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.hub = Hub(config)
        self.bucket = Bucket.full(POOL_RATE, POOL_BURST, now := time.monotonic())
        self.costs = Bucket.full(COST_RATE, COST_BURST, now)
        self.line = Line()
        self.failed_until = -math.inf
        self.quiet_until = -math.inf

    def lane(self, key_index: int) -> Lane:
        """What a client with this key speaks for."""
        return Lane(self, key_index, self.bucket, self.costs, self.line)

    def cost(self, message: Message) -> float:
        """What taking this message takes from `costs`."""
        return 1.0 + self.hub.num_boots / BOOTS_PER_COST if isinstance(message, Bump | Label | Status) else 0.0

    def tick_at(self) -> float:
        """When its next tick is due."""
        return max(self.hub.tick_at(), self.failed_until)

    def round_at(self, now: float) -> float:
        """When its next round is due."""
        return max(self.hub.round_at(now), self.failed_until)
