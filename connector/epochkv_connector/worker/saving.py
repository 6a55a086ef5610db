"""Saves of one rank: copy GPU blocks to slots behind the forward pass, then put the slots to the store.

The two parts are acknowledged apart (`Phase.COPIED`, `Phase.STORED`): GPU blocks are free after the first, which needs no
network, and slots after the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from epochkv_connector.store.queues import StoreOutcome
from epochkv_connector.wire.jobs import Phase, SaveJob
from epochkv_connector.worker.copying.staging import Pair, StagingStream
from epochkv_connector.worker.rank import Rank
from epochkv_connector.worker.tasks import JobFailed, SaveTask, Stage, remaining


class SaveTasks:
    """Saves under way, guarded by `Rank.changed`.

    Attributes:
        copies: saves that may still read GPU blocks, by job id.
        puts: saves that are copied and not yet stored or given up, by job id.
        waiting: those of them that other ranks have yet to agree to, by job id.
        acks: (save, phase, failed) that were not told yet.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.copies: dict[int, SaveTask] = {}
        self.puts: dict[int, SaveTask] = {}
        self.waiting: dict[int, SaveTask] = {}
        self.acks: list[tuple[SaveTask, Phase, bool]] = []
        self._unsubmitted: list[SaveTask] = []

    def take(self, job: SaveJob) -> None:
        """A step brought this save: it begins with `submit`. Model-runner thread."""
        rank = self._rank
        with rank.changed:
            if job.job_id in self.copies or job.job_id in self.puts:
                rank.counters.add("duplicate_jobs")
                return
            save = SaveTask(job, time.monotonic() + job.deadline_seconds)
            self.copies[job.job_id] = save
            self._unsubmitted.append(save)
        rank.counters.add("save_jobs")

    def submit(self, as_named: Callable[[], bool] = lambda: True) -> None:
        """The forward pass was issued: begin behind it. Model-runner thread.

        Args:
            as_named: asked when the device is past it: whether it was computed with the weights that names say.
        """
        rank = self._rank
        with rank.changed:
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
            return self._rank.changed.wait_for(lambda: not self.copies, timeout)

    def settle(self, timeout: float) -> None:
        """Return when no copy reads GPU blocks; after `timeout` seconds those that do have failed. Model-runner thread."""
        if self.wait_copied(timeout):
            return
        with self._rank.changed:
            late = list(self.copies.values())
            for save in late:
                save.overtaken = True
        for save in late:
            self.fail_copy(save, "overtaken", f"save job {save.job.job_id} was not copied before its blocks were used again")

    def fail_waiting(self, reason: str, detail: str) -> None:
        """End every save that is not being copied and has no copy behind it."""
        for save in list(self.copies.values()):
            self.fail_copy(save, reason, f"save job {save.job.job_id}: {detail}")

    def drop_unsubmitted(self, reason: str) -> None:
        with self._rank.changed:
            saves, self._unsubmitted = self._unsubmitted, []
        for save in saves:
            self.fail_copy(save, reason, "the engine shuts down")

    def expire(self, now: float) -> None:
        """Fail copies that have not begun in time; puts have deadlines of their own in the store client."""
        for save in [save for save in list(self.copies.values()) if save.deadline <= now]:
            self.fail_copy(save, "deadline", f"save job {save.job.job_id} missed its deadline")
        for save in [save for save in list(self.waiting.values()) if save.deadline <= now]:
            self.refuse(save.job.job_id, "deadline", f"other ranks did not agree to save job {save.job.job_id} in time")

    def fail_copy(self, save: SaveTask, reason: str, detail: str) -> None:
        """End a save that has not begun to copy."""
        with self._rank.changed:
            if save.stage is not Stage.QUEUED:
                return
            save.stage = Stage.COPYING
        self._mark_copy_failed(save, reason, detail)
        self._end_copy(save)
        if save.job.namespace is not None:
            self._acknowledge(save, Phase.STORED, failed=True)

    def _begin(self, save: SaveTask) -> None:
        rank = self._rank
        rank.check_slots(save.job.moves)
        rank.slots.check_free(move for move in save.job.moves if move.copy)
        rank.copy_threads["save"].submit(partial(self._gather, save))

    def _gather(self, save: SaveTask, stream: StagingStream) -> None:
        rank = self._rank
        with rank.changed:
            if save.stage is not Stage.QUEUED:
                return
            save.stage = Stage.COPYING
        rank.guard(partial(self._copy, save, stream), partial(self._mark_copy_failed, save))
        self._end_copy(save)
        if save.job.namespace is None:
            return
        if save.failed:
            self._acknowledge(save, Phase.STORED, failed=True)
        elif rank.alone:
            rank.guard(partial(self._begin_put, save), partial(self._fail_put, save))

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
        with self._rank.changed:
            save.stage = Stage.OVER
            self.copies.pop(save.job.job_id, None)
            if save.job.namespace is not None:
                self.puts[save.job.job_id] = save
                if not save.failed and not self._rank.alone:
                    self.waiting[save.job.job_id] = save
            self.acks.append((save, Phase.COPIED, save.failed))
            self._rank.changed.notify_all()

    def agree(self, job_id: int) -> None:
        """Every rank has copied this save, with the weights that its names say: its shards may be stored."""
        with self._rank.changed:
            save = self.waiting.pop(job_id, None)
        if save is not None:
            self._rank.guard(partial(self._begin_put, save), partial(self._fail_put, save))

    def refuse(self, job_id: int, reason: str = "other_rank", detail: str = "another rank has not copied it") -> None:
        """Some rank has not copied this save: a lone shard is useless, and beside a shard of other weights it would be wrong."""
        with self._rank.changed:
            save = self.waiting.pop(job_id, None)
        if save is not None:
            self._fail_put(save, reason, detail)

    def _begin_put(self, save: SaveTask) -> None:
        rank, store, namespace = self._rank, self._rank.store, save.job.namespace
        assert namespace is not None
        rank.check_running()
        if store is None:
            raise JobFailed("no_store", f"save job {save.job.job_id} names L2, but there is none")
        ours = [move for move in save.job.moves if move.put and rank.is_ours(move)]
        if not ours:
            self._acknowledge(save, Phase.STORED, failed=False)
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
        self._acknowledge(save, Phase.STORED, failed=False)

    def _fail_put(self, save: SaveTask, reason: str, detail: str) -> None:
        self._rank.tell("save_put", reason, detail, word="dropped")
        self._acknowledge(save, Phase.STORED, failed=True)

    def _acknowledge(self, save: SaveTask, phase: Phase, *, failed: bool) -> None:
        with self._rank.changed:
            self.puts.pop(save.job.job_id, None)
            self.acks.append((save, phase, failed))
            self._rank.changed.notify_all()
