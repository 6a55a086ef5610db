"""Translates vLLM's per-step calls on a worker into calls of `half.WorkerHalf`.

vLLM asks for results and for acknowledgements in two calls, and an idle in-process engine collects acknowledgements between
steps. So everything that a half reports is kept here until the call that it belongs to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from epochkv_connector.weights.lora import HeldAdapters
from epochkv_connector.wire.jobs import JobAck, LoadJob, Phase, SaveJob, Source
from epochkv_connector.wire.steps import StepMetadata, WorkerReport
from epochkv_connector.worker.half import IDLE_WAIT_SECONDS
from epochkv_connector.worker.tasks import Report

REFUSE_SECONDS = 2.0
"""How long a half that raised may take to end its copies before the engine goes on without it."""


class Half(Protocol):
    """`half.WorkerHalf`, or a stand-in that refuses everything.

    Attributes:
        rank: its number, in the order the scheduler half counts ranks.
        layout: how its KV tensors lie (`worker.copying.layout.layout_digest`); empty: nobody has looked.
    """

    layout: bytes

    @property
    def rank(self) -> int: ...
    def start_step(self, step: StepMetadata) -> None: ...
    def finish_step(self, as_named: Callable[[], bool] = ...) -> None: ...
    def settle(self) -> None: ...
    def results(self, wait_seconds: float = 0.0) -> Report: ...
    def wait_copied(self, timeout: float) -> bool: ...
    def open_jobs(self) -> set[int]: ...
    def stats(self) -> dict[str, float]: ...
    def shutdown(self, timeout: float = 5.0) -> bool: ...


class _Debts:
    """What a rank owes the scheduler half and vLLM: one report for each load and poisoned request, one acknowledgement
    for each phase of each job. Nothing is paid twice, whichever half pays."""

    def __init__(self) -> None:
        self.loads: dict[int, LoadJob] = {}
        self.saves: dict[int, tuple[SaveJob, set[Phase]]] = {}
        self._reports: set[str] = set()

    def take_on(self, step: StepMetadata) -> None:
        """Add the jobs of a step. Job ids are never reused, so a job that comes twice counts once."""
        self._reports.update(step.poisoned)
        for load in step.loads:
            self.loads[load.job_id] = load
            self._reports.add(load.request_id)
        for save in step.saves:
            self.saves[save.job_id] = (save, set(save.phases))

    def pay(self, report: Report) -> Report:
        """The part of a half's report that is owed; it is owed no more."""
        finished = report.finished_recving & self._reports
        self._reports -= finished
        return Report(finished, report.failed_recving & finished, [ack for ack in report.acks if self._is_owed(ack)])

    def _is_owed(self, ack: JobAck) -> bool:
        if ack.phase is Phase.LOADED:
            return self.loads.pop(ack.job_id, None) is not None
        save, phases = self.saves.get(ack.job_id, (None, set()))
        if ack.phase is Phase.RELEASED or ack.phase not in phases:
            return ack.phase is Phase.RELEASED
        phases.discard(ack.phase)
        if not phases:
            del self.saves[ack.job_id]
        return save is not None

    def failing(self, spared: set[int], rank: int, *, unknown: bool = False) -> Report:
        """A report that fails everything owed, except the jobs in `spared`.

        Args:
            unknown: it is not known whether the store still writes to the slots of these loads, so they stay busy for ever.
        """
        acks = [
            JobAck(job_id, rank, Phase.LOADED, 0, 0, failed=True, busy_slots=_fetched(load) if unknown else ())
            for job_id, load in self.loads.items()
            if job_id not in spared
        ]
        for job_id, (save, phases) in self.saves.items():
            if job_id not in spared:
                acks += [JobAck(job_id, rank, phase, save.start_block, 0, failed=True) for phase in sorted(phases)]
        failed = self._reports - {load.request_id for job_id, load in self.loads.items() if job_id in spared}
        return Report(set(failed), set(failed), acks)


def _fetched(load: LoadJob) -> tuple[int, ...]:
    return tuple(move.slot for move in load.moves if move.source is Source.STORE)


class RefusingHalf:
    """Answers every job at once as failed: what a rank without a host region owes the scheduler half."""

    layout = b""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._owed = _Debts()

    def start_step(self, step: StepMetadata) -> None:
        """Fail the loads, drop the saves, report the poisoned."""
        self._owed.take_on(step)

    def finish_step(self, as_named: Callable[[], bool] = lambda: True) -> None:
        """Nothing to begin."""

    def settle(self) -> None:
        """Nothing is copied."""

    def results(self, wait_seconds: float = 0.0) -> Report:
        """Everything since the last call."""
        return self._owed.pay(self._owed.failing(set(), self.rank))

    def wait_copied(self, timeout: float) -> bool:
        """Nothing is copied."""
        return True

    def open_jobs(self) -> set[int]:
        """Everything is answered at once."""
        return set()

    def stats(self) -> dict[str, float]:
        """Nothing is moved."""
        return {}

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Nothing to end."""
        return True


class Look(Protocol):
    """`weights.rank.Look`: a comparison of weights behind a forward pass."""

    number: int

    def ended(self) -> bool: ...
    def holds(self) -> bool: ...


class WorkerSide:
    """One rank's facade. Model-runner thread; in-process engines also call `drain` on the scheduler's (the same) thread.

    Args:
        look: begins a comparison of the weights with the answer to the question of this number.
        adapters: of this rank.
    """

    def __init__(
        self,
        half: Half,
        on_error: Callable[[str, Exception], None] = lambda where, error: None,
        look: Callable[[int], Look] | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        self.half = half
        self._on_error = on_error
        self._look = look
        self._adapters = adapters or HeldAdapters()
        self._replaced: list[tuple[int, int]] = []
        self._looks: list[Look] = []
        self._kept = Report(set(), set(), [])
        self._debts = _Debts()
        self._retired: Half | None = None  # it raised; asked for ever, as slots may be released late
        self._started = self._finished = True
        self._idle = False

    def new_step(self) -> None:
        """Metadata was bound."""
        self._started = self._finished = False

    def settle(self, metadata: StepMetadata) -> None:
        """Before anything of the step writes to a GPU block: end the copies that have lost their hold on theirs."""
        if metadata.settle:
            self.half.settle()
            if self._retired is not None:
                with contextlib.suppress(Exception):
                    self._retired.settle()

    def start(self, metadata: StepMetadata, *, idle: bool) -> None:
        """Loads begin. `idle`: the step schedules no tokens, so waiting a millisecond for a completion costs nobody."""
        if self._started:
            return
        self._started, self._idle = True, idle
        self._debts.take_on(metadata)
        self.settle(metadata)
        self.half.start_step(metadata)

    def finish(self, metadata: StepMetadata) -> None:
        """The forward pass was issued: saves begin behind it."""
        self.start(metadata, idle=self._idle)
        if not self._finished:
            self._finished = True
            self._replaced += self._adapters.replaced(metadata.newest_epoch)
            as_named = self._compare(metadata.look)
            self.half.finish_step(as_named if self._adapters.are_unchanged(metadata.adapters) else lambda: False)

    def _compare(self, number: int) -> Callable[[], bool]:
        """Whether the last forward pass used the weights that this step's names say. Weights that cannot be compared count as changed."""
        if number < 0 or self._look is None:
            return lambda: number < 0
        look = self._look(number)
        self._looks.append(look)
        return look.holds

    def refuse(self, metadata: StepMetadata) -> None:
        """The half raised while taking a step: it is shut down and gets no more jobs.

        Everything it owes is answered once. What it is still copying when its shutdown has to go on is answered when that
        ends and not before: the blocks of a load that was reported are given to others at once.
        """
        if not self._started:
            self._debts.take_on(metadata)
        self._started = self._finished = True
        old, self.half = self.half, RefusingHalf(self.half.rank)
        self._retired = old
        with contextlib.suppress(Exception):  # it has raised before; what it cannot end is refused below
            old.shutdown(REFUSE_SECONDS)
        self._collect_retired()

    def results(self) -> tuple[set[str], set[str]]:
        """(finished, failed) loads, each once. Never raises: a half that does is refused."""
        try:
            return self._results()
        except Exception as error:
            self._on_error("results", error)
            self.refuse(StepMetadata())
            return self._results()

    def _results(self) -> tuple[set[str], set[str]]:
        self._collect(self.half.results(IDLE_WAIT_SECONDS if self._idle else 0.0))
        self._collect_retired()
        finished, failed = self._kept.finished_recving, self._kept.failed_recving
        self._kept = Report(set(), set(), self._kept.acks)
        return finished, failed

    def acks(self) -> WorkerReport:
        """Acknowledgements, each once."""
        acks = list(self._kept.acks)
        self._kept.acks.clear()
        over = [look for look in self._looks if look.ended()]
        self._looks = [look for look in self._looks if look not in over]
        replaced, self._replaced = self._replaced, []
        return WorkerReport(acks=acks, late=sorted({look.number for look in over if not look.holds()}), replaced=replaced)

    def drain(self, timeout: float) -> WorkerReport:
        """Wait until no save holds GPU blocks (at most `timeout` seconds); loads that ended meanwhile are kept."""
        self.half.wait_copied(timeout)
        self._collect(self.half.results())
        self._collect_retired()
        return self.acks()

    def _collect_retired(self) -> None:
        """What the retired half has ended, and a refusal of everything owed that it is not working on."""
        retired = self._retired
        if retired is None:
            return
        spared: set[int] = set()
        unknown = False
        try:
            self._collect(retired.results())
            spared = retired.open_jobs()
        except Exception:  # nobody will ever know more than this
            spared, unknown = set(), True
        self._collect(self._debts.failing(spared | self.half.open_jobs(), self.half.rank, unknown=unknown))

    def _collect(self, report: Report) -> None:
        owed = self._debts.pay(report)
        self._kept.finished_recving.update(owed.finished_recving)
        self._kept.failed_recving.update(owed.failed_recving)
        self._kept.acks.extend(owed.acks)
