"""What a rank keeps about a job under way, and the threads that copy for it."""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, NamedTuple

from epochkv_connector.store import Ticket
from epochkv_connector.wire.jobs import BlockMove, JobAck, LoadJob, Phase, SaveJob
from epochkv_connector.worker.copying.staging import Staging, StagingStream

logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
"""How long a device may take to give a copy thread its stream."""


class JobFailed(Exception):
    """A job cannot be done; `reason` is the name of a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Stage(enum.IntEnum):
    """How far a load or the copying part of a save is. Only QUEUED work may be failed by a deadline: a copy runs to its end."""

    QUEUED = 0  # fetching from L2, or waiting for the copy thread
    COPYING = 1
    OVER = 2


@dataclass(slots=True, eq=False)
class LoadTask:
    job: LoadJob
    deadline: float
    after: Any = None  # event behind which the copy may run
    pieces: tuple[tuple[BlockMove, ...], ...] = ((),)  # in no piece does a slot come twice
    at: int = 0  # the piece that is being fetched or copied
    stage: Stage = Stage.QUEUED
    failed: bool = False
    filled: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()  # slots that are to blame for a failure, where that is known
    ticket: Ticket | None = None
    busy: tuple[int, ...] = ()  # slots the ticket writes to

    @property
    def piece(self) -> tuple[BlockMove, ...]:
        return self.pieces[self.at]

    @property
    def is_last_piece(self) -> bool:
        return self.at + 1 == len(self.pieces)

    def ack(self, rank: int) -> JobAck:
        """The LOADED acknowledgement; slots whose transfer still runs are named busy.

        A failed load in several pieces blames no slot: a slot stands for several of its blocks.
        """
        vague = self.failed and len(self.pieces) > 1
        return JobAck(
            job_id=self.job.job_id,
            rank=rank,
            phase=Phase.LOADED,
            start_block=0,
            num_blocks=0 if self.failed else len(self.job.moves),
            failed=self.failed,
            filled_slots=() if vague else tuple(dict.fromkeys(self.filled)),
            failed_slots=self.bad if self.failed and not vague else (),
            busy_slots=self.busy if is_open(self.ticket) else (),
        )


@dataclass(slots=True, eq=False)
class SaveTask:
    job: SaveJob
    deadline: float
    after: Any = None  # event behind which the copy may run
    stage: Stage = Stage.QUEUED
    failed: bool = False
    overtaken: bool = False  # its GPU blocks may have been written to while it copied
    as_named: Callable[[], bool] = lambda: True  # whether its blocks were computed with the weights that their names say
    ticket: Ticket | None = None
    busy: tuple[int, ...] = ()  # slots the ticket reads from

    def ack(self, rank: int, phase: Phase, *, failed: bool) -> JobAck:
        """The COPIED or STORED acknowledgement: the whole range or nothing of it."""
        return JobAck(
            job_id=self.job.job_id,
            rank=rank,
            phase=phase,
            start_block=self.job.start_block,
            num_blocks=0 if failed else self.job.num_blocks,
            failed=failed,
            busy_slots=self.busy if phase is Phase.STORED and is_open(self.ticket) else (),
        )


def is_open(ticket: Ticket | None) -> bool:
    """True while the store may still touch the buffers of a request."""
    return ticket is not None and not ticket.released.done()


class Report(NamedTuple):
    """What one `results()` call hands to vLLM (request ids) and to the scheduler role (acknowledgements)."""

    finished_recving: set[str]
    failed_recving: set[str]
    acks: list[JobAck]


Work = Callable[[StagingStream], None]
"""Copies of one job on its thread's stream."""


class CopyThread:
    """A daemon thread that copies in one direction, in order of arrival. Work must not raise; an exception is only logged.

    The constructor returns with an open stream, so a CUDA runtime that cannot be used is noticed before the first job.
    """

    def __init__(self, name: str, staging: Staging) -> None:
        """Raises RuntimeError or OSError when the stream cannot be opened, or not within `OPEN_SECONDS`."""
        self._staging = staging
        self._opened: Future[None] = Future()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"epochkv-{name}", daemon=True)
        self._thread.start()
        try:
            self._opened.result(OPEN_SECONDS)
        except FutureTimeoutError:
            self._work.put(None)
            raise RuntimeError(f"the device gave the thread that copies for a {name} no stream within {OPEN_SECONDS:.0f} s") from None

    def submit(self, work: Work) -> None:
        self._work.put(work)

    def stop(self, timeout: float) -> bool:
        """End after what is queued; False if it did not within `timeout` seconds."""
        self._work.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            stream = StagingStream(self._staging)
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        while (work := self._work.get()) is not None:
            try:
                work(stream)
            except Exception:
                logger.exception("a copy thread met an unexpected error")


def remaining(deadline: float) -> float:
    """Seconds until a monotonic deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())
