"""Executes the load and save jobs of one rank, and acknowledges each phase exactly once.

Model-runner thread: each step `start_step`, `finish_step`, `results`; `shutdown`. Two copy threads
(one per direction) and the store client's threads do the work (`loading`, `saving`). Nothing raises out of a step and
nothing blocks it: whatever goes wrong with a job becomes a failed job, counted by reason and logged once per kind.

Every async load is reported once in `finished_recving`, and in `failed_recving` too when a single byte is missing.
Deadlines fail what is not being copied; a copy is finite and is waited for, because a reported load's blocks may be
given to others at once. Slots that a late store call may still touch are named busy in the acknowledgement and
followed by `Phase.RELEASED`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from epochkv_connector.wire.jobs import JobAck, Phase
from epochkv_connector.wire.layout import RankLayout
from epochkv_connector.worker.copying.staging import Staging
from epochkv_connector.worker.loading import LoadTasks
from epochkv_connector.worker.rank import OpenStore, Rank
from epochkv_connector.worker.saving import SaveTasks
from epochkv_connector.worker.tasks import LoadTask, Report, SaveTask, is_open, remaining

if TYPE_CHECKING:
    from epochkv_connector.wire.steps import StepMetadata

IDLE_WAIT_SECONDS = 0.001
"""How long `results` may wait for a completion on a step without scheduled tokens."""

SETTLE_SECONDS = 1.0
"""How long a step waits for copies whose GPU blocks it may write to; later ones count as failed."""


class JobRunner:
    """Executes the jobs of one rank. The model-runner thread owns it; any thread may call `stats`.

    Attributes:
        layout: how its KV tensors and host slots lie, for the scheduler role.
    """

    def __init__(
        self,
        staging: Staging,
        *,
        rank: int = 0,
        world_size: int = 1,
        replicas: Sequence[int] = (),
        digest: bytes = b"",
        open_store: OpenStore | None = None,
    ) -> None:
        """Open the streams of the copy threads, and the store.

        Args:
            staging: jobs name only slots that every rank's has.
            rank, world_size: in the order the scheduler role counts ranks.
            replicas: how many consecutive ranks hold the same KV, by KV cache group; none given: every rank has its own.
            digest: `copying.layout.layout_digest` of its KV tensors; empty: nobody has looked.
            open_store: makes and starts the L2 client for the host region; None: no L2.

        Raises:
            OSError, RuntimeError: one cannot be opened; the others are closed.
        """
        self.layout = RankLayout(digest, staging.region.num_slots, {group: view.payload_bytes for group, view in staging.groups.items()})
        self._rank = Rank(staging, rank, world_size, replicas, open_store)
        self._loads = LoadTasks(self._rank)
        self._saves = SaveTasks(self._rank)
        # Guarded by Rank.changed:
        self._unreleased: list[LoadTask | SaveTask] = []
        self._poisoned: list[str] = []

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Fail what is open, end the threads, close the store. A second call does nothing.

        False: a call or copy is still under way, and its memory is kept until the process ends.
        """
        rank = self._rank
        if rank.stopped:
            return True
        rank.stopped = True
        deadline = time.monotonic() + timeout
        for load in list(self._loads.open.values()):
            self._loads.fail(load, "shutdown", "the engine shuts down")
        self._saves.drop_unsubmitted("shutdown")
        for job_id in list(self._saves.waiting):
            self._saves.refuse(job_id, "shutdown", "the engine shuts down")
        return rank.close(deadline)

    def stats(self) -> dict[str, float]:
        """Counters since start: `copy_{load,save}_{bytes,seconds,blocks}`, `{load,save}_jobs`, `{load,save}_failed_<reason>`,
        `save_put_dropped_<reason>`; gauges `held_slots`, `open_loads`, `open_copies`; the store's own as `store_*`."""
        values = self._rank.counters.snapshot()
        values["held_slots"] = self._rank.slots.num_held
        values["open_loads"] = len(self._loads.open)
        values["open_copies"] = len(self._saves.copies)
        if self._rank.store is not None:
            values |= {f"store_{name}": value for name, value in self._rank.store.stats().items()}
        return values

    def start_step(self, step: StepMetadata) -> None:
        """Take the jobs of a step: loads begin at once, saves with `finish_step`. Never raises."""
        self._saves.submit()  # of a step that had no finish_step: its forward is over by now
        self._rank.tell_epoch(step.newest_epoch)
        for job_id in step.agreed:
            self._saves.agree(job_id)
        for job_id in step.refused:
            self._saves.refuse(job_id)
        for request_id in step.poisoned:
            self._poison(request_id)
        for load in step.loads:
            self._loads.take(load)
        for save in step.saves:
            self._saves.take(save)

    def finish_step(self, as_named: Callable[[], bool] = lambda: True) -> None:
        """The forward of this step has been issued (`wait_for_save`): begin its saves behind it (`SaveTasks.submit`). Never raises."""
        self._saves.submit(as_named)

    def settle(self) -> None:
        """GPU blocks of saves may be written to from now on: wait for their copies, and fail what is late. Never raises."""
        self._saves.settle(SETTLE_SECONDS)

    def results(self, wait_seconds: float = 0.0) -> Report:
        """What has ended since the last call; each thing once. Never raises.

        Args:
            wait_seconds: with loads or copies open and nothing to report, wait this long for one to end
                (`IDLE_WAIT_SECONDS` on a step without scheduled tokens, otherwise 0).
        """
        loads, saves, changed = self._loads, self._saves, self._rank.changed
        now = time.monotonic()
        loads.expire(now)
        saves.expire(now)
        report = Report(set(), set(), [])
        with changed:
            if wait_seconds > 0 and (loads.open or saves.copies):
                changed.wait_for(lambda: loads.over or saves.acks or self._poisoned, wait_seconds)
            over, loads.over = loads.over, []
            acks, saves.acks = saves.acks, []
            poisoned, self._poisoned = self._poisoned, []
            released = [task for task in self._unreleased if not is_open(task.ticket)]
            self._unreleased = [task for task in self._unreleased if is_open(task.ticket)]
        for task in released:
            report.acks.append(JobAck(task.job.job_id, self._rank.number, Phase.RELEASED, 0, 0))
        for load in over:
            self._report(report, load, load.ack(self._rank.number))
            report.finished_recving.add(load.job.request_id)
            if load.failed:
                report.failed_recving.add(load.job.request_id)
        for save, phase, failed in acks:
            self._report(report, save, save.ack(self._rank.number, phase, failed=failed))
        report.finished_recving.update(poisoned)
        report.failed_recving.update(poisoned)
        return report

    def _report(self, report: Report, task: LoadTask | SaveTask, ack: JobAck) -> None:
        report.acks.append(ack)
        if ack.busy_slots:
            with self._rank.changed:
                self._unreleased.append(task)

    def _poison(self, request_id: str) -> None:
        """Report once more, finished and failed; a load of it that is still under way makes that report itself."""
        if self._loads.poison(request_id):
            self._rank.counters.add("poisoned_under_way")
            return
        self._rank.counters.add("poisoned")
        with self._rank.changed:
            self._poisoned.append(request_id)

    def open_jobs(self) -> set[int]:
        """Jobs with something left to be acknowledged, save for RELEASED, by a later `results`."""
        with self._rank.changed:
            ended = [load.job.job_id for load in self._loads.over] + [save.job.job_id for save, _, _ in self._saves.acks]
            return {*self._loads.open, *self._saves.copies, *self._saves.puts, *ended}

    def wait_copied(self, timeout: float) -> bool:
        """Wait until no save holds GPU blocks; then `results` has every COPIED. False after `timeout` seconds."""
        return self._saves.wait_copied(timeout)

    def settle_for_sleep(self, timeout: float) -> int:
        """The memory of GPU blocks is about to be unmapped: end every copy, and let none begin. Model-runner thread.

        Loads that are not being copied fail. Saves are copied; those that are not after `timeout` seconds fail.

        Returns:
            Copies that still run: the memory must stay mapped unless it is 0.
        """
        deadline = time.monotonic() + timeout
        self._loads.fail_waiting("sleep", "the engine goes to sleep")
        if not self._saves.wait_copied(remaining(deadline)):
            self._saves.fail_waiting("sleep", "the engine goes to sleep before it was copied")

        def left() -> int:
            return self._loads.num_copying() + len(self._saves.copies)

        with self._rank.changed:
            self._rank.changed.wait_for(lambda: not left(), remaining(deadline))
            return left()
