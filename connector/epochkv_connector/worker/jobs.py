"""Loads and saves of one rank, and what they share: host region, copy threads, store, the contents of slots, and the state of each job.

Everything that more than one thread touches is guarded by `Rank.changed`, which is also how the model-runner thread is told
that something has ended. A job that cannot be done raises `JobFailed` here; `Rank.guard` turns that, and anything else, into
the failure of that job alone.

A load fetches blocks from the store into slots where need be, and copies the slots to GPU blocks: what one store call has brought is
copied while the next call runs. A load with more blocks than it was given slots names slots more than once. It goes through in
*pieces*, cut where a slot comes again. The next piece is fetched when the last copy has ended and the store has let go of the slots.
A load that fails while blocks are copied ends with that copy: blocks of a reported load are given to others at once. One rank that
fails makes the whole load fail. vLLM then has all ranks compute what was to be loaded, and the request steps aside once before it is
scheduled again (`Admission._steps_aside_once`).

A save copies GPU blocks to slots behind the forward pass, then puts the slots to the store. The two parts are acknowledged apart
(`Phase.COPIED`, `Phase.STORED`): GPU blocks are free after the first, which needs no network, and slots after the last.
"""

import enum
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from epochkv_connector.naming.identity import epoch_of, object_key, replica_owner
from epochkv_connector.store.client import StoreClient, Ticket, Transfer
from epochkv_connector.store.connection import AGAIN_SECONDS, Counters, StoreOutcome
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, Tier
from epochkv_connector.worker.staging import HostRegion, Staging, StagingStream, compute_event
from epochkv_fence.common import Seldom

logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
"""How long a device may take to give a copy thread its stream."""


class JobFailed(Exception):
    """A job cannot be done; `reason` is the name of a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Stage(enum.IntEnum):
    """How far a job is. Only QUEUED work may be ended by a deadline: a copy runs to its end.

    A load: QUEUED -> COPYING -> (QUEUED -> COPYING, for what arrives later) -> OVER.
    A save: QUEUED -> COPYING -> OVER, or with a namespace -> COPIED -> PUTTING -> OVER.
    Whoever makes QUEUED into COPYING (`Rank.claim`), or COPIED into PUTTING, owns the task and ends that stage.
    """

    QUEUED = 0  # nothing of it is copied: fetching from L2, or waiting for the forward pass or the copy thread
    COPYING = 1
    COPIED = 2  # later passes have yet to settle its step, or other ranks to agree to its put
    PUTTING = 3
    OVER = 4


@dataclass(slots=True, eq=False)
class LoadTask:
    job: LoadJob
    deadline: float
    after: Any = None  # event behind which the copy may run
    pieces: tuple[tuple[BlockMove, ...], ...] = ((),)  # in no piece does a slot come twice
    at: int = 0  # the piece that is being fetched and copied
    left: int = 0  # moves of the piece that no copy has taken up
    ready: list[BlockMove] = field(default_factory=list)  # those of them whose slots are filled
    stage: Stage = Stage.QUEUED
    failed: bool = False
    known: int = 0  # how many blocks of `ticket` have an outcome
    filled: tuple[int, ...] = ()
    ticket: Ticket | None = None
    busy: tuple[int, ...] = ()  # slots the ticket writes to

    @property
    def piece(self) -> tuple[BlockMove, ...]:
        return self.pieces[self.at]

    @property
    def is_ending(self) -> bool:
        """The copy under way is its last."""
        return self.stage is Stage.COPYING and not self.left and self.at + 1 == len(self.pieces)


Settled = Callable[[], bool | None]
"""Whether all ranks of a domain computed a step with the weights that its names say. None: a later pass will tell."""


@dataclass(slots=True, eq=False)
class SaveTask:
    job: SaveJob
    deadline: float
    after: Any = None  # event behind which the copy may run
    stage: Stage = Stage.QUEUED
    failed: bool = False
    as_named: Callable[[], bool] = lambda: True  # whether its blocks were computed with the weights that their names say
    settled: Settled = lambda: True
    told: bool = False  # SETTLED was
    agreed: bool = False  # every rank has copied it, and settled it if it `settles`
    ticket: Ticket | None = None
    busy: tuple[int, ...] = ()  # slots the ticket reads from


Task = TypeVar("Task", LoadTask, SaveTask)


def is_open(ticket: Ticket | None) -> bool:
    """True while the store may still touch the buffers of a request."""
    return ticket is not None and not ticket.released.done()


def acknowledgement(task: LoadTask | SaveTask, rank: int, phase: Phase, failed: bool) -> JobAck:
    """Slots whose transfer still runs are named busy. A failed load in several pieces names no filled slot: a slot stands for several of
    its blocks."""
    filled: tuple[int, ...] = ()
    if isinstance(task, LoadTask) and not (failed and len(task.pieces) > 1):
        filled = tuple(dict.fromkeys(task.filled))
    busy = task.busy if phase is not Phase.COPIED and is_open(task.ticket) else ()
    return JobAck(task.job.job_id, rank, phase, failed, filled, busy)


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
            for slot in slots:
                self._held[slot] -= 1
                if not self._held[slot]:
                    del self._held[slot]
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
        """See `role.JobRunner`."""
        self.number = number
        self.alone = world_size == 1
        self.replicas = tuple(replicas)
        self.staging = staging
        self.store: StoreClient | None = None
        self.copy_threads: dict[str, CopyThread] = {}
        self.newest_epoch = -1
        self.stopped = self.asleep = False
        self.counters = Counters()
        self.warn = Seldom(logger, AGAIN_SECONDS)
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
        if self.stopped:
            raise JobFailed("shutdown", "the engine shuts down")

    def check_mapped(self) -> None:
        """Refuse copies from `shutdown` on, and while the memory of KV is unmapped."""
        self.check_running()
        if self.asleep:
            raise JobFailed("sleep", "the engine sleeps")

    def transfer(self, namespace: str, move: BlockMove) -> Transfer:
        key = object_key(namespace, move.group, self.number // self._replicas(move.group), move.block_hash)
        return Transfer(key, self.staging.region.slot_address(move.slot), self.staging.object_view(move.group, move.slot))

    def is_ours(self, move: BlockMove) -> bool:
        """Whether this rank, of all that hold the same KV, puts this block."""
        replicas = self._replicas(move.group)
        return replica_owner(move.block_hash, replicas) == self.number % replicas

    def _replicas(self, group: int) -> int:
        return self.replicas[group] if group < len(self.replicas) else 1

    def count_copy(self, kind: str, moves: Sequence[BlockMove], seconds: float) -> None:
        self.counters.add(f"copy_{kind}_blocks", len(moves))
        self.counters.add(f"copy_{kind}_bytes", sum(self.staging.groups[move.group].payload_bytes for move in moves))
        self.counters.add(f"copy_{kind}_seconds", seconds)

    def tell(self, kind: str, reason: str, detail: str, word: str = "failed") -> None:
        """Count a failure, and say it (`Seldom`)."""
        self.counters.add(f"{kind}_{word}_{reason}")
        self.warn(f"{kind} {reason}", logging.WARNING, "EpochKV: %s of KV %s (vLLM computes what is missing): %s", kind, word, detail)

    def guard(self, work: Callable[[], None], fail: Callable[[str, str], None]) -> None:
        """Run one job's work; anything it raises fails that job only."""
        try:
            work()
        except JobFailed as error:
            fail(error.reason, str(error))
        except Exception as error:
            logger.debug("job failed", exc_info=True)
            fail("error", f"{type(error).__name__}: {error}")


class LoadTasks:
    """The loads among `Rank.jobs`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def take(self, job: LoadJob) -> None:
        """A step brought this load: begin at once. Model-runner thread."""
        after = compute_event(self._rank.staging.device)
        load = LoadTask(job, time.monotonic() + job.deadline_seconds, after, pieces=_cut(job.moves))
        self._rank.add(load)
        self._rank.counters.add("load_jobs")
        self._guard(load, partial(self._begin_piece, load))

    def open(self) -> list[LoadTask]:
        return self._rank.tasks(LoadTask, Stage.QUEUED, Stage.COPYING)

    def cancel(self, job_id: int) -> None:
        """Nobody waits for this prefetch any more: begin no further store call for it."""
        with self._rank.changed:
            load = self._rank.jobs.get(job_id)
        if isinstance(load, LoadTask) and load.ticket is not None:
            load.ticket.cancel()

    def expire(self, now: float) -> None:
        """Fail what is past its deadline and not being copied."""
        for load in self._rank.tasks(LoadTask, Stage.QUEUED):
            if load.deadline <= now:
                self.fail(load, "deadline", f"load job {load.job.job_id} missed its deadline")

    def fail_open(self, reason: str, detail: str) -> None:
        """Fail every load that is not over with the copy under way."""
        with self._rank.changed:
            for load in self.open():
                if not load.is_ending:
                    self.fail(load, reason, f"load job {load.job.job_id}: {detail}")

    def fail(self, load: LoadTask, reason: str, detail: str) -> None:
        """End a load; one that is being copied ends with that copy."""
        with self._rank.changed:
            if load.stage is Stage.OVER or load.failed:
                return
            self._mark_failed(load, reason, detail)
            if not self._rank.claim(load):
                return
        self._end(load)

    def _begin_piece(self, load: LoadTask) -> None:
        rank = self._rank
        rank.check_mapped()
        with rank.changed:  # a deadline cannot come between asking the store and knowing the ticket
            if load.stage is not Stage.QUEUED:
                return
            load.left = len(load.piece)
            from_store = [move for move in load.piece if move.source is Tier.STORE]
            if from_store:
                self._fetch(load, from_store)
            load.ready += [move for move in load.piece if move.source is Tier.HOST]
        if load.piece:
            self._queue_scatter(load)
        elif rank.claim(load):
            self._end(load)

    def _fetch(self, load: LoadTask, moves: Sequence[BlockMove]) -> None:
        rank, store, namespace = self._rank, self._rank.store, load.job.namespace
        rank.slots.check_free(moves)
        if load.at and remaining(load.deadline) == 0:  # it passed while the piece before this one was copied
            raise JobFailed("deadline", f"load job {load.job.job_id} missed its deadline")
        if namespace is None or store is None:
            raise JobFailed("no_store", f"load job {load.job.job_id} needs L2, but there is none")
        rank.slots.empty(moves)
        transfers = [rank.transfer(namespace, move) for move in moves]
        load.busy = tuple(move.slot for move in moves)
        load.ticket = rank.slots.hold(load.busy, lambda: store.get(transfers, remaining(load.deadline)))
        load.known = 0
        load.ticket.on_progress = partial(self._arrived, load, moves)
        load.ticket.done.add_done_callback(lambda done: self._guard(load, partial(self._fetched, load, moves, done)))

    def _arrived(self, load: LoadTask, moves: Sequence[BlockMove], outcomes: Sequence[StoreOutcome]) -> None:
        """What became of the first `moves` so far."""
        with self._rank.changed:
            if load.stage is Stage.OVER:
                return
            told = zip(moves[load.known :], outcomes[load.known :], strict=False)
            filled = [move for move, outcome in told if outcome is StoreOutcome.OK]
            load.known = len(outcomes)
            load.filled += tuple(move.slot for move in filled)
            self._rank.slots.fill(filled)
            if load.job.prefetch:
                return
            load.ready += filled
        self._queue_scatter(load)

    def _fetched(self, load: LoadTask, moves: Sequence[BlockMove], done: Future[list[StoreOutcome]]) -> None:
        outcomes = done.result()
        self._arrived(load, moves, outcomes)
        bad = [outcome for outcome in outcomes if outcome is not StoreOutcome.OK]
        if bad:
            raise JobFailed(f"store_{bad[0]}", f"{len(bad)} of {len(outcomes)} blocks were not read ({bad[0]})")
        if load.job.prefetch and self._rank.claim(load):
            self._end(load)

    def _queue_scatter(self, load: LoadTask) -> None:
        if not self._rank.stopped:  # what is open then, fails
            self._rank.copy_threads["load"].submit(partial(self._scatter, load))

    def _scatter(self, load: LoadTask, stream: StagingStream) -> None:
        """Copy what is in its slots by now."""
        rank = self._rank
        with rank.changed:
            if not load.ready or not rank.claim(load):
                return  # an earlier copy has taken it up
            moves, load.ready = load.ready, []
            load.left -= len(moves)
        rank.guard(partial(self._copy, load, moves, stream), partial(self._mark_failed, load))
        with rank.changed:
            over, piece_over = load.failed or load.is_ending, not load.left
            if not over:
                load.stage = Stage.QUEUED
                load.at += piece_over
        if over:
            self._end(load)
        elif not piece_over:
            self._queue_scatter(load)  # what has arrived meanwhile
        elif load.ticket is None:
            self._guard(load, partial(self._begin_piece, load))
        else:  # the answer comes before the store has let go of the slots
            load.ticket.released.add_done_callback(lambda _: self._guard(load, partial(self._begin_piece, load)))

    def _copy(self, load: LoadTask, moves: Sequence[BlockMove], stream: StagingStream) -> None:
        rank = self._rank
        rank.slots.check_contents(moves)
        began = time.monotonic()
        stream.scatter(moves, load.after)
        rank.count_copy("load", moves, time.monotonic() - began)

    def _guard(self, load: LoadTask, work: Callable[[], None]) -> None:
        self._rank.guard(work, partial(self.fail, load))

    def _mark_failed(self, load: LoadTask, reason: str, detail: str) -> None:
        load.failed = True
        if not load.job.prefetch:
            self._rank.tell("load", reason, detail)

    def _end(self, load: LoadTask) -> None:
        if load.ticket is not None:
            load.ticket.cancel()
        with self._rank.changed:
            self._rank.end_phase(load, Phase.LOADED, load.failed)


def _cut(moves: Sequence[BlockMove]) -> tuple[tuple[BlockMove, ...], ...]:
    """Runs of moves in which no slot comes twice, in order; one empty run for no moves."""
    pieces: list[tuple[BlockMove, ...]] = []
    piece: list[BlockMove] = []
    slots: set[int] = set()
    for move in moves:
        if move.slot in slots:
            pieces.append(tuple(piece))
            piece, slots = [], set()
        piece.append(move)
        slots.add(move.slot)
    return (*pieces, tuple(piece))


class SaveTasks:
    """The saves among `Rank.jobs`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._unsubmitted: list[SaveTask] = []

    def take(self, job: SaveJob) -> None:
        """A step brought this save: it begins with `submit`. Model-runner thread."""
        save = SaveTask(job, time.monotonic() + job.deadline_seconds)
        self._rank.add(save)
        self._unsubmitted.append(save)
        self._rank.counters.add("save_jobs")

    def holding(self) -> list[SaveTask]:
        """Those that may still read GPU blocks."""
        return self._rank.tasks(SaveTask, Stage.QUEUED, Stage.COPYING)

    def submit(self, as_named: Callable[[], bool] = lambda: True, settled: Settled = lambda: True) -> None:
        """The forward pass was issued (`wait_for_save`): begin behind it. Model-runner thread.

        Args:
            as_named: asked when the device is past it: whether it was computed with the weights that names say.
            settled: asked before anything of it leaves this engine, until it says more than None.
        """
        rank = self._rank
        saves, self._unsubmitted = self._unsubmitted, []
        if not saves:
            return
        after = compute_event(rank.staging.device)
        for save in saves:
            save.after, save.as_named, save.settled = after, as_named, settled
            rank.guard(partial(self._begin, save), partial(self.fail_copy, save))

    def wait_copied(self, timeout: float) -> bool:
        """Wait until no save reads GPU blocks; then `results` has every COPIED. False after `timeout` seconds. Model-runner thread."""
        self.drop_unsubmitted("unfinished", "its step has not ended")
        with self._rank.changed:
            return self._rank.changed.wait_for(lambda: not self.holding(), timeout)

    def fail_waiting(self, reason: str, detail: str) -> None:
        """End every save that is not being copied and has no copy behind it."""
        for save in self._rank.tasks(SaveTask, Stage.QUEUED):
            self.fail_copy(save, reason, f"save job {save.job.job_id}: {detail}")

    def drop_unsubmitted(self, reason: str, detail: str) -> None:
        """End the saves of a step that did not end: nobody has compared what its blocks were computed with."""
        saves, self._unsubmitted = self._unsubmitted, []
        for save in saves:
            self.fail_copy(save, reason, detail)

    def expire(self, now: float) -> None:
        """Fail copies that have not begun in time; puts have deadlines of their own in the store client."""
        for save in self._rank.tasks(SaveTask, Stage.QUEUED, Stage.COPIED):
            if save.deadline > now:
                continue
            self.fail_copy(save, "deadline", f"save job {save.job.job_id} missed its deadline")
            self.refuse(save.job.job_id, "deadline", f"other ranks did not agree to save job {save.job.job_id} in time")

    def fail_copy(self, save: SaveTask, reason: str, detail: str) -> None:
        """End a save that has not begun to copy."""
        if self._rank.claim(save):
            self._mark_copy_failed(save, reason, detail)
            self._end_copy(save)

    def _begin(self, save: SaveTask) -> None:
        rank = self._rank
        rank.check_mapped()
        rank.slots.check_free(move for move in save.job.moves if move.copy)
        rank.copy_threads["save"].submit(partial(self._gather, save))

    def _gather(self, save: SaveTask, stream: StagingStream) -> None:
        if self._rank.claim(save):
            self._rank.guard(partial(self._copy, save, stream), partial(self._mark_copy_failed, save))
            self._end_copy(save)

    def _copy(self, save: SaveTask, stream: StagingStream) -> None:
        rank = self._rank
        if remaining(save.deadline) == 0:
            raise JobFailed("deadline", f"save job {save.job.job_id} missed its deadline")
        fresh = [move for move in save.job.moves if move.copy]
        rank.slots.empty(fresh)
        rank.slots.check_contents(move for move in save.job.moves if not move.copy)
        began = time.monotonic()
        stream.gather(fresh, save.after)
        if not save.as_named():
            raise JobFailed("weights", f"blocks of save job {save.job.job_id} were computed with other weights than they are named after")
        rank.count_copy("save", fresh, time.monotonic() - began)
        rank.slots.fill(fresh)

    def _mark_copy_failed(self, save: SaveTask, reason: str, detail: str) -> None:
        save.failed = True
        self._rank.tell("save", reason, detail)

    def _end_copy(self, save: SaveTask) -> None:
        rank = self._rank
        if save.job.namespace is None:
            rank.end_phase(save, Phase.COPIED, save.failed)
        elif save.failed:
            rank.end_phase(save, Phase.COPIED, True, Stage.PUTTING)
            self._give_up(save)
        else:
            save.agreed = rank.alone
            rank.end_phase(save, Phase.COPIED, False, Stage.COPIED)
            self._settle(save)

    def agree(self, job_id: int) -> None:
        """Every rank has copied this save, with the weights that its names say: its shards may be stored as soon as they are settled."""
        with self._rank.changed:
            save = self._rank.jobs.get(job_id)
        if isinstance(save, SaveTask) and save.stage is Stage.COPIED:
            save.agreed = True
            self._settle(save)

    def put_settled(self) -> None:
        """A pass of the domain has begun: go on with saves whose step was what their names say in the whole domain."""
        for save in self._rank.tasks(SaveTask, Stage.COPIED):
            self._settle(save)

    def _settle(self, save: SaveTask) -> None:
        """Store it once its step is settled, here and on every other rank: shards that lie beside each other are of the same weights."""
        rank = self._rank
        if not (save.agreed or save.job.settles):
            return
        settled = save.told or save.settled()
        if settled is False:
            self.refuse(save.job.job_id, "weights", "another data-parallel rank held other weights than its names say")
        elif settled and not save.agreed:
            with rank.changed:
                if save.stage is Stage.COPIED and not save.told:
                    save.told = True
                    rank.end_phase(save, Phase.SETTLED, False, Stage.COPIED)
        elif settled and self._copied(save.job.job_id) is not None:
            rank.guard(partial(self._begin_put, save), partial(self._fail_put, save))

    def refuse(self, job_id: int, reason: str = "other_rank", detail: str = "another rank has not copied it") -> None:
        """Some rank has not copied or settled this save: a lone shard is useless, and beside a shard of other weights it would be wrong."""
        if (save := self._copied(job_id)) is not None:
            self._fail_put(save, reason, detail)

    def _copied(self, job_id: int) -> SaveTask | None:
        """The save of this id, if other ranks have yet to agree to its put; it is the caller's to end now."""
        with self._rank.changed:
            save = self._rank.jobs.get(job_id)
            if not isinstance(save, SaveTask) or save.stage is not Stage.COPIED:
                return None
            save.stage = Stage.PUTTING
            return save

    def _begin_put(self, save: SaveTask) -> None:
        rank, store, namespace = self._rank, self._rank.store, save.job.namespace
        assert namespace is not None
        rank.check_running()
        if store is None:
            raise JobFailed("no_store", f"save job {save.job.job_id} names L2, but there is none")
        ours = [move for move in save.job.moves if move.put and rank.is_ours(move)]
        if not ours:
            rank.end_phase(save, Phase.STORED, False)
            return
        transfers = [rank.transfer(namespace, move) for move in ours]
        with rank.changed:  # no newer epoch may be told between the look at it and the put
            if epoch_of(namespace) < rank.newest_epoch:
                raise JobFailed("stale", f"save job {save.job.job_id} is of an older epoch ({namespace})")
            save.busy = tuple(move.slot for move in ours)
            save.ticket = rank.slots.hold(save.busy, lambda: store.put(transfers, remaining(save.deadline)))
        save.ticket.done.add_done_callback(lambda done: rank.guard(partial(self._stored, save, done), partial(self._fail_put, save)))

    def _stored(self, save: SaveTask, done: Future[list[StoreOutcome]]) -> None:
        bad = next((outcome for outcome in done.result() if outcome is not StoreOutcome.OK), None)
        if bad is not None:
            raise JobFailed(f"{bad}", f"save job {save.job.job_id} was not stored completely ({bad})")
        self._rank.end_phase(save, Phase.STORED, False)

    def _fail_put(self, save: SaveTask, reason: str, detail: str) -> None:
        self._rank.tell("save_put", reason, detail, word="dropped")
        self._give_up(save)

    def _give_up(self, save: SaveTask) -> None:
        if save.job.settles and not save.told:
            self._rank.end_phase(save, Phase.SETTLED, True, Stage.PUTTING)
        self._rank.end_phase(save, Phase.STORED, True)
