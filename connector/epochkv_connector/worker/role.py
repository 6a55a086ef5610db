"""The worker role of one rank: `JobRunner` executes its jobs, `WorkerRole` translates vLLM's per-step calls.

Model-runner thread: each step `start_step`, `finish_step`, `results`; `shutdown`. Two copy threads
(one per direction) and the store client's threads do the work (`jobs`). Nothing raises out of a step and
nothing blocks it: whatever goes wrong with a job becomes a failed job, counted by reason and logged once per kind.

Every async load is reported once in `finished_recving`, and in `failed_recving` too when a single byte is missing.
Deadlines fail what is not being copied; a copy is finite and is waited for, because a reported load's blocks may be
given to others at once. Slots that a late store call may still touch are named busy in the acknowledgement and
followed by `Phase.RELEASED`.

vLLM asks for results and for acknowledgements in two calls, and an idle in-process engine collects acknowledgements between
steps. So everything that the runner reports is kept in `WorkerRole` until the call that it belongs to.

vLLM's sleep unmaps the memory of the KV blocks that copies read or write. Each rank ends them first, in its own process and on the thread
that will sleep (`settle_for_sleep`).
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from epochkv_connector.config import ConnectorConfig, check_fits
from epochkv_connector.engine import describe
from epochkv_connector.engine.describe import describe_layers, describe_platform
from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.connection import StoreSettings
from epochkv_connector.weights.rank import Comparison, HeldAdapters
from epochkv_connector.wire import JobAck, LoadJob, Phase, RankLayout, SaveJob, StepMetadata, Tier, WorkerReport
from epochkv_connector.worker.jobs import (
    LoadTask,
    LoadTasks,
    OpenStore,
    Rank,
    Report,
    SaveTask,
    SaveTasks,
    Settled,
    Stage,
    acknowledgement,
    is_open,
    remaining,
)
from epochkv_connector.worker.layout import GroupSpec, group_view, layout_digest, slot_stride
from epochkv_connector.worker.staging import HostRegion, Staging
from epochkv_fence.connection import ConfigurationError

IDLE_WAIT_SECONDS = 0.001
"""How long `results` may wait for a completion on a step without scheduled tokens."""


class JobRunner:
    """Executes the jobs of one rank. The model-runner thread owns it; any thread may call `stats`.

    Attributes:
        layout: how its KV tensors and host slots lie, for the scheduler role.
        finish_step, put_settled, wait_copied: those of its saves (`SaveTasks`). They never raise.
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
            digest: `layout.layout_digest` of its KV tensors; empty: nobody has looked.
            open_store: makes and starts the L2 client for the host region; None: no L2.

        Raises:
            OSError, RuntimeError: one cannot be opened; the others are closed.
        """
        self.layout = RankLayout(digest, staging.region.num_slots, {group: view.payload_bytes for group, view in staging.groups.items()})
        self._rank = Rank(staging, rank, world_size, replicas, open_store)
        self._loads = LoadTasks(self._rank)
        self._saves = saves = SaveTasks(self._rank)
        self.finish_step, self.put_settled, self.wait_copied = saves.submit, saves.put_settled, saves.wait_copied
        # Guarded by Rank.changed:
        self._unreleased: list[LoadTask | SaveTask] = []
        self._invalidated: list[str] = []

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Fail what is open, end the threads, close the store. A second call does nothing.

        False: a call or copy is still under way, and its memory is kept until the process ends.
        """
        rank = self._rank
        if rank.stopped:
            return True
        rank.stopped = True
        deadline = time.monotonic() + timeout
        self._loads.fail_open("shutdown", "the engine shuts down")
        self._saves.drop_unsubmitted("shutdown", "the engine shuts down")
        for save in rank.tasks(SaveTask, Stage.COPIED):
            self._saves.refuse(save.job.job_id, "shutdown", "the engine shuts down")
        return rank.close(deadline)

    def stats(self) -> dict[str, float]:
        """Counters since start: `copy_{load,save}_{bytes,seconds,blocks}`, `{load,save}_jobs`, `{load,save}_failed_<reason>`,
        `save_put_dropped_<reason>`; gauges `held_slots`, `open_loads`, `open_copies`; the store's own as `store_*`."""
        values = self._rank.counters.snapshot()
        values["held_slots"] = self._rank.slots.num_held
        values["open_loads"] = len(self._loads.open())
        values["open_copies"] = len(self._saves.holding())
        if self._rank.store is not None:
            values |= {f"store_{name}": value for name, value in self._rank.store.stats().items()}
        return values

    def start_step(self, step: StepMetadata) -> None:
        """Take the jobs of a step: loads begin at once, saves with `finish_step`. Never raises."""
        self._saves.drop_unsubmitted("unfinished", "its step has not ended")
        self._rank.tell_epoch(step.newest_epoch)
        for job_id in step.agreed:
            self._saves.agree(job_id)
        for job_id in step.refused:
            self._saves.refuse(job_id)
        with self._rank.changed:
            self._invalidated += step.invalidated  # no rank has a load of these any more, or was told of one
        for job_id in step.cancelled:
            self._loads.cancel(job_id)
        for load in step.loads:
            self._loads.take(load)
        for save in step.saves:
            self._saves.take(save)

    def results(self, wait_seconds: float = 0.0) -> Report:
        """What has ended since the last call; each thing once. Never raises.

        Args:
            wait_seconds: with loads or copies open and nothing to report, wait this long for one to end
                (`IDLE_WAIT_SECONDS` on a step without scheduled tokens, otherwise 0).
        """
        rank, now = self._rank, time.monotonic()
        self._loads.expire(now)
        self._saves.expire(now)
        report = Report(set(), set(), [])
        with rank.changed:
            if wait_seconds > 0 and (self._loads.open() or self._saves.holding()):
                rank.changed.wait_for(lambda: rank.ended or self._invalidated, wait_seconds)
            ended, rank.ended = rank.ended, []
            invalidated, self._invalidated = self._invalidated, []
            released = [task for task in self._unreleased if not is_open(task.ticket)]
            self._unreleased = [task for task in self._unreleased if is_open(task.ticket)]
        for task in released:
            report.acks.append(JobAck(task.job.job_id, rank.number, Phase.RELEASED))
        for task, phase, failed in ended:
            ack = acknowledgement(task, rank.number, phase, failed)
            report.acks.append(ack)
            if ack.busy_slots:
                with rank.changed:
                    self._unreleased.append(task)
            if isinstance(task, LoadTask) and not task.job.prefetch:
                report.finished_recving.add(task.job.request_id)
                if failed:
                    report.failed_recving.add(task.job.request_id)
        report.finished_recving.update(invalidated)
        report.failed_recving.update(invalidated)
        return report

    def unreleased(self) -> list[int]:
        """Jobs that were acknowledged with busy slots, and no more since."""
        with self._rank.changed:
            return [task.job.job_id for task in self._unreleased]

    def open_jobs(self) -> set[int]:
        """Jobs with something left to be acknowledged, save for RELEASED, by a later `results`."""
        with self._rank.changed:
            return {*self._rank.jobs, *(task.job.job_id for task, _, _ in self._rank.ended)}

    def settle_for_sleep(self, timeout: float) -> int:
        """The memory of GPU blocks is about to be unmapped: end every copy, and let none begin before `woken`. Model-runner thread.

        Loads fail. Saves are copied; those that are not after `timeout` seconds fail.

        Returns:
            Copies that still run: the memory must stay mapped unless it is 0.
        """
        deadline = time.monotonic() + timeout
        self._saves.wait_copied(remaining(deadline))
        self._rank.asleep = True
        self._loads.fail_open("sleep", "the engine goes to sleep")
        self._saves.fail_waiting("sleep", "the engine goes to sleep before it was copied")

        def left() -> int:
            return len(self._rank.tasks(LoadTask, Stage.COPYING)) + len(self._saves.holding())

        with self._rank.changed:
            self._rank.changed.wait_for(lambda: not left(), remaining(deadline))
            return left()

    def woken(self) -> None:
        """The memory of GPU blocks is mapped: copies may begin."""
        self._rank.asleep = False


def slot_count(config: ConnectorConfig, slot_bytes: int, num_ranks: int) -> int:
    """Slots of a rank's host region: its share of L1's capacity, or the staging ring when there is no L1.

    Args:
        slot_bytes: from one slot to the next.
        num_ranks: that share this machine's L1.

    Raises:
        ConfigurationError: the share has no room for one slot.
    """
    if config.local is None:
        return config.staging_slots
    count = config.local.capacity_bytes // (slot_bytes * num_ranks)
    if count < 1:
        raise ConfigurationError(
            f"local.capacity_bytes is {config.local.capacity_bytes}; one block takes {slot_bytes} bytes on each of "
            f"{num_ranks} ranks, so give at least {slot_bytes * num_ranks} (or leave local out for no L1)"
        )
    return count


def build_runner(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> JobRunner:
    """What executes this rank's jobs.

    Raises:
        LayoutError, ConfigurationError, OSError, RuntimeError: this engine cannot be staged.
    """
    layout = describe.cache_layout(vllm_config, kv_cache_config)
    ranks, rank = describe.num_worker_ranks(vllm_config), describe.worker_rank(vllm_config)
    settings = StoreSettings.of(config)
    described = kv_cache_config.kv_cache_groups
    groups = {
        index: GroupSpec(list(described[index].layer_names), described[index].kv_cache_spec.block_size) for index, _ in layout.restored
    }
    layers = describe_layers(vllm_config, [name for group in groups.values() for name in group.layer_names])
    about = {"layers": layers, "platform": describe_platform(vllm_config, kv_cache_config)}
    digest = layout_digest(kv_caches, list(groups.values()), kv_cache_config.num_blocks, about)

    def open_store(region: HostRegion) -> StoreClient:
        assert settings is not None
        client = StoreClient(settings, [(region.address, region.num_bytes)], layout=digest)
        client.start()
        return client

    stride = slot_stride([group_view(kv_caches, group, kv_cache_config.num_blocks).payload_bytes for group in groups.values()])
    ranks_here = describe.ranks_here(vllm_config)
    num_slots = slot_count(config, stride, ranks_here)
    if config.local is None:
        check_fits(num_slots * stride * ranks_here, "staging_slots", config.staging_slots)
    staging = Staging(kv_caches, groups, num_slots, kv_cache_config.num_blocks)
    return JobRunner(
        staging,
        rank=rank,
        world_size=ranks,
        replicas=describe.group_replicas(vllm_config, kv_cache_config),
        digest=digest,
        open_store=open_store if settings is not None else None,
    )


REFUSE_SECONDS = 2.0
"""How long a runner that raised may take to end its copies before the engine goes on without it."""


class _Pending:
    """What vLLM and the scheduler role have yet to hear of a rank: one report for each load and invalidated request, one acknowledgement
    for each phase of each job. Nothing is said twice, whoever says it."""

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[LoadJob | SaveJob, set[Phase]]] = {}
        self._reports: set[str] = set()

    def take_on(self, step: StepMetadata) -> None:
        """Add the jobs of a step. Job ids are never reused, so a job that comes twice counts once."""
        self._reports.update(step.invalidated)
        self._reports.update(load.request_id for load in step.loads if not load.prefetch)
        jobs: list[LoadJob | SaveJob] = [*step.loads, *step.saves]
        for job in jobs:
            self.jobs[job.job_id] = job, set(job.phases)

    def take(self, report: Report) -> Report:
        """The part of a report that is pending; it is pending no more."""
        finished = report.finished_recving & self._reports
        self._reports -= finished
        return Report(finished, report.failed_recving & finished, [ack for ack in report.acks if self._is_pending(ack)])

    def _is_pending(self, ack: JobAck) -> bool:
        if ack.phase is Phase.RELEASED:
            return True
        job, phases = self.jobs.get(ack.job_id, (None, set()))
        if job is None or ack.phase not in phases:
            return False
        phases.discard(ack.phase)
        if not phases:
            del self.jobs[ack.job_id]
        return True

    def failing(self, rank: int, spared: set[int], lost: set[int]) -> Report:
        """A report that fails everything pending, except the jobs in `spared`.

        Args:
            lost: it is not known whether the store still writes to the slots of these loads, so the slots stay busy for ever.
        """
        acks, going_on = list[JobAck](), set[str]()
        for job_id, (job, phases) in self.jobs.items():
            load = job if isinstance(job, LoadJob) else None
            if job_id in spared:
                going_on |= {load.request_id} if load else set()
                continue
            fetched = tuple(move.slot for move in load.moves if move.source is Tier.STORE) if load and job_id in lost else ()
            acks += [JobAck(job_id, rank, phase, failed=True, busy_slots=fetched) for phase in sorted(phases)]
        failed = self._reports - going_on
        return Report(failed, failed, acks)


class WorkerRole:
    """One rank. Model-runner thread; in-process engines also call `drain` on the scheduler's (the same) thread.

    Args:
        rank: its number, in the order the scheduler role counts ranks.
        runner: executes its jobs; None: this rank cannot be staged, and every job is answered as failed.
        begin: told of each step, before its forward pass. Whether all ranks of its domain began that as the question of this number saw.
        compare: begins a comparison of the weights with the answer to the question of this number.
        adapters: of this rank.
    """

    def __init__(
        self,
        rank: int,
        runner: JobRunner | None,
        on_error: Callable[[str, Exception], None] = lambda where, error: None,
        compare: Callable[[int], Comparison] | None = None,
        begin: Callable[[int], bool] = lambda number: True,
        adapters: HeldAdapters | None = None,
    ) -> None:
        self.rank = rank
        self.runner = runner
        self._on_error = on_error
        self._compare_weights, self._begin = compare, begin
        self._adapters = adapters or HeldAdapters()
        self._replaced: list[tuple[int, int]] = []
        self._comparisons: list[Comparison] = []
        self._mixed: set[int] = set()
        self._kept = Report(set(), set(), [])
        self._pending = _Pending()
        self._broken: JobRunner | None = None  # it raised; asked for ever, as slots may be released late
        self._unended: set[int] = set()  # its jobs that it may still be working on
        self._taken = self._finished = True
        self._idle = False
        self._handled: BaseException | None = None

    def new_step(self) -> None:
        self._taken = self._finished = False
        self._handled = sys.exc_info()[1]  # by the program that vLLM runs in

    def take(self, metadata: StepMetadata) -> None:
        """Loads begin; the forward pass touches none of their blocks."""
        if self._taken:
            return
        self._taken = True
        self._pending.take_on(metadata)
        if self.runner is not None:
            self.runner.start_step(metadata)

    def start(self, metadata: StepMetadata, *, idle: bool) -> None:
        """`idle`: the step schedules no tokens, so waiting a millisecond for a completion costs nobody."""
        self.take(metadata)
        self._idle = idle
        if not self._begin(metadata.digest_number):
            self._mixed.add(metadata.digest_number)  # where there are drafts, the results leave before `finish` compares

    def finish(self, metadata: StepMetadata) -> None:
        """The forward pass was issued: saves begin behind it."""
        self.take(metadata)
        if self._finished:
            return
        self._finished = True
        self._replaced += self._adapters.replaced(metadata.newest_epoch)
        as_named, settled = self._compare(metadata.digest_number)
        handled, self._handled = self._handled, None  # its frames may hold memory
        if self.runner is not None and sys.exc_info()[1] is handled:  # vLLM ends a step, too, whose forward pass has raised
            self.runner.finish_step(as_named if self._adapters.are_unchanged(metadata.adapters) else lambda: False, settled)

    def _compare(self, number: int) -> tuple[Callable[[], bool], Settled]:
        """Whether the last forward pass used the weights that this step's names say. Weights that cannot be compared count as changed."""
        if number < 0 or self._compare_weights is None:
            return lambda: number < 0, lambda: True
        comparison = self._compare_weights(number)
        self._comparisons.append(comparison)
        return lambda: comparison.as_expected and comparison.holds(), comparison.settled

    def refuse(self, metadata: StepMetadata) -> None:
        """Taking a step has raised: the runner is shut down and gets no more jobs.

        Everything pending is answered once. What it is still copying when its shutdown has to go on is answered when that
        ends and not before: the blocks of a load that was reported are given to others at once.
        """
        if not self._taken:
            self._pending.take_on(metadata)
        self._taken = self._finished = True
        if self.runner is not None:
            self._broken, self.runner = self.runner, None
            self._unended = set(self._pending.jobs)
            with contextlib.suppress(Exception):  # it has raised before; what it cannot end is refused below
                self._broken.shutdown(REFUSE_SECONDS)
        self._collect()

    def retire(self) -> None:
        """Another runner follows, over other KV tensors: this one answers all that is pending, and its host region goes."""
        self.refuse(StepMetadata())
        before, self._broken, self._unended = self._broken, None, set()
        self._collect()
        if before is not None:  # whatever still writes, writes to that region
            self._kept.acks.extend(JobAck(job_id, self.rank, Phase.RELEASED) for job_id in before.unreleased())

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
        acks, self._kept = self._kept.acks, Report(self._kept.finished_recving, self._kept.failed_recving, [])
        over = [one for one in self._comparisons if one.ended() or not one.as_expected]
        self._comparisons = [one for one in self._comparisons if one not in over]
        replaced, self._replaced = self._replaced, []
        late = {one.number for one in over if one.ended() and not one.holds()}
        mixed, self._mixed = ({one.number for one in over if not one.as_expected} | self._mixed) - late, set()
        return WorkerReport(acks=acks, late=sorted(late), mixed=sorted(mixed), replaced=replaced)

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
