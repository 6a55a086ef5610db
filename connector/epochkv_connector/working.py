"""The worker-facing half of the facade: vLLM's per-step calls in, `worker.WorkerHalf` behind.

Exists because vLLM asks for results and acknowledgements in two calls, and because an idle in-process engine collects
acknowledgements between steps: whatever a collection brings is kept until the call that it belongs to.
"""

from __future__ import annotations

from typing import Protocol

from epochkv_connector.records import JobAck, Phase
from epochkv_connector.wire import StepMetadata, WorkerReport
from epochkv_connector.worker.tasks import Report
from epochkv_connector.worker.worker import IDLE_WAIT_SECONDS


class Half(Protocol):
    """`worker.WorkerHalf`, or a stand-in that refuses everything."""

    def start_step(self, step: StepMetadata) -> None: ...
    def finish_step(self) -> None: ...
    def results(self, wait_seconds: float = 0.0) -> Report: ...
    def wait_copied(self, timeout: float) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def shutdown(self, timeout: float = 5.0) -> bool: ...


class RefusingHalf:
    """Answers every job at once as failed: what a rank without a host region owes the scheduler half."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failed: set[str] = set()
        self._acks: list[JobAck] = []

    def start_step(self, step: StepMetadata) -> None:
        """Fail the loads, drop the saves, report the poisoned."""
        for load in step.loads:
            self._failed.add(load.request_id)
            self._acks.append(JobAck(load.job_id, self._rank, Phase.LOADED, 0, 0, failed=True))
        self._failed.update(step.poisoned)
        for save in step.saves:
            for phase in (Phase.COPIED,) if save.namespace is None else (Phase.COPIED, Phase.STORED):
                self._acks.append(JobAck(save.job_id, self._rank, phase, save.start_block, 0, failed=True))

    def finish_step(self) -> None:
        """Nothing to begin."""

    def results(self, wait_seconds: float = 0.0) -> Report:
        """Everything since the last call."""
        failed, self._failed = self._failed, set()
        acks, self._acks = self._acks, []
        return Report(set(failed), failed, acks)

    def wait_copied(self, timeout: float) -> bool:
        """Nothing is copied."""
        return True

    def stats(self) -> dict[str, float]:
        """Nothing is moved."""
        return {}

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Nothing to end."""
        return True


class WorkerSide:
    """One rank's facade. Model-runner thread; in-process engines also call `drain` on the scheduler's (the same) thread."""

    def __init__(self, half: Half, rank: int) -> None:
        self.half = half
        self._rank = rank
        self._kept = Report(set(), set(), [])
        self._started = self._finished = True
        self._idle = False

    def new_step(self) -> None:
        """Metadata was bound."""
        self._started = self._finished = False

    def start(self, metadata: StepMetadata, *, idle: bool) -> None:
        """Loads begin. `idle`: the step schedules no tokens, so waiting a millisecond for a completion costs nobody."""
        if self._started:
            return
        self._started, self._idle = True, idle
        self.half.start_step(metadata)

    def finish(self, metadata: StepMetadata) -> None:
        """The forward pass was issued: saves begin behind it."""
        self.start(metadata, idle=self._idle)
        if not self._finished:
            self._finished = True
            self.half.finish_step()

    def refuse(self, metadata: StepMetadata) -> None:
        """The half raised while taking a step: its jobs are answered here, each once, and it gets no more."""
        refusing = RefusingHalf(self._rank)
        refusing.start_step(metadata)
        self._collect(refusing.results())
        self.half = refusing
        self._started = self._finished = True

    def results(self) -> tuple[set[str], set[str]]:
        """(finished, failed) loads, each once."""
        self._collect(self.half.results(IDLE_WAIT_SECONDS if self._idle else 0.0))
        finished, failed = self._kept.finished_recving, self._kept.failed_recving
        self._kept = Report(set(), set(), self._kept.acks)
        return finished, failed

    def acks(self) -> WorkerReport:
        """Acknowledgements, each once."""
        acks = list(self._kept.acks)
        self._kept.acks.clear()
        return WorkerReport(acks=acks)

    def drain(self, timeout: float) -> WorkerReport:
        """Wait until no save holds GPU blocks (at most `timeout` seconds); loads that ended meanwhile are kept."""
        self.half.wait_copied(timeout)
        self._collect(self.half.results())
        return self.acks()

    def _collect(self, report: Report) -> None:
        self._kept.finished_recving.update(report.finished_recving)
        self._kept.failed_recving.update(report.failed_recving)
        self._kept.acks.extend(report.acks)
