"""What the bookkeeping acts on: GPU blocks with owners, a store that holds names, and ranks that do as told, or not."""

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, StepMetadata, Tier

SHARDS = 2


def keys_of(namespace: str, group: int, block_hash: bytes) -> list[str]:
    """One key per shard, readable."""
    return [f"{namespace}/g{group}/r{shard}/{block_hash.hex()}" for shard in range(SHARDS)]


class Pool:
    """GPU blocks with reference counts; block 0 is the null block. Freed blocks are reused, newest first."""

    null_block_id = 0

    def __init__(self) -> None:
        self.refs: Counter[int] = Counter()
        self.not_kept: set[int] = set()  # blocks that vLLM leaves out of its own cache
        self.named: dict[int, tuple[int, bytes]] = {}  # states in vLLM's own cache
        self._free: list[int] = []
        self._next = itertools.count(1)

    def new(self) -> int:
        block = self._free.pop() if self._free else next(self._next)
        assert self.refs[block] == 0, "a referenced GPU block was given out"
        self.refs[block] = 1
        self.not_kept.discard(block)
        self.named.pop(block, None)
        return block

    def num_references(self, block_id: int) -> int:
        return self.refs[block_id]

    def holds(self, group: int, name: bytes) -> bool:
        return False

    def is_kept(self, block_id: int) -> bool:
        return block_id not in self.not_kept

    def names(self, block_id: int, group: int, name: bytes) -> bool:
        return self.named.get(block_id) == (group, name)

    def touch(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.refs[block] > 0, "a free GPU block was referenced"
            self.refs[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert block != self.null_block_id, "the null block was freed"
            self.refs[block] -= 1
            assert self.refs[block] >= 0, "a GPU block was freed twice"
            if self.refs[block] == 0:
                self._free.append(block)


class Store:
    """L2: names to content. Answers at once, never, or with an error."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.answering = True
        self.failing = False
        self.queries: list[list[str]] = []
        self.timeouts: list[float] = []
        self.unanswered: list[tuple[Future[Sequence[bool]], list[str]]] = []

    def exists(self, keys: Sequence[str], timeout: float) -> Future[Sequence[bool]]:
        future: Future[Sequence[bool]] = Future()
        self.queries.append(list(keys))
        self.timeouts.append(timeout)
        if self.failing:
            future.set_exception(ConnectionError("store is down"))
        elif self.answering:
            future.set_result([key in self.objects for key in keys])
        else:
            self.unanswered.append((future, list(keys)))
        return future

    def answer(self) -> None:
        """Answer everything that waits."""
        for future, keys in self.unanswered:
            if not future.cancelled():
                future.set_result([key in self.objects for key in keys])
        self.unanswered.clear()

    def put(self, namespace: str, group: int, block_hash: bytes, shards: Sequence[int] = range(SHARDS)) -> None:
        for shard in shards:
            self.objects[keys_of(namespace, group, block_hash)[shard]] = (group, block_hash)

    def holds(self, namespace: str, group: int, block_hash: bytes) -> bool:
        return all(key in self.objects for key in keys_of(namespace, group, block_hash))


@dataclass
class Worker:
    """One rank: runs jobs only when told to, acknowledges in the protocol's order."""

    rank: int
    store: Store
    gpu: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    slots: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    todo: deque[tuple[str, SaveJob | LoadJob]] = field(default_factory=deque)
    late: dict[int, SaveJob | LoadJob] = field(default_factory=dict)  # jobs with slots still busy
    reports: list[tuple[str, bool]] = field(default_factory=list)  # request id, failed
    cancelled: set[int] = field(default_factory=set)

    def receive(self, step: StepMetadata, named: Sequence[str]) -> None:
        self.todo.extend(("copy", job) for job in step.saves)
        self.todo.extend(("load", job) for job in step.loads)
        self.cancelled.update(step.cancelled)
        self.reports.extend((request_id, True) for request_id in named)

    def work(self, how: str = "ok") -> list[JobAck]:
        """Do the next thing; `how`: ok, partial, drop or late (times out while transfers go on)."""
        if not self.todo:
            return []
        what, job = self.todo.popleft()
        if what == "load":
            assert isinstance(job, LoadJob)
            return self._load(job, how)
        assert isinstance(job, SaveJob)
        return self._copy(job, how) if what == "copy" else self._put(job, how)

    def release(self) -> list[JobAck]:
        """The transfers of one timed-out job end: only now do they write."""
        if not self.late:
            return []
        job_id, job = self.late.popitem()
        if isinstance(job, LoadJob):
            for move in job.moves:
                if move.source is Tier.STORE:
                    self._fetch(job, move)
        return [JobAck(job_id, self.rank, Phase.RELEASED, 0, 0)]

    def _range(self, job: SaveJob, how: str) -> tuple[int, int]:
        if how == "partial":
            return job.start_block, job.num_blocks // 2
        return job.start_block, 0 if how in ("drop", "late") else job.num_blocks

    def _copy(self, job: SaveJob, how: str) -> list[JobAck]:
        how = "drop" if how == "late" else how  # a device copy is waited for
        start, num = self._range(job, how)
        if how != "drop":
            for move in job.moves:
                if move.copy:
                    self.slots[move.slot] = self.gpu[move.gpu_block]
        if job.namespace is not None:
            self.todo.append(("put", job))
        return [JobAck(job.job_id, self.rank, Phase.COPIED, start, num, failed=how != "ok")]

    def _put(self, job: SaveJob, how: str) -> list[JobAck]:
        start, num = self._range(job, how)
        assert job.namespace is not None
        if how == "ok":
            for move in job.moves:
                if move.put and self.slots.get(move.slot) == (move.group, move.block_hash):
                    for shard in range(SHARDS):
                        self.store.put(job.namespace, move.group, move.block_hash, [shard])
        busy: tuple[int, ...] = ()
        if how == "late":
            self.late[job.job_id] = job
            busy = tuple(move.slot for move in job.moves)
        return [JobAck(job.job_id, self.rank, Phase.STORED, start, num, failed=how != "ok", busy_slots=busy)]

    def _fetch(self, job: LoadJob, move: BlockMove) -> bool:
        """Bring one block into its slot; False if L2 does not hold it."""
        if job.namespace is None or not self.store.holds(job.namespace, move.group, move.block_hash):
            return False
        self.slots[move.slot] = (move.group, move.block_hash)
        return True

    def _load(self, job: LoadJob, how: str) -> list[JobAck]:
        if how == "late":
            self.late[job.job_id] = job
            every = tuple(dict.fromkeys(move.slot for move in job.moves))
            self._report(job, failed=True)
            return [JobAck(job.job_id, self.rank, Phase.LOADED, 0, 0, True, (), every)]
        if how == "drop" or job.job_id in self.cancelled:
            self._report(job, failed=True)
            return [JobAck(job.job_id, self.rank, Phase.LOADED, 0, 0, True)]
        filled, num_missing = [], 0
        for move in job.moves:  # in order: a slot may stand for several blocks
            lost = how == "partial" and move is job.moves[-1]
            if lost or (move.source is Tier.STORE and not self._fetch(job, move)):
                num_missing += 1
                continue
            if move.source is Tier.STORE:
                filled.append(move.slot)
            assert self.slots[move.slot] == (move.group, move.block_hash), "a slot had two owners"
            if not job.prefetch:
                self.gpu[move.gpu_block] = self.slots[move.slot]
        self._report(job, failed=num_missing > 0)
        return [JobAck(job.job_id, self.rank, Phase.LOADED, 0, len(job.moves) - num_missing, num_missing > 0, tuple(filled))]

    def _report(self, job: LoadJob, *, failed: bool) -> None:
        if not job.prefetch:
            self.reports.append((job.request_id, failed))
