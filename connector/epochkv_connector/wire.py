"""What the two roles tell each other, once per scheduler step, and what each rank says of its memory at the start.

The scheduler role decides (which block, which slot, which name), the worker role moves bytes and acknowledges.
Job ids are never reused and never derived from request ids. Every rank acknowledges every phase of every job exactly once.
vLLM merges ranks within one step only (`KVOutputAggregator.aggregate`), so `WorkerReport.aggregate` only concatenates, and the scheduler
role counts ranks down *across* steps.

Plain values without vLLM, whose import takes seconds: `connector` registers `StepMetadata` and `WorkerReport` with vLLM's base classes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank, as measured on the KV tensors that vLLM registered."""

    digest: bytes = b""  # of how they lie (`worker.layout.layout_digest`); empty: nobody has looked
    num_slots: int = 0  # of its host region; 0: it has none, and answers every job as failed
    payload_bytes: Mapping[int, int] = field(default_factory=dict)  # of one block, by KV cache group: of those that are saved
    refusal: str = ""  # why there are no slots; empty: there are, or nobody knows why


def common_slots(layouts: Sequence[RankLayout], num_ranks: int) -> int:
    """Slots that every one of `num_ranks` ranks has: a job names the same slots on all of them. 0 unless all have answered."""
    return min(layout.num_slots for layout in layouts) if len(layouts) == num_ranks > 0 else 0


class Tier(enum.IntEnum):
    HOST = 0  # the slot already holds the block (L1 hit)
    STORE = 1  # fetch into the slot from L2 first


class Phase(enum.IntEnum):
    """What a rank acknowledges: each phase of a job exactly once, on success, failure and timeout alike."""

    COPIED = 0  # save: the device-to-host part is over (or will never begin); GPU blocks may be freed
    SETTLED = 1  # save that `settles`: all ranks of the domain computed its step with the weights that its names say
    STORED = 2  # save with a namespace: every put has ended or was given up; the slots' references may be dropped
    LOADED = 3  # load: the request's blocks are filled, or the load failed
    RELEASED = 4  # follows a LOADED or STORED that named `busy_slots`: this rank touches them no more


class BlockMove(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One block of one KV cache group of one request."""

    group: int  # index of the KV cache group
    block: int  # index of the block in the request's chain, in units of the group's block size
    gpu_block: int  # id in the GPU block pool (never the null block); of no meaning in a prefetch
    slot: int  # index into the host region; the same on every rank
    block_hash: bytes  # vLLM's block hash (made under the job's root), names the block in L2
    source: Tier = Tier.HOST  # for loads only
    copy: bool = True  # for saves only. False: the slot already holds the block (it is in L1), copy nothing
    put: bool = True  # for saves only. False: L2 is known to hold the block, copy it to the slot and put nothing


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill GPU blocks of `request_id`; a prefetch fills slots from the store, and that is all.

    Any other is reported once per rank in `finished_recving`, and in `failed_recving` if any byte is missing. Several moves from the store
    may name one slot: each of them is in its GPU block before the next one is fetched.
    """

    job_id: int
    request_id: str
    namespace: str | None  # L2 key prefix, frozen at creation; None: no L2 for this job
    moves: tuple[BlockMove, ...]
    deadline_seconds: float  # from receipt, on the worker's monotonic clock; afterwards the load is failed
    prefetch: bool = False

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What every rank acknowledges."""
        return (Phase.LOADED,)


class SaveJob(msgspec.Struct, frozen=True):
    """Copy blocks of requests, of each in chain order, to host slots, then (if `namespace`) put them to L2.

    The GPU blocks stay referenced by the scheduler role until every rank acknowledged `Phase.COPIED`, or vLLM clears its cache.
    """

    job_id: int
    request_id: str  # whose blocks come first
    namespace: str | None
    moves: tuple[BlockMove, ...]
    deadline_seconds: float
    settles: bool = False  # in a domain, each of several ranks finds out alone whether the step was what its names say

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What every rank acknowledges, in this order."""
        if self.namespace is None:
            return (Phase.COPIED,)
        return (Phase.COPIED, Phase.SETTLED, Phase.STORED) if self.settles else (Phase.COPIED, Phase.STORED)


@dataclass(frozen=True, slots=True)
class JobAck:
    """One rank's acknowledgement of one phase of one job.

    Attributes:
        failed: at least one block is missing. A save that failed on one rank is saved nowhere.
        filled_slots: loads: slots that now hold verified L2 bytes and may be indexed in L1; unknown in a failed load where a slot stands
            for several blocks.
        busy_slots: slots that this rank may still write or read after this acknowledgement (a deadline passed while
            a transfer ran). They are given to nobody until the rank acknowledges `Phase.RELEASED` for the job.
    """

    job_id: int
    rank: int
    phase: Phase
    failed: bool = False
    filled_slots: tuple[int, ...] = ()
    busy_slots: tuple[int, ...] = ()


@dataclass
class StepMetadata:
    """Scheduler role -> every worker rank, one object per step.

    Attributes:
        loads, saves: jobs born in this step.
        cancelled: prefetches that nobody waits for any more.
        invalidated: request ids whose load must be reported once more, finished *and* failed (fence.md, "Invalidated loads"). Also
            names requests for which no load job was ever sent (a hit that could not be kept): reported the same way.
        newest_epoch: highest epoch adopted; a put of an older namespace that has not begun is dropped and reported as failed.
        digest_number: after the forward pass of this step each rank compares its weights with what it answered to the
            question of this number (`weights.rank`); -1: nothing is named.
        adapters: (id, number) of adapters whose requests' blocks are saved, and of the questions (`rank.digest_adapters`) that they are
            named after.
        agreed, refused: saves of earlier steps that every rank has copied (and settled), or some rank has not. With several ranks a
            block's shards go to L2 only when all are known to be of the same weights.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    cancelled: tuple[int, ...] = ()
    invalidated: tuple[str, ...] = ()
    newest_epoch: int = -1
    digest_number: int = -1
    adapters: tuple[tuple[int, int], ...] = ()
    agreed: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Callable[[bytes], StepMetadata], tuple[bytes]]:
        """The scheduler's thread pickles each step for ranks in other processes: by one call for all blocks, not by one for each."""
        return unpacked, (msgspec.msgpack.encode(self),)


def unpacked(step: bytes) -> StepMetadata:
    return msgspec.msgpack.decode(step, type=StepMetadata)


@dataclass
class WorkerReport:
    """Every worker rank -> scheduler role, every step (never None and never falsy: the aggregator skips those).

    Attributes:
        late: questions whose answer was not true any more when a step was over (`StepMetadata.digest_number`).
        mixed: questions of steps that not all data-parallel ranks of the domain began with what they had seen (`weights.domain`).
        replaced: adapters, and the questions, likewise.
    """

    acks: list[JobAck] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)
    replaced: list[tuple[int, int]] = field(default_factory=list)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        names = ("acks", "late", "mixed", "replaced")
        return WorkerReport(**{name: getattr(self, name) + getattr(other, name) for name in names})
