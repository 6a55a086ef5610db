"""The L2 store as both roles of the connector see it: never blocks, never raises, never lies.

Requests wait in queues and are served by this client's own threads, because no store call has an upper bound that suits a scheduler:
a dead master costs 4 s, a hung segment owner 2 s and more. Two things end separately: the *answer*, which a deadline may give early,
and the *use of the caller's buffers*, which ends when the store call has really returned. While the connection is not READY
everything is answered DOWN at once.
"""

import collections
import contextlib
import enum
import functools
import heapq
import itertools
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from operator import methodcaller
from typing import TypeVar

import xxhash

from epochkv_connector.naming.identity import CODEC_VERSION, key_digest
from epochkv_connector.store.connection import AGAIN_SECONDS, Counters, StoreConnection, StoreOutcome, StoreSettings, StoreState, outcome_of
from epochkv_connector.worker.layout import HEADER_BYTES as END_BYTES
from epochkv_connector.worker.layout import LAYOUT_DIGEST_BYTES
from epochkv_fence.common import Seldom

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        on_progress: told of the outcomes so far whenever a store call has ended, on a thread of the client.
        released: resolved (always after `done`) when the store touches the buffers no more. Until then nobody else
        may use them.
        cancelled: nothing more of this request should be begun.
    """

    def __init__(self) -> None:
        self.done: Future[list[StoreOutcome]] = Future()
        self.released: Future[None] = Future()
        self.on_progress: Callable[[Sequence[StoreOutcome]], None] = lambda outcomes: None
        self.cancelled = False

    def cancel(self) -> None:
        """Begin no further store call for it; what runs runs to its end."""
        self.cancelled = True


def resolve(future: Future[T], value: T | StoreUnavailable) -> bool:
    """Set the result, or the exception, unless somebody was faster; True if this call did it."""
    try:
        if isinstance(value, StoreUnavailable):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        return False
    return True


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in a queue. `abandon(outcome)` answers it without having begun; `run()` does the work and answers."""

    run: Callable[[], None]
    abandon: Callable[[StoreOutcome], None]
    num_objects: int = 1


class RequestQueue:
    """A FIFO served by its own daemon threads.

    Attributes:
        depth: objects that the waiting requests are for, at most `max_depth` unless one alone is for more.
    """

    def __init__(self, name: str, num_threads: int, max_depth: float = math.inf) -> None:
        self.name = name
        self.depth = 0
        self._max_depth = max_depth
        self._queue: collections.OrderedDict[QueuedRequest, None] = collections.OrderedDict()
        self._ready = threading.Condition()
        self._stopping = False
        self._num_threads, self.threads = num_threads, 0

    def start(self) -> None:
        for _ in range(self._num_threads):
            self.add_thread()

    def add_thread(self) -> None:
        threading.Thread(target=self._serve, name=f"epochkv-store-{self.name}-{self.threads}", daemon=True).start()
        self.threads += 1

    def submit(self, request: QueuedRequest) -> None:
        """Queue; or abandon with CLOSED, or with DROPPED where there is no room: later blocks of a prompt need those that wait."""
        with self._ready:
            has_room = not self._queue or self.depth + request.num_objects <= self._max_depth
            accepted = has_room and not self._stopping
            if accepted:
                self._queue[request] = None
                self.depth += request.num_objects
                self._ready.notify()
        if not accepted:
            request.abandon(StoreOutcome.CLOSED if self._stopping else StoreOutcome.DROPPED)

    def withdraw(self, request: QueuedRequest) -> bool:
        """Whether it waited; it does not any more, and is the caller's to answer."""
        with self._ready:
            waited = self._queue.pop(request, request) is None
            self.depth -= waited * request.num_objects
        return waited

    def abandon_all(self, outcome: StoreOutcome) -> None:
        with self._ready:
            waiting, self.depth = list(self._queue), 0
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
                request, _ = self._queue.popitem(last=False)
                self.depth -= request.num_objects
            try:
                request.run()
            except Exception:  # a queue thread must outlive anything one request does
                logger.exception("store %s request failed unexpectedly", self.name)
                request.abandon(StoreOutcome.ERROR)


class Alarms:
    """One daemon thread that runs short actions at given times (deadlines, ends of quarantines)."""

    def __init__(self) -> None:
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
                while not self._stopping and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                while self._heap and (self._stopping or self._heap[0][0] <= time.monotonic()):
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
    """How many objects the next store call of one kind carries: few until calls are seen to be fast, few again while one is not.

    A call costs the client milliseconds whatever it carries, but one to a hung peer blocks for seconds for each few objects:
    the calls that meet a hang after a while of work may be long, the ones after them are short.
    """

    def __init__(self, low: int, high: int, fast_seconds: float) -> None:
        self._low, self._high, self._fast_seconds = min(low, high), high, fast_seconds
        self._num_keys = self._low
        self._begun: dict[int, float] = {}  # by thread

    def begin(self) -> int:
        """This thread begins a call: so many objects it may carry."""
        if self.num_older(self._fast_seconds):
            self._num_keys = self._low
        self._begun[threading.get_ident()] = time.monotonic()
        return self._num_keys

    def num_older(self, seconds: float) -> int:
        """How many calls have lasted longer than this."""
        limit = time.monotonic() - seconds
        return sum(begun < limit for begun in list(self._begun.values()))

    def end(self, num_keys: int, *, succeeded: bool) -> None:
        """The call of this thread has ended. Threads may race here: the next call is then smaller or larger by one step."""
        seconds = time.monotonic() - self._begun.pop(threading.get_ident())
        if not succeeded or seconds > self._fast_seconds:
            self._num_keys = self._low
        elif num_keys >= self._num_keys:
            self._num_keys = min(4 * self._num_keys, self._high)


def first_chunk(transfers: Sequence[Transfer], max_keys: int, max_bytes: int) -> Sequence[Transfer]:
    """The first objects: at most `max_keys`, and at most `max_bytes` unless the first alone is larger; empty for none.

    An eighth more is taken where that is the rest: a call costs milliseconds, whatever it carries.
    """
    if len(transfers) <= max_keys and sum(len(transfer.view) for transfer in transfers) <= max_bytes + max_bytes // 8:
        return transfers
    size = 0
    for index, transfer in enumerate(transfers[:max_keys]):
        size += len(transfer.view)
        if index and size > max_bytes:
            return transfers[:index]
    return transfers[:max_keys]


# ----------------------------------------------------------------------------------------------------------------------
# Header and trailer around every payload in the store, so that foreign or torn bytes are a failed load and never KV.
#
# The store is not trusted to return the bytes that were put: a forced flush while a reader is active hands out another object's
# bytes with a success code (measured: 5 % of 16 MiB reads), a client of another version may lay bytes out differently, keys can be
# written by anybody who reaches the port. Both ends carry the digest of the key, the digest of the layout that the writer's KV
# tensors have (`worker.layout.layout_digest`: engines may have one name and still read the same bytes as other heads or layers), and
# the length; with `verify: full` the payload's xxh3-128 decides.
#
# Layout of either end, 128 bytes, little endian:
# `magic 8 | codec u16 | flags u16 | zero u32 | key digest 16 | layout digest 16 | payload bytes u64 | payload xxh3-128 16 |
# zero 48 | xxh3-64 of the 120 bytes before`.


NO_LAYOUT = bytes(LAYOUT_DIGEST_BYTES)
"""Layout digest of a client that has no KV tensors."""

_HEADER_MAGIC = b"EPOCHKV<"
_TRAILER_MAGIC = b">EPOCHKV"
_END = struct.Struct("<8sHHI16s16sQ16s48x")
_SEAL = struct.Struct("<Q")
_HAS_CHECKSUM = 1


class Defect(enum.StrEnum):
    """Why bytes are not the object that was asked for."""

    MAGIC = "magic"  # not one of our objects
    SEALED = "sealed"  # header or trailer damaged
    CODEC = "codec"  # written by another codec version
    DIGEST = "digest"  # another key's object
    LAYOUT = "layout"  # written from KV tensors that are laid out otherwise
    LENGTH = "length"  # another payload size
    NO_CHECKSUM = "no_checksum"  # written with verify=header, read with verify=full
    CHECKSUM = "checksum"  # payload differs from what was sealed
    TORN = "torn"  # header and trailer belong to different writes


def seal(obj: memoryview, digest: bytes, layout: bytes, *, checksum: bool) -> None:
    """Write header and trailer in place around the payload.

    Args:
        obj: writable, `END_BYTES + payload + END_BYTES` bytes.
        digest: `naming.identity.key_digest` of the object's key.
        layout: 16 bytes that say how the payload was cut from KV tensors.
        checksum: also store the payload's xxh3-128.
    """
    payload = obj[END_BYTES : len(obj) - END_BYTES]
    digest_of_payload = xxhash.xxh3_128_digest(payload) if checksum else bytes(16)
    flags = _HAS_CHECKSUM if checksum else 0
    obj[:END_BYTES] = _end(_HEADER_MAGIC, flags, digest, layout, len(payload), digest_of_payload)
    obj[len(obj) - END_BYTES :] = _end(_TRAILER_MAGIC, flags, digest, layout, len(payload), digest_of_payload)


def find_defect(obj: memoryview, digest: bytes, layout: bytes, *, checksum: bool) -> Defect | None:
    """Check both ends (and with `checksum` the payload) of an object read for the key with this digest; None: it is that object."""
    payload = obj[END_BYTES : len(obj) - END_BYTES]
    header, trailer = bytes(obj[:END_BYTES]), bytes(obj[len(obj) - END_BYTES :])
    for raw, magic in ((header, _HEADER_MAGIC), (trailer, _TRAILER_MAGIC)):
        defect = _end_defect(raw, magic, digest, layout, len(payload))
        if defect is not None:
            return defect
    fields = _END.unpack_from(header)
    if fields[1:] != _END.unpack_from(trailer)[1:]:
        return Defect.TORN
    if not checksum:
        return None
    if not fields[2] & _HAS_CHECKSUM:
        return Defect.NO_CHECKSUM
    return None if xxhash.xxh3_128_digest(payload) == fields[7] else Defect.CHECKSUM


def _end(magic: bytes, flags: int, digest: bytes, layout: bytes, payload_bytes: int, checksum: bytes) -> bytes:
    body = _END.pack(magic, CODEC_VERSION, flags, 0, digest, layout, payload_bytes, checksum)
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def _end_defect(raw: bytes, magic: bytes, digest: bytes, layout: bytes, payload_bytes: int) -> Defect | None:
    found_magic, codec, _flags, _zero, found_digest, found_layout, length, _checksum = _END.unpack_from(raw)
    if found_magic != magic:
        return Defect.MAGIC
    if xxhash.xxh3_64_intdigest(raw[: _END.size]) != _SEAL.unpack_from(raw, _END.size)[0]:
        return Defect.SEALED
    if codec != CODEC_VERSION:
        return Defect.CODEC
    if found_digest != digest:
        return Defect.DIGEST
    if found_layout != layout:
        return Defect.LAYOUT
    return Defect.LENGTH if length != payload_bytes else None


# ----------------------------------------------------------------------------------------------------------------------
# The client.


_HUNG_SECONDS = 1.0
_MAX_GET_THREADS = 8
"""Store calls that may hang while another thread fetches for others."""

_FULL_SECONDS = 1.0
"""After a put that found no space, nothing is put for so long."""

_OTHER_LAYOUT = (
    "object %s was put by an engine with the same fingerprint, whose KV tensors are laid out otherwise (another attention backend, order "
    "of dimensions or layer types): treated as a miss; give both engines the same hardware and --attention-backend, or pools of their own"
)

CallStore = Callable[[Sequence[Transfer]], list[int] | StoreOutcome]
"""Moves a few objects in one store call: a code for each, or why there was no call."""

Judge = Callable[[Transfer, int], StoreOutcome]
"""What a code, and the bytes that came with it, mean for one object."""


class _Question:
    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.answer: Future[Sequence[bool]] = Future()


class StoreClient:
    """One Mooncake client behind queues, deadlines and a circuit breaker. All public methods may be called from any thread."""

    def __init__(self, settings: StoreSettings, regions: Sequence[tuple[int, int]] = (), *, layout: bytes = NO_LAYOUT) -> None:
        """Nothing happens before `start`.

        Args:
            regions: (address, bytes) of memory that puts and gets use, which must outlive `close`; none: a client for
                `exists` and `remove_matching` only.
            layout: how payloads are cut from this rank's KV tensors (`worker.layout.layout_digest`); objects of any other
                layout are misses.
        """
        self.settings = settings
        self._layout = layout
        self._counters = Counters()
        self._warn = Seldom(logger, AGAIN_SECONDS)
        self._connection = StoreConnection(settings, regions, self._counters, self._warn, self._abandon_waiting)
        self._gets = RequestQueue("get", settings.get_threads)
        self._puts = RequestQueue("put", 1, settings.max_queued_puts)
        self._lookups = RequestQueue("lookup", 1)
        self._admin = RequestQueue("admin", 1)
        self._queues = (self._gets, self._puts, self._lookups, self._admin)
        self._alarms = Alarms()
        self._judges = ThreadPoolExecutor(settings.get_threads, "epochkv-store-judge")
        self._watching = False  # whether `_watch_gets` will run
        self._questions: collections.deque[_Question] = collections.deque()
        self._full_until = 0.0  # put thread only
        self._defective: set[str] = set()  # keys whose objects are not what was put there
        self._call_sizes = {
            kind: CallSize(settings.min_call_keys, settings.max_call_keys, settings.fast_call_seconds) for kind in ("get", "put")
        }

    def start(self) -> None:
        """Connect in the background; returns at once, also when there is no master."""
        if self._connection.start():
            for queue in self._queues:
                queue.start()
            self._alarms.start()

    @property
    def state(self) -> StoreState:
        return self._connection.state

    def wait_ready(self, timeout: float) -> bool:
        """Wait until READY, at most `timeout` seconds (tests and tools; an engine never waits)."""
        return self._connection.wait_ready(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new calls, answer what waits, wait for calls in flight, close. A second call does nothing.

        False if a call was still in flight after `timeout` seconds: its buffers must then live as long as the process.
        """
        if not self._connection.begin_close():
            return self._connection.in_flight == 0
        for queue in self._queues:
            queue.stop()
        idle = self._connection.finish_close(timeout)
        self._alarms.stop()
        if idle:
            self._judges.shutdown(wait=False)
        return idle

    def exists(self, keys: Sequence[str], timeout: float = 1.0) -> Future[Sequence[bool]]:
        """Ask which keys can be read, in order. Questions that wait are asked together; long ones are split.

        Every hit is leased by the store, so ask only for what may be read. The future fails with `StoreUnavailable`
        when there is no answer (not connected, breaker open, `timeout` seconds passed).
        """
        question = _Question(list(keys))
        self._questions.append(question)
        abandon = functools.partial(self._give_no_answer, question)
        self._submit(self._lookups, QueuedRequest(self._ask, abandon), timeout, lambda: abandon(StoreOutcome.TIMEOUT))
        if question.answer.done():  # not connected: nobody will take it up
            with contextlib.suppress(ValueError):
                self._questions.remove(question)
        return question.answer

    def _give_no_answer(self, question: _Question, outcome: StoreOutcome) -> None:
        if resolve(question.answer, StoreUnavailable(outcome)):
            self._counters.add(f"exists_{outcome}")

    def _ask(self) -> None:
        """Ask what waits and fits into one call together, or one question that is longer. Lookup thread."""
        asked: list[_Question] = []
        keys: list[str] = []
        step = self.settings.max_exists_keys
        while self._questions and (not keys or len(keys) + len(self._questions[0].keys) <= step):
            question = self._questions.popleft()
            if not question.answer.done():
                asked.append(question)
                keys += question.keys
        found: list[bool] = []
        for start in range(0, len(keys), step):
            if all(question.answer.done() for question in asked):
                return
            codes = self._connection.call("exists", methodcaller("exists", keys[start : start + step]))
            if isinstance(codes, StoreOutcome):
                for question in asked:
                    self._give_no_answer(question, codes)
                return
            found += [code == 1 for code in codes]
        position = iter(found)
        for question in asked:
            resolve(question.answer, list(itertools.islice(position, len(question.keys))))

    def get(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        """Read objects into registered memory and verify them. After the first miss the rest is not begun (CANCELLED)."""

        def call(chunk: Sequence[Transfer]) -> list[int] | StoreOutcome:
            return self._connection.call("get", methodcaller("get", *_columns(chunk)))

        ticket = self._move(self._gets, "get", list(transfers), timeout, call, self._judge)
        if not self._watching:
            self._watch_later()
        return ticket

    def put(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        """Seal objects (header and trailer are written into `view`) and store them. Existing keys are OK and keep their bytes,
        unless a get of this client with `verify: full` has found them defective: nothing else would ever replace those."""
        return self._move(self._puts, "put", list(transfers), timeout, self._call_put, lambda _, code: self._known(code))

    def remove_matching(self, pattern: str, timeout: float = 10.0) -> int:
        """Remove the objects whose keys match (see `naming.identity`), except leased ones; blocks for at most `timeout` seconds.

        Returns how many were removed: repeat after the lease time until it is 0. Raises StoreUnavailable.
        """
        answer: Future[int] = Future()

        def run() -> None:
            codes = self._connection.call("remove", lambda client: [client.remove_matching(pattern)])
            if isinstance(codes, StoreOutcome):
                abandon(codes)
            elif codes[0] < 0:
                abandon(self._known(codes[0]))
            else:
                resolve(answer, codes[0])

        def abandon(outcome: StoreOutcome) -> None:
            resolve(answer, StoreUnavailable(outcome, f"removing {pattern!r}"))

        self._submit(self._admin, QueuedRequest(run, abandon), timeout, lambda: abandon(StoreOutcome.TIMEOUT))
        try:
            return answer.result(timeout + 1.0)
        except FutureTimeoutError:
            raise StoreUnavailable(StoreOutcome.TIMEOUT, f"removing {pattern!r}") from None

    def stats(self) -> dict[str, float]:
        """Counters since start (calls, objects by outcome, bytes, seconds, defects) and gauges (state, depth of queues)."""
        state = self._connection.state
        return self._counters.snapshot() | {
            "state": float(state),
            "breaker_open": float(state is StoreState.PROBING),
            "queued_puts": float(self._puts.depth),
            "queued_gets": float(self._gets.depth),
            "in_flight": float(self._connection.in_flight),
        }

    def _watch_later(self) -> None:
        self._watching = True
        self._alarms.at(time.monotonic() + _HUNG_SECONDS, self._watch_gets)

    def _watch_gets(self) -> None:
        """While requests wait and every thread is in a call that hangs, add threads. Alarm thread."""
        self._watching = False  # before the look: who submits after it watches
        if self._gets.depth and self._connection.state is StoreState.READY:
            if self._gets.threads <= self._call_sizes["get"].num_older(_HUNG_SECONDS) < _MAX_GET_THREADS:
                self._gets.add_thread()
            self._watch_later()

    def _abandon_waiting(self) -> None:
        for queue in self._queues:
            queue.abandon_all(StoreOutcome.DOWN)

    def _submit(self, queue: RequestQueue, request: QueuedRequest, timeout: float, expire: Callable[[], None]) -> None:
        state = self._connection.state
        if state is not StoreState.READY:
            request.abandon(StoreOutcome.DOWN if state < StoreState.DRAINING else StoreOutcome.CLOSED)
            return
        queue.submit(request)
        self._alarms.at(time.monotonic() + timeout, expire)

    def _move(self, queue: RequestQueue, kind: str, transfers: list[Transfer], timeout: float, call: CallStore, judge: Judge) -> Ticket:
        """One store call after the other; what one has moved is judged while the next one runs."""
        ticket, size = Ticket(), self._call_sizes[kind]
        outcomes: list[StoreOutcome] = []
        quarantine = 0.0

        def answer(outcomes: list[StoreOutcome]) -> None:
            if resolve(ticket.done, outcomes):
                for outcome, number in collections.Counter(outcomes).items():
                    self._counters.add(f"{kind}_{outcome}", number)

        def end_call(chunk: Sequence[Transfer], codes: list[int] | StoreOutcome, seconds: float) -> None:
            nonlocal quarantine
            if isinstance(codes, StoreOutcome):
                moved = [codes] * len(chunk)
            else:
                moved = [judge(transfer, code) for transfer, code in zip(chunk, codes, strict=True)]
                if quarantine := self._settle(kind, chunk, moved, seconds):  # it may still write: nothing of it is believed
                    moved = [StoreOutcome.TRANSFER] * len(chunk)
            outcomes.extend(moved)
            if any(outcome is not StoreOutcome.OK for outcome in moved):
                ticket.cancel()
            else:
                ticket.on_progress(outcomes)

        def run() -> None:
            begun, ended = 0, Future[None]()
            ended.set_result(None)
            while begun < len(transfers) and not ticket.cancelled:
                chunk = first_chunk(transfers[begun:], size.begin(), self.settings.max_call_bytes)
                begun += len(chunk)
                codes, bad, seconds = _timed(call, chunk, size)
                ended.result()
                ended = self._judges.submit(end_call, chunk, codes, seconds)
                if bad:
                    break
            ended.result()
            answer(outcomes + [StoreOutcome.CANCELLED] * (len(transfers) - len(outcomes)))
            if quarantine:
                self._counters.add("quarantined", len(transfers))
                self._alarms.at(time.monotonic() + quarantine, functools.partial(resolve, ticket.released, None))
            else:
                resolve(ticket.released, None)

        def abandon(outcome: StoreOutcome) -> None:
            answer([outcome] * len(transfers))
            resolve(ticket.released, None)

        def expire() -> None:
            ticket.cancel()
            answer([StoreOutcome.TIMEOUT] * len(transfers))
            if queue.withdraw(request):  # no thread need get to it before its buffers are free
                resolve(ticket.released, None)

        request = QueuedRequest(run, abandon, len(transfers))
        self._submit(queue, request, timeout, expire)
        return ticket

    def _call_put(self, chunk: Sequence[Transfer]) -> list[int] | StoreOutcome:
        if time.monotonic() < self._full_until:
            return StoreOutcome.FULL
        for transfer in chunk:
            seal(transfer.view, key_digest(transfer.key), self._layout, checksum=self.settings.verify_payload)
        codes = self._connection.call("put", methodcaller("put", *_columns(chunk), self._defective))
        if not isinstance(codes, StoreOutcome):
            self._defective.difference_update(transfer.key for transfer, code in zip(chunk, codes, strict=True) if code == 0)
            if StoreOutcome.FULL in map(outcome_of, codes):
                self._full_until = time.monotonic() + _FULL_SECONDS
        return codes

    def _judge(self, transfer: Transfer, code: int) -> StoreOutcome:
        """OK only for exactly the bytes that were put under this key."""
        if code != len(transfer.view):
            return self._known(code) if code < 0 else StoreOutcome.SIZE
        checksum = self.settings.verify_payload
        defect = find_defect(transfer.view, key_digest(transfer.key), self._layout, checksum=checksum)
        if defect is None:
            return StoreOutcome.OK
        self._counters.add(f"defect_{defect}")
        if defect is Defect.LAYOUT:
            self._warn(f"defect {defect}", logging.WARNING, _OTHER_LAYOUT, transfer.key)
        else:
            self._warn(f"defect {defect}", logging.WARNING, "object %s is not what was put there (%s): a miss", transfer.key, defect)
            if len(self._defective) >= 1000:  # most are of names that nobody uses any more
                self._defective.clear()
            if checksum:  # who checks less might take parts of the old and the new bytes for the object
                self._defective.add(transfer.key)
        return StoreOutcome.FOREIGN

    def _known(self, code: int) -> StoreOutcome:
        outcome = outcome_of(code)
        if outcome is StoreOutcome.ERROR:
            self._counters.add(f"code_{code}")
            self._warn(f"code {code}", logging.WARNING, "Mooncake returned %d, which is not expected: treated as a miss", code)
        return outcome

    def _settle(self, kind: str, chunk: Sequence[Transfer], outcomes: list[StoreOutcome], seconds: float) -> float:
        """Count; seconds for which the buffers must stay unused although the call has returned."""
        moved = sum(len(t.view) for t, outcome in zip(chunk, outcomes, strict=True) if outcome is StoreOutcome.OK)
        self._counters.add(f"{kind}_bytes", moved)
        self._counters.add(f"{kind}_seconds", seconds)
        hung = StoreOutcome.TRANSFER in outcomes and seconds >= self.settings.hung_call_seconds
        return self.settings.quarantine_seconds if hung else 0.0


def _timed(call: CallStore, chunk: Sequence[Transfer], size: CallSize) -> tuple[list[int] | StoreOutcome, set[StoreOutcome], float]:
    """What a store call gave, what of it was not OK, and its seconds; `size` has told how large it may be, and hears how it went."""
    began, bad = time.monotonic(), {StoreOutcome.ERROR}
    try:
        codes = call(chunk)
        bad = {codes} if isinstance(codes, StoreOutcome) else {outcome_of(code) for code in codes if code < 0}
    finally:
        size.end(len(chunk), succeeded=bad <= {StoreOutcome.ABSENT})  # a miss is an answer like any other
    return codes, bad, time.monotonic() - began


def _columns(chunk: Sequence[Transfer]) -> tuple[list[str], list[int], list[int]]:
    return [t.key for t in chunk], [t.address for t in chunk], [len(t.view) for t in chunk]
