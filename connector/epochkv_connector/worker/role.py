"""The worker role: translates vLLM's per-step calls on one rank into calls of `runner.JobRunner`.

vLLM asks for results and for acknowledgements in two calls, and an idle in-process engine collects acknowledgements between
steps. So everything that the runner reports is kept here until the call that it belongs to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from epochkv_connector.weights.rank import HeldAdapters
from epochkv_connector.wire import JobAck, LoadJob, Phase, SaveJob, StepMetadata, Tier, WorkerReport
from epochkv_connector.worker.rank import Report
from epochkv_connector.worker.runner import IDLE_WAIT_SECONDS, JobRunner

if TYPE_CHECKING:
    from epochkv_connector.weights.rank import Comparison

REFUSE_SECONDS = 2.0
"""How long a runner that raised may take to end its copies before the engine goes on without it."""


class _Pending:
    """What vLLM and the scheduler role have yet to hear of a rank: one report for each load and invalidated request, one acknowledgement
    for each phase of each job. Nothing is said twice, whoever says it."""

    def __init__(self) -> None:
        self.loads: dict[int, LoadJob] = {}
        self.saves: dict[int, tuple[SaveJob, set[Phase]]] = {}
        self._reports: set[str] = set()

    def take_on(self, step: StepMetadata) -> None:
        """Add the jobs of a step. Job ids are never reused, so a job that comes twice counts once."""
        self._reports.update(step.invalidated)
        for load in step.loads:
            self.loads[load.job_id] = load
            self._reports.add(load.request_id)
        for save in step.saves:
            self.saves[save.job_id] = (save, set(save.phases))

    def take(self, report: Report) -> Report:
        """The part of a report that is pending; it is pending no more."""
        finished = report.finished_recving & self._reports
        self._reports -= finished
        return Report(finished, report.failed_recving & finished, [ack for ack in report.acks if self._is_pending(ack)])

    def _is_pending(self, ack: JobAck) -> bool:
        if ack.phase is Phase.RELEASED:
            return True
        if ack.phase is Phase.LOADED:
            return self.loads.pop(ack.job_id, None) is not None
        _, phases = self.saves.get(ack.job_id, (None, set()))
        if ack.phase not in phases:
            return False
        phases.discard(ack.phase)
        if not phases:
            del self.saves[ack.job_id]
        return True

    def failing(self, rank: int, spared: set[int], lost: set[int]) -> Report:
        """A report that fails everything pending, except the jobs in `spared`.

        Args:
            lost: it is not known whether the store still writes to the slots of these loads, so the slots stay busy for ever.
        """
        acks = []
        for job_id, load in self.loads.items():
            if job_id not in spared:
                fetched = tuple(move.slot for move in load.moves if move.source is Tier.STORE)
                acks.append(JobAck(job_id, rank, Phase.LOADED, failed=True, busy_slots=fetched if job_id in lost else ()))
        for job_id, (save, phases) in self.saves.items():
            if job_id not in spared:
                acks += [JobAck(job_id, rank, phase, save.start_block, 0, failed=True) for phase in sorted(phases)]
        failed = self._reports - {load.request_id for job_id, load in self.loads.items() if job_id in spared}
        return Report(failed, failed, acks)


class WorkerRole:
    """One rank. Model-runner thread; in-process engines also call `drain` on the scheduler's (the same) thread.

    Args:
        rank: its number, in the order the scheduler role counts ranks.
        runner: executes its jobs; None: this rank cannot be staged, and every job is answered as failed.
        compare: begins a comparison of the weights with the answer to the question of this number.
        adapters: of this rank.
    """

    def __init__(
        self,
        rank: int,
        runner: JobRunner | None,
        on_error: Callable[[str, Exception], None] = lambda where, error: None,
        compare: Callable[[int], Comparison] | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        self.rank = rank
        self.runner = runner
        self._on_error = on_error
        self._compare_weights = compare
        self._adapters = adapters or HeldAdapters()
        self._replaced: list[tuple[int, int]] = []
        self._comparisons: list[Comparison] = []
        self._kept = Report(set(), set(), [])
        self._pending = _Pending()
        self._broken: JobRunner | None = None  # it raised; asked for ever, as slots may be released late
        self._unended: set[int] = set()  # its jobs that it may still be working on
        self._started = self._finished = True
        self._idle = False

    def new_step(self) -> None:
        self._started = self._finished = False

    def settle(self, metadata: StepMetadata) -> None:
        """Before anything of the step writes to a GPU block: end the copies that have lost their hold on theirs."""
        if not metadata.settle:
            return
        if self.runner is not None:
            self.runner.settle()
        elif self._broken is not None:
            with contextlib.suppress(Exception):
                self._broken.settle()

    def start(self, metadata: StepMetadata, *, idle: bool) -> None:
        """Loads begin. `idle`: the step schedules no tokens, so waiting a millisecond for a completion costs nobody."""
        if self._started:
            return
        self._started, self._idle = True, idle
        self._pending.take_on(metadata)
        self.settle(metadata)
        if self.runner is not None:
            self.runner.start_step(metadata)

    def finish(self, metadata: StepMetadata) -> None:
        """The forward pass was issued: saves begin behind it."""
        self.start(metadata, idle=self._idle)
        if self._finished:
            return
        self._finished = True
        self._replaced += self._adapters.replaced(metadata.newest_epoch)
        as_named = self._compare(metadata.digest_number)
        if self.runner is not None:
            self.runner.finish_step(as_named if self._adapters.are_unchanged(metadata.adapters) else lambda: False)

    def _compare(self, number: int) -> Callable[[], bool]:
        """Whether the last forward pass used the weights that this step's names say. Weights that cannot be compared count as changed."""
        if number < 0 or self._compare_weights is None:
            return lambda: number < 0
        comparison = self._compare_weights(number)
        self._comparisons.append(comparison)
        return comparison.holds

    def refuse(self, metadata: StepMetadata) -> None:
        """Taking a step has raised: the runner is shut down and gets no more jobs.

        Everything pending is answered once. What it is still copying when its shutdown has to go on is answered when that
        ends and not before: the blocks of a load that was reported are given to others at once.
        """
        if not self._started:
            self._pending.take_on(metadata)
        self._started = self._finished = True
        if self.runner is not None:
            self._broken, self.runner = self.runner, None
            self._unended = {*self._pending.loads, *self._pending.saves}
            with contextlib.suppress(Exception):  # it has raised before; what it cannot end is refused below
                self._broken.shutdown(REFUSE_SECONDS)
        self._collect()

    def results(self) -> tuple[set[str], set[str]]:
        """(finished, failed) loads, each once. Never raises: everything is refused when the runner does."""
        try:
            self._collect(IDLE_WAIT_SECONDS if self._idle else 0.0)
        except Exception as error:
            self._on_error("results", error)
            self.refuse(StepMetadata())
        finished, failed = self._kept.finished_recving, self._kept.failed_recving
        self._kept = Report(set(), set(), self._kept.acks)
        return finished, failed

    def acks(self) -> WorkerReport:
        acks = list(self._kept.acks)
        self._kept.acks.clear()
        over = [one for one in self._comparisons if one.ended()]
        self._comparisons = [one for one in self._comparisons if one not in over]
        replaced, self._replaced = self._replaced, []
        return WorkerReport(acks=acks, late=sorted({one.number for one in over if not one.holds()}), replaced=replaced)

    def drain(self, timeout: float) -> WorkerReport:
        """Wait until no save holds GPU blocks (at most `timeout` seconds); loads that ended meanwhile are kept."""
        if self.runner is not None:
            self.runner.wait_copied(timeout)
        self._collect()
        return self.acks()

    def stats(self) -> dict[str, float]:
        """See `JobRunner.stats`; empty without a runner."""
        return {} if self.runner is None else self.runner.stats()

    def shutdown(self) -> None:
        if self.runner is not None:
            self.runner.shutdown()

    def _collect(self, wait_seconds: float = 0.0) -> None:
        """Keep what the runner has ended. Without one, what the broken one has ended, and a refusal of all else that is pending."""
        if self.runner is not None:
            self._keep(self.runner.results(wait_seconds))
            return
        lost: set[int] = set()
        if self._broken is not None:
            try:
                self._keep(self._broken.results())
                self._unended &= self._broken.open_jobs()
            except Exception:  # nobody will ever know more than this
                lost, self._unended = self._unended, set()
        self._keep(self._pending.failing(self.rank, self._unended, lost))

    def _keep(self, report: Report) -> None:
        new = self._pending.take(report)
        self._kept.finished_recving.update(new.finished_recving)
        self._kept.failed_recving.update(new.failed_recving)
        self._kept.acks.extend(new.acks)
