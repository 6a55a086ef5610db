"""Which blocks of the running requests are saved, and what becomes of their saves.

A block is saved once: what L1 holds, what another job is saving and what L2 is known to hold is left out. Each request remembers
how far it was looked at, so a step costs only its new blocks. Slots are taken per alignment unit, for all its groups or none. What
finds no slot is tried again while the request lives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.planning.hits import align_down
from epochkv_connector.scheduler.tiers.index import Key
from epochkv_connector.scheduler.tiers.ledger import Copied, Outcome, Released, Stored
from epochkv_connector.scheduler.tiers.state import TierState
from epochkv_connector.scheduler.tiers.views import ScheduledRequestView
from epochkv_connector.wire.jobs import BlockMove, JobAck, SaveJob

if TYPE_CHECKING:
    from epochkv_connector.engine.blocks import BlockPoolAdapter


class SavePlanner:
    """Chooses, and takes slots. The names under way are told back with `over`."""

    def __init__(self, tiers: TierState) -> None:
        self._tiers = tiers
        self._layout = tiers.layout
        self._index = tiers.index
        self._known = tiers.known
        self._tracker = tiers.tracker
        self._cursors: dict[str, tuple[bytes, str | None, int]] = {}  # root, namespace, tokens that were looked at
        self._saving: set[Key] = set()
        self._needs: dict[str, int] = {}  # request -> slots that its next unit needs and did not find
        self._lacking: dict[int, dict[str, None]] = {}  # the same by number of slots, the longest deferred first
        self.num_deferred = 0

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
        for move in moves:
            self._saving.discard((move.group, move.block_hash))

    def clear(self) -> None:
        self._cursors.clear()
        self._needs.clear()
        self._lacking.clear()

    def draft(self, view: ScheduledRequestView, namespace: str | None, null_block: int) -> SaveJob | None:
        """Take slots for the request's new blocks, or None if nothing is to be saved."""
        unit, size = self._layout.alignment_tokens, view.hash_block_size
        end = align_down(min(view.num_confirmed_tokens, len(view.block_hashes) * size), unit)
        root, under, looked_at = self._cursors.get(view.request_id, (view.root, namespace, 0))
        start = token = looked_at if (root, under) == (view.root, namespace) else 0
        self.give_up(view.request_id)
        moves: list[BlockMove] = []
        while token < end:
            of_unit = self._moves_of_unit(view, token, namespace, null_block)
            if of_unit is None:
                self.num_deferred += 1
                break
            moves.extend(of_unit)
            token += unit
        self._cursors[view.request_id] = (view.root, namespace, token)
        if not moves:
            return None
        job_id, deadline = next(self._tiers.ids), self._tiers.config.job_deadline_seconds
        return SaveJob(job_id, view.request_id, namespace, start // size, (token - start) // size, tuple(moves), deadline)

    def _moves_of_unit(self, view: ScheduledRequestView, token: int, namespace: str | None, null_block: int) -> list[BlockMove] | None:
        """Blocks of one alignment unit with their slots, or None if the slots cannot be had (nothing is taken)."""
        wanted = self._wanted(view, token, namespace, null_block)
        held = [slot for *_, slot, _ in wanted if slot is not None]
        num_new = len(wanted) - len(held)
        needed = num_new + sum(1 for slot in held if self._index.is_idle(slot))
        if needed > self._index.num_available:
            self._needs[view.request_id] = needed
            self._lacking.setdefault(needed, {})[view.request_id] = None
            return None
        self._index.pin(held)
        fresh = iter(self._index.allocate(num_new))
        moves = []
        for group, block, gpu_block, name, slot, put in wanted:
            move_slot = next(fresh) if slot is None else slot
            moves.append(BlockMove(group, block, gpu_block, move_slot, name, copy=slot is None, put=put))
            self._saving.add((group, name))
        return moves

    def _wanted(
        self, view: ScheduledRequestView, token: int, namespace: str | None, null_block: int
    ) -> list[tuple[int, int, int, bytes, int | None, bool]]:
        wanted = []
        for group, spec in enumerate(self._layout.groups):
            gpu_blocks = view.group_block_ids[group]
            scale = spec.block_size // view.hash_block_size
            first = token // spec.block_size
            for block in range(first, first + self._layout.alignment_tokens // spec.block_size):
                if block >= len(gpu_blocks) or gpu_blocks[block] == null_block:
                    continue  # outside the sliding window by now
                name = bytes(view.block_hashes[(block + 1) * scale - 1])
                if (group, name) in self._saving:
                    continue
                slot = self._index.get(group, name)
                if slot is not None and self._tracker is not None:
                    self._tracker.add([(group, name)])  # it may have been forgotten there; L1 holds it
                put = namespace is not None and (group, name) not in self._known
                if not put and (slot is not None or not self._index.indexed):
                    continue
                wanted.append((group, block, gpu_blocks[block], name, slot, put))
        return wanted


class SaveJobs:
    """Jobs for blocks that are worth saving, and what their end gives back.

    Attributes:
        pool: vLLM's GPU blocks; None: not bound yet, so nothing is saved.
    """

    def __init__(self, tiers: TierState) -> None:
        self.planner = SavePlanner(tiers)
        self.pool: BlockPoolAdapter | None = None
        self._tiers = tiers
        self._jobs: list[SaveJob] = []
        self._scale: dict[int, int] = {}  # hash blocks per block, by group; an engine has one hash block size
        self._agreed: list[int] = []  # saves that ranks wait to hear of
        self._refused: list[int] = []

    def collect(self, views: Iterable[ScheduledRequestView], snap: Snapshot) -> Sequence[SaveJob]:
        """Take slots and GPU references for new blocks of these requests: after all lookups of a step, or between steps.

        Only blocks named under the current root are saved: to L1, to L2 when the root is shared, or to both.

        Returns:
            The jobs that go out with the next metadata for it.
        """
        first, namespace = len(self._jobs), self._tiers.namespace(snap)
        if not self._tiers.is_usable or self.pool is None or (self._tiers.config.local is None and namespace is None):
            return ()
        for view in views:
            if view.root == snap.root:
                job = self.planner.draft(view, namespace, self.pool.null_block_id)
                if job is not None:
                    self._open(job, view.hash_block_size, self.pool)
        return self._jobs[first:]

    def _open(self, job: SaveJob, hash_block_size: int, pool: BlockPoolAdapter) -> None:
        gpu_blocks = tuple(move.gpu_block for move in job.moves if move.copy)
        pool.touch(gpu_blocks)
        if not self._scale:
            self._scale = {index: group.block_size // hash_block_size for index, group in enumerate(self._tiers.layout.groups)}
        self._tiers.ledger.open_save(job, gpu_blocks, self._scale, self._tiers.clock())
        self._jobs.append(job)
        self._tiers.counts["saves_emitted"] += 1

    def end_step(self) -> tuple[tuple[SaveJob, ...], tuple[int, ...], tuple[int, ...]]:
        """The step's jobs, and earlier saves that every rank has copied, or some rank has not."""
        step = tuple(self._jobs), tuple(self._agreed), tuple(self._refused)
        self._jobs, self._agreed, self._refused = [], [], []
        return step

    def drop_unsent(self) -> None:
        """The step's jobs reach no worker: end them, so that their GPU blocks and slots come back."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            for rank in range(self._tiers.ledger.num_ranks):
                for phase in job.phases:
                    for outcome in self._tiers.ledger.acknowledge(JobAck(job.job_id, rank, phase, job.start_block, 0, failed=True)):
                        self.apply(outcome)

    def let_go(self) -> bool:
        """Give the GPU blocks of open saves back before their copies are known to have ended. True if there were any.

        The caller has every rank end them before it writes to a block again (`StepMetadata.settle`).
        """
        blocks = self._tiers.ledger.let_go()
        if blocks and self.pool is not None:
            self.pool.free(blocks)
        return bool(blocks)

    def apply(self, outcome: Outcome) -> None:
        """Every rank has ended a part of a save, or touches slots of a job no more."""
        match outcome:
            case Copied():
                self._copied(outcome)
            case Stored():
                self._tiers.counts["blocks_stored"] += len(outcome.stored)
                if not outcome.abandoned:
                    self._tiers.stored(outcome)
            case Released():
                self._tiers.index.unpin(outcome.slots)

    def _copied(self, done: Copied) -> None:
        if done.gpu_blocks and self.pool is not None:
            self.pool.free(tuple(reversed(done.gpu_blocks)))
        self.planner.over(done.job.moves)
        if done.job.namespace is not None and self._tiers.ledger.num_ranks > 1:
            (self._agreed if done.complete else self._refused).append(done.job.job_id)
        self._tiers.counts["blocks_saved"] += len(done.saved)
        if not done.abandoned:
            self._tiers.copied(done)

    def is_pending(self) -> bool:
        """Whether a save may still read GPU blocks, or ranks wait to hear that one may be stored, or may not."""
        return self._tiers.ledger.num_gpu_blocks > 0 or bool(self._agreed or self._refused)

    def would_free_gpu_blocks(self) -> bool:
        """Whether the end of a save would free a GPU block: one that nobody but the save holds."""
        pool = self.pool
        return pool is not None and any(pool.num_references(block) <= 1 for block in self._tiers.ledger.gpu_blocks())

    def leak_report(self) -> dict[str, int]:
        return {"unsent_saves": len(self._jobs), "unsent_agreements": len(self._agreed) + len(self._refused), **self.planner.leak_report()}
