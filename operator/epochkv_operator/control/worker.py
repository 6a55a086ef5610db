"""The work queue and its workers: take a key, reconcile it, put it back with a backoff when that failed.

A key is served by one worker at a time, each time with a deadline, never lost, never queued twice, and backs off alone when it fails. The
shape is client-go's workqueue. kopf offers no such thing for keys that many kinds of objects feed into.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from epochkv_operator import metrics
from epochkv_operator.kube.client import ApiError, Conflict, Unavailable
from epochkv_operator.kube.status import ObjectGone
from epochkv_operator.kube.store import Key

K = TypeVar("K", bound=Hashable)

BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_MAX_SECONDS = 30.0
RETRY_AFTER_MAX_SECONDS = 60.0
NEWS_SECONDS = 1.0  # the longest backoff of a key that was added while it was in work
SPREAD_SECONDS = 1.0


class WorkQueue(Generic[K]):
    """Keys to reconcile. All methods run on one event loop; `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: dict[K, float] = {}  # insertion-ordered: first in, first out; value: since when
        self._active: dict[K, float] = {}  # in work; value: since when the key was ready
        self._again: dict[K, float] = {}  # added while in work
        self._timers: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[K, int] = {}
        self._moved = clock()
        self._wakeup = asyncio.Event()

    def add(self, key: K) -> None:
        """Serve the key as soon as possible. A key in work is served once more: it may have read old state."""
        self._cancel_timer(key)
        if key in self._active:
            self._again.setdefault(key, self._clock())
        elif key not in self._ready:
            if not self._ready and not self._active:
                self._moved = self._clock()
            self._ready[key] = self._clock()
            self._wakeup.set()

    def add_after(self, key: K, delay_seconds: float) -> None:
        """Serve the key after a delay, or earlier if somebody adds it. Of two delays the shorter one counts."""
        if not delay_seconds:
            self.add(key)
            return
        if key in self._ready:
            return
        due = self._clock() + delay_seconds
        if key in self._timers:
            if self._timers[key][0] <= due:
                return
            self._cancel_timer(key)
        handle = asyncio.get_running_loop().call_later(delay_seconds, self.add, key)
        self._timers[key] = (due, handle)

    async def get(self) -> K:
        """The next key; its worker must call `done` or `retry`."""
        while not self._ready:
            self._wakeup.clear()
            await self._wakeup.wait()
        key = next(iter(self._ready))
        self._active[key] = self._ready.pop(key)
        self._moved = self._clock()
        return key

    def done(self, key: K) -> float:
        """The key was served; its backoff is forgotten. Returns the seconds since it became ready."""
        self._failures.pop(key, None)
        return self._release(key)

    def retry(self, key: K, at_least_seconds: float = 0.0) -> float:
        """Serving failed: the key comes back after its backoff, which doubles. Returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        backoff = BACKOFF_FIRST_SECONDS * 2.0 ** min(failures, 16)
        longest = BACKOFF_MAX_SECONDS if self._again.pop(key, None) is None else NEWS_SECONDS
        delay = max(min(RETRY_AFTER_MAX_SECONDS, at_least_seconds), min(longest, backoff))
        self._release(key)
        self.add_after(key, delay)
        return delay

    def sort(self, order: Callable[[K], bool]) -> None:
        """Serve the ready keys in this order, those of `False` first."""
        self._ready = dict(sorted(self._ready.items(), key=lambda item: order(item[0])))

    def hurry(self) -> None:
        """The API server answers again: no key that failed waits out its backoff."""
        for key in self._failures:
            self.add_after(key, random.uniform(0.0, SPREAD_SECONDS))

    def __len__(self) -> int:
        return len(self._ready)

    def oldest_age_seconds(self) -> float:
        """Age of the oldest key that is ready or in work; 0 when there is none. Keys waiting out a backoff do not count."""
        since = [*self._ready.values(), *self._active.values()]
        return self._clock() - min(since) if since else 0.0

    def stuck_seconds(self) -> float:
        """For how long nothing was taken to be served or was served, while there was something; 0 when there is nothing.

        A long queue that moves is no sign of a fault: a thousand new objects take minutes, and are not served sooner by a restart.
        """
        return self._clock() - self._moved if self._ready or self._active else 0.0

    def close(self) -> None:
        for key in list(self._timers):
            self._cancel_timer(key)

    def _release(self, key: K) -> float:
        self._moved = self._clock()
        age = self._moved - self._active.pop(key)
        if key in self._again:
            self._ready[key] = self._again.pop(key)
            self._wakeup.set()
        return age

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer[1].cancel()


log = structlog.get_logger(__name__)
DEADLINE_SECONDS = 60.0
SLOW_SECONDS = 5.0  # for how long a worker waits for a try: webhooks of the namespace may hang
LANES = 4  # of a namespace, once tries of it take longer: in each, one key is served after the other
Reconcile = Callable[[Key], Awaitable[None]]


@dataclass(eq=False)
class Worker:
    """Serves keys of several kinds. Several workers may share one queue: call `run` several times. A namespace whose tries take long holds
    up no other.

    `recheck`: after about how many seconds a healthy object is looked at again, by kind.
    """

    _queue: WorkQueue[Key]
    _reconcilers: Mapping[str, Reconcile]
    _recheck: Mapping[str, float]
    _problems: dict[Key, str] = field(default_factory=dict)
    _lanes: dict[tuple[str, int], deque[Key]] = field(default_factory=dict)
    """Keys that wait behind a try that takes long, by namespace and number of the lane."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tries:
            while True:
                key = await self._queue.get()
                await asyncio.sleep(0)  # a key that needs no request never waits: others have their turn in between
                name = key.namespace, hash(key) % LANES
                if (lane := self._lanes.get(name)) is not None:
                    lane.append(key)
                    continue
                this = tries.create_task(self._serve(key))
                _, slow = await asyncio.wait([this], timeout=SLOW_SECONDS)
                if slow and name not in self._lanes:
                    self._lanes[name] = deque()
                    tries.create_task(self._follow(name, this))

    async def _follow(self, name: tuple[str, int], slow: asyncio.Task[None]) -> None:
        await asyncio.wait([slow])
        while lane := self._lanes[name]:
            await self._serve(lane.popleft())
        del self._lanes[name]

    async def _serve(self, key: Key) -> None:
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await self._reconcilers[key.kind](key)
        except ObjectGone:
            self._served(key, "gone")
        except Exception as error:
            self._failed(key, error)
        else:
            self._served(key, "ok")
            if key.kind in self._recheck:
                self._queue.add_after(key, self._recheck[key.kind] * random.uniform(0.8, 1.2))

    def _served(self, key: Key, result: str) -> None:
        if self._problems.pop(key, None):
            log.info("reconciling works again", object=str(key))
        metrics.RECONCILE_SECONDS.labels(kind=key.kind).observe(self._queue.done(key))
        metrics.RECONCILES.labels(kind=key.kind, result=result).inc()

    def _failed(self, key: Key, error: Exception) -> None:
        """Back off. One log line per problem, not per attempt; a conflict is no problem at all."""
        at_least = error.retry_after_seconds or 0.0 if isinstance(error, Unavailable) else 0.0
        delay = self._queue.retry(key, at_least)
        metrics.RECONCILES.labels(kind=key.kind, result="conflict" if isinstance(error, Conflict) else "error").inc()
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, Conflict) or self._problems.get(key) == problem:
            return
        self._problems[key] = problem
        trace = None if isinstance(error, ApiError | TimeoutError) else error
        said = {"object": str(key), "retry_in_seconds": round(delay, 1), "error": problem}
        log.warning("reconciling failed, trying again", **said, exc_info=trace)
