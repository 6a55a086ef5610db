"""The scheduler half: one object that ties index, plans, jobs, lookups, saves and tracker together.

It decides and never moves bytes. The facade translates vLLM's calls into these, pins roots and decides what is poisoned.
This half guarantees that every hit it answers is either loaded or named as failed, and that everything it holds (host
slots, GPU references, plans, queries) is given back on every way a request can take.

All methods run on vLLM's scheduler thread. Order within one step: `lookup`, then `commit` or `abort`, for each waiting
request; then `collect_saves`; then `build`. `on_acks`, `finish`, `adopt`, `reset` and `poison` come at any other time.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from epochkv_connector.config.keys import ConnectorConfig
from epochkv_connector.scheduler.index import HostIndex, slot_count
from epochkv_connector.scheduler.jobs import Copied, Ledger, Loaded, Outcome, Released, Stored
from epochkv_connector.scheduler.lookup import KnownInStore, Lookups
from epochkv_connector.scheduler.pause import LoadPause
from epochkv_connector.scheduler.planner import MISS, HitPlanner, LoadDraft
from epochkv_connector.scheduler.saves import SaveDraft, SavePlanner
from epochkv_connector.scheduler.tracker import Tracker
from epochkv_connector.scheduler.views import (
    BlockPoolPort,
    CacheLayout,
    Commit,
    Hit,
    KeysOf,
    LookupClient,
    NameListener,
    RequestView,
    ScheduledRequestView,
    Snapshot,
)
from epochkv_connector.wire.jobs import JobAck, LoadJob, SaveJob, Source

if TYPE_CHECKING:  # wire imports vLLM, which takes seconds and which the bookkeeping does not need
    from epochkv_connector.wire.steps import StepMetadata

logger = logging.getLogger(__name__)

KNOWN_IN_STORE_CAPACITY = 100_000

COUNTERS = (
    "lookups",
    "lookups_deferred",
    "lookups_missed",
    "lookups_below_min",
    "lookups_paused",
    "hits_shrunk",
    "tokens_planned_host",
    "tokens_planned_store",
    "plans_opened",
    "plans_committed",
    "plans_aborted",
    "plans_expired",
    "plans_over_cap",
    "plans_dropped",
    "loads_doomed",
    "loads_done",
    "loads_failed",
    "blocks_loaded",
    "saves_emitted",
    "blocks_saved",
    "blocks_stored",
    "poisoned",
)
"""Counters in `stats()`, always present."""


@dataclass(frozen=True, slots=True)
class StepJobs:
    """The contents of one `StepMetadata`, without vLLM's base class."""

    loads: tuple[LoadJob, ...]
    saves: tuple[SaveJob, ...]
    poisoned: tuple[str, ...]
    agreed: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


class SchedulerHalf:
    """See the module's docstring.

    Args:
        layout: KV cache groups; a layout with a `problem()` gets no hits and no saves, said once.
        num_ranks: worker ranks that acknowledge every job (vLLM's world size).
        store: existence queries; None: lookups end at L1.
        ids: job ids, never repeating.
        clock: monotonic seconds.
        keys_of: names a block's L2 keys; required with `store`.

    Raises:
        ConfigError: L1 is too small for one block.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: CacheLayout,
        *,
        num_ranks: int,
        store: LookupClient | None,
        ids: Iterator[int],
        clock: Callable[[], float],
        keys_of: KeysOf | None = None,
    ) -> None:
        if store is not None and keys_of is None:
            raise TypeError("SchedulerHalf needs keys_of together with store")
        self._config = config
        self.layout = layout
        self._ids = ids
        self._clock = clock
        self.problem = layout.problem()
        if self.problem:
            logger.warning("EpochKV answers no hits and saves nothing: %s", self.problem)
        self.num_slots = slot_count(config, max(1, layout.slot_bytes), num_ranks)
        self._count: Counter[str] = Counter()
        self._tracker = Tracker(config.tracker_capacity) if config.tracker and config.local else None
        self.listener: NameListener | None = None
        self._index = HostIndex(self.num_slots, max(1, len(layout.groups)), config.local is not None, self._left)
        self._ledger = Ledger(num_ranks)
        self._known = KnownInStore(KNOWN_IN_STORE_CAPACITY)
        self._saves = SavePlanner(layout, self._index, self._known, self._tracker)
        self._lookups: Lookups | None = None
        if store is not None and keys_of is not None:
            wait, deadline = config.lookup_wait_ms / 1e3, config.lookup_deadline_ms / 1e3
            self._lookups = Lookups(store, keys_of, wait, deadline, clock)
        self._pause = LoadPause(2 * config.job_deadline_seconds, clock)
        self._planner = HitPlanner(
            config,
            layout,
            self._index,
            self._known,
            tracker=self._tracker,
            lookups=self._lookups,
            pause=self._pause,
            slots_due=lambda: self._ledger.num_saves > 0,
            counts=self._count,
            clock=clock,
        )
        self._load_drafts: dict[str, LoadDraft] = {}
        self._save_jobs: list[SaveJob] = []
        self._scale: dict[int, int] = {}  # hash blocks per block, by group; an engine has one hash block size
        self._poisoned: dict[str, None] = {}  # ordered set
        self._agreed: list[int] = []  # saves that ranks wait to hear of
        self._refused: list[int] = []
        self._doomed: set[str] = set()  # of this step
        self._sources: dict[str, Mapping[Source, int]] = {}  # of this step
        self._pool: BlockPoolPort | None = None
        self._root: bytes | None = None

    def bind_block_pool(self, pool: BlockPoolPort) -> None:
        """Give access to vLLM's GPU blocks; before the first `commit` and `collect_saves`."""
        self._pool = pool

    # -- hits ----------------------------------------------------------------------------------------------------

    def begin_lookup(self, req: RequestView, snap: Snapshot) -> None:
        """Start asking L2 for what L1 does not hold, before the scheduler needs the answer. Returns at once."""
        if not self.problem and req.root == snap.root:
            self._planner.begin(req, self._namespace(snap))

    def lookup(self, req: RequestView, num_local_tokens: int, snap: Snapshot) -> Hit:
        """How many tokens beyond `num_local_tokens` the tiers give; what is promised is held by a plan.

        The hit never covers the last token: vLLM has to compute one, and with a sliding window a load of the whole
        prompt would leave out a block that this token attends to. Idempotent for the same (request, local tokens, root).
        """
        self._count["lookups"] += 1
        if self.problem or req.root != snap.root or self._is_loading(req.request_id):
            return MISS
        return self._planner.answer(req, num_local_tokens, self._namespace(snap))

    def commit(
        self,
        req: RequestView,
        group_block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        snap: Snapshot,
    ) -> Commit:
        """vLLM has allocated blocks. 0 tokens abort the plan; fewer than planned shrink it; a second call does nothing.

        A promise that cannot be kept (no plan, other root, more tokens than planned, a block vLLM expects to be filled
        and the plan does not cover) makes the request DOOMED: vLLM waits for it already, so it is reported as failed.
        """
        request_id = req.request_id
        if num_external_tokens <= 0:
            self.abort(request_id)
            return Commit.NOTHING
        if request_id in self._doomed:
            return Commit.DOOMED
        if self._is_loading(request_id):
            return Commit.LOADING
        null_block = 0 if self._pool is None else self._pool.null_block_id
        draft = self._planner.accept(req, snap.root, num_external_tokens, group_block_ids, null_block)
        if draft is None:
            self._count["loads_doomed"] += 1
            self._doomed.add(request_id)
            self.poison([request_id])
            return Commit.DOOMED
        self._count["plans_committed"] += 1
        self._load_drafts[request_id] = draft
        self._sources[request_id] = self._planner.sources(draft, num_external_tokens)
        if draft.num_fetched:
            self._pause.begin(request_id)
        return Commit.LOADING

    def hit_sources(self, request_id: str) -> Mapping[Source, int]:
        """Tokens by tier of the hit committed in this step (for vLLM's metrics)."""
        return self._sources.get(request_id, {})

    def abort(self, request_id: str) -> None:
        """vLLM did not take the hit (or took none)."""
        self._planner.forget_request(request_id)

    def finish(self, request_id: str) -> None:
        """The request is over. A load under way stays until every rank reports it; saves stay until acknowledged."""
        self.abort(request_id)
        self._saves.forget_request(request_id)

    def _namespace(self, snap: Snapshot) -> str | None:
        return snap.namespace if snap.shared and self._config.distributed is not None else None

    def _is_loading(self, request_id: str) -> bool:
        return request_id in self._load_drafts or self._ledger.is_loading(request_id)

    # -- saves ---------------------------------------------------------------------------------------------------

    def collect_saves(self, views: Iterable[ScheduledRequestView], snap: Snapshot) -> Sequence[SaveJob]:
        """Take slots and GPU references for new blocks of these requests: after all lookups of a step, or between steps.

        Only blocks named under the current root are saved: to L1, to L2 when the root is shared, or to both.

        Returns:
            The jobs that go out with the next metadata for it.
        """
        first, namespace = len(self._save_jobs), self._namespace(snap)
        if self.problem or self._pool is None or (self._config.local is None and namespace is None):
            return ()
        for view in views:
            if view.root == snap.root:
                draft = self._saves.draft(view, namespace, self._pool.null_block_id)
                if draft is not None:
                    self._open_save(draft, view.hash_block_size, self._pool)
        return self._save_jobs[first:]

    def let_go(self) -> bool:
        """Give the GPU blocks of open saves back before their copies are known to have ended. True if there were any.

        The caller has every rank end them before it writes to a block again (`StepMetadata.settle`).
        """
        blocks = self._ledger.let_go()
        if blocks and self._pool is not None:
            self._pool.free(blocks)
        return bool(blocks)

    def continuable_saves(self, scheduled: Container[str]) -> list[str]:
        """Of these requests, those with blocks that were not saved for lack of slots, as far as there are slots now."""
        return self._saves.continuable(scheduled)

    def give_up_save(self, request_id: str) -> None:
        """Blocks of this request that lacked slots may not be saved any more."""
        self._saves.give_up(request_id)

    def _open_save(self, draft: SaveDraft, hash_block_size: int, pool: BlockPoolPort) -> None:
        job = SaveJob(
            job_id=next(self._ids),
            request_id=draft.request_id,
            namespace=draft.namespace,
            start_block=draft.start_token // hash_block_size,
            num_blocks=(draft.end_token - draft.start_token) // hash_block_size,
            moves=draft.moves,
            deadline_seconds=self._config.job_deadline_seconds,
        )
        gpu_blocks = tuple(move.gpu_block for move in draft.moves if move.copy)
        pool.touch(gpu_blocks)
        if not self._scale:
            self._scale = {index: group.block_size // hash_block_size for index, group in enumerate(self.layout.groups)}
        self._ledger.open_save(job, gpu_blocks, self._scale, self._clock())
        self._save_jobs.append(job)
        self._count["saves_emitted"] += 1

    # -- the step ------------------------------------------------------------------------------------------------

    def build(self, newest_epoch: int) -> StepMetadata:
        """End the step: what the workers are told."""
        from epochkv_connector.wire.steps import StepMetadata

        step = self.end_step()
        return StepMetadata(
            loads=step.loads,
            saves=step.saves,
            poisoned=step.poisoned,
            newest_epoch=newest_epoch,
            agreed=step.agreed,
            refused=step.refused,
        )

    def end_step(self) -> StepJobs:
        """`build` without vLLM's base class: allocate the slots of accepted hits, give out the jobs, age the plans."""
        now = self._clock()
        loads = tuple(self._open_load(draft, now) for draft in self._load_drafts.values())
        self._planner.end_step()
        step = StepJobs(loads, tuple(self._save_jobs), tuple(self._poisoned), tuple(self._agreed), tuple(self._refused))
        self._load_drafts, self._save_jobs, self._poisoned = {}, [], {}
        self._agreed, self._refused = [], []
        self._doomed.clear()
        self._sources.clear()
        return step

    def drop_unsent_saves(self) -> None:
        """The step's jobs reach no worker: end its saves, so that their GPU blocks and slots come back."""
        jobs, self._save_jobs = self._save_jobs, []
        for job in jobs:
            for rank in range(self._ledger.num_ranks):
                for phase in job.phases:
                    self.on_acks([JobAck(job.job_id, rank, phase, job.start_block, 0, failed=True)])

    def _open_load(self, draft: LoadDraft, now: float) -> LoadJob:
        moves = tuple(draft.moves)
        if draft.num_fetched:
            fresh = itertools.cycle(self._index.allocate(draft.num_reserved, reserved=True))
            moves = tuple(m if m.source is Source.HOST else msgspec.structs.replace(m, slot=next(fresh)) for m in moves)
        deadline = self._config.job_deadline_seconds
        job = LoadJob(next(self._ids), draft.request_id, draft.namespace, moves, deadline)
        self._ledger.open_load(job, now, draft.abandoned, reads=draft.num_fetched > 0)
        return job

    def on_acks(self, acks: Iterable[JobAck]) -> None:
        """Acknowledgements of any number of ranks, in order."""
        for ack in acks:
            for outcome in self._ledger.acknowledge(ack):
                self._apply(outcome)

    def _apply(self, outcome: Outcome) -> None:
        match outcome:
            case Copied():
                self._on_copied(outcome)
            case Stored():
                self._count["blocks_stored"] += len(outcome.stored)
                if not outcome.abandoned:
                    self._known.add((move.group, move.block_hash) for move in outcome.stored)
            case Loaded():
                self._on_loaded(outcome)
            case Released():
                self._index.unpin(outcome.slots)

    def _on_copied(self, done: Copied) -> None:
        if done.gpu_blocks and self._pool is not None:
            self._pool.free(tuple(reversed(done.gpu_blocks)))
        self._saves.over(done.job.moves)
        if done.job.namespace is not None and self._ledger.num_ranks > 1:
            (self._agreed if done.complete else self._refused).append(done.job.job_id)
        self._count["blocks_saved"] += len(done.saved)
        if done.abandoned:
            return
        new = [move for move in done.saved if self._index.insert(move.slot, move.group, move.block_hash)]
        if self._tracker is not None:
            self._tracker.confirm((move.group, move.block_hash) for move in new)
        if self.listener is not None:
            self.listener.arrived((move.group, move.block_hash) for move in new)

    def _left(self, key: tuple[int, bytes]) -> None:
        """L1 lost a block."""
        if self._tracker is not None:
            self._tracker.forget(key)
        if self.listener is not None:
            self.listener.left(key)

    def _on_loaded(self, done: Loaded) -> None:
        self._count["loads_done"] += 1
        self._count["loads_failed"] += done.failed
        self._count["blocks_loaded"] += len(done.job.moves) - len(done.doubted)
        fetched = sum(move.source is Source.STORE for move in done.job.moves)
        if fetched:
            arrived = not done.failed or len(done.filled) == fetched
            self._pause.end(done.job.request_id, None if done.abandoned else arrived)
        if done.abandoned:
            return
        # Verified L2 bytes in a slot are good on every rank, even when the copy to the GPU came too late.
        new = [move for move in done.filled if self._index.insert(move.slot, move.group, move.block_hash)]
        if self.listener is not None:
            self.listener.arrived((move.group, move.block_hash) for move in new)
        self._known.add((move.group, move.block_hash) for move in done.filled)
        filled = {move.slot for move in done.filled}
        for move in done.doubted:
            if move.source is Source.HOST:
                self._index.forget(move.group, move.block_hash)
            elif move.slot not in filled:
                self._known.discard([(move.group, move.block_hash)])
        if self._tracker is not None:
            for move in done.hull:
                self._tracker.forget((move.group, move.block_hash))

    # -- names change --------------------------------------------------------------------------------------------

    def adopt(self, snap: Snapshot) -> set[str]:
        """New names hold. Plans, queries and remembered answers go; L1 of another root is first to be evicted.

        Returns:
            Requests with a load under way or about to be sent: the caller poisons them.
        """
        if snap.root != self._root:
            self._root = snap.root
            self._forget_names()
            found_again = self._index.renew(snap.root)
            if self._tracker is not None:
                self._tracker.confirm(found_again)
            if self.listener is not None:
                self.listener.found_again(found_again)
        self._planner.forget_all()
        return self.open_loads()

    def reset(self) -> set[str]:
        """Clear means clear: as `adopt`, and L1 is empty at once."""
        self._forget_names()
        self._index.clear()
        self._planner.forget_all()
        return self.open_loads()

    def _forget_names(self) -> None:
        self._known.clear()
        self._saves.clear()
        if self._tracker is not None:
            self._tracker.clear()
        self._ledger.abandon_all()
        for draft in self._load_drafts.values():
            draft.abandoned = True

    def poison(self, request_ids: Iterable[str]) -> None:
        """Name these requests in the next metadata: every rank then reports them finished *and* failed."""
        for request_id in (request_ids,) if isinstance(request_ids, str) else request_ids:
            self._poisoned[request_id] = None
            self._count["poisoned"] += 1

    # -- what is open --------------------------------------------------------------------------------------------

    def holds_gpu_blocks(self) -> bool:
        """Whether a save may still read GPU blocks."""
        return self._ledger.num_gpu_blocks > 0

    def owes_word(self) -> bool:
        """Whether ranks wait to hear that a save may be stored, or may not."""
        return bool(self._agreed or self._refused)

    def would_free_gpu_blocks(self) -> bool:
        """Whether the end of a save would free a GPU block: one that nobody but the save holds."""
        pool = self._pool
        return pool is not None and any(pool.num_references(block) <= 1 for block in self._ledger.gpu_blocks())

    def open_loads(self) -> set[str]:
        """Requests whose load some rank has not reported (including hits accepted in this step)."""
        return self._ledger.loading() | set(self._load_drafts)

    def leak_report(self) -> dict[str, int]:
        """Everything that must be 0 when no request lives and every job is acknowledged."""
        return {
            "plans": self._planner.num_plans,
            "plan_slots": self._planner.num_held,
            "held_slots": self._index.num_held,
            "reserved_slots": self._index.num_reserved,
            "busy_slots": self._ledger.num_busy_slots,
            "jobs": len(self._ledger),
            "loads": self._ledger.num_loads,
            "unsent_loads": len(self._load_drafts),
            "unsent_saves": len(self._save_jobs),
            "unsent_poisoned": len(self._poisoned),
            "unsent_agreements": len(self._agreed) + len(self._refused),
            "gpu_blocks": self._ledger.num_gpu_blocks,
            "names_saving": self._saves.num_saving,
            "save_cursors": self._saves.num_cursors,
            "saves_lacking_slots": self._saves.num_lacking,
            "hits_lacking_slots": self._planner.num_lacking,
            "queries": 0 if self._lookups is None else len(self._lookups),
        }

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges of now. The one method that may be called on another thread."""
        values: dict[str, float] = {name: self._count.get(name, 0) for name in COUNTERS}
        values |= {
            "slots": self.num_slots,
            "slots_indexed": self._index.num_indexed,
            "slots_other_roots": self._index.num_dead,
            "slots_held": self._index.num_held,
            "slots_reserved": self._index.num_reserved,
            "slots_busy": self._ledger.num_busy_slots,
            "evictions": self._index.evictions,
            "saves_deferred": self._saves.num_deferred,
            "jobs_open": len(self._ledger),
            "reads_open": self._ledger.num_reads,
            "jobs_overdue": self._ledger.num_overdue(self._clock()),
            "acks_ignored": self._ledger.ignored_acks,
            "plans_open": self._planner.num_plans,
            "tracker_entries": 0 if self._tracker is None else len(self._tracker),
            "known_in_store": len(self._known),
            "loads_paused": self._pause.paused,
            "load_pauses": self._pause.num_pauses,
        }
        if self._lookups is not None:
            values |= self._lookups.stats()
        return {name: float(value) for name, value in values.items()}
