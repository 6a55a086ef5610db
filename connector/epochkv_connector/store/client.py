"""The L2 store as both halves of the connector see it: never blocks, never raises, never lies.

Requests wait in lanes and are served by this client's own threads, because no store call has an upper bound that
suits a
scheduler: a dead master costs 4 s, a hung segment owner 2 s and more. Every request has a deadline for its answer,
and a separate end of the use of its buffers. While the link is not READY everything is answered DOWN at once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from epochkv_connector.naming.object_keys import key_digest, prefix_pattern
from epochkv_connector.store import envelope
from epochkv_connector.store.connection import Connection, outcome_of
from epochkv_connector.store.counters import Counters, Notices
from epochkv_connector.store.lanes import (
    Alarms,
    CallSize,
    Lane,
    Op,
    Outcome,
    StoreUnavailable,
    Ticket,
    Transfer,
    first_chunk,
    refuse,
    resolve,
)
from epochkv_connector.store.link import Link, State
from epochkv_connector.store.settings import StoreSettings

logger = logging.getLogger(__name__)

_FULL_BACKOFF_SECONDS = (0.25, 4.0)

_OTHER_LAYOUT = (
    "object %s was put by an engine of the same name whose KV tensors are laid out otherwise (another attention backend, order of "
    "dimensions or layer types): treated as a miss; give both engines the same hardware and --attention-backend, or pools of their own"
)

MoveChunk = Callable[[Sequence[Transfer]], tuple[list[Outcome], float]]
"""Moves a few objects in one store call: outcomes, and for how many seconds the buffers must still stay unused."""


class StoreClient:
    """One Mooncake client behind queues, deadlines and a circuit breaker. All public methods may be called from any thread."""

    def __init__(self, settings: StoreSettings, regions: Sequence[tuple[int, int]] = (), *, layout: bytes = envelope.NO_LAYOUT) -> None:
        """Nothing happens before `start`.

        Args:
            settings: see there.
            regions: (address, bytes) of memory that puts and gets use, which must outlive `close`; none: a client for
                `exists` and `remove_by_prefix` only.
            layout: how payloads are cut from this rank's KV tensors (`worker.copying.layout.layout_digest`); objects of any other
                layout are misses.
        """
        self.settings = settings
        self._layout = layout
        self._counters = Counters()
        self._notices = Notices(logger)
        self._link = Link(settings, regions, self._counters, self._notices, self._abandon_waiting)
        self._gets = Lane("get", settings.get_threads)
        self._puts = Lane("put", 1, settings.max_queued_puts)
        self._lookups = Lane("lookup", 1)
        self._admin = Lane("admin", 1)
        self._lanes = (self._gets, self._puts, self._lookups, self._admin)
        self._alarms = Alarms()
        self._full_pause, self._full_until = 0.0, 0.0  # put thread only
        self._call_sizes = {
            kind: CallSize(settings.min_call_keys, settings.max_call_keys, settings.fast_call_seconds) for kind in ("get", "put")
        }

    def start(self) -> None:
        """Connect in the background; returns at once, also when there is no master."""
        if self._link.start():
            for lane in self._lanes:
                lane.start()
            self._alarms.start()

    @property
    def state(self) -> State:
        """Where the client is now."""
        return self._link.state

    @property
    def ready(self) -> bool:
        """True while calls are served."""
        return self._link.state is State.READY

    def wait_ready(self, timeout: float) -> bool:
        """Wait until READY, at most `timeout` seconds (tests and tools; an engine never waits)."""
        return self._link.wait_ready(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new calls, answer what waits, wait for calls in flight, close. A second call does nothing.

        Returns:
            False if a call was still in flight after `timeout` seconds: its buffers must then live as long as the
            process.
        """
        started = self._link.state is not State.NEW
        if not self._link.begin_close():
            return self._link.in_flight == 0
        for lane in self._lanes:
            lane.stop()
        idle = self._link.finish_close(timeout)
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
                codes = self._link.call("exists", functools.partial(_exists, wanted[start : start + step]))
                if isinstance(codes, Outcome):
                    return abandon(codes)
                found += [code == 1 for code in codes]
            resolve(answer, found)

        def abandon(outcome: Outcome) -> None:
            if refuse(answer, StoreUnavailable(outcome)):
                self._counters.add(f"exists_{outcome}")

        self._submit(self._lookups, Op(run, abandon), timeout, lambda: abandon(Outcome.TIMEOUT))
        return answer

    def get(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        """Read objects into registered memory and verify them. After the first miss the rest is not begun (CANCELLED)."""
        return self._move(self._gets, "get", list(transfers), timeout, self._get_chunk)

    def put(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        """Seal objects (header and trailer are written into `view`) and store them. Existing keys are OK and keep their bytes."""
        return self._move(self._puts, "put", list(transfers), timeout, self._put_chunk)

    def remove_by_prefix(self, prefix: str, timeout: float = 10.0) -> int:
        """Remove the objects whose key starts with `prefix`, except leased ones; blocks for at most `timeout` seconds.

        Returns:
            How many were removed. Repeat after the lease time until it is 0.

        Raises:
            StoreUnavailable: no answer.
        """
        return self._remove(prefix_pattern(prefix), timeout)

    def remove_matching(self, pattern: str, timeout: float = 10.0) -> int:
        """Remove the objects whose keys match (`keys.older_pattern`, `keys.other_weights_pattern`). As `remove_by_prefix`."""
        return self._remove(pattern, timeout)

    def _remove(self, pattern: str, timeout: float) -> int:
        answer: Future[int] = Future()

        def run() -> None:
            codes = self._link.call("remove", lambda connection: [connection.remove_matching(pattern)])
            if isinstance(codes, Outcome):
                abandon(codes)
            elif codes[0] < 0:
                abandon(self._known(codes[0]))
            else:
                resolve(answer, codes[0])

        def abandon(outcome: Outcome) -> None:
            refuse(answer, StoreUnavailable(outcome, f"removing {pattern!r}"))

        self._submit(self._admin, Op(run, abandon), timeout, lambda: abandon(Outcome.TIMEOUT))
        try:
            return answer.result(timeout + 1.0)
        except FutureTimeoutError:
            raise StoreUnavailable(Outcome.TIMEOUT, f"removing {pattern!r}") from None

    def stats(self) -> dict[str, float]:
        """Counters since start (calls, objects by outcome, bytes, seconds, defects) and gauges (state, depth of queues)."""
        state = self._link.state
        return self._counters.snapshot() | {
            "state": float(state),
            "breaker_open": float(state is State.PROBING),
            "queued_puts": float(self._puts.depth),
            "queued_gets": float(self._gets.depth),
            "in_flight": float(self._link.in_flight),
        }

    def _abandon_waiting(self) -> None:
        for lane in self._lanes:
            lane.abandon_all(Outcome.DOWN)

    def _submit(self, lane: Lane, op: Op, timeout: float, expire: Callable[[], None]) -> None:
        state = self._link.state
        if state is not State.READY:
            op.abandon(Outcome.DOWN if state < State.DRAINING else Outcome.CLOSED)
            return
        self._alarms.at(time.monotonic() + timeout, expire)
        lane.submit(op)

    def _move(self, lane: Lane, kind: str, transfers: list[Transfer], timeout: float, move: MoveChunk) -> Ticket:
        ticket = Ticket()

        def answer(outcomes: list[Outcome]) -> None:
            if resolve(ticket.done, outcomes):
                for outcome in outcomes:
                    self._counters.add(f"{kind}_{outcome}")

        def run() -> None:
            outcomes: list[Outcome] = []
            quarantine = 0.0
            while len(outcomes) < len(transfers) and not ticket.cancelled:
                num_keys = self._call_sizes[kind].num_keys
                chunk = first_chunk(transfers[len(outcomes) :], num_keys, self.settings.max_call_bytes)
                moved, hold = move(chunk)
                outcomes += moved
                quarantine = max(quarantine, hold)
                if any(outcome is not Outcome.OK for outcome in moved):
                    break
            answer(outcomes + [Outcome.CANCELLED] * (len(transfers) - len(outcomes)))
            if quarantine:
                self._counters.add("quarantined", len(transfers))
                self._alarms.at(time.monotonic() + quarantine, functools.partial(resolve, ticket.released, None))
            else:
                resolve(ticket.released, None)

        def abandon(outcome: Outcome) -> None:
            answer([outcome] * len(transfers))
            resolve(ticket.released, None)

        def expire() -> None:
            ticket.cancel()
            answer([Outcome.TIMEOUT] * len(transfers))

        self._submit(lane, Op(run, abandon, len(transfers)), timeout, expire)
        return ticket

    def _get_chunk(self, chunk: Sequence[Transfer]) -> tuple[list[Outcome], float]:
        began = time.monotonic()
        codes = self._link.call("get", functools.partial(_get, chunk))
        if isinstance(codes, Outcome):
            return [codes] * len(chunk), 0.0
        seconds = time.monotonic() - began
        outcomes = [self._judge(transfer, code) for transfer, code in zip(chunk, codes, strict=True)]
        return outcomes, self._settle("get", chunk, outcomes, seconds)

    def _put_chunk(self, chunk: Sequence[Transfer]) -> tuple[list[Outcome], float]:
        if time.monotonic() < self._full_until:
            return [Outcome.FULL] * len(chunk), 0.0
        for transfer in chunk:
            envelope.seal(transfer.view, key_digest(transfer.key), self._layout, checksum=self.settings.verify_payload)
        began = time.monotonic()
        codes = self._link.call("put", functools.partial(_put, chunk))
        if isinstance(codes, Outcome):
            return [codes] * len(chunk), 0.0
        seconds = time.monotonic() - began
        outcomes = [self._known(code) for code in codes]
        if Outcome.FULL in outcomes:
            low, high = _FULL_BACKOFF_SECONDS
            self._full_pause = min(max(self._full_pause * 2, low), high)
            self._full_until = time.monotonic() + self._full_pause
        else:
            self._full_pause = 0.0
        return outcomes, self._settle("put", chunk, outcomes, seconds)

    def _judge(self, transfer: Transfer, code: int) -> Outcome:
        """OK only for exactly the bytes that were put under this key."""
        if code != len(transfer.view):
            return self._known(code) if code < 0 else Outcome.SIZE
        checksum = self.settings.verify_payload
        defect = envelope.find_defect(transfer.view, key_digest(transfer.key), self._layout, checksum=checksum)
        if defect is None:
            return Outcome.OK
        self._counters.add(f"defect_{defect}")
        if defect is envelope.Defect.LAYOUT:
            self._notices.say(f"defect {defect}", _OTHER_LAYOUT, transfer.key)
        else:
            self._notices.say(f"defect {defect}", "object %s is not what was put there (%s): treated as a miss", transfer.key, defect)
        return Outcome.FOREIGN

    def _known(self, code: int) -> Outcome:
        outcome = outcome_of(code)
        if outcome is Outcome.ERROR:
            self._counters.add(f"code_{code}")
            self._notices.say(f"code {code}", "Mooncake returned %d, which is not expected: treated as a miss", code)
        return outcome

    def _settle(self, kind: str, chunk: Sequence[Transfer], outcomes: list[Outcome], seconds: float) -> float:
        """Count; seconds for which the buffers must stay unused although the call has returned."""
        moved = sum(len(t.view) for t, outcome in zip(chunk, outcomes, strict=True) if outcome is Outcome.OK)
        self._counters.add(f"{kind}_bytes", moved)
        self._counters.add(f"{kind}_seconds", seconds)
        failed_key: str | None = None
        if Outcome.TRANSFER in outcomes:
            failed_key = chunk[outcomes.index(Outcome.TRANSFER)].key if kind == "get" else ""
        # A miss is an answer like any other; what fails says nothing good of the next call.
        well = all(outcome in (Outcome.OK, Outcome.ABSENT) for outcome in outcomes)
        self._call_sizes[kind].saw(len(chunk), seconds, succeeded=well)
        self._link.note_transfers(failed_key=failed_key, succeeded=Outcome.OK in outcomes, seconds=seconds)
        hung = failed_key is not None and seconds >= self.settings.hung_call_seconds
        return self.settings.quarantine_seconds if hung else 0.0


def _exists(keys: list[str], connection: Connection) -> list[int]:
    return connection.exists(keys)


def _get(chunk: Sequence[Transfer], connection: Connection) -> list[int]:
    return connection.get([t.key for t in chunk], [t.address for t in chunk], [len(t.view) for t in chunk])


def _put(chunk: Sequence[Transfer], connection: Connection) -> list[int]:
    return connection.put([t.key for t in chunk], [t.address for t in chunk], [len(t.view) for t in chunk])
