"""Loads of one rank: fetch from the store into slots where need be, then copy the slots to GPU blocks.

A load with more blocks than it was given slots names slots more than once. It goes through in *pieces*, cut where a slot comes
again. The next piece is fetched when the last copy has ended and the store has let go of the slots. Between pieces a load may be
failed like one that has not begun. While a piece is copied it is not: blocks of a reported load are given to others at once.

One rank that fails makes the whole load fail. vLLM then has all ranks compute what was to be loaded, and the request steps aside
once before it is scheduled again (`Admission._steps_aside_once`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from epochkv_connector.store.queues import StoreOutcome
from epochkv_connector.wire.jobs import BlockMove, LoadJob, Tier
from epochkv_connector.worker.copying.staging import Pair, StagingStream
from epochkv_connector.worker.rank import Rank
from epochkv_connector.worker.tasks import JobFailed, LoadTask, Stage, remaining


class LoadTasks:
    """Open loads by job id, and those that ended and were not told yet (`over`); both guarded by `Rank.changed`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.open: dict[int, LoadTask] = {}
        self.over: list[LoadTask] = []

    def take(self, job: LoadJob) -> None:
        """A step brought this load: begin at once. Model-runner thread."""
        rank = self._rank
        if job.job_id in self.open:
            rank.counters.add("duplicate_jobs")
            return
        load = LoadTask(job, time.monotonic() + job.deadline_seconds, rank.event(), pieces=_cut(job.moves))
        with rank.changed:
            self.open[job.job_id] = load
        rank.counters.add("load_jobs")
        self._guard(load, partial(self._begin, load))

    def poison(self, request_id: str) -> bool:
        """Fail the load of this request. False: there is none under way."""
        for load in list(self.open.values()):
            if load.job.request_id == request_id:
                load.failed = True
                self.fail(load, "poisoned", "poisoned while under way")
                return True
        return False

    def expire(self, now: float) -> None:
        """Fail what is past its deadline and not being copied."""
        for load in [load for load in list(self.open.values()) if load.deadline <= now]:
            self.fail(load, "deadline", f"load job {load.job.job_id} missed its deadline")

    def fail_waiting(self, reason: str, detail: str) -> None:
        for load in list(self.open.values()):
            self.fail(load, reason, f"load job {load.job.job_id}: {detail}")

    def num_copying(self) -> int:
        with self._rank.changed:
            return sum(load.stage is Stage.COPYING for load in self.open.values())

    def fail(self, load: LoadTask, reason: str, detail: str) -> None:
        """End a load that is not being copied; one that is ends with that copy."""
        with self._rank.changed:
            if load.stage is not Stage.QUEUED:
                return
            load.stage = Stage.COPYING  # ours to end now
            ticket = load.ticket
        if ticket is not None:
            ticket.cancel()
        self._mark_failed(load, reason, detail)
        self._end(load)

    def _begin(self, load: LoadTask) -> None:
        self._rank.check_slots(load.job.moves)
        self._begin_piece(load)

    def _begin_piece(self, load: LoadTask) -> None:
        rank = self._rank
        rank.check_running()
        with rank.changed:  # a deadline cannot come between asking the store and knowing the ticket
            if load.stage is not Stage.QUEUED:
                return
            from_store = [move for move in load.piece if move.source is Tier.STORE]
            if from_store:
                self._fetch(load, from_store)
                return
        self._queue_scatter(load)

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
        load.ticket.done.add_done_callback(lambda done: self._guard(load, partial(self._fetched, load, moves, done)))

    def _fetched(self, load: LoadTask, moves: Sequence[BlockMove], done: Future[list[StoreOutcome]]) -> None:
        outcomes = done.result()
        filled = [move for move, outcome in zip(moves, outcomes, strict=True) if outcome is StoreOutcome.OK]
        bad = next((outcome for outcome in outcomes if outcome is not StoreOutcome.OK), None)
        with self._rank.changed:
            if load.stage is not Stage.QUEUED:
                return
            load.filled += tuple(move.slot for move in filled)
            load.bad = tuple(move.slot for move, outcome in zip(moves, outcomes, strict=True) if outcome is not StoreOutcome.OK)
            self._rank.slots.fill(filled)
        if bad is None:
            self._queue_scatter(load)
        else:
            missing = len(moves) - len(filled)
            raise JobFailed(f"store_{bad}", f"{missing} of {len(moves)} blocks were not read ({bad})")

    def _queue_scatter(self, load: LoadTask) -> None:
        self._rank.check_running()
        self._rank.copy_threads["load"].submit(partial(self._scatter, load))

    def _scatter(self, load: LoadTask, stream: StagingStream) -> None:
        rank = self._rank
        with rank.changed:
            if load.stage is not Stage.QUEUED:
                return
            load.stage = Stage.COPYING
        rank.guard(partial(self._copy, load, stream), partial(self._mark_failed, load))
        with rank.changed:
            goes_on = not load.failed and not load.is_last_piece
            if goes_on:
                load.at += 1
                load.stage = Stage.QUEUED
        if not goes_on:
            self._end(load)
        elif load.ticket is None:
            self._guard(load, partial(self._begin_piece, load))
        else:  # the answer comes before the store has let go of the slots
            load.ticket.released.add_done_callback(lambda _: self._guard(load, partial(self._begin_piece, load)))

    def _copy(self, load: LoadTask, stream: StagingStream) -> None:
        rank = self._rank
        load.bad = rank.slots.mismatched(load.piece)
        rank.slots.check_contents(load.piece)
        pairs = [Pair(move.group, move.gpu_block, move.slot) for move in load.piece]
        began = time.monotonic()
        stream.scatter(pairs, load.after)
        rank.count_copy("load", pairs, time.monotonic() - began)

    def _guard(self, load: LoadTask, work: Callable[[], None]) -> None:
        self._rank.guard(work, partial(self.fail, load))

    def _mark_failed(self, load: LoadTask, reason: str, detail: str) -> None:
        load.failed = True
        self._rank.tell("load", reason, detail)

    def _end(self, load: LoadTask) -> None:
        with self._rank.changed:
            load.stage = Stage.OVER
            self.open.pop(load.job.job_id, None)
            self.over.append(load)
            self._rank.changed.notify_all()


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
