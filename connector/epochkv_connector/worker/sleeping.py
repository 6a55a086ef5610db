"""Ends copies before vLLM's sleep unmaps the memory of the KV blocks that they read or write.

No version of vLLM tells a connector of sleep. `weights.executor` intercepts the executor's `sleep` and first asks every rank, in
the rank's own process and on the thread that will run it.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epochkv_connector.worker.runner import JobRunner

SLEEP_SECONDS = 30.0
"""How long the copies of all ranks may take to end: each moves at most one job's blocks, at the speed of the bus."""


_runners: dict[str, weakref.WeakSet[JobRunner]] = {}
_lock = threading.Lock()


def register(engine_id: str, runner: JobRunner) -> None:
    """The runner copies for a rank of this engine, in this process, for as long as it lives."""
    with _lock:
        _runners.setdefault(engine_id, weakref.WeakSet()).add(runner)


def settle_for_sleep(engine_id: str, timeout: float = SLEEP_SECONDS) -> int:
    """End the copies of this engine's ranks in this process. Model-runner thread, before `sleep`.

    Returns:
        Copies that still run after `timeout` seconds: memory must stay mapped unless it is 0.
    """
    with _lock:
        runners = list(_runners.get(engine_id, ()))
    return sum(runner.settle_for_sleep(timeout) for runner in runners)
