"""Ends copies before vLLM's sleep unmaps the memory of the KV blocks that they read or write.

No version of vLLM tells a connector of sleep. `weights.executor` intercepts the executor's `sleep` and first asks every rank, in
the rank's own process and on the thread that will run it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

SLEEP_SECONDS = 30.0
"""How long the copies of all ranks may take to end: each moves at most one job's blocks, at the speed of the bus."""


class Settles(Protocol):
    """`half.WorkerHalf`."""

    def settle_for_sleep(self, timeout: float) -> int: ...


_halves: dict[str, weakref.WeakSet[Settles]] = {}
_lock = threading.Lock()


def register(engine_id: str, half: Settles) -> None:
    """This half copies for a rank of this engine, in this process, for as long as it lives."""
    with _lock:
        _halves.setdefault(engine_id, weakref.WeakSet()).add(half)


def settle_for_sleep(engine_id: str, timeout: float = SLEEP_SECONDS) -> int:
    """End the copies of this engine's ranks in this process. Model-runner thread, before `sleep`.

    Returns:
        Copies that still run after `timeout` seconds: memory must stay mapped unless it is 0.
    """
    with _lock:
        halves = list(_halves.get(engine_id, ()))
    return sum(half.settle_for_sleep(timeout) for half in halves)
