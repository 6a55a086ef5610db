"""A small world around the bookkeeping: GPU blocks, host slots and a store that really hold (names of) bytes.

Content is modelled as the name it was computed under, so a block that ends up holding something else than its name says is
a wrong answer in life. Ranks acknowledge late, in any interleaving, and may fail, drop or time out.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from epochkv_connector.config.connector_config import ConnectorConfig
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.requests import LoadEvent, Requests
from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping, StepJobs
from epochkv_connector.scheduler.tiers.views import CacheLayout, GroupKind, GroupLayout, RequestView, ScheduledRequestView
from epochkv_connector.wire.jobs import BlockMove, JobAck, LoadJob, Phase, SaveJob, Tier
from tests.unit.connector_scheduler.index_check import check_index

HASH_BLOCK = 4
SHARDS = 2

SLOT_BYTES = 100

FULL = CacheLayout((GroupLayout(GroupKind.FULL, 4),), 4)
SLIDING_FIRST = CacheLayout((GroupLayout(GroupKind.SLIDING, 4, window_tokens=6), GroupLayout(GroupKind.FULL, 4)), 4)
THREE_GROUPS = CacheLayout(
    (
        GroupLayout(GroupKind.SLIDING, 4, window_tokens=9),
        GroupLayout(GroupKind.FULL, 8),
        GroupLayout(GroupKind.SLIDING, 8, window_tokens=10),
    ),
    8,
)
LAYOUTS = {"full": FULL, "sliding first": SLIDING_FIRST, "three groups": THREE_GROUPS}


def snap_of(epoch: int, *, shared: bool = True) -> Snapshot:
    """Shared roots have a namespace; private ones have none."""
    kind = "shared" if shared else "private"
    return Snapshot(epoch, True, f"{kind} root {epoch}".encode(), f"pool/fp/e{epoch}" if shared else None, shared)


def config(*, l1_slots: int = 0, l2: bool = False, ranks: int = 1, **options: object) -> ConnectorConfig:
    """A configuration with that many L1 slots of `SLOT_BYTES` on each rank (0: no L1)."""
    extra: dict[str, object] = {"pool": {"name": "p", "namespace": "n", "uid": "u"}, **options}
    if l1_slots:
        extra["local"] = {"capacity_bytes": l1_slots * SLOT_BYTES * ranks}
    if l2:
        extra["distributed"] = {"master_address": "master:1"}
    return ConnectorConfig.parse(extra, {})


def chain(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Block hashes as vLLM makes them: each names its whole prefix and the root."""
    return list(_chain(root, tuple(tokens)))


@functools.lru_cache(maxsize=4096)
def _chain(root: bytes, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    hashes, parent = [], root
    for start in range(0, len(tokens) - len(tokens) % HASH_BLOCK, HASH_BLOCK):
        block = repr(tokens[start : start + HASH_BLOCK]).encode()
        parent = hashlib.sha256(parent + block).digest()[:8]
        hashes.append(parent)
    return tuple(hashes)


def view(request_id: str, tokens: Sequence[int], root: bytes) -> RequestView:
    """What the facade would show of a request with these tokens."""
    return RequestView(request_id, len(tokens), chain(root, tokens), HASH_BLOCK, root)


def keys_of(namespace: str, group: int, block_hash: bytes) -> list[str]:
    """One key per shard, readable."""
    return [f"{namespace}/g{group}/r{shard}/{block_hash.hex()}" for shard in range(SHARDS)]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pool:
    """GPU blocks with reference counts; block 0 is the null block. Freed blocks are reused, newest first."""

    null_block_id = 0

    def __init__(self) -> None:
        self.refs: Counter[int] = Counter()
        self._free: list[int] = []
        self._next = itertools.count(1)

    def new(self) -> int:
        block = self._free.pop() if self._free else next(self._next)
        assert self.refs[block] == 0, "a referenced GPU block was given out"
        self.refs[block] = 1
        return block

    def num_references(self, block_id: int) -> int:
        return self.refs[block_id]

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

    def receive(self, step: StepJobs, named: Sequence[str]) -> None:
        self.todo.extend(("copy", job) for job in step.saves)
        self.todo.extend(("load", job) for job in step.loads)
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
            self.reports.append((job.request_id, True))
            return [JobAck(job.job_id, self.rank, Phase.LOADED, 0, 0, True, (), every, every)]
        if how == "drop":
            self.reports.append((job.request_id, True))
            return [JobAck(job.job_id, self.rank, Phase.LOADED, 0, 0, True)]
        filled, missing = [], []
        for move in job.moves:  # in order: a slot may stand for several blocks
            lost = how == "partial" and move is job.moves[-1]
            if lost or (move.source is Tier.STORE and not self._fetch(job, move)):
                missing.append(move.slot)
                continue
            if move.source is Tier.STORE:
                filled.append(move.slot)
            assert self.slots[move.slot] == (move.group, move.block_hash), "a slot had two owners"
            self.gpu[move.gpu_block] = self.slots[move.slot]
        self.reports.append((job.request_id, bool(missing)))
        done = len(job.moves) - len(missing)
        return [JobAck(job.job_id, self.rank, Phase.LOADED, 0, done, bool(missing), tuple(filled), tuple(missing))]


class World:
    """The bookkeeping and what vLLM waits for, with pool, store, ranks and clock."""

    def __init__(self, cfg: ConnectorConfig, layout: CacheLayout = FULL, ranks: int = 1) -> None:
        self.clock = Clock()
        self.pool = Pool()
        self.store = Store()
        self.layout = layout
        self.workers = [Worker(rank, self.store) for rank in range(ranks)]
        self.counters: Counter[str] = Counter()
        self.requests = Requests(self.counters)
        self.named: list[str] = []  # whom ranks were asked to report as failed, in the last step
        self.books = Bookkeeping(
            cfg,
            layout,
            num_ranks=ranks,
            num_slots=cfg.local.capacity_bytes // (SLOT_BYTES * ranks) if cfg.local else cfg.staging_slots,
            store=self.store if cfg.distributed else None,  # type: ignore[arg-type]  # a double
            ids=itertools.count(),
            clock=self.clock,
            keys_of=keys_of,
        )
        self.books.bind_block_pool(self.pool)  # type: ignore[arg-type]  # a double

    def step(self) -> StepJobs:
        """End a step and hand its jobs to the ranks."""
        jobs = self.books.end_step()
        self.requests.send(load.request_id for load in jobs.loads)
        self.named = self.requests.names()
        for worker in self.workers:
            worker.receive(jobs, self.named)
        return jobs

    def commit(self, request: RequestView, blocks: list[list[int]], num_external: int, snap: Snapshot) -> bool | None:
        """vLLM takes so much of a hit. Returns whether it is loaded; None: it took nothing."""
        if num_external == 0:
            self.books.hits.forget_request(request.request_id)
            return None
        loading = self.books.loads.commit(request, blocks, num_external, snap)
        self.requests.on(self.requests.see(request), LoadEvent.ACCEPT if loading else LoadEvent.DOOM)
        return loading

    def rename(self, snap: Snapshot | None) -> int:
        """New names hold, or (None) everything is cleared. Returns how many loads that overtook."""
        self.books.reset() if snap is None else self.books.adopt(snap)
        before = self.counters["poisoned_loads"]
        self.requests.overtake()
        return self.counters["poisoned_loads"] - before

    def finish(self, request_id: str) -> None:
        """The request is over."""
        self.books.finish(request_id)
        self.requests.finish(request_id)

    def work(self, how: str = "ok") -> None:
        """Every rank does everything."""
        for worker in self.workers:
            while acks := worker.work(how):
                self.books.on_acks(acks)

    def allocate(self, num_local: int, num_total: int) -> list[list[int]]:
        """GPU blocks as vLLM would give them: null below the window of the next token, new ones otherwise."""
        blocks = []
        for group in self.layout.groups:
            skipped = 0
            if group.kind is GroupKind.SLIDING:
                skipped = max(0, num_total - group.window_tokens + 1) // group.block_size
            count = -(-num_total // group.block_size)
            blocks.append([0 if index < skipped else self.pool.new() for index in range(count)])
        return blocks

    def compute(self, blocks: list[list[int]], hashes: Sequence[bytes], start: int, end: int) -> None:
        """The forward pass of all ranks writes these tokens' KV."""
        for group, spec in enumerate(self.layout.groups):
            scale = spec.block_size // HASH_BLOCK
            for index in range(start // spec.block_size, end // spec.block_size):
                while len(blocks[group]) <= index:
                    blocks[group].append(self.pool.new())
                if blocks[group][index]:
                    for worker in self.workers:
                        worker.gpu[blocks[group][index]] = (group, hashes[(index + 1) * scale - 1])

    def free(self, blocks: list[list[int]]) -> None:
        """The request gives its blocks back."""
        self.pool.free([block for group in blocks for block in group if block])

    def save(self, request_id: str, tokens: Sequence[int], snap: Snapshot) -> list[list[int]]:
        """Compute a prompt and save it, all ranks succeeding. Returns its blocks (still held)."""
        blocks = self.begin_save(request_id, tokens, snap)
        self.work()
        return blocks

    def begin_save(self, request_id: str, tokens: Sequence[int], snap: Snapshot) -> list[list[int]]:
        """Compute a prompt and give its save to the ranks."""
        hashes = chain(snap.root, tokens)
        blocks = [[] for _ in self.layout.groups]
        end = len(hashes) * HASH_BLOCK // self.layout.alignment_tokens * self.layout.alignment_tokens
        self.compute(blocks, hashes, 0, end)
        self.books.saves.collect([scheduled(request_id, tokens, snap.root, blocks, end)], snap)
        self.step()
        return blocks

    def load(self, request_id: str, tokens: Sequence[int], snap: Snapshot, local: int = 0) -> tuple[int, bool | None]:
        """Look up and accept everything. Returns the tokens answered and what became of them."""
        hit = self.books.hits.answer(view(request_id, tokens, snap.root), local, snap)
        assert hit.num_tokens is not None
        blocks = self.allocate(local, local + hit.num_tokens)
        return hit.num_tokens, self.commit(view(request_id, tokens, snap.root), blocks, hit.num_tokens, snap)

    def assert_idle(self) -> None:
        """Nothing is held by anybody."""
        assert {name: count for name, count in self.books.leak_report().items() if count} == {}
        check_index(self.books.state.index)


def scheduled(request_id: str, tokens: Sequence[int], root: bytes, blocks: list[list[int]], confirmed: int) -> ScheduledRequestView:
    """What the facade would show of a request that computes."""
    return ScheduledRequestView(request_id, confirmed, chain(root, tokens), HASH_BLOCK, root, blocks)
