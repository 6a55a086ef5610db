"""What the loads and saves of one rank share: host region, copy threads, store, the contents of slots, and the state of each job.

Everything that more than one thread touches is guarded by `changed`, which is also how the model-runner thread is told
that something has ended. A job that cannot be done raises `JobFailed` here; `guard` turns that, and anything else, into
the failure of that job alone.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from epochkv_connector.naming.identity import epoch_of, object_key, replica_owner
from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.queues import Counters, Notices, Ticket, Transfer
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob
from epochkv_connector.worker.staging import HostRegion, Pair, Staging, StagingStream, compute_event

logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
"""How long a device may take to give a copy thread its stream."""


class JobFailed(Exception):
    """A job cannot be done; `reason` is the name of a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Stage(enum.IntEnum):
    """How far a job is. Only QUEUED work may be failed by a deadline: a copy runs to its end.

    A load: QUEUED -> COPYING -> (QUEUED -> COPYING, for each further piece) -> OVER.
    A save: QUEUED -> COPYING -> OVER, or with a namespace -> COPIED (several ranks only) -> PUTTING -> OVER.
    Whoever makes QUEUED into COPYING (`Rank.claim`), or COPIED into PUTTING, owns the task and ends that stage.
    """

    QUEUED = 0  # fetching from L2, or waiting for the forward pass or the copy thread
    COPYING = 1
    COPIED = 2  # other ranks have yet to agree to its put
    PUTTING = 3
    OVER = 4


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
    ticket: Ticket | None = None
    busy: tuple[int, ...] = ()  # slots the ticket writes to

    @property
    def piece(self) -> tuple[BlockMove, ...]:
        return self.pieces[self.at]

    @property
    def is_last_piece(self) -> bool:
        return self.at + 1 == len(self.pieces)

    def ack(self, rank: int, phase: Phase, failed: bool) -> JobAck:
        """The LOADED acknowledgement; slots whose transfer still runs are named busy.

        A failed load in several pieces names no filled slot: a slot stands for several of its blocks.
        """
        return JobAck(
            job_id=self.job.job_id,
            rank=rank,
            phase=phase,
            failed=failed,
            filled_slots=() if failed and len(self.pieces) > 1 else tuple(dict.fromkeys(self.filled)),
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

    def ack(self, rank: int, phase: Phase, failed: bool) -> JobAck:
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


Task = TypeVar("Task", LoadTask, SaveTask)


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


class Slots:
    """Which block each slot holds, and which slots a late store call may still touch. Guarded by `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._held: Counter[int] = Counter()  # slot -> transfers that may still touch it
        self._contents: dict[int, tuple[int, bytes]] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def check_free(self, moves: Iterable[BlockMove]) -> None:
        """Refuse to write to slots that a late store call may still touch."""
        with self._changed:
            held = [move.slot for move in moves if move.slot in self._held]
        if held:
            raise JobFailed("slot_busy", f"slots {held} are still in use by an earlier job's transfer")

    def check_contents(self, moves: Iterable[BlockMove]) -> None:
        """Refuse slots that do not hold the very block that the scheduler role believes they hold."""
        bad = [move.slot for move in moves if self._contents.get(move.slot) != (move.group, move.block_hash)]
        if bad:
            raise JobFailed("slot_mismatch", f"slots {bad} do not hold the blocks that were asked for")

    def empty(self, moves: Iterable[BlockMove]) -> None:
        """The slots of these moves are about to be overwritten."""
        with self._changed:
            for move in moves:
                self._contents.pop(move.slot, None)

    def fill(self, moves: Iterable[BlockMove]) -> None:
        """The slots of these moves hold their blocks now."""
        with self._changed:
            for move in moves:
                self._contents[move.slot] = (move.group, move.block_hash)

    def hold(self, slots: tuple[int, ...], ask: Callable[[], Ticket]) -> Ticket:
        """Ask the store for a transfer; no other job gets these slots until the store has let go of them."""
        with self._changed:
            self._held.update(slots)
        try:
            ticket = ask()
        except BaseException:
            self._release(slots)
            raise
        ticket.released.add_done_callback(lambda _: self._release(slots))
        return ticket

    def _release(self, slots: tuple[int, ...]) -> None:
        with self._changed:
            self._held.subtract(slots)
            self._held = +self._held
            self._changed.notify_all()


_KEPT: list[Staging] = []
"""Regions that a store call in flight may still touch after `close`: they live as long as the process."""

OpenStore = Callable[[HostRegion], StoreClient]


class Rank:
    """One rank's region, copy threads, store and slots. No job may be given to it after `close`.

    Attributes:
        replicas: how many consecutive ranks hold the same KV, by KV cache group; groups beyond: 1.
        alone: no other rank holds a part of this engine's weights.
        newest_epoch: highest epoch this rank was told of.
        jobs: every job that is not over, by its id; guarded by `changed`.
        ended: (job, phase, failed) of acknowledgements that were not told yet; guarded by `changed`.
    """

    def __init__(self, staging: Staging, number: int, world_size: int, replicas: Sequence[int], open_store: OpenStore | None) -> None:
        """See `runner.JobRunner`."""
        self.number = number
        self.alone = world_size == 1
        self.replicas = tuple(replicas)
        self.staging = staging
        self.store: StoreClient | None = None
        self.copy_threads: dict[str, CopyThread] = {}
        self.newest_epoch = -1
        self.stopped = False
        self.counters = Counters()
        self.notices = Notices(logger)
        self.changed = threading.Condition()  # re-entrant: a store may answer inside the call that asks it
        self.slots = Slots(self.changed)
        self.jobs: dict[int, LoadTask | SaveTask] = {}
        self.ended: list[tuple[LoadTask | SaveTask, Phase, bool]] = []
        try:
            for name in ("load", "save"):
                self.copy_threads[name] = CopyThread(name, staging)
            if open_store is not None:
                self.store = open_store(staging.region)
        except BaseException:
            self.close(time.monotonic() + 1.0)
            raise

    def close(self, deadline: float) -> bool:
        """End the threads and close the store. False: a call or copy is still under way, so its memory is kept."""
        stopped = [thread.stop(remaining(deadline)) for thread in self.copy_threads.values()]
        clean = all(stopped)
        if self.store is not None:
            clean = self.store.close(max(remaining(deadline), 0.1)) and clean
        if clean:
            self.staging.region.unpin()
        else:
            _KEPT.append(self.staging)
        return clean

    def tell_epoch(self, epoch: int) -> None:
        """The engine has adopted this epoch, or a later one before."""
        with self.changed:
            self.newest_epoch = max(self.newest_epoch, epoch)

    def add(self, task: LoadTask | SaveTask) -> None:
        with self.changed:
            assert task.job.job_id not in self.jobs
            self.jobs[task.job.job_id] = task

    def tasks(self, kind: type[Task], *stages: Stage) -> list[Task]:
        """Jobs of this kind that are in one of these stages."""
        with self.changed:
            return [task for task in self.jobs.values() if isinstance(task, kind) and task.stage in stages]

    def claim(self, task: LoadTask | SaveTask) -> bool:
        """Make a QUEUED task the caller's own, to copy or to fail. False: somebody was faster."""
        with self.changed:
            if task.stage is not Stage.QUEUED:
                return False
            task.stage = Stage.COPYING
            return True

    def end_phase(self, task: LoadTask | SaveTask, phase: Phase, failed: bool, stage: Stage = Stage.OVER) -> None:
        """A phase has ended: the task goes on in `stage`."""
        with self.changed:
            task.stage = stage
            if stage is Stage.OVER:
                self.jobs.pop(task.job.job_id, None)
            self.ended.append((task, phase, failed))
            self.changed.notify_all()

    def check_running(self) -> None:
        """Refuse jobs from `shutdown` on."""
        if self.stopped:
            raise JobFailed("shutdown", "the engine shuts down")

    def event(self) -> Any:
        """End of the work issued so far on the model's stream (None on CPU). Model-runner thread only."""
        return compute_event(self.staging.device)

    def transfer(self, namespace: str, move: BlockMove) -> Transfer:
        key = object_key(namespace, move.group, self.number // self._replicas(move.group), move.block_hash)
        return Transfer(key, self.staging.region.slot_address(move.slot), self.staging.object_view(move.group, move.slot))

    def is_ours(self, move: BlockMove) -> bool:
        """Whether this rank, of all that hold the same KV, puts this block."""
        replicas = self._replicas(move.group)
        return replica_owner(move.block_hash, replicas) == self.number % replicas

    def _replicas(self, group: int) -> int:
        return self.replicas[group] if group < len(self.replicas) else 1

    def is_stale(self, namespace: str) -> bool:
        """Whether the namespace is of an older epoch than this rank was told of."""
        return epoch_of(namespace) < self.newest_epoch

    def count_copy(self, kind: str, pairs: Sequence[Pair], seconds: float) -> None:
        self.counters.add(f"copy_{kind}_blocks", len(pairs))
        self.counters.add(f"copy_{kind}_bytes", sum(self.staging.groups[pair.group].payload_bytes for pair in pairs))
        self.counters.add(f"copy_{kind}_seconds", seconds)

    def tell(self, kind: str, reason: str, detail: str, word: str = "failed") -> None:
        """Count a failure, and say it (`Notices`)."""
        self.counters.add(f"{kind}_{word}_{reason}")
        self.notices.say(f"{kind} {reason}", "KV %s %s: %s", kind, word, detail)

    def guard(self, work: Callable[[], None], fail: Callable[[str, str], None]) -> None:
        """Run one job's work; anything it raises fails that job only."""
        try:
            work()
        except JobFailed as error:
            fail(error.reason, str(error))
        except Exception as error:
            logger.debug("job failed", exc_info=True)
            fail("error", f"{type(error).__name__}: {error}")
