"""The worker half of the connector on one rank: executes load and save jobs and acknowledges each phase exactly once.

Model-runner thread: `register` once; each step `start_step`, `finish_step`, `results`; `shutdown`. Two copy threads
(one per direction) and the store client's threads do the work. Nothing raises out of a step and nothing blocks it:
whatever goes wrong with a job becomes a failed job, counted by reason and logged once per kind.

Every async load is reported once in `finished_recving`, and in `failed_recving` too when a single byte is missing.
Deadlines fail what has not begun to copy; a copy is finite and is waited for, because a reported load's blocks may be
given to others at once. Slots that a late store call may still touch are named busy in the acknowledgement and
followed by `Phase.RELEASED`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from epochkv_connector.keys import KeyCodecError, epoch_of, object_key, replica_owner
from epochkv_connector.records import BlockMove, JobAck, LoadJob, Phase, SaveJob, Source
from epochkv_connector.store.counters import Counters, Notices
from epochkv_connector.store.lanes import Outcome, Transfer
from epochkv_connector.worker.staging import GroupSpec, HostRegion, Pair, Staging, StagingStream, compute_event
from epochkv_connector.worker.tasks import BlockStore, Load, Mover, Report, Save, Stage, is_open, remaining

logger = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.001
"""How long `results` may wait for a completion on a step without scheduled tokens."""

OpenStore = Callable[[HostRegion], BlockStore]

_KEPT: list[Staging] = []
"""Regions that a store call in flight may still touch after shutdown: they live as long as the process."""


class JobFailed(Exception):
    """A job cannot be done; `reason` is the name of a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Step(Protocol):
    """What a step brings (`wire.StepMetadata`)."""

    @property
    def loads(self) -> Sequence[LoadJob]: ...
    @property
    def saves(self) -> Sequence[SaveJob]: ...
    @property
    def poisoned(self) -> Sequence[str]: ...
    @property
    def newest_epoch(self) -> int: ...


class WorkerHalf:
    """One rank's half. Not thread-safe for its callers: the model-runner thread owns it (`stats` may be read from anywhere)."""

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        shard: int | None = None,
        num_shards: int | None = None,
        replica: int | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        """Nothing is allocated before `register`.

        Args:
            rank, world_size: in the order the scheduler half counts ranks.
            shard, num_shards: which KV shard this rank holds, of how many; default: every rank its own.
            replica: this rank's place among the ranks that hold the same shard; default: consecutive ranks share a
            shard
                (as vLLM replicates KV heads).
            open_store: makes and starts the L2 client for the host region; None: no L2.
        """
        self.rank = rank
        self.shard = rank if shard is None else shard
        self.replicas = max(1, world_size // (num_shards or world_size))
        self.replica = rank % self.replicas if replica is None else replica
        self._open_store = open_store
        self._staging: Staging | None = None
        self._store: BlockStore | None = None
        self._movers: dict[str, Mover] = {}
        self._newest_epoch = -1
        self._stopped = False
        self._counters = Counters()
        self._notices = Notices(logger)
        # Everything below is guarded by _changed.
        self._changed = threading.Condition()
        self._loads: dict[int, Load] = {}
        self._copies: dict[int, Save] = {}
        self._puts: set[int] = set()  # saves that are copied and not yet stored or given up
        self._unsubmitted: list[Save] = []
        self._over: list[Load] = []
        self._acks: list[tuple[Save, Phase, bool]] = []
        self._unreleased: list[Load | Save] = []
        self._poisoned: list[str] = []
        self._held: Counter[int] = Counter()  # slot -> transfers that may still touch it
        self._contents: dict[int, tuple[int, bytes]] = {}

    # -- life
    # -------------------------------------------------------------------------------------------------------------

    def register(
        self,
        kv_caches: Mapping[str, Any],
        groups: Sequence[GroupSpec],
        num_slots: int,
        num_blocks: int | None = None,
    ) -> int:
        """Read the layouts, map (and page-lock) the host region, open the store.

        Args:
            kv_caches: as vLLM's `register_kv_caches` gives them.
            groups: in the order of `kv_cache_config.kv_cache_groups`.
            num_slots: slots on this rank, the same on every rank.
            num_blocks: `kv_cache_config.num_blocks`.

        Returns:
            Bytes from slot to slot.

        Raises:
            LayoutError, ValueError, OSError, RuntimeError: this engine cannot be staged; says why.
        """
        self._staging = Staging(kv_caches, groups, num_slots, num_blocks)
        self._movers = {name: Mover(name, self._staging) for name in ("load", "save")}
        if self._open_store is not None:
            self._store = self._open_store(self._staging.region)
        return self._staging.region.stride

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Fail what is open, end the threads, close the store. A second call does nothing.

        Returns:
            True if everything ended; False: a call or copy is still under way and its memory is kept until the
            process ends.
        """
        if self._stopped:
            return True
        self._stopped = True
        deadline = time.monotonic() + timeout
        for load in list(self._loads.values()):
            self._fail_load(load, "shutdown", "the engine shuts down")
        self._drop_unsubmitted("shutdown")
        stopped = [mover.stop(remaining(deadline)) for mover in self._movers.values()]
        clean = all(stopped)
        if self._store is not None:
            clean = self._store.close(max(remaining(deadline), 0.1)) and clean
        if self._staging is not None:
            if clean:
                self._staging.region.unpin()
            else:
                _KEPT.append(self._staging)
        return clean

    def stats(self) -> dict[str, float]:
        """Counters since start: `copy_{load,save}_{bytes,seconds,blocks}`, `{load,save}_jobs`, `{load,save}_failed_<reason>`,
        `save_put_dropped_<reason>`; gauges `held_slots`, `open_loads`, `open_copies`; the store's own as `store_*`."""
        values = self._counters.snapshot()
        values["held_slots"] = len(self._held)
        values["open_loads"] = len(self._loads)
        values["open_copies"] = len(self._copies)
        if self._store is not None:
            values |= {f"store_{name}": value for name, value in self._store.stats().items()}
        return values

    # -- one step
    # -----------------------------------------------------------------------------------------------------------

    def start_step(self, step: Step) -> None:
        """Take the jobs of a step: loads begin at once, saves with `finish_step`. Never raises."""
        self._submit_saves()  # of a step that had no finish_step: its forward is over by now
        self._newest_epoch = max(self._newest_epoch, step.newest_epoch)
        now = time.monotonic()
        for request_id in step.poisoned:
            self._poison(request_id)
        for job in step.loads:
            if job.job_id in self._loads:
                self._counters.add("duplicate_jobs")
                continue
            load = Load(job, now + job.deadline_seconds, self._event())
            with self._changed:
                self._loads[job.job_id] = load
            self._counters.add("load_jobs")
            self._guard(partial(self._begin_load, load), partial(self._fail_load, load))
        with self._changed:
            for save_job in step.saves:
                if save_job.job_id in self._copies:
                    self._counters.add("duplicate_jobs")
                    continue
                save = Save(save_job, now + save_job.deadline_seconds)
                self._copies[save_job.job_id] = save
                self._unsubmitted.append(save)
                self._counters.add("save_jobs")

    def finish_step(self) -> None:
        """The forward of this step has been issued (`wait_for_save`): begin its saves behind it. Never raises."""
        self._submit_saves()

    def results(self, wait_seconds: float = 0.0) -> Report:
        """What has ended since the last call; each thing once. Never raises.

        Args:
            wait_seconds: with loads or copies open and nothing to report, wait this long for one to end
                (`IDLE_WAIT_SECONDS` on a step without scheduled tokens, otherwise 0).
        """
        self._expire()
        report = Report(set(), set(), [])
        with self._changed:
            if wait_seconds > 0 and (self._loads or self._copies):
                self._changed.wait_for(lambda: self._over or self._acks or self._poisoned, wait_seconds)
            over, self._over = self._over, []
            acks, self._acks = self._acks, []
            poisoned, self._poisoned = self._poisoned, []
            released = [task for task in self._unreleased if not is_open(task.ticket)]
            self._unreleased = [task for task in self._unreleased if is_open(task.ticket)]
        for task in released:
            report.acks.append(JobAck(task.job.job_id, self.rank, Phase.RELEASED, 0, 0))
        for load in over:
            self._report(report, load, load.ack(self.rank))
            report.finished_recving.add(load.job.request_id)
            if load.failed:
                report.failed_recving.add(load.job.request_id)
        for save, phase, failed in acks:
            self._report(report, save, save.ack(self.rank, phase, failed=failed))
        report.finished_recving.update(poisoned)
        report.failed_recving.update(poisoned)
        return report

    def open_jobs(self) -> set[int]:
        """Jobs with something left to be acknowledged, save for RELEASED, by a later `results`."""
        with self._changed:
            ended = [load.job.job_id for load in self._over] + [save.job.job_id for save, _, _ in self._acks]
            return {*self._loads, *self._copies, *self._puts, *ended}

    def reads_over(self) -> set[int]:
        """Loads that deliver nothing any more and whose end no `results` has told yet. Any thread."""
        with self._changed:
            ended = [*self._over, *(task for task in self._unreleased if isinstance(task, Load))]
            return {load.job.job_id for load in ended if not is_open(load.ticket)}

    def wait_copied(self, timeout: float) -> bool:
        """Wait until no save holds GPU blocks; then `results` has every COPIED. False after `timeout` seconds."""
        self._submit_saves()
        with self._changed:
            return self._changed.wait_for(lambda: not self._copies, timeout)

    def _report(self, report: Report, task: Load | Save, ack: JobAck) -> None:
        report.acks.append(ack)
        if ack.busy_slots:
            self._unreleased.append(task)

    def _poison(self, request_id: str) -> None:
        """Report once more, finished and failed; a load of it that is still under way makes that report itself."""
        for load in list(self._loads.values()):
            if load.job.request_id == request_id:
                self._counters.add("poisoned_under_way")
                load.failed = True
                self._fail_load(load, "poisoned", "poisoned while under way")
                return
        self._counters.add("poisoned")
        with self._changed:
            self._poisoned.append(request_id)

    def _expire(self) -> None:
        now = time.monotonic()
        for load in [load for load in list(self._loads.values()) if load.deadline <= now]:
            self._fail_load(load, "deadline", f"load job {load.job.job_id} missed its deadline")
        for save in [save for save in list(self._copies.values()) if save.deadline <= now]:
            self._fail_copy(save, "deadline", f"save job {save.job.job_id} missed its deadline")

    # -- loads
    # --------------------------------------------------------------------------------------------------------------

    def _begin_load(self, load: Load) -> None:
        staging = self._usable()
        from_store = [move for move in load.job.moves if move.source is Source.STORE]
        self._check_slots(staging, load.job.moves, from_store)
        if not from_store:
            self._queue_scatter(load)
            return
        if load.job.namespace is None or self._store is None:
            raise JobFailed("no_store", f"load job {load.job.job_id} needs L2, but there is none")
        load.busy = tuple(move.slot for move in from_store)
        with self._changed:
            self._held.update(load.busy)
            for slot in load.busy:
                self._contents.pop(slot, None)
        transfers = [self._transfer(staging, load.job.namespace, move) for move in from_store]
        load.ticket = self._store.get(transfers, remaining(load.deadline))
        load.ticket.released.add_done_callback(lambda _: self._release(load.busy))
        load.ticket.done.add_done_callback(
            lambda done: self._guard(partial(self._fetched, load, from_store, done), partial(self._fail_load, load))
        )

    def _fetched(self, load: Load, moves: Sequence[BlockMove], done: Future[list[Outcome]]) -> None:
        outcomes = done.result()
        filled = [move for move, outcome in zip(moves, outcomes, strict=True) if outcome is Outcome.OK]
        bad = next((outcome for outcome in outcomes if outcome is not Outcome.OK), None)
        with self._changed:
            if load.stage is not Stage.QUEUED:
                return
            load.filled = tuple(move.slot for move in filled)
            load.bad = tuple(move.slot for move, outcome in zip(moves, outcomes, strict=True) if outcome is not Outcome.OK)
            for move in filled:
                self._contents[move.slot] = (move.group, move.block_hash)
        if bad is None:
            self._queue_scatter(load)
        else:
            missing = len(moves) - len(filled)
            raise JobFailed(f"store_{bad}", f"{missing} of {len(moves)} blocks were not read ({bad})")

    def _queue_scatter(self, load: Load) -> None:
        self._usable()
        self._movers["load"].submit(partial(self._scatter, load))

    def _scatter(self, load: Load, stream: StagingStream) -> None:
        with self._changed:
            if load.stage is not Stage.QUEUED:
                return
            load.stage = Stage.COPYING
        self._guard(partial(self._copy_load, load, stream), partial(self._mark_failed, load))
        self._end_load(load)

    def _copy_load(self, load: Load, stream: StagingStream) -> None:
        load.bad = self._mismatched(load.job.moves)
        self._check_contents(load.job.moves)
        pairs = [Pair(move.group, move.gpu_block, move.slot) for move in load.job.moves]
        began = time.monotonic()
        stream.scatter(pairs, load.after)
        self._count_copy("load", pairs, time.monotonic() - began)

    def _fail_load(self, load: Load, reason: str, detail: str) -> None:
        """End a load that has not begun to copy; one that has ends by itself."""
        with self._changed:
            if load.stage is not Stage.QUEUED:
                return
            load.stage = Stage.COPYING  # ours to end now
        if load.ticket is not None:
            load.ticket.cancel()
        self._mark_failed(load, reason, detail)
        self._end_load(load)

    def _mark_failed(self, load: Load, reason: str, detail: str) -> None:
        load.failed = True
        self._tell("load", reason, detail)

    def _end_load(self, load: Load) -> None:
        with self._changed:
            load.stage = Stage.OVER
            self._loads.pop(load.job.job_id, None)
            self._over.append(load)
            self._changed.notify_all()

    # -- saves
    # --------------------------------------------------------------------------------------------------------------

    def _submit_saves(self) -> None:
        with self._changed:
            saves, self._unsubmitted = self._unsubmitted, []
        if not saves:
            return
        after = self._event()
        for save in saves:
            save.after = after
            self._guard(partial(self._begin_save, save), partial(self._fail_copy, save))

    def _drop_unsubmitted(self, reason: str) -> None:
        with self._changed:
            saves, self._unsubmitted = self._unsubmitted, []
        for save in saves:
            self._fail_copy(save, reason, "the engine shuts down")

    def _begin_save(self, save: Save) -> None:
        staging = self._usable()
        self._check_slots(staging, save.job.moves, [move for move in save.job.moves if move.copy])
        self._movers["save"].submit(partial(self._gather, save))

    def _gather(self, save: Save, stream: StagingStream) -> None:
        with self._changed:
            if save.stage is not Stage.QUEUED:
                return
            save.stage = Stage.COPYING
        self._guard(partial(self._copy_save, save, stream), partial(self._mark_copy_failed, save))
        self._end_copy(save)
        if save.job.namespace is not None:
            if save.failed:
                self._acknowledge(save, Phase.STORED, failed=True)
            else:
                self._guard(partial(self._begin_put, save), partial(self._fail_put, save))

    def _copy_save(self, save: Save, stream: StagingStream) -> None:
        if remaining(save.deadline) == 0:
            raise JobFailed("deadline", f"save job {save.job.job_id} missed its deadline")
        fresh = [move for move in save.job.moves if move.copy]
        with self._changed:
            for move in fresh:
                self._contents.pop(move.slot, None)
        self._check_contents(move for move in save.job.moves if not move.copy)
        pairs = [Pair(move.group, move.gpu_block, move.slot) for move in fresh]
        began = time.monotonic()
        stream.gather(pairs, save.after)
        self._count_copy("save", pairs, time.monotonic() - began)
        with self._changed:
            for move in fresh:
                self._contents[move.slot] = (move.group, move.block_hash)

    def _begin_put(self, save: Save) -> None:
        staging, namespace = self._usable(), save.job.namespace
        assert namespace is not None
        if self._is_stale(namespace):
            raise JobFailed("stale", f"save job {save.job.job_id} is of an older epoch ({namespace})")
        if self._store is None:
            raise JobFailed("no_store", f"save job {save.job.job_id} names L2, but there is none")
        wanted = (move for move in save.job.moves if move.put)
        ours = [move for move in wanted if replica_owner(move.block_hash, self.replicas) == self.replica]
        if not ours:
            self._acknowledge(save, Phase.STORED, failed=False)
            return
        save.busy = tuple(move.slot for move in ours)
        with self._changed:
            self._held.update(save.busy)
        transfers = [self._transfer(staging, namespace, move) for move in ours]
        save.ticket = self._store.put(transfers, remaining(save.deadline))
        save.ticket.released.add_done_callback(lambda _: self._release(save.busy))
        save.ticket.done.add_done_callback(lambda done: self._stored(save, done))

    def _stored(self, save: Save, done: Future[list[Outcome]]) -> None:
        bad = next((outcome for outcome in done.result() if outcome is not Outcome.OK), None)
        if bad is None:
            self._acknowledge(save, Phase.STORED, failed=False)
        else:
            self._fail_put(save, f"{bad}", f"save job {save.job.job_id} was not stored completely ({bad})")

    def _fail_put(self, save: Save, reason: str, detail: str) -> None:
        self._tell("save_put", reason, detail, word="dropped")
        self._acknowledge(save, Phase.STORED, failed=True)

    def _fail_copy(self, save: Save, reason: str, detail: str) -> None:
        """End a save that has not begun to copy."""
        with self._changed:
            if save.stage is not Stage.QUEUED:
                return
            save.stage = Stage.COPYING
        self._mark_copy_failed(save, reason, detail)
        self._end_copy(save)
        if save.job.namespace is not None:
            self._acknowledge(save, Phase.STORED, failed=True)

    def _mark_copy_failed(self, save: Save, reason: str, detail: str) -> None:
        save.failed = True
        self._tell("save", reason, detail)

    def _end_copy(self, save: Save) -> None:
        with self._changed:
            save.stage = Stage.OVER
            self._copies.pop(save.job.job_id, None)
            if save.job.namespace is not None:
                self._puts.add(save.job.job_id)
            self._acks.append((save, Phase.COPIED, save.failed))
            self._changed.notify_all()

    def _acknowledge(self, save: Save, phase: Phase, *, failed: bool) -> None:
        with self._changed:
            self._puts.discard(save.job.job_id)
            self._acks.append((save, phase, failed))
            self._changed.notify_all()

    # -- shared
    # ---------------------------------------------------------------------------------------------------------------

    def _usable(self) -> Staging:
        if self._staging is None:
            raise JobFailed("unregistered", "a job came before the KV caches were registered")
        if self._stopped:
            raise JobFailed("shutdown", "the engine shuts down")
        return self._staging

    def _transfer(self, staging: Staging, namespace: str, move: BlockMove) -> Transfer:
        key = object_key(namespace, move.group, self.shard, move.block_hash)
        return Transfer(key, staging.region.slot_address(move.slot), staging.object_view(move.group, move.slot))

    def _check_slots(self, staging: Staging, moves: Iterable[BlockMove], written: Iterable[BlockMove]) -> None:
        """Refuse slots and groups that do not exist, and writing to slots that a late store call may still touch."""
        for move in moves:
            if not (0 <= move.slot < staging.region.num_slots and 0 <= move.group < len(staging.groups)):
                raise JobFailed("bad_move", f"slot {move.slot} of group {move.group} does not exist")
        with self._changed:
            held = [move.slot for move in written if move.slot in self._held]
        if held:
            raise JobFailed("slot_busy", f"slots {held} are still in use by an earlier job's transfer")

    def _check_contents(self, moves: Iterable[BlockMove]) -> None:
        """A slot must hold the very block that the scheduler half believes it holds."""
        bad = self._mismatched(moves)
        if bad:
            raise JobFailed("slot_mismatch", f"slots {bad} do not hold the blocks that were asked for")

    def _mismatched(self, moves: Iterable[BlockMove]) -> tuple[int, ...]:
        return tuple(move.slot for move in moves if self._contents.get(move.slot) != (move.group, move.block_hash))

    def _release(self, slots: Iterable[int]) -> None:
        with self._changed:
            self._held.subtract(slots)
            self._held = +self._held

    def _event(self) -> Any:
        """End of the work issued so far on the model's stream (None on CPU). Model-runner thread only."""
        return None if self._staging is None else compute_event(self._staging.device)

    def _is_stale(self, namespace: str) -> bool:
        try:
            return epoch_of(namespace) < self._newest_epoch
        except KeyCodecError:
            return False

    def _count_copy(self, kind: str, pairs: Sequence[Pair], seconds: float) -> None:
        staging = self._staging
        assert staging is not None
        self._counters.add(f"copy_{kind}_blocks", len(pairs))
        self._counters.add(f"copy_{kind}_bytes", sum(staging.groups[pair.group].payload_bytes for pair in pairs))
        self._counters.add(f"copy_{kind}_seconds", seconds)

    def _guard(self, work: Callable[[], None], fail: Callable[[str, str], None]) -> None:
        """Run one job's work; anything it raises fails that job only."""
        try:
            work()
        except JobFailed as error:
            fail(error.reason, str(error))
        except Exception as error:
            logger.debug("job failed", exc_info=True)
            fail("error", f"{type(error).__name__}: {error}")

    def _tell(self, kind: str, reason: str, detail: str, word: str = "failed") -> None:
        self._counters.add(f"{kind}_{word}_{reason}")
        self._notices.say(f"{kind} {reason}", "KV %s %s: %s (said once; counted)", kind, word, detail)
