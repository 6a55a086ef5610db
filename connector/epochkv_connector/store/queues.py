"""Queues, tickets and deadlines between the connector's threads and the threads that call the store, and what is counted of them.

Two things end separately and are kept apart here: the *answer* (a deadline may give it early) and the *use of the
caller's buffers*, which ends when the store call has really returned.
"""

from __future__ import annotations

import collections
import enum
import heapq
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeVar

logger = logging.getLogger(__name__)


class Counters:
    """Named numbers that only grow. Any thread may add."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> float:
        with self._lock:
            self._values[name] += amount
            return self._values[name]

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)


AGAIN_SECONDS = 60.0


class Notices:
    """Warnings of which each kind is said at most once a minute. Any thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()

    def say(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Log a warning unless one of this kind was logged less than a minute ago."""
        now = self._clock()
        with self._lock:
            if now < self._said.get(kind, -AGAIN_SECONDS) + AGAIN_SECONDS:
                return
            self._said[kind] = now
        self._logger.warning(message, *args, exc_info=exc_info)

    def forget(self) -> None:
        """Everything may be said again (the state they described is over)."""
        with self._lock:
            self._said.clear()


T = TypeVar("T")


class StoreOutcome(enum.StrEnum):
    """What became of one object of a request. Everything but OK is a miss for a get and a dropped save for a put."""

    OK = "ok"
    ABSENT = "absent"  # no such key
    PENDING = "pending"  # its put has not ended
    EXPIRED = "expired"  # the read outlived its lease: the bytes may be another object's
    TRANSFER = "transfer"  # segment owner gone or hung
    FULL = "full"  # no space in the store now, or backing off because of that
    UNREACHABLE = "unreachable"  # master gone or hung; opens the breaker
    SIZE = "size"  # another length than asked for
    FOREIGN = "foreign"  # header, trailer or checksum are not those of this key (counted by `envelope.Defect`)
    TIMEOUT = "timeout"  # deadline of the request
    DROPPED = "dropped"  # oldest put of a full queue
    CANCELLED = "cancelled"  # the caller gave up before it began
    DOWN = "down"  # not connected, or the breaker is open
    CLOSED = "closed"  # the client is closing
    ERROR = "error"  # anything else; logged once per code


class StoreUnavailable(RuntimeError):
    """A store call has no answer; `outcome` says why."""

    def __init__(self, outcome: StoreOutcome, detail: str = "") -> None:
        super().__init__(f"the L2 store gave no answer: {outcome.value}{': ' + detail if detail else ''}")
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Transfer:
    """One object and the registered memory it comes from or goes to: `view` (writable, header to trailer) at `address`."""

    key: str
    address: int
    view: memoryview


class Ticket:
    """A put or get under way.

    Attributes:
        done: one `StoreOutcome` per transfer, in order. Never fails; on a deadline it is answered early.
        released: resolved (always after `done`) when the store touches the buffers no more. Until then nobody else
        may use them.
    """

    def __init__(self) -> None:
        self.done: Future[list[StoreOutcome]] = Future()
        self.released: Future[None] = Future()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """True once nothing more of this request should be begun."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Begin no further store call for it; what runs runs to its end."""
        self._cancelled.set()


def resolve(future: Future[T], value: T) -> bool:
    """Set the result unless somebody was faster; True if this call did it."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return False
    return True


def refuse(future: Future[T], error: Exception) -> bool:
    """Set the exception unless somebody was faster; True if this call did it."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in a queue. `abandon(outcome)` answers it without having begun; `run()` does the work and answers."""

    run: Callable[[], None]
    abandon: Callable[[StoreOutcome], None]
    weight: int = 1


class RequestQueue:
    """A FIFO served by its own daemon threads. With `max_weight`, the oldest waiting request makes room for the newest."""

    def __init__(self, name: str, num_threads: int, max_weight: int | None = None) -> None:
        self.name = name
        self._max_weight = max_weight
        self._weight = 0
        self._queue: collections.deque[QueuedRequest] = collections.deque()
        self._ready = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._serve, name=f"epochkv-store-{name}-{i}", daemon=True) for i in range(num_threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        return self._weight

    def submit(self, request: QueuedRequest) -> None:
        """Queue; may abandon older requests with DROPPED, or `request` itself with CLOSED."""
        dropped: list[QueuedRequest] = []
        with self._ready:
            closed = self._stopping
            if not closed:
                self._queue.append(request)
                self._weight += request.weight
                while self._max_weight is not None and self._weight > self._max_weight and len(self._queue) > 1:
                    oldest = self._queue.popleft()
                    self._weight -= oldest.weight
                    dropped.append(oldest)
                self._ready.notify()
        for oldest in dropped:
            oldest.abandon(StoreOutcome.DROPPED)
        if closed:
            request.abandon(StoreOutcome.CLOSED)

    def abandon_all(self, outcome: StoreOutcome) -> None:
        with self._ready:
            waiting, self._weight = list(self._queue), 0
            self._queue.clear()
        for request in waiting:
            request.abandon(outcome)

    def stop(self) -> None:
        """Accept nothing more, answer what waits with CLOSED, let the threads end after their current call."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        self.abandon_all(StoreOutcome.CLOSED)

    def _serve(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._stopping:
                    self._ready.wait()
                if not self._queue:
                    return
                request = self._queue.popleft()
                self._weight -= request.weight
            try:
                request.run()
            except Exception:  # a queue thread must outlive anything one request does
                logger.exception("store %s request failed unexpectedly", self.name)
                request.abandon(StoreOutcome.ERROR)


class Alarms:
    """One daemon thread that runs short actions at given times (deadlines, ends of quarantines)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()  # among those of one time
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="epochkv-store-alarms", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Run `action` at `when` (monotonic seconds). Actions must not block; they run late, never early, and at once after `stop`."""
        with self._changed:
            if not self._stopping:
                if not self._heap or when < self._heap[0][0]:
                    self._changed.notify()
                heapq.heappush(self._heap, (when, next(self._order), action))
                return
        _run_quietly(action)

    def stop(self) -> None:
        """Run everything that is left at once and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            due: list[Callable[[], object]] = []
            with self._changed:
                while not self._stopping and (not self._heap or self._heap[0][0] > self._clock()):
                    self._changed.wait(self._heap[0][0] - self._clock() if self._heap else None)
                while self._heap and (self._stopping or self._heap[0][0] <= self._clock()):
                    due.append(heapq.heappop(self._heap)[2])
                stopping = self._stopping
            for action in due:
                _run_quietly(action)
            if stopping:
                return


def _run_quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        logger.exception("a store deadline action failed unexpectedly")


class CallSize:
    """How many objects the next store call of one kind carries: few until calls are seen to be fast, few again after one that was not.

    A call costs the client milliseconds whatever it carries, but one to a hung peer blocks for seconds for each few objects:
    the first call that meets a hang after a while of work may be long, the ones after it are short.
    """

    def __init__(self, low: int, high: int, fast_seconds: float) -> None:
        self._low, self._high, self._fast_seconds = min(low, high), high, fast_seconds
        self.num_keys = self._low

    def saw(self, num_keys: int, seconds: float, *, succeeded: bool) -> None:
        """A call of `num_keys` objects ended. Threads may race here: the next call is then smaller or larger by one step."""
        if not succeeded or seconds > self._fast_seconds:
            self.num_keys = self._low
        elif num_keys >= self.num_keys:
            self.num_keys = min(2 * self.num_keys, self._high)


def first_chunk(transfers: Sequence[Transfer], max_keys: int, max_bytes: int) -> Sequence[Transfer]:
    """The first objects: at most `max_keys`, and at most `max_bytes` unless the first alone is larger; empty for none."""
    size = 0
    for index, transfer in enumerate(transfers[:max_keys]):
        size += len(transfer.view)
        if index and size > max_bytes:
            return transfers[:index]
    return transfers[:max_keys]
