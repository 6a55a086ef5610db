"""What the two halves of the connector tell each other, once per scheduler step.

The scheduler half decides (which block, which slot, which name), the worker half moves bytes and acknowledges.
Jobs carry ids that are never reused and never derived from request ids. Every job is acknowledged by every rank exactly
once per phase; `WorkerReport.aggregate` only concatenates, so it is associative and commutative, and the scheduler half counts ranks
down *across* steps (vLLM merges ranks within one step only: `KVOutputAggregator.aggregate`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class Source(enum.IntEnum):
    """Where the bytes of a load come from."""

    HOST = 0  # the slot already holds the block (L1 hit)
    STORE = 1  # fetch into the slot from L2 first


class Phase(enum.IntEnum):
    """What a rank acknowledges."""

    COPIED = 0  # save: the device-to-host part is over; GPU blocks may be freed
    STORED = 1  # save: every put has ended, one way or the other; the slots' references may be dropped
    LOADED = 2  # load: the request's blocks are filled, or the load failed


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block of one KV cache group of one request.

    Attributes:
        group: index of the KV cache group.
        block: index of the block in the request's chain, in units of the group's block size.
        gpu_block: id in the GPU block pool (never the null block).
        slot: index into the host region; the same on every rank.
        block_hash: vLLM's block hash (made under the job's root), names the block in L2.
        source: for loads only.
    """

    group: int
    block: int
    gpu_block: int
    slot: int
    block_hash: bytes
    source: Source = Source.HOST


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill GPU blocks of `request_id`. Reported once per rank in `finished_recving` (and `failed_recving` if any byte is missing)."""

    job_id: int
    request_id: str
    namespace: str | None  # L2 key prefix, frozen at creation; None: no L2 for this job
    moves: tuple[BlockMove, ...]
    deadline_seconds: float  # from receipt, on the worker's monotonic clock; afterwards the load is failed


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy one contiguous range of blocks of a request to host slots, then (if `namespace`) put them to L2.

    The GPU blocks stay referenced by the scheduler half until every rank acknowledged `Phase.COPIED`.
    """

    job_id: int
    request_id: str
    namespace: str | None
    start_block: int  # in units of the hash block size
    num_blocks: int
    moves: tuple[BlockMove, ...]
    deadline_seconds: float


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler half -> every worker rank, one object per step.

    Attributes:
        loads, saves: jobs born in this step.
        poisoned: request ids whose load must be reported once more, finished *and* failed (fence.md, "Poison").
        newest_epoch: highest epoch adopted; a put of an older namespace that has not begun may be skipped.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    poisoned: tuple[str, ...] = ()
    newest_epoch: int = -1


@dataclass(frozen=True, slots=True)
class JobAck:
    """One rank's acknowledgement of one phase of one job.

    `[start_block, start_block + num_blocks)` is the range this rank managed (saves: aggregated by intersection over ranks);
    for loads `num_blocks` counts blocks of the job that are filled and `failed` says that at least one is missing.
    `filled_slots`: slots that now hold verified L2 bytes and may be indexed in L1.
    """

    job_id: int
    rank: int
    phase: Phase
    start_block: int
    num_blocks: int
    failed: bool = False
    filled_slots: tuple[int, ...] = ()


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Every worker rank -> scheduler half, every step (never None and never falsy: the aggregator skips those)."""

    acks: list[JobAck] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Concatenate; ranks are counted by the scheduler half."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(acks=self.acks + other.acks)
