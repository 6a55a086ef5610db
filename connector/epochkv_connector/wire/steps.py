"""What the two roles tell each other, once per scheduler step.

The scheduler role decides (which block, which slot, which name), the worker role moves bytes and acknowledges.
Job ids are never reused and never derived from request ids. Every rank acknowledges every phase of every job exactly once.
vLLM merges ranks within one step only (`KVOutputAggregator.aggregate`), so `WorkerReport.aggregate` only concatenates, and the scheduler
role counts ranks down *across* steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epochkv_connector.engine.interface import KVConnectorMetadata, KVConnectorWorkerMetadata
from epochkv_connector.wire.jobs import JobAck, LoadJob, SaveJob


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler role -> every worker rank, one object per step.

    Attributes:
        loads, saves: jobs born in this step.
        poisoned: request ids whose load must be reported once more, finished *and* failed (fence.md, "Poison"). Also
            names requests for which no load job was ever sent (a hit that could not be kept): reported the same way.
        newest_epoch: highest epoch adopted; a put of an older namespace that has not begun is dropped and reported as failed.
        settle: saves of earlier steps hold their GPU blocks no more: their copies must end before this step writes to any.
        look: after the forward pass of this step each rank compares its weights with what it answered to the question of this number
            (`weights.rank`); -1: nothing is named.
        adapters: (id, number) of adapters whose requests' blocks are saved, and of the questions (`rank.digest_adapters`) that they are
            named after.
        agreed, refused: saves of earlier steps that every rank has copied, or some rank has not. With several ranks a block's shards
            go to L2 only when all are known to be of the same weights.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    poisoned: tuple[str, ...] = ()
    newest_epoch: int = -1
    settle: bool = False
    look: int = -1
    adapters: tuple[tuple[int, int], ...] = ()
    agreed: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Every worker rank -> scheduler role, every step (never None and never falsy: the aggregator skips those).

    Attributes:
        late: questions whose answer was not true any more when a step was over (`StepMetadata.look`).
        replaced: adapters, and the questions, likewise.
    """

    acks: list[JobAck] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    replaced: list[tuple[int, int]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Concatenate."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(acks=self.acks + other.acks, late=self.late + other.late, replaced=self.replaced + other.replaced)
