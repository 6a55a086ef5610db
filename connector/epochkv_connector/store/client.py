"""The L2 store as both roles of the connector see it: never blocks, never raises, never lies.

Requests wait in queues and are served by this client's own threads, because no store call has an upper bound that suits a scheduler:
a dead master costs 4 s, a hung segment owner 2 s and more. Every request has a deadline for its answer, and a separate end of the use
of its buffers. While the connection is not READY everything is answered DOWN at once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from operator import methodcaller

from epochkv_connector.naming.identity import key_digest
from epochkv_connector.store import envelope
from epochkv_connector.store.connection import StoreConnection, StoreSettings, StoreState, outcome_of
from epochkv_connector.store.queues import (
    Alarms,
    CallSize,
    Counters,
    Notices,
    QueuedRequest,
    RequestQueue,
    StoreOutcome,
    StoreUnavailable,
    Ticket,
    Transfer,
    first_chunk,
    refuse,
    resolve,
)

logger = logging.getLogger(__name__)

_FULL_SECONDS = 1.0
"""After a put that found no space, nothing is put for so long."""

_OTHER_LAYOUT = (
    "object %s was put by an engine of the same name whose KV tensors are laid out otherwise (another attention backend, order of "
    "dimensions or layer types): treated as a miss; give both engines the same hardware and --attention-backend, or pools of their own"
)

MoveChunk = Callable[[Sequence[Transfer]], tuple[list[StoreOutcome], float]]
"""Moves a few objects in one store call: outcomes, and for how many seconds the buffers must still stay unused."""


class StoreClient:
    """One Mooncake client behind queues, deadlines and a circuit breaker. All public methods may be called from any thread."""

    def __init__(self, settings: StoreSettings, regions: Sequence[tuple[int, int]] = (), *, layout: bytes = envelope.NO_LAYOUT) -> None:
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
        self._notices = Notices(logger)
        self._connection = StoreConnection(settings, regions, self._counters, self._notices, self._abandon_waiting)
        self._gets = RequestQueue("get", settings.get_threads)
        self._puts = RequestQueue("put", 1, settings.max_queued_puts)
        self._lookups = RequestQueue("lookup", 1)
        self._admin = RequestQueue("admin", 1)
        self._queues = (self._gets, self._puts, self._lookups, self._admin)
        self._alarms = Alarms()
        self._full_until = 0.0  # put thread only
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
        started = self._connection.state is not StoreState.NEW
        if not self._connection.begin_close():
            return self._connection.in_flight == 0
        for queue in self._queues:
            queue.stop()
        idle = self._connection.finish_close(timeout)
        if started:
            self._alarms.stop()
        return idle

    def exists(self, keys: Sequence[str], timeout: float = 1.0) -> Future[Sequence[bool]]:
        """Ask which keys can be read, in order. Longer questions are split.

        Every hit is leased by the store, so ask only for what may be read. The future fails with `StoreUnavailable`
        when there is no answer (not connected, breaker open, `timeout` seconds passed).
        """
        answer: Future[Sequence[bool]] = Future()
        wanted = list(keys)

        def run() -> None:
            found: list[bool] = []
            step = self.settings.max_exists_keys
            for start in range(0, len(wanted), step):
                if answer.done():
                    return
                codes = self._connection.call("exists", methodcaller("exists", wanted[start : start + step]))
                if isinstance(codes, StoreOutcome):
                    return abandon(codes)
                found += [code == 1 for code in codes]
            resolve(answer, found)

        def abandon(outcome: StoreOutcome) -> None:
            if refuse(answer, StoreUnavailable(outcome)):
                self._counters.add(f"exists_{outcome}")

        self._submit(self._lookups, QueuedRequest(run, abandon), timeout, lambda: abandon(StoreOutcome.TIMEOUT))
        return answer

    def get(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        """Read objects into registered memory and verify them. After the first miss the rest is not begun (CANCELLED)."""
        return self._move(self._gets, "get", list(transfers), timeout, self._get_chunk)

    def put(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        """Seal objects (header and trailer are written into `view`) and store them. Existing keys are OK and keep their bytes."""
        return self._move(self._puts, "put", list(transfers), timeout, self._put_chunk)

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
            refuse(answer, StoreUnavailable(outcome, f"removing {pattern!r}"))

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

    def _abandon_waiting(self) -> None:
        for queue in self._queues:
            queue.abandon_all(StoreOutcome.DOWN)

    def _submit(self, queue: RequestQueue, request: QueuedRequest, timeout: float, expire: Callable[[], None]) -> None:
        state = self._connection.state
        if state is not StoreState.READY:
            request.abandon(StoreOutcome.DOWN if state < StoreState.DRAINING else StoreOutcome.CLOSED)
            return
        self._alarms.at(time.monotonic() + timeout, expire)
        queue.submit(request)

    def _move(self, queue: RequestQueue, kind: str, transfers: list[Transfer], timeout: float, move: MoveChunk) -> Ticket:
        ticket = Ticket()

        def answer(outcomes: list[StoreOutcome]) -> None:
            if resolve(ticket.done, outcomes):
                for outcome in outcomes:
                    self._counters.add(f"{kind}_{outcome}")

        def run() -> None:
            outcomes: list[StoreOutcome] = []
            quarantine = 0.0
            while len(outcomes) < len(transfers) and not ticket.cancelled:
                num_keys = self._call_sizes[kind].num_keys
                chunk = first_chunk(transfers[len(outcomes) :], num_keys, self.settings.max_call_bytes)
                moved, hold = move(chunk)
                outcomes += moved
                quarantine = max(quarantine, hold)
                if any(outcome is not StoreOutcome.OK for outcome in moved):
                    break
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

        self._submit(queue, QueuedRequest(run, abandon, len(transfers)), timeout, expire)
        return ticket

    def _get_chunk(self, chunk: Sequence[Transfer]) -> tuple[list[StoreOutcome], float]:
        began = time.monotonic()
        codes = self._connection.call("get", methodcaller("get", *_columns(chunk)))
        if isinstance(codes, StoreOutcome):
            return [codes] * len(chunk), 0.0
        seconds = time.monotonic() - began
        outcomes = [self._judge(transfer, code) for transfer, code in zip(chunk, codes, strict=True)]
        return outcomes, self._settle("get", chunk, outcomes, seconds)

    def _put_chunk(self, chunk: Sequence[Transfer]) -> tuple[list[StoreOutcome], float]:
        if time.monotonic() < self._full_until:
            return [StoreOutcome.FULL] * len(chunk), 0.0
        for transfer in chunk:
            envelope.seal(transfer.view, key_digest(transfer.key), self._layout, checksum=self.settings.verify_payload)
        began = time.monotonic()
        codes = self._connection.call("put", methodcaller("put", *_columns(chunk)))
        if isinstance(codes, StoreOutcome):
            return [codes] * len(chunk), 0.0
        seconds = time.monotonic() - began
        outcomes = [self._known(code) for code in codes]
        if StoreOutcome.FULL in outcomes:
            self._full_until = time.monotonic() + _FULL_SECONDS
        return outcomes, self._settle("put", chunk, outcomes, seconds)

    def _judge(self, transfer: Transfer, code: int) -> StoreOutcome:
        """OK only for exactly the bytes that were put under this key."""
        if code != len(transfer.view):
            return self._known(code) if code < 0 else StoreOutcome.SIZE
        checksum = self.settings.verify_payload
        defect = envelope.find_defect(transfer.view, key_digest(transfer.key), self._layout, checksum=checksum)
        if defect is None:
            return StoreOutcome.OK
        self._counters.add(f"defect_{defect}")
        if defect is envelope.Defect.LAYOUT:
            self._notices.say(f"defect {defect}", _OTHER_LAYOUT, transfer.key)
        else:
            self._notices.say(f"defect {defect}", "object %s is not what was put there (%s): treated as a miss", transfer.key, defect)
        return StoreOutcome.FOREIGN

    def _known(self, code: int) -> StoreOutcome:
        outcome = outcome_of(code)
        if outcome is StoreOutcome.ERROR:
            self._counters.add(f"code_{code}")
            self._notices.say(f"code {code}", "Mooncake returned %d, which is not expected: treated as a miss", code)
        return outcome

    def _settle(self, kind: str, chunk: Sequence[Transfer], outcomes: list[StoreOutcome], seconds: float) -> float:
        """Count; seconds for which the buffers must stay unused although the call has returned."""
        moved = sum(len(t.view) for t, outcome in zip(chunk, outcomes, strict=True) if outcome is StoreOutcome.OK)
        self._counters.add(f"{kind}_bytes", moved)
        self._counters.add(f"{kind}_seconds", seconds)
        # A miss is an answer like any other; what fails says nothing good of the next call.
        well = all(outcome in (StoreOutcome.OK, StoreOutcome.ABSENT) for outcome in outcomes)
        self._call_sizes[kind].saw(len(chunk), seconds, succeeded=well)
        hung = StoreOutcome.TRANSFER in outcomes and seconds >= self.settings.hung_call_seconds
        return self.settings.quarantine_seconds if hung else 0.0


def _columns(chunk: Sequence[Transfer]) -> tuple[list[str], list[int], list[int]]:
    return [t.key for t in chunk], [t.address for t in chunk], [len(t.view) for t in chunk]
