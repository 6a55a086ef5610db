"""A small world around the bookkeeping: GPU blocks, host slots and a store that really hold (names of) bytes.

Content is modelled as the name it was computed under, so a block that ends up holding something else than its name says is
a wrong answer in life. Ranks acknowledge late, in any interleaving, and may fail, drop or time out.
"""

import functools
import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.requests import LoadEvent, Requests
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, RequestView, ScheduledRequestView
from epochkv_connector.tiers.manager import TierManager
from epochkv_connector.tiers.state import HostIndex
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, StepMetadata, Tier

SHARDS = 2


def keys_of(namespace: str, group: int, block_hash: bytes) -> list[str]:
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
        return [JobAck(job_id, self.rank, Phase.RELEASED)]

    def _copy(self, job: SaveJob, how: str) -> list[JobAck]:
        how = "drop" if how == "late" else how  # a device copy is waited for
        if how != "drop":
            for move in job.moves:
                if move.copy:
                    self.slots[move.slot] = self.gpu[move.gpu_block]
        if job.namespace is not None:
            self.todo.append(("put", job))
        return [JobAck(job.job_id, self.rank, Phase.COPIED, failed=how != "ok")]

    def _put(self, job: SaveJob, how: str) -> list[JobAck]:
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
        return [JobAck(job.job_id, self.rank, Phase.STORED, failed=how != "ok", busy_slots=busy)]

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
            first = job.moves[: len(job.moves) // 2]
            came = tuple(move.slot for move in first if move.source is Tier.STORE and self._fetch(job, move))
            self._report(job, failed=True)
            return [JobAck(job.job_id, self.rank, Phase.LOADED, True, came, every)]
        if how == "drop" or job.job_id in self.cancelled:
            self._report(job, failed=True)
            return [JobAck(job.job_id, self.rank, Phase.LOADED, True)]
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
        return [JobAck(job.job_id, self.rank, Phase.LOADED, num_missing > 0, tuple(filled))]

    def _report(self, job: LoadJob, *, failed: bool) -> None:
        if not job.prefetch:
            self.reports.append((job.request_id, failed))


HASH_BLOCK = 4

SLOT_BYTES = 512


def sliding(block_size: int, window: int) -> GroupLayout:
    return GroupLayout(GroupKind.SLIDING, block_size, window_tokens=window)


FULL = CacheLayout((GroupLayout(GroupKind.FULL, 4),), 4)
SLIDING_FIRST = CacheLayout((sliding(4, 6), GroupLayout(GroupKind.FULL, 4)), 4)
THREE_GROUPS = CacheLayout((sliding(4, 9), GroupLayout(GroupKind.FULL, 8), sliding(8, 10)), 8)
STATES = CacheLayout((GroupLayout(GroupKind.FULL, 4), GroupLayout(GroupKind.STATE, 8), GroupLayout(GroupKind.STATE, 4)), 8)
MIXED = CacheLayout((GroupLayout(GroupKind.STATE, 8), GroupLayout(GroupKind.PRIVATE, 4), sliding(4, 9), GroupLayout(GroupKind.FULL, 8)), 8)
CHUNKS = CacheLayout((GroupLayout(GroupKind.CHUNKED, 4, window_tokens=16), GroupLayout(GroupKind.FULL, 4)), 4)
LAYOUTS = {"full": FULL, "sliding first": SLIDING_FIRST, "three": THREE_GROUPS, "states": STATES, "mixed": MIXED, "chunks": CHUNKS}


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


SNAP = snap_of(1)
PROMPT = list(range(41))  # 10 full hash blocks and one token more
L1 = config(l1_slots=200)
L2 = config(l2=True)
BOTH = config(l1_slots=200, l2=True)


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
    return RequestView(request_id, len(tokens), chain(root, tokens))


class World:
    """The bookkeeping and what vLLM waits for, with pool, store, ranks and clock."""

    def __init__(self, cfg: ConnectorConfig, layout: CacheLayout = FULL, ranks: int = 1) -> None:
        self.now = 1000.0  # seconds that pass only when told
        self.pool = Pool()
        self.keeps: Callable[[], bool] = lambda: True  # whether vLLM keeps the next block of a window in its own cache
        self.store = Store()
        self.layout = layout
        self.workers = [Worker(rank, self.store) for rank in range(ranks)]
        self.counters: Counter[str] = Counter()
        self.requests = Requests(self.counters)
        self.named: list[str] = []  # whom ranks were asked to report as failed, in the last step
        self.tiers = TierManager(
            cfg,
            layout,
            num_ranks=ranks,
            num_slots=cfg.local.capacity_bytes // (SLOT_BYTES * ranks) if cfg.local else cfg.staging_slots,
            store=self.store if cfg.distributed else None,  # type: ignore[arg-type]  # a double
            ids=itertools.count(),
            clock=lambda: self.now,
            keys_of=keys_of,
        )
        self.tiers.bind_block_pool(self.pool, HASH_BLOCK)  # type: ignore[arg-type]  # a double

    def step(self) -> StepMetadata:
        """End a step and hand its jobs to the ranks."""
        jobs = self.tiers.end_step()
        self.requests.send(load.request_id for load in jobs.loads if not load.prefetch)
        self.named = self.requests.names()
        for worker in self.workers:
            worker.receive(jobs, self.named)
        return jobs

    def commit(self, request: RequestView, blocks: list[list[int]], num_external: int, snap: Snapshot) -> bool | None:
        """vLLM takes so much of a hit. Returns whether it is loaded; None: it took nothing."""
        if num_external == 0:
            self.tiers.hits.forget_request(request.request_id)
            return None
        loading = self.tiers.loads.commit(request, blocks, num_external, snap)
        self.requests.on(self.requests.see(request), LoadEvent.ACCEPT if loading else LoadEvent.FAIL_UNSENT)
        return loading

    def take(self, num: int, snap: Snapshot = SNAP, blocks: list[list[int]] | None = None) -> bool | None:
        """`commit` of request b."""
        return self.commit(view("b", PROMPT, SNAP.root), self.allocate(0, max(num, 0)) if blocks is None else blocks, num, snap)

    def stored(self, tokens: Sequence[int], snap: Snapshot = SNAP) -> None:
        """Another engine has put this prompt to L2."""
        assert snap.namespace
        hashes = chain(snap.root, tokens)
        for group, spec in enumerate(self.layout.groups):
            scale = spec.block_size // HASH_BLOCK
            for block in range(len(hashes) // scale):
                self.store.put(snap.namespace, group, hashes[(block + 1) * scale - 1])

    def rename(self, snap: Snapshot | None) -> int:
        """New names hold, or (None) everything is cleared. Returns how many loads that overtook."""
        self.tiers.reset() if snap is None else self.tiers.adopt(snap)
        before = self.counters["invalidated_loads"]
        self.requests.overtake()
        return self.counters["invalidated_loads"] - before

    def finish(self, request_id: str) -> None:
        self.tiers.finish(request_id)
        self.requests.finish(request_id)

    def work(self, how: str = "ok") -> None:
        for worker in self.workers:
            while acks := worker.work(how):
                self.tiers.on_acks(acks)

    def allocate(self, num_local: int, num_total: int) -> list[list[int]]:
        """GPU blocks as vLLM would give them: null below what the next token needs, new ones otherwise."""
        blocks = []
        for group in self.layout.groups:
            skipped = 0
            if group.kind is GroupKind.SLIDING:
                skipped = max(0, num_total - group.window_tokens + 1) // group.block_size
            elif group.kind is GroupKind.CHUNKED:
                skipped = num_total // group.window_tokens * group.window_tokens // group.block_size
            elif group.kind is GroupKind.STATE:
                skipped = max(0, num_total - 1) // group.block_size
            count = 1 if group.kind is GroupKind.PRIVATE else -(-num_total // group.block_size)
            blocks.append([0 if index < skipped else self.pool.new() for index in range(count)])
        return blocks

    def compute(self, blocks: list[list[int]], hashes: Sequence[bytes], start: int, end: int) -> list[tuple[int, int, int]]:
        """The forward pass of all ranks writes these tokens' KV. Returns the states that vLLM offers with it."""
        offers: list[tuple[int, int, int]] = []
        for group, spec in self.layout.restored:
            if spec.kind is GroupKind.STATE:
                offers += self._compute_state(group, blocks[group], hashes, end) if end > start else []
                continue
            scale = spec.block_size // HASH_BLOCK
            for index in range(start // spec.block_size, end // spec.block_size):
                while len(blocks[group]) <= index:
                    blocks[group].append(self.pool.new())
                if blocks[group][index]:
                    if spec.kind is GroupKind.SLIDING and not self.keeps():
                        self.pool.not_kept.add(blocks[group][index])
                    self._write(blocks[group][index], (group, hashes[(index + 1) * scale - 1]))
        return offers

    def _compute_state(self, group: int, blocks: list[int], hashes: Sequence[bytes], end: int) -> list[tuple[int, int, int]]:
        """The state of `end` tokens, which overwrites the one before unless that ended a block."""
        size = self.layout.groups[group].block_size
        index = (end - 1) // size
        if index >= len(blocks):
            self.pool.free([block for block in blocks if block])
            blocks[:] = [0] * index + [self.pool.new()]
        block = blocks[index]
        self.pool.named.pop(block, None)
        if block == 0:
            return []
        if end % size:
            self._write(block, (group, b"a state in the middle"))
            return []
        name = hashes[end // HASH_BLOCK - 1]
        self._write(block, (group, name))
        self.pool.named[block] = (group, name)
        return [(group, block, end)]

    def _write(self, block: int, content: tuple[int, bytes]) -> None:
        for worker in self.workers:
            worker.gpu[block] = content

    def free(self, blocks: list[list[int]]) -> None:
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
        states = self.compute(blocks, hashes, 0, end)
        self.tiers.saves.collect([scheduled(request_id, tokens, snap.root, blocks, end, states)], snap)
        self.step()
        return blocks

    def collect(self, request_id: str, blocks: list[list[int]], confirmed: int, states: Sequence[tuple[int, int, int]] = ()) -> None:
        """A request with this `PROMPT` was computed so far."""
        self.tiers.saves.collect([scheduled(request_id, PROMPT, SNAP.root, blocks, confirmed, states)], SNAP)

    def begin(self, request_id: str, tokens: Sequence[int] = PROMPT) -> None:
        self.tiers.hits.begin(view(request_id, tokens, SNAP.root), SNAP)

    def answer(self, request_id: str, tokens: Sequence[int] = PROMPT, local: int = 0) -> int | None:
        return self.tiers.hits.answer(view(request_id, tokens, SNAP.root), local, SNAP)

    def load(self, request_id: str, tokens: Sequence[int], snap: Snapshot, local: int = 0) -> tuple[int, bool | None]:
        """Look up and accept everything. Returns the tokens answered and what became of them."""
        hit = self.tiers.hits.answer(view(request_id, tokens, snap.root), local, snap)
        assert hit is not None
        blocks = self.allocate(local, local + hit)
        return hit, self.commit(view(request_id, tokens, snap.root), blocks, hit, snap)

    def assert_idle(self) -> None:
        assert {name: count for name, count in self.tiers.leak_report().items() if count} == {}
        check_index(self.tiers.state.index)


def scheduled(
    request_id: str,
    tokens: Sequence[int],
    root: bytes,
    blocks: list[list[int]],
    confirmed: int,
    states: Sequence[tuple[int, int, int]] = (),
) -> ScheduledRequestView:
    """What the facade would show of a request that computes."""
    return ScheduledRequestView(request_id, confirmed, chain(root, tokens), blocks, states)


def check_index(index: HostIndex) -> None:
    """Every slot has exactly one owner, and the index's maps and counts say so."""
    idle = [slot for slot in (*index._dead, *index._idle) if slot not in index._refs]
    assert sorted([*index._free, *idle, *index._refs]) == list(range(index.num_slots)), "a slot has two owners, or none"
    assert min(index._refs.values(), default=1) > 0, "a slot without references is held"
    assert len(index._free) + len(idle) - index.num_reserved == index.num_available >= 0, "more slots are promised than exist"
    named = {slot: (group, name) for group, names in enumerate(index._maps) for name, slot in names.items()}
    assert named == {slot: name for slot, name in enumerate(index._names) if name is not None}
    for slot in named:
        kept, other = (index._idle, index._dead) if index._roots[slot] == index._root else (index._dead, index._idle)
        assert slot not in other, f"slot {slot} is kept with those of other roots, or of this one"
        assert slot in index._refs or slot in kept, f"slot {slot} is found but not kept"


def planned(cfg=BOTH, layout: CacheLayout = FULL, l1_tokens: int = 20) -> World:
    """A world in which request b has a plan of 40 tokens: some in L1, the rest in L2."""
    world = World(cfg, layout)
    if cfg.local:
        world.free(world.save("a", PROMPT[:l1_tokens], SNAP))
        world.tiers.finish("a")
    world.stored(PROMPT)
    assert world.answer("b") == 40
    return world
