"""Workers: take a key, reconcile it, put it back with a backoff when that failed. One reconcile per key at a time,
each with a deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

import structlog

from epochkv_operator import metrics
from epochkv_operator.control.storm import Storm
from epochkv_operator.kube.client import ApiError, Conflict, Unavailable
from epochkv_operator.kube.queue import WorkQueue
from epochkv_operator.kube.resources import ENGINES, POOLS
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.work_keys import Key

log = structlog.get_logger(__name__)
DEADLINE_SECONDS = 60.0
Reconcile = Callable[[Key], Awaitable[None]]


def recheck_seconds(resync_seconds: float) -> dict[str, float]:
    """After about how long a healthy object is looked at again, by kind.

    Pools often: a deleted Secret has no watch that would tell. Engines rarely: whatever they are made from is watched, and compared in
    each resync.
    """
    return {POOLS.kind: min(60.0, 2 * resync_seconds), ENGINES.kind: 2 * resync_seconds}


class Worker:
    """Serves keys of several kinds. Several workers may share one queue: call `run` several times. `recheck`: see `recheck_seconds`."""

    def __init__(self, queue: WorkQueue[Key], reconcilers: Mapping[str, Reconcile], storm: Storm, recheck: Mapping[str, float]) -> None:
        self._queue = queue
        self._storm = storm
        self._reconcilers = reconcilers
        self._recheck = recheck
        self._problems: dict[Key, str] = {}

    async def run(self) -> None:
        while True:
            key = await self._queue.get()
            await asyncio.sleep(0)  # a key that needs no request never waits: others have their turn in between
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await self._reconcilers[key.kind](key)
            except asyncio.CancelledError:
                raise
            except ObjectGone:
                self._served(key, "gone")
            except Exception as error:
                self._failed(key, error)
            else:
                self._served(key, "ok")
                if key.kind in self._recheck:
                    self._queue.add_after(key, self._recheck[key.kind] * random.uniform(0.8, 1.2))

    def _served(self, key: Key, result: str) -> None:
        self._storm.served(key)
        if self._problems.pop(key, None):
            log.info("reconciling works again", object=str(key))
        metrics.RECONCILE_SECONDS.labels(kind=key.kind).observe(self._queue.done(key))
        metrics.RECONCILES.labels(kind=key.kind, result=result).inc()

    def _failed(self, key: Key, error: Exception) -> None:
        """Back off. One log line per problem, not per attempt; a conflict is no problem at all."""
        at_least = error.retry_after_seconds or 0.0 if isinstance(error, Unavailable) else 0.0
        delay = self._queue.retry(key, at_least)
        if isinstance(error, Unavailable | TimeoutError):
            self._storm.waits(key)
        metrics.RECONCILES.labels(kind=key.kind, result="conflict" if isinstance(error, Conflict) else "error").inc()
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, Conflict) or self._problems.get(key) == problem:
            return
        self._problems[key] = problem
        expected = isinstance(error, ApiError | TimeoutError)
        log.warning(
            "reconciling failed, trying again",
            object=str(key),
            retry_in_seconds=round(delay, 1),
            error=problem,
            exc_info=None if expected else error,
        )
