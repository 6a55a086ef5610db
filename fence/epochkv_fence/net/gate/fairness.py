"""Whose message is taken next: pools take turns by the time that their messages cost, so that no flood of one pool delays
another's leases.

libzmq hands messages over connection by connection. A pool with hundreds of connections, or with messages that look at
thousands of boots, would have nearly all of the hub's only thread. So what arrives is put into a line per pool at once, which
is cheap, and taken from the line that has used the least time so far.
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
class Line:
    """The messages of one pool, in their order.

    Attributes:
        used: seconds, on a clock that only compares lines: who waits for the first time starts with those served now.
    """

    waiting: deque[Waiting] = field(default_factory=deque)
    num_bytes: int = 0
    used: float = 0.0
    queued: bool = False


class Turns:
    """The lines that have something in them."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, int, Line]] = []
        self._clock = 0.0
        self._number = 0

    def put(self, line: Line, message: Waiting) -> bool:
        """At the end of its line; False: the line is too long."""
        size = sum(map(len, message.frames))
        if len(line.waiting) >= MAX_WAITING or line.num_bytes + size > MAX_WAITING_BYTES:
            return False
        line.waiting.append(message)
        line.num_bytes += size
        if not line.queued:
            line.used = max(line.used, self._clock)
            self._queue(line)
        return True

    def __bool__(self) -> bool:
        return bool(self._lines)

    def serve(self, take: Callable[[Waiting], None], seconds: float) -> int:
        """Take messages for about so long; returns how many. `take` must not raise."""
        taken = 0
        now = time.monotonic()
        end = now + seconds
        while self._lines and now < end:
            _, _, line = heappop(self._lines)
            self._clock = line.used
            began = now
            while line.waiting and now < began + SLICE_SECONDS:
                message = line.waiting.popleft()
                line.num_bytes -= sum(map(len, message.frames))
                take(message)
                taken += 1
                now = time.monotonic()
            line.used += now - began
            line.queued = False
            if line.waiting:
                self._queue(line)
        return taken

    def _queue(self, line: Line) -> None:
        line.queued = True
        self._number += 1
        heappush(self._lines, (line.used, self._number, line))
