"""The tier manager: hits, loads and saves over one index of blocks and one table of jobs in flight.

It decides and never moves bytes. It loads every hit that it answered, or refuses it at once. What it holds (host slots, GPU
references, plans, queries) it gives back on every way a request can take.

Order within one step: `hits.answer`, then `loads.commit`, for each waiting request; then `saves.collect`; then `end_step`.
`on_acks`, `finish`, `adopt` and `reset` come at any other time.

`SavePlanner` chooses which blocks of the running requests are saved. A block is saved once: what L1 holds, what another job is
saving and what L2 is known to hold is left out. Each request remembers how far it was looked at, so a step costs only its new
blocks. Slots are taken per alignment unit, for all its groups or none. What finds no slot is tried again while the request lives.

A recurrent state is saved in the step in which vLLM offers it, or in which a request resumes at it: its block may hold a later state
with the next step.
Of a sliding window, what vLLM keeps in its own cache is saved: the blocks that a later request can resume at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import indexOf
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.tiers.hits import HitPlanner, LoadJobs
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, KeysOf, ScheduledRequestView, align_down, longest_hit
from epochkv_connector.tiers.lookup import Lookups
from epochkv_connector.tiers.state import Copied, Key, Loaded, Outcome, Released, Settled, Stored, TierState, block_keys
from epochkv_connector.wire import BlockMove, JobAck, SaveJob, StepMetadata

if TYPE_CHECKING:
    from epochkv_connector.engine.blocks import BlockPoolAdapter
    from epochkv_connector.store.client import StoreClient


class Wanted(NamedTuple):
    """A block that is worth saving."""

    group: int
    block: int
    gpu_block: int
    name: bytes
    slot: int | None  # in L1; None: it is not there yet
    put: bool  # L2 is not known to hold it


class SavePlanner:
    """Chooses, and takes slots. The names under way are told back with `over`."""

    def __init__(self, state: TierState) -> None:
        self._state = state
        self._layout = state.layout
        self._index = state.index
        self._known = state.known
        self._cursors: dict[str, tuple[str | None, int]] = {}  # namespace, tokens that were looked at
        self._saving: set[Key] = set()
        self._needs: dict[str, int] = {}  # request -> slots that its next unit needs and did not find
        self._lacking: dict[int, dict[str, None]] = {}  # the same by number of slots, the longest deferred first
        self.num_deferred = 0  # times that blocks found no slots; they are tried again
        self.num_states_lost = 0  # recurrent states that found no slots

    def leak_report(self) -> dict[str, int]:
        return {"names_saving": len(self._saving), "save_cursors": len(self._cursors), "saves_lacking_slots": len(self._needs)}

    def continuable(self, scheduled: Container[str]) -> list[str]:
        """Of these requests, those whose save was deferred and finds slots now: no more than there are slots for."""
        available = self._index.num_available if self._lacking else 0
        found: list[str] = []
        for needed in sorted(self._lacking):
            for request_id in self._lacking[needed]:
                if needed > available:
                    return found
                if request_id in scheduled:
                    found.append(request_id)
                    available -= needed
        return found

    def lacks(self, request_id: str) -> bool:
        return request_id in self._needs

    def give_up(self, request_id: str) -> None:
        """What was deferred of the request is not asked for again before its next block."""
        needed = self._needs.pop(request_id, None)
        if needed is None:
            return
        del self._lacking[needed][request_id]
        if not self._lacking[needed]:
            del self._lacking[needed]

    def forget_request(self, request_id: str) -> None:
        self._cursors.pop(request_id, None)
        self.give_up(request_id)

    def over(self, moves: tuple[BlockMove, ...]) -> None:
        self._saving.difference_update(block_keys(moves))

    def clear(self) -> None:
        self._cursors.clear()
        self._needs.clear()
        self._lacking.clear()

    def draft(self, view: ScheduledRequestView, namespace: str | None, pool: BlockPoolAdapter) -> SaveJob | None:
        """Take slots for the request's new blocks, or None if nothing is to be saved."""
        unit, size = self._layout.alignment_tokens, self._state.hash_block_size
        end = align_down(min(view.num_confirmed_tokens, len(view.block_hashes) * size), unit)
        under, looked_at = self._cursors.get(view.request_id, (namespace, 0))
        start = looked_at if under == namespace else 0
        token = self._behind_held(view, start, end, namespace, pool)
        self.give_up(view.request_id)
        wanted: list[Wanted] = []
        room = self._index.num_available
        while token < end:
            of_unit = self._unit(view, token, namespace, pool)
            needed = self._num_needed(of_unit)
            if needed > room:
                self._needs[view.request_id] = needed
                self._lacking.setdefault(needed, {})[view.request_id] = None
                self.num_deferred += 1
                break
            wanted += of_unit
            room -= needed
            token += unit
        self._cursors[view.request_id] = (namespace, token)
        moves = self._take(wanted)
        for state in self._states(view, namespace, pool, is_first=start == 0):
            moves += self._take(state)
        if not moves:
            return None
        job_id, deadline = next(self._state.ids), self._state.config.job_deadline_seconds
        return SaveJob(job_id, view.request_id, namespace, tuple(moves), deadline, self._state.settles)

    def _behind_held(self, view: ScheduledRequestView, token: int, end: int, namespace: str | None, pool: BlockPoolAdapter) -> int:
        """Where the first unit from `token` on begins that may have something to save. Of a long hit, every tier has each block."""
        for group, spec in self._layout.restored:
            if spec.kind is GroupKind.STATE:
                continue
            first, scale = token // spec.block_size, self._state.scales[group]
            if spec.kind is not GroupKind.FULL:  # those outside of the window come first, and cannot be saved
                ids = view.group_block_ids[group]
                first = bisect_left(ids, True, first, max(first, len(ids)), key=lambda gpu_block: gpu_block != pool.null_block_id)
            names = view.block_hashes[(first + 1) * scale - 1 : end // spec.block_size * scale : scale]
            tiers: list[Iterable[bool]] = [map(self._index.holds(group), names)] if self._index.indexed else []
            if namespace is not None:
                tiers.append(map(self._known.holds, zip(repeat(group), names)))
            num_held = indexOf(chain(map(all, zip(*tiers, strict=True)), (False,)), False)
            end = min(end, token + align_down((first + num_held) * spec.block_size - token, self._layout.alignment_tokens))
        return max(token, end)

    def _num_needed(self, wanted: Sequence[Wanted]) -> int:
        """Slots that become unavailable if all of these are taken."""
        held = [one.slot for one in wanted if one.slot is not None]
        return len(wanted) - len(held) + self._index.num_idle(held)

    def _take(self, wanted: Sequence[Wanted]) -> list[BlockMove]:
        """Moves with slots, of which there are enough."""
        held = [one.slot for one in wanted if one.slot is not None]
        self._index.pin(held)
        fresh = iter(self._index.allocate(len(wanted) - len(held)))
        self._saving.update((one.group, one.name) for one in wanted)
        return [
            BlockMove(group, block, gpu_block, next(fresh) if slot is None else slot, name, copy=slot is None, put=put)
            for group, block, gpu_block, name, slot, put in wanted
        ]

    def _unit(self, view: ScheduledRequestView, token: int, namespace: str | None, pool: BlockPoolAdapter) -> list[Wanted]:
        """What is worth saving of one alignment unit, but states."""
        found: list[Wanted] = []
        for group, spec in self._layout.restored:
            if spec.kind is GroupKind.STATE:
                continue
            gpu_blocks = view.group_block_ids[group]
            # Drafts' blocks are named later than they are complete. With longer windows for drafts, vLLM keeps fewer than hits need.
            only_kept = spec.kind is GroupKind.SLIDING and not spec.eagle and not spec.extra_retained_tokens
            first = token // spec.block_size
            for block in range(first, first + self._layout.alignment_tokens // spec.block_size):
                if block >= len(gpu_blocks) or gpu_blocks[block] == pool.null_block_id:
                    continue  # outside the sliding window by now
                if only_kept and not pool.is_kept(gpu_blocks[block]):
                    continue
                if (one := self._worth(view, group, block, gpu_blocks[block], namespace)) is not None:
                    found.append(one)
        return found

    def _worth(self, view: ScheduledRequestView, group: int, block: int, gpu_block: int, namespace: str | None) -> Wanted | None:
        """The block, unless every tier has it, or will."""
        name = bytes(view.block_hashes[(block + 1) * self._state.scales[group] - 1])
        if (group, name) in self._saving:
            return None
        slot = self._index.get(group, name)
        put = namespace is not None and (group, name) not in self._known
        if not put and (slot is not None or not self._index.indexed):
            return None
        return Wanted(group, block, gpu_block, name, slot, put)

    def _held_states(self, view: ScheduledRequestView) -> Iterator[tuple[int, int, int]]:
        """Blocks of states in the request's table, as offers: vLLM does not offer the state that a request finds on the GPU."""
        for group, spec in self._layout.restored:
            if spec.kind is GroupKind.STATE:
                for block, gpu_block in enumerate(view.group_block_ids[group], 1):
                    yield group, gpu_block, block * spec.block_size

    def _states(
        self, view: ScheduledRequestView, namespace: str | None, pool: BlockPoolAdapter, *, is_first: bool
    ) -> Iterator[list[Wanted]]:
        """Offered states that are worth saving, boundary by boundary, all groups of one or none; at the first look also those held.

        vLLM's own cache must hold the very block under the very name now. Anything else may be a state of other tokens.
        """
        by_boundary: dict[int, dict[int, Wanted]] = {}  # and by group: vLLM may offer a state twice
        for group, gpu_block, tokens in (*view.states, *(self._held_states(view) if is_first else ())):
            spec = self._layout.groups[group]
            end = tokens // self._state.hash_block_size
            if tokens % spec.block_size or not 0 < end <= len(view.block_hashes) or gpu_block == pool.null_block_id:
                continue  # a state inside of a block (`prefix_match_unit`) has no name of a whole block
            if not pool.names(gpu_block, group, bytes(view.block_hashes[end - 1])):
                continue
            if (one := self._worth(view, group, tokens // spec.block_size - 1, gpu_block, namespace)) is not None:
                by_boundary.setdefault(tokens, {})[group] = one
        for by_group in by_boundary.values():
            # For the boundary before, slots were taken since: one of these may have been given to it.
            wanted = [one._replace(slot=self._index.get(one.group, one.name)) for one in by_group.values()]
            if self._num_needed(wanted) > self._index.num_available:
                self.num_states_lost += len(wanted)
            elif wanted:
                yield wanted


SETTLE_SECONDS = 1.0
"""For so long an engine goes on for saves that its domain has yet to settle. Where nobody makes passes, none is settled before the next."""


class SaveJobs:
    """Jobs for blocks that are worth saving, and what their end gives back."""

    pool: BlockPoolAdapter  # bound before the first request

    def __init__(self, state: TierState) -> None:
        self.planner = SavePlanner(state)
        self._state = state
        self._jobs: list[SaveJob] = []
        self._agreed: list[int] = []  # saves that ranks wait to hear of
        self._refused: list[int] = []
        self._num_settling, self._settle_until = 0, 0.0  # saves that every rank has copied, and some rank not settled

    def collect(self, views: Iterable[ScheduledRequestView], snap: Snapshot) -> Sequence[SaveJob]:
        """Take slots and GPU references for new blocks of these requests: after all lookups of a step, or between steps. They are saved
        to L1, to L2 when the root is shared, or to both. With an L1 by one job: a store call has its price, and a block that is decoded
        alone would have its own. The slots of a ring come back sooner with a job for each request. Returns the share of each request."""
        namespace = self._state.namespace(snap)
        if not self._state.is_usable or (self._state.config.local is None and namespace is None):
            return ()
        shares = [share for view in views if (share := self.planner.draft(view, namespace, self.pool)) is not None]
        jobs = shares
        if shares and self._state.config.local is not None:
            jobs = [msgspec.structs.replace(shares[0], moves=tuple(chain.from_iterable(share.moves for share in shares)))]
        for job in jobs:
            gpu_blocks = tuple(move.gpu_block for move in job.moves if move.copy)
            self.pool.touch(gpu_blocks)
            self._state.jobs.open_save(job, gpu_blocks, self._state.clock())
            self._jobs.append(job)
            self._state.counts["saves_emitted"] += 1
        return shares

    def end_step(self) -> tuple[tuple[SaveJob, ...], tuple[int, ...], tuple[int, ...]]:
        """The step's jobs, and earlier saves that every rank has copied, or some rank has not."""
        step = tuple(self._jobs), tuple(self._agreed), tuple(self._refused)
        self._jobs, self._agreed, self._refused = [], [], []
        return step

    def drop_unsent(self) -> None:
        """The step's jobs reach no worker: end them, so that their GPU blocks and slots come back."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            for rank in range(self._state.jobs.num_ranks):
                for phase in job.phases:
                    for outcome in self._state.jobs.acknowledge(JobAck(job.job_id, rank, phase, failed=True)):
                        self.apply(outcome)

    def apply(self, outcome: Outcome) -> None:
        """Every rank has ended a part of a save, or touches slots of a job no more."""
        match outcome:
            case Copied():
                self._copied(outcome)
            case Settled():
                self._num_settling -= 1
                self._agree(outcome)
            case Stored():
                self.planner.over(outcome.job.moves)
                self._state.counts["blocks_stored"] += len(outcome.stored)
                if not outcome.abandoned:
                    self._state.known.add(block_keys(outcome.stored))
            case Released():
                self._state.index.unpin(outcome.slots)

    def _copied(self, done: Copied) -> None:
        if done.gpu_blocks:
            self.pool.free(tuple(reversed(done.gpu_blocks)))
        if done.job.namespace is None:  # others wait for the put
            self.planner.over(done.job.moves)
        elif done.job.settles:
            self._num_settling, self._settle_until = self._num_settling + 1, self._state.clock() + SETTLE_SECONDS
        elif self._state.jobs.num_ranks > 1:
            self._agree(done)
        self._state.counts["blocks_saved"] += len(done.saved)
        if not done.abandoned:
            self._state.insert(done.saved)

    def _agree(self, done: Copied | Settled) -> None:
        (self._refused if done.failed else self._agreed).append(done.job.job_id)

    def is_pending(self) -> bool:
        """Whether a save may still read GPU blocks and is not overdue, or ranks wait to hear that one may be stored, or may not, or find
        that out in passes that may be idle ones."""
        jobs = self._state.jobs
        if self._num_settling and self._state.clock() < self._settle_until:
            return True
        reading = jobs.num_gpu_blocks > 0 and any(True for _ in jobs.gpu_blocks(self._state.clock()))
        return reading or bool(self._agreed or self._refused)

    def would_free_gpu_blocks(self) -> bool:
        """Whether the end of a save that is not overdue would free a GPU block: one that nobody but the save holds."""
        return any(self.pool.num_references(block) <= 1 for block in self._state.jobs.gpu_blocks(self._state.clock()))

    def leak_report(self) -> dict[str, int]:
        return {"unsent_saves": len(self._jobs), "unsent_agreements": len(self._agreed) + len(self._refused), **self.planner.leak_report()}


class TierManager:
    """See the module's docstring.

    Args:
        layout: KV cache groups; a layout with a `problem()` gets no hits and no saves.
        num_ranks: worker ranks that acknowledge every job (vLLM's world size).
        num_slots: host slots that every rank has; 0: some rank has none, so there are no hits and no saves.
        store: existence queries; None: no L2 is configured, so nobody asks.
        ids: job ids, never repeating.
        clock: monotonic seconds.
        keys_of: names a block's L2 keys.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: CacheLayout,
        *,
        num_ranks: int,
        num_slots: int,
        store: StoreClient | None,
        ids: Iterator[int],
        clock: Callable[[], float],
        keys_of: KeysOf,
    ) -> None:
        self.state = TierState(config, layout, num_ranks, num_slots, ids, clock)
        self.hits = HitPlanner(self.state, Lookups(self.state, store, keys_of))
        self.loads = LoadJobs(self.state, self.hits)
        self.saves = SaveJobs(self.state)

    def bind_block_pool(self, pool: BlockPoolAdapter, hash_block_size: int) -> None:
        """Give access to vLLM's GPU blocks, and tell how many tokens a block hash is of; before the first request."""
        self.hits.is_on_gpu = pool.holds
        self.saves.pool, self.loads.null_block = pool, pool.null_block_id
        self.state.hash_block_size = hash_block_size
        self.state.scales = [group.block_size // hash_block_size for group in self.state.layout.groups]

    def stored(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Tokens of the longest prefix of these blocks that L2 is known to hold, and of the longest that it can."""
        layout, known, scales = self.state.layout, self.state.known, self.state.scales

        def present(group: int, block: int) -> bool:
            position = (block + 1) * scales[group] - 1
            return position < len(names) and (group, bytes(names[position])) in known

        def first_absent(group: int, first: int, end: int) -> int:
            return next((block for block in range(first, end) if not present(group, block)), end)

        most = len(names) * self.state.hash_block_size
        return (
            longest_hit(layout, 0, most, present, first_absent),
            longest_hit(layout, 0, most, lambda group, block: (block + 1) * scales[group] <= len(names), lambda group, first, end: end),
        )

    def finish(self, request_id: str) -> None:
        """The request is over. A load under way stays until every rank reports it; saves stay until acknowledged."""
        self.hits.forget_request(request_id)
        self.saves.planner.forget_request(request_id)

    def end_step(self) -> StepMetadata:
        """End the step: allocate the slots of accepted hits, age the plans. Returns the jobs, and nothing else that ranks are told."""
        step = StepMetadata(self.loads.end_step())
        self.hits.end_step()
        prefetches, step.cancelled = self.hits.prefetches.end_step()
        step.loads += prefetches
        step.saves, step.agreed, step.refused = self.saves.end_step()
        return step

    def on_acks(self, acks: Iterable[JobAck]) -> None:
        for ack in acks:
            for outcome in self.state.jobs.acknowledge(ack):
                if isinstance(outcome, Loaded):
                    self.loads.loaded(outcome)
                else:
                    self.saves.apply(outcome)

    def adopt(self, snap: Snapshot) -> None:
        """New names hold. Plans, queries and remembered answers go; L1 of another root is first to be evicted."""
        if self.state.rename(snap.root):
            self._end_plans()
        self.hits.forget_all()

    def reset(self) -> None:
        """As `adopt`, and L1 is empty at once."""
        self.state.clear()
        self._end_plans()
        self.hits.forget_all()

    def _end_plans(self) -> None:
        """Forget how far each request was saved. Accepted hits still go out, and what they bring is not indexed."""
        self.saves.planner.clear()
        self.loads.abandon()

    def leak_report(self) -> dict[str, int]:
        """Everything that must be 0 when no request lives and every job is acknowledged."""
        return {
            "held_slots": self.state.index.num_held,
            "reserved_slots": self.state.index.num_reserved,
            "busy_slots": self.state.jobs.num_busy_slots,
            "jobs": len(self.state.jobs),
            "loads": self.state.jobs.num_loads,
            "loading": len(self.state.loading),
            "gpu_blocks": self.state.jobs.num_gpu_blocks,
            **self.hits.leak_report(),
            **self.loads.leak_report(),
            **self.saves.leak_report(),
        }

    def stats(self) -> dict[str, float]:
        """Counters since the start (absent: 0), and gauges of now. The one method that may be called on another thread."""
        index, jobs, pause = self.state.index, self.state.jobs, self.hits.pause
        values = {
            **self.state.counts,
            "slots": index.num_slots,
            "slots_indexed": index.num_indexed,
            "slots_other_roots": index.num_dead,
            "slots_held": index.num_held,
            "slots_reserved": index.num_reserved,
            "slots_busy": jobs.num_busy_slots,
            "evictions": index.evictions,
            "dropped_saved": index.dropped_saved,
            "dropped_unread": index.dropped_unread,
            "dropped_unused": index.dropped_unused,
            "saves_deferred": self.saves.planner.num_deferred,
            "states_lost": self.saves.planner.num_states_lost,
            "jobs_open": len(jobs),
            "jobs_overdue": jobs.num_overdue(self.state.clock()),
            "acks_ignored": jobs.ignored_acks,
            "plans_open": len(self.hits.plans),
            "known_in_store": len(self.state.known),
            "loads_paused": pause.paused,
            "load_pauses": pause.num_pauses,
        }
        return defaultdict(float, {name: float(value) for name, value in values.items()})
