"""Loads and saves of one rank.

A load fetches blocks from the store into slots where need be, then copies the slots to GPU blocks. A load with more blocks than it
was given slots names slots more than once. It goes through in *pieces*, cut where a slot comes again. The next piece is fetched when
the last copy has ended and the store has let go of the slots. Between pieces a load may be failed like one that has not begun. While
a piece is copied it is not: blocks of a reported load are given to others at once. One rank that fails makes the whole load fail.
vLLM then has all ranks compute what was to be loaded, and the request steps aside once before it is scheduled again
(`Admission._steps_aside_once`).

A save copies GPU blocks to slots behind the forward pass, then puts the slots to the store. The two parts are acknowledged apart
(`Phase.COPIED`, `Phase.STORED`): GPU blocks are free after the first, which needs no network, and slots after the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from epochkv_connector.store.queues import StoreOutcome
from epochkv_connector.wire import BlockMove, LoadJob, Phase, SaveJob, Tier
from epochkv_connector.worker.rank import JobFailed, LoadTask, Rank, SaveTask, Stage, remaining
from epochkv_connector.worker.staging import Pair, StagingStream


class LoadTasks:
    """The loads among `Rank.jobs`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def take(self, job: LoadJob) -> None:
        """A step brought this load: begin at once. Model-runner thread."""
        load = LoadTask(job, time.monotonic() + job.deadline_seconds, self._rank.event(), pieces=_cut(job.moves))
        self._rank.add(load)
        self._rank.counters.add("load_jobs")
        self._guard(load, partial(self._begin_piece, load))

    def open(self) -> list[LoadTask]:
        return self._rank.tasks(LoadTask, Stage.QUEUED, Stage.COPYING)

    def invalidate(self, request_id: str) -> bool:
        """Fail the load of this request. False: there is none under way."""
        for load in self.open():
            if load.job.request_id == request_id:
                load.failed = True
                self.fail(load, "invalidated", "invalidated while under way")
                return True
        return False

    def expire(self, now: float) -> None:
        """Fail what is past its deadline and not being copied."""
        for load in self._rank.tasks(LoadTask, Stage.QUEUED):
            if load.deadline <= now:
                self.fail(load, "deadline", f"load job {load.job.job_id} missed its deadline")

    def fail_waiting(self, reason: str, detail: str) -> None:
        for load in self._rank.tasks(LoadTask, Stage.QUEUED):
            self.fail(load, reason, f"load job {load.job.job_id}: {detail}")

    def fail(self, load: LoadTask, reason: str, detail: str) -> None:
        """End a load that is not being copied; one that is ends with that copy."""
        if not self._rank.claim(load):
            return
        if load.ticket is not None:
            load.ticket.cancel()
        self._mark_failed(load, reason, detail)
        self._end(load)

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
        if not rank.claim(load):
            return
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

    def submit(self, as_named: Callable[[], bool] = lambda: True) -> None:
        """The forward pass was issued: begin behind it. Model-runner thread.

        Args:
            as_named: asked when the device is past it: whether it was computed with the weights that names say.
        """
        rank = self._rank
        saves, self._unsubmitted = self._unsubmitted, []
        if not saves:
            return
        after = rank.event()
        for save in saves:
            save.after, save.as_named = after, as_named
            rank.guard(partial(self._begin, save), partial(self.fail_copy, save))

    def wait_copied(self, timeout: float) -> bool:
        """Wait until no save reads GPU blocks; False after `timeout` seconds. Model-runner thread."""
        self.submit()
        with self._rank.changed:
            return self._rank.changed.wait_for(lambda: not self.holding(), timeout)

    def settle(self, timeout: float) -> None:
        """Return when no copy reads GPU blocks; after `timeout` seconds those that do have failed. Model-runner thread."""
        if self.wait_copied(timeout):
            return
        with self._rank.changed:
            late = self.holding()
            for save in late:
                save.overtaken = True
        for save in late:
            self.fail_copy(save, "overtaken", f"save job {save.job.job_id} was not copied before its blocks were used again")

    def fail_waiting(self, reason: str, detail: str) -> None:
        """End every save that is not being copied and has no copy behind it."""
        for save in self._rank.tasks(SaveTask, Stage.QUEUED):
            self.fail_copy(save, reason, f"save job {save.job.job_id}: {detail}")

    def drop_unsubmitted(self, reason: str) -> None:
        saves, self._unsubmitted = self._unsubmitted, []
        for save in saves:
            self.fail_copy(save, reason, "the engine shuts down")

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
        rank.check_running()
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
        pairs = [Pair(move.group, move.gpu_block, move.slot) for move in fresh]
        began = time.monotonic()
        stream.gather(pairs, save.after)
        if save.overtaken:
            raise JobFailed("overtaken", f"blocks of save job {save.job.job_id} were used again while they were copied")
        if not save.as_named():
            raise JobFailed("weights", f"blocks of save job {save.job.job_id} were computed with other weights than they are named after")
        rank.count_copy("save", pairs, time.monotonic() - began)
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
            rank.end_phase(save, Phase.STORED, True)
        elif rank.alone:
            rank.end_phase(save, Phase.COPIED, False, Stage.PUTTING)
            self._put(save)
        else:
            rank.end_phase(save, Phase.COPIED, False, Stage.COPIED)

    def agree(self, job_id: int) -> None:
        """Every rank has copied this save, with the weights that its names say: its shards may be stored."""
        if (save := self._copied(job_id)) is not None:
            self._put(save)

    def refuse(self, job_id: int, reason: str = "other_rank", detail: str = "another rank has not copied it") -> None:
        """Some rank has not copied this save: a lone shard is useless, and beside a shard of other weights it would be wrong."""
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

    def _put(self, save: SaveTask) -> None:
        self._rank.guard(partial(self._begin_put, save), partial(self._fail_put, save))

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
            if rank.is_stale(namespace):
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
        self._rank.end_phase(save, Phase.STORED, True)
