"""Whose message is taken next: pools take turns by the time that their messages cost, so that no flood of one pool delays
another's leases.

libzmq hands messages over connection by connection. A pool with hundreds of connections, or with messages that look at
thousands of boots, would have nearly all of the hub's only thread. So what arrives is put into a queue per pool at once, which
is cheap, and taken from the queue that has used the least time so far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

SLICE_SECONDS: Final = 0.0005
"""How long one pool is served before another's turn; a single message may take longer."""
MAX_WAITING: Final = 20_000
"""Messages of one pool: what 10,000 boots say at once, twice."""
MAX_WAITING_BYTES: Final = 32 * 2**20


class Waiting(NamedTuple):
    """A message that was received and not looked at yet."""

    peer: bytes
    key: str
    frames: list[bytes]


@dataclass(slots=True)
class PoolQueue:
    """The messages of one pool, in their order.

    Attributes:
        used: seconds, on a clock that only compares queues: who waits for the first time starts with those served now.
    """

    waiting: deque[Waiting] = field(default_factory=deque)
    num_bytes: int = 0
    used: float = 0.0
    queued: bool = False


class Turns:
    """The queues that are not empty."""

    def __init__(self) -> None:
        self._queues: list[tuple[float, int, PoolQueue]] = []
        self._clock = 0.0
        self._number = 0

    def put(self, queue: PoolQueue, message: Waiting) -> bool:
        """Add it to the end of its queue; False: the queue is too long."""
        size = sum(map(len, message.frames))
        if len(queue.waiting) >= MAX_WAITING or queue.num_bytes + size > MAX_WAITING_BYTES:
            return False
        queue.waiting.append(message)
        queue.num_bytes += size
        if not queue.queued:
            queue.used = max(queue.used, self._clock)
            self._enqueue(queue)
        return True

    def __bool__(self) -> bool:
        return bool(self._queues)

    def serve(self, take: Callable[[Waiting], None], seconds: float) -> int:
        """Take messages for about so long; returns how many. `take` must not raise."""
        taken = 0
        now = time.monotonic()
        end = now + seconds
        while self._queues and now < end:
            _, _, queue = heappop(self._queues)
            self._clock = queue.used
            began = now
            while queue.waiting and now < began + SLICE_SECONDS:
                message = queue.waiting.popleft()
                queue.num_bytes -= sum(map(len, message.frames))
                take(message)
                taken += 1
                now = time.monotonic()
            queue.used += now - began
            queue.queued = False
            if queue.waiting:
                self._enqueue(queue)
        return taken

    def _enqueue(self, queue: PoolQueue) -> None:
        queue.queued = True
        self._number += 1
        heappush(self._queues, (queue.used, self._number, queue))
