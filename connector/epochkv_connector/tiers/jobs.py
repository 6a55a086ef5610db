"""The jobs in flight: who still owes an acknowledgement, and what may be released when.

vLLM merges the ranks of one step only, so ranks are counted down here, across steps, by job id. A job never ends by
itself: workers acknowledge it as dropped after its deadline, and until a rank says so nothing it might still touch is
reused.
Saves are aggregated over ranks by intersection: a block is saved if every rank saved it. After a load that failed on one rank, the
request is recomputed (`worker.jobs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import msgspec

from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, Tier

_SLOT = attrgetter("slot")


class Copied(msgspec.Struct, frozen=True):
    """Every rank is done with the GPU blocks of a save."""

    job: SaveJob
    gpu_blocks: tuple[int, ...]  # to be given back, in chain order
    saved: tuple[BlockMove, ...]  # copies that every rank managed
    complete: bool  # every rank managed everything
    abandoned: bool


class Stored(msgspec.Struct, frozen=True):
    """Every rank's puts of a save have ended."""

    job: SaveJob
    stored: tuple[BlockMove, ...]  # blocks that every rank put (or found there)
    abandoned: bool


class Loaded(msgspec.Struct, frozen=True):
    """Every rank has reported a load."""

    job: LoadJob
    filled: tuple[BlockMove, ...]  # fetched from L2 and verified on every rank
    failed: bool
    doubted: tuple[BlockMove, ...]  # blocks that may not have arrived on some rank
    abandoned: bool


class Released(msgspec.Struct, frozen=True):
    """No rank touches these slots for the job any more; drop the job's references, in this order."""

    slots: tuple[int, ...]


Outcome = Copied | Stored | Loaded | Released


class _Open(msgspec.Struct):
    """One job and what its ranks have said.

    `abandoned`: the root has changed, or the tiers were cleared, since the job went out. The job is not dropped: its copies and puts
    go on under the old name, and only its results are not indexed.
    """

    job: SaveJob | LoadJob
    opened_at: float
    gpu_blocks: tuple[int, ...] = ()  # referenced for a save
    num_read: int = 0  # GPU blocks that a save may still read, referenced or not
    scale: Sequence[int] = ()  # saves: hash blocks per block, by group
    acked: dict[Phase, set[int]] = msgspec.field(default_factory=dict)
    done: set[Phase] = msgspec.field(default_factory=set)
    ranges: dict[Phase, tuple[int, int]] = msgspec.field(default_factory=dict)  # intersection so far, hash blocks
    filled: set[int] | None = None  # intersection over ranks of filled slots
    failed: bool = False
    busy: dict[int, set[int]] = msgspec.field(default_factory=dict)  # rank -> slots
    reads: bool = False  # loads: some block comes from L2
    unreleased: set[int] = msgspec.field(default_factory=set)
    abandoned: bool = False


class Jobs:
    """Open jobs by id. `acknowledge` turns acknowledgements into outcomes; applying them is the caller's.

    Args:
        num_ranks: acknowledgements that complete a phase.

    Attributes:
        num_gpu_blocks: GPU blocks that saves may still read.
        ignored_acks: of an unknown job or phase, or a rank's second one.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ignored_acks = 0
        self._jobs: dict[int, _Open] = {}
        self._loading: dict[str, int] = {}  # request id -> job whose load has not been reported by all ranks
        self.num_gpu_blocks = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def gpu_blocks(self) -> Iterator[int]:
        for entry in self._jobs.values():
            if Phase.COPIED not in entry.done:
                yield from entry.gpu_blocks

    @property
    def num_loads(self) -> int:
        """Loads that some rank has not reported."""
        return len(self._loading)

    @property
    def num_saves(self) -> int:
        return sum(1 for entry in self._jobs.values() if isinstance(entry.job, SaveJob))

    @property
    def num_busy_slots(self) -> int:
        """Slots held back because a rank may still touch them after a deadline."""
        entries = list(self._jobs.values())  # a copy: metrics are read on other threads
        return len({slot for entry in entries for slots in list(entry.busy.values()) for slot in list(slots)})

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loading

    @property
    def num_reads(self) -> int:
        """Loads that fetch from L2 and that some rank has not reported, or whose slots it may still write to. Any thread."""
        return sum(entry.reads and (Phase.LOADED not in entry.done or bool(entry.busy)) for entry in list(self._jobs.values()))

    def num_overdue(self, now: float) -> int:
        """Jobs that a rank should have acknowledged as dropped by now (a rank that hangs, or lost metadata)."""
        return sum(1 for entry in list(self._jobs.values()) if now - entry.opened_at > 2 * entry.job.deadline_seconds)

    def open_load(self, job: LoadJob, now: float, abandoned: bool = False, *, reads: bool) -> None:
        """A load goes out.

        Args:
            abandoned: its root is not current any more, so its blocks must not be indexed.
            reads: some of its blocks come from L2.
        """
        assert job.request_id not in self._loading, f"request {job.request_id} has a load already"
        slots = set(map(_SLOT, job.moves))
        self._jobs[job.job_id] = _Open(job, now, unreleased=slots, abandoned=abandoned, reads=reads)
        self._loading[job.request_id] = job.job_id

    def open_save(self, job: SaveJob, gpu_blocks: Iterable[int], scale: Sequence[int], now: float) -> None:
        """A save goes out.

        Args:
            gpu_blocks: blocks the caller has referenced for it, in chain order.
            scale: hash blocks per block, by group.
        """
        entry = _Open(job, now, tuple(gpu_blocks), scale=scale, unreleased=set(map(_SLOT, job.moves)))
        entry.num_read = len(entry.gpu_blocks)
        self._jobs[job.job_id] = entry
        self.num_gpu_blocks += entry.num_read

    def let_go(self) -> list[int]:
        """GPU blocks that saves have referenced and that the caller gives back now, although ranks may still read them."""
        blocks: list[int] = []
        for entry in self._jobs.values():
            if Phase.COPIED not in entry.done:
                blocks += reversed(entry.gpu_blocks)
                entry.gpu_blocks = ()
        return blocks

    def abandon_all(self) -> None:
        """The root changed: results of jobs under way must not be indexed."""
        for entry in self._jobs.values():
            entry.abandoned = True

    def acknowledge(self, ack: JobAck) -> list[Outcome]:
        """Count one rank's acknowledgement; the outcomes are in the order in which to apply them."""
        entry = self._jobs.get(ack.job_id)
        if entry is None:
            self.ignored_acks += 1
            return []
        if ack.phase is Phase.RELEASED:
            if entry.busy.pop(ack.rank, None) is None:
                self.ignored_acks += 1
            return self._settle(entry)
        expected = (Phase.LOADED,) if isinstance(entry.job, LoadJob) else (Phase.COPIED, Phase.STORED)
        ranks = entry.acked.setdefault(ack.phase, set())
        if ack.phase not in expected or ack.rank in ranks:
            self.ignored_acks += 1
            return []
        ranks.add(ack.rank)
        self._merge(entry, ack)
        outcomes: list[Outcome] = []
        if len(ranks) == self.num_ranks:
            entry.done.add(ack.phase)
            outcomes.append(self._complete(entry, ack.phase))
        return outcomes + self._settle(entry)

    def _merge(self, entry: _Open, ack: JobAck) -> None:
        if ack.busy_slots:
            entry.busy.setdefault(ack.rank, set()).update(ack.busy_slots)
        if isinstance(entry.job, SaveJob):
            job = entry.job
            start, end = entry.ranges.get(ack.phase, (job.start_block, job.start_block + job.num_blocks))
            entry.ranges[ack.phase] = (max(start, ack.start_block), min(end, ack.start_block + ack.num_blocks))
            return
        vague = ack.failed and len({move.slot for move in entry.job.moves}) < len(entry.job.moves)
        filled = set() if vague else set(ack.filled_slots) - set(ack.busy_slots)
        entry.filled = filled if entry.filled is None else entry.filled & filled
        entry.failed = entry.failed or ack.failed

    def _complete(self, entry: _Open, phase: Phase) -> Outcome:
        job = entry.job
        if isinstance(job, LoadJob):
            del self._loading[job.request_id]
            return self._loaded(entry, job)
        start, end = entry.ranges[phase]
        inside = [
            move
            for move in job.moves
            if start <= move.block * entry.scale[move.group] and (move.block + 1) * entry.scale[move.group] <= end
        ]
        if phase is Phase.STORED:
            return Stored(job, tuple(move for move in inside if move.put), entry.abandoned)
        self.num_gpu_blocks -= entry.num_read
        complete = start <= job.start_block and end >= job.start_block + job.num_blocks
        return Copied(job, entry.gpu_blocks, tuple(move for move in inside if move.copy), complete, entry.abandoned)

    def _loaded(self, entry: _Open, job: LoadJob) -> Loaded:
        filled = entry.filled or set()
        arrived = tuple(move for move in job.moves if move.source is Tier.STORE and move.slot in filled)
        doubted: tuple[BlockMove, ...] = ()
        if entry.failed:  # blame the fetched blocks that are not filled, else everything
            doubted = tuple(move for move in job.moves if move.source is Tier.STORE and move.slot not in filled) or job.moves
        return Loaded(job, arrived, entry.failed, doubted, entry.abandoned)

    def _settle(self, entry: _Open) -> list[Outcome]:
        """Release the slots that nobody touches any more; close the job when none is left."""
        job = entry.job
        if isinstance(job, LoadJob):
            over = Phase.LOADED in entry.done
        else:
            over = Phase.COPIED in entry.done and (job.namespace is None or Phase.STORED in entry.done)
        if not over:
            return []
        busy = set().union(*entry.busy.values()) if entry.busy else set()
        held = dict.fromkeys(map(_SLOT, reversed(job.moves)))  # a load may use a slot for several of its blocks
        slots = [slot for slot in held if slot in entry.unreleased and slot not in busy]
        entry.unreleased.difference_update(slots)
        if not entry.unreleased:
            del self._jobs[job.job_id]
        return [Released(tuple(slots))] if slots else []
