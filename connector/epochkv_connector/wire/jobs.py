"""Jobs and their acknowledgements, as plain values.

`steps` imports vLLM's base classes. This module does not: property tests run thousands of schedules of the bookkeeping a second,
without loading vLLM.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec


class Tier(enum.IntEnum):
    HOST = 0  # the slot already holds the block (L1 hit)
    STORE = 1  # fetch into the slot from L2 first


class Phase(enum.IntEnum):
    """What a rank acknowledges: each phase of a job exactly once, on success, failure and timeout alike."""

    COPIED = 0  # save: the device-to-host part is over (or will never begin); GPU blocks may be freed
    STORED = 1  # save with a namespace: every put has ended or was given up; the slots' references may be dropped
    LOADED = 2  # load: the request's blocks are filled, or the load failed
    RELEASED = 3  # follows a LOADED or STORED that named `busy_slots`: this rank touches them no more


class BlockMove(msgspec.Struct, frozen=True, gc=False):
    """One block of one KV cache group of one request.

    Attributes:
        group: index of the KV cache group.
        block: index of the block in the request's chain, in units of the group's block size.
        gpu_block: id in the GPU block pool (never the null block).
        slot: index into the host region; the same on every rank.
        block_hash: vLLM's block hash (made under the job's root), names the block in L2.
        source: for loads only.
        copy: for saves only. False: the slot already holds the block (it is in L1), copy nothing.
        put: for saves only. False: L2 is known to hold the block, copy it to the slot and put nothing.
    """

    group: int
    block: int
    gpu_block: int
    slot: int
    block_hash: bytes
    source: Tier = Tier.HOST
    copy: bool = True
    put: bool = True


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill GPU blocks of `request_id`.

    Reported once per rank in `finished_recving`, and in `failed_recving` if any byte is missing. Several moves from the store
    may name one slot: each of them is in its GPU block before the next one is fetched.
    """

    job_id: int
    request_id: str
    namespace: str | None  # L2 key prefix, frozen at creation; None: no L2 for this job
    moves: tuple[BlockMove, ...]
    deadline_seconds: float  # from receipt, on the worker's monotonic clock; afterwards the load is failed


class SaveJob(msgspec.Struct, frozen=True):
    """Copy one contiguous range of blocks of a request to host slots, then (if `namespace`) put them to L2.

    The GPU blocks stay referenced by the scheduler role until every rank acknowledged `Phase.COPIED`, or vLLM clears its cache.
    `moves` may skip blocks of the range that need nothing (already saved, or outside a sliding window).
    """

    job_id: int
    request_id: str
    namespace: str | None
    start_block: int  # in units of the hash block size
    num_blocks: int
    moves: tuple[BlockMove, ...]
    deadline_seconds: float

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What every rank acknowledges, in this order."""
        return (Phase.COPIED,) if self.namespace is None else (Phase.COPIED, Phase.STORED)


@dataclass(frozen=True, slots=True)
class JobAck:
    """One rank's acknowledgement of one phase of one job.

    Attributes:
        start_block, num_blocks: saves: the range `[start_block, start_block + num_blocks)` that this rank managed, in
            the units of `SaveJob` (the job's whole range when nothing went wrong); aggregated over ranks by
            intersection. Loads: `num_blocks` counts the blocks of the job that are filled, `start_block` is 0.
        failed: at least one block is missing.
        filled_slots: loads: slots that now hold verified L2 bytes and may be indexed in L1.
        failed_slots: failed loads: slots whose block did not reach the GPU; empty with `failed` set: unknown (as it is,
            like `filled_slots`, where a slot stands for several blocks).
            Aggregated over ranks by hull in the request's chain.
        busy_slots: slots that this rank may still write or read after this acknowledgement (a deadline passed while
            a transfer ran). They are given to nobody until the rank acknowledges `Phase.RELEASED` for the job.
    """

    job_id: int
    rank: int
    phase: Phase
    start_block: int
    num_blocks: int
    failed: bool = False
    filled_slots: tuple[int, ...] = ()
    failed_slots: tuple[int, ...] = ()
    busy_slots: tuple[int, ...] = ()
