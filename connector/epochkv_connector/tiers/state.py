"""Which block is in which host slot, who holds it, what L2 is known to hold, and which jobs are in flight.

vLLM merges the ranks of one step only, so ranks are counted down here, across steps, by job id (`Jobs`). A job never ends by
itself: workers acknowledge it as dropped after its deadline, and until a rank says so nothing it might still touch is
reused. A save counts if every rank managed it. After a load that failed on one rank, the request is recomputed (`worker.jobs`).

What L1 holds and what L2 is known to hold change together, in `TierState`, or not at all.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

import msgspec

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.tiers.layout import CacheLayout
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, Tier


class Copied(msgspec.Struct, frozen=True):
    """Every rank is done with the GPU blocks of a save."""

    job: SaveJob
    gpu_blocks: tuple[int, ...]  # to be given back, in chain order
    saved: tuple[BlockMove, ...]  # its copies, if every rank managed them
    failed: bool  # on some rank
    abandoned: bool


class Settled(msgspec.Struct, frozen=True):
    """Every rank has found out whether the domain computed a save's step with the weights that its names say."""

    job: SaveJob
    failed: bool  # on some rank


class Stored(msgspec.Struct, frozen=True):
    """Every rank's puts of a save have ended."""

    job: SaveJob
    stored: tuple[BlockMove, ...]  # its puts, if every rank put them (or found them there)
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


Outcome = Copied | Settled | Stored | Loaded | Released


class _Open(msgspec.Struct):
    """One job and what its ranks have said.

    `abandoned`: the root has changed, or the tiers were cleared, since the job went out. The job is not dropped: its copies and puts
    go on under the old name, and only its results are not indexed.
    """

    job: SaveJob | LoadJob
    opened_at: float
    gpu_blocks: tuple[int, ...] = ()  # referenced for a save
    acked: dict[Phase, set[int]] = msgspec.field(default_factory=dict)
    done: set[Phase] = msgspec.field(default_factory=set)
    filled: set[int] | None = None  # intersection over ranks of filled slots
    failed: set[Phase] = msgspec.field(default_factory=set)  # on some rank
    busy: dict[int, set[int]] = msgspec.field(default_factory=dict)  # rank -> slots
    held: list[int] | None = None  # slots to be released, in this order; None: nobody has asked yet
    abandoned: bool = False

    def is_overdue(self, now: float) -> bool:
        """A rank should have acknowledged it as dropped by now (it hangs, or its word was lost to an error)."""
        return now - self.opened_at > 2 * self.job.deadline_seconds


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

    def gpu_blocks(self, now: float = 0.0) -> Iterator[int]:
        """Those that saves have referenced and ranks may still read, once for each save. `now`: but those of overdue ones."""
        for entry in self._jobs.values():
            if Phase.COPIED not in entry.done and not entry.is_overdue(now):
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

    def is_overdue(self, job_id: int, now: float) -> bool:
        return self._jobs[job_id].is_overdue(now)

    def num_overdue(self, now: float) -> int:
        return sum(entry.is_overdue(now) for entry in list(self._jobs.values()))

    def open_load(self, job: LoadJob, now: float, abandoned: bool = False) -> None:
        """A load goes out. `abandoned`: its root is not current any more, so its blocks must not be indexed."""
        assert job.prefetch or job.request_id not in self._loading, f"request {job.request_id} has a load already"
        self._jobs[job.job_id] = _Open(job, now, abandoned=abandoned)
        if not job.prefetch:
            self._loading[job.request_id] = job.job_id

    def open_save(self, job: SaveJob, gpu_blocks: Iterable[int], now: float) -> None:
        """A save goes out. The caller has referenced `gpu_blocks` for it, in chain order."""
        entry = self._jobs[job.job_id] = _Open(job, now, tuple(gpu_blocks))
        self.num_gpu_blocks += len(entry.gpu_blocks)

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
        ranks = entry.acked.setdefault(ack.phase, set())
        if ack.phase not in entry.job.phases or ack.rank in ranks:
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
        if ack.failed:
            entry.failed.add(ack.phase)
        if isinstance(entry.job, SaveJob):
            return
        vague = ack.failed and len({move.slot for move in entry.job.moves}) < len(entry.job.moves)
        filled = set() if vague else set(ack.filled_slots)  # by calls that have returned: those of one fetch write to different slots
        entry.filled = filled if entry.filled is None else entry.filled & filled

    def _complete(self, entry: _Open, phase: Phase) -> Outcome:
        job = entry.job
        if isinstance(job, LoadJob):
            if not job.prefetch:
                del self._loading[job.request_id]
            return self._loaded(entry, job)
        failed = phase in entry.failed
        moves = () if failed else job.moves
        if phase is Phase.SETTLED:
            return Settled(job, failed)
        if phase is Phase.STORED:
            return Stored(job, tuple(move for move in moves if move.put), entry.abandoned)
        self.num_gpu_blocks -= len(entry.gpu_blocks)
        return Copied(job, entry.gpu_blocks, tuple(move for move in moves if move.copy), failed, entry.abandoned)

    def _loaded(self, entry: _Open, job: LoadJob) -> Loaded:
        filled = entry.filled or set()
        arrived = tuple(move for move in job.moves if move.source is Tier.STORE and move.slot in filled) if filled else ()
        doubted: tuple[BlockMove, ...] = ()
        failed = Phase.LOADED in entry.failed
        if failed:  # blame the fetched blocks that are not filled, else everything
            doubted = tuple(move for move in job.moves if move.source is Tier.STORE and move.slot not in filled) or job.moves
        return Loaded(job, arrived, failed, doubted, entry.abandoned)

    def _settle(self, entry: _Open) -> list[Outcome]:
        """Release the slots that nobody touches any more; close the job when none is left."""
        job = entry.job
        if not entry.done.issuperset(job.phases):
            return []
        if entry.held is None:
            # A load may use a slot for several of its blocks.
            entry.held = list(dict.fromkeys(map(attrgetter("slot"), reversed(job.moves))))
        slots, entry.held = entry.held, []
        if entry.busy:
            busy = set().union(*entry.busy.values())
            entry.held = [slot for slot in slots if slot in busy]
            slots = [slot for slot in slots if slot not in busy]
        if not entry.held:
            del self._jobs[job.job_id]
        return [Released(tuple(slots))] if slots else []


Key = tuple[int, bytes]
"""(KV cache group, block hash)"""


class HostIndex:
    """Slots, their references and their names. `renew` and `clear` walk all slots, all else only those that the call is about.

    Args:
        num_slots: those that every rank's host region has.
        num_groups: KV cache groups.
        indexed: False: a staging ring; nothing is ever found in it.
        on_evict: told the name of every block that leaves the index.

    Attributes:
        evictions: blocks that made room.
        dropped_saved, dropped_unread: those that this engine had computed and that left the index, however; and of these, those
            that no request has loaded.
        dropped_unused: those that were fetched for a request that has not loaded them.
        num_reserved: slots promised and not yet allocated.
    """

    def __init__(self, num_slots: int, num_groups: int, indexed: bool = True, on_evict: Callable[[Key], None] | None = None) -> None:
        self.num_slots = num_slots
        self.indexed = indexed
        self.evictions = self.dropped_saved = self.dropped_unread = self.dropped_unused = 0
        self._unread: set[int] = set()  # no request has loaded what they hold
        self._saved: set[int] = set()  # it was computed here
        self._on_evict = on_evict
        self._maps: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots with names of the current root, to be evicted in this order unless held
        self._dead: OrderedDict[int, None] = OrderedDict()  # the same of other roots, before them
        self._refs: Counter[int] = Counter()  # of slots that have any
        self._names: list[Key | None] = [None] * num_slots
        self._roots: list[bytes | None] = [None] * num_slots  # the root a name was made with
        self._root: bytes | None = None
        self.num_reserved = 0

    def get(self, group: int, block_hash: bytes) -> int | None:
        return self._maps[group].get(block_hash)

    def num_idle(self, slots: Iterable[int]) -> int:
        """How many slots fewer would be available if these were referenced."""
        return len(set(slots).difference(self._refs))

    def finder(self, group: int) -> Callable[[bytes, int], int]:
        """Slot of a block of one group, or the second argument: `get` for many blocks in a row."""
        return self._maps[group].get

    def holds(self, group: int) -> Callable[[bytes], bool]:
        """Whether a block of one group is there: for many blocks in a row."""
        return self._maps[group].__contains__

    @property
    def num_held(self) -> int:
        """Slots with at least one reference."""
        return len(self._refs)

    @property
    def num_available(self) -> int:
        """Slots that can still be promised: free, or evictable, and not reserved."""
        return self.num_slots - len(self._refs) - self.num_reserved

    @property
    def num_indexed(self) -> int:
        """Blocks with a name, those of other roots included."""
        return sum(len(names) for names in self._maps)

    @property
    def num_dead(self) -> int:
        """Blocks of other roots, to be evicted first."""
        return len(self._dead)

    def reserve(self, count: int) -> None:
        """Promise `count` slots, which have to be available, for a later `allocate(..., reserved=True)`."""
        assert count <= self.num_available, f"{count} slots to reserve, {self.num_available} available"
        self.num_reserved += count

    def unreserve(self, count: int) -> None:
        assert count <= self.num_reserved, f"{count} reservations given back, {self.num_reserved} exist"
        self.num_reserved -= count

    def pin(self, slots: Iterable[int]) -> None:
        """Reference indexed slots, so that they stay. The caller has checked `num_available` for those without references."""
        self._refs.update(slots)

    def read(self, slots: Iterable[int]) -> None:
        """A request loads what these hold."""
        self._unread.difference_update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        """Drop one reference each. Give slots in reverse chain order: what is dropped first is evicted first."""
        refs, names, roots, root = self._refs, self._names, self._roots, self._root
        for slot in slots:
            count = refs.pop(slot, 0)
            assert count > 0, f"slot {slot} is released once too often"
            if count > 1:
                refs[slot] = count - 1
            elif names[slot] is None:
                self._free.append(slot)
            else:
                order = self._idle if roots[slot] == root else self._dead
                order[slot] = None
                order.move_to_end(slot)

    def allocate(self, count: int, reserved: bool = False, prefetched: bool = False) -> list[int]:
        """Anonymous slots with one reference each, for what is computed here unless it is fetched.

        Args:
            reserved: fetched for a load: use up a promise. Otherwise the caller has checked `num_available`.
            prefetched: fetched for a request that waits.
        """
        if reserved:
            self.unreserve(count)
        assert count <= self.num_available, f"{count} slots wanted, {self.num_available} available of {self.num_slots}"
        slots = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for slot in slots:
            self._refs[slot] = 1
        self._unread.update(slots)
        (self._saved.difference_update if reserved or prefetched else self._saved.update)(slots)
        return slots

    def _evict(self) -> int:
        """Make the slot anonymous that has been without references for longest, of those of other roots first."""
        while (slot := (self._dead or self._idle).popitem(last=False)[0]) in self._refs:
            pass  # in the order again when it is released
        self._unname(slot)
        self.evictions += 1
        return slot

    def insert(self, slot: int, group: int, block_hash: bytes) -> bool:
        """Name an anonymous slot. False if the block is in another slot already, or this is a staging ring."""
        assert slot in self._refs, f"slot {slot} is nobody's"
        assert self._names[slot] is None, f"slot {slot} is not anonymous"
        names = self._maps[group]
        if not self.indexed or block_hash in names:
            return False
        names[block_hash] = slot
        self._names[slot] = (group, block_hash)
        self._roots[slot] = self._root
        return True

    def forget(self, group: int, block_hash: bytes) -> None:
        """Make a block unfindable (its bytes are doubted); the slot is freed when nobody refers to it."""
        slot = self._maps[group].get(block_hash)
        if slot is None:
            return
        self._unname(slot)
        if slot not in self._refs:
            self._free.append(slot)

    def _unname(self, slot: int) -> None:
        name = self._names[slot]
        assert name is not None, f"slot {slot} has no name to lose"
        self._names[slot] = None
        self._idle.pop(slot, None)
        self._dead.pop(slot, None)
        del self._maps[name[0]][name[1]]
        if slot in self._saved:
            self.dropped_saved += 1
            self.dropped_unread += slot in self._unread
        else:
            self.dropped_unused += slot in self._unread
        if self._on_evict is not None:
            self._on_evict(name)

    def renew(self, root: bytes) -> list[Key]:
        """Another root holds. Returns the blocks that were saved under this very root before and are findable again."""
        if root == self._root:
            return []
        self._root = root
        back = [slot for slot in self._dead if self._roots[slot] == root]
        self._dead.update(self._idle)
        for slot in back:
            del self._dead[slot]
        self._idle = OrderedDict.fromkeys(back)
        return [name for slot in back if (name := self._names[slot]) is not None]

    def clear(self) -> None:
        """A reset: no block is findable any more, and what nobody refers to is free at once."""
        for name in list(filter(None, self._names)):
            self.forget(*name)


class RecentBlocks:
    """LRU set of (group, block hash), at most `capacity` entries. Give keys in chain order: the head is forgotten last.

    Attributes:
        holds: `in`, for many keys in a row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()
        self.holds: Callable[[Key], bool] = self._keys.__contains__

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[Key]) -> None:
        for key in reversed(list(keys)):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[Key]) -> None:
        """These are not, or no longer, where they were."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


KNOWN_IN_STORE_CAPACITY = 100_000

DOUBT_SECONDS = 30.0


class Doubts:
    """Blocks that failed to come from L2 again and again: they count as absent for a while after each failure but the first.

    One bad object at the head of many prompts would fail the loads of all of them, and so pause L2 for everybody. The first failure may
    be a passing one, or a defect that the next put mends (`store.client`).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[Key, float] = {}  # of those that failed and have not come since

    def __contains__(self, key: Key) -> bool:
        return key in self._until

    def without(self, found: frozenset[Key]) -> frozenset[Key]:
        """Those that do not count as absent."""
        now = self._clock()
        return frozenset(key for key in found if self._until.get(key, now) <= now) if self._until else found

    def add(self, keys: Iterable[Key]) -> None:
        now = self._clock()
        for key in keys:
            self._until[key] = now + DOUBT_SECONDS if key in self._until else now
        while len(self._until) > KNOWN_IN_STORE_CAPACITY:
            del self._until[next(iter(self._until))]

    def discard(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._until.pop(key, None)


class Listener(Protocol):
    """Told which blocks L1 holds (`engine.events.HostEvents`)."""

    def arrived(self, keys: Iterable[Key]) -> None: ...
    def left(self, key: Key) -> None: ...
    def found_again(self, keys: Iterable[Key]) -> None: ...


class TierState:
    """See the module's docstring, and `TierManager` for the arguments.

    Attributes:
        settles: as of `SaveJob`.
        is_usable: blocks of this layout can be saved and loaded, and there are slots for them.
        known: what L2 is known to hold.
        doubts: what of it fails to load.
        loading: the last block of each load under way, whose it is, and when it is waited for no longer.
        listener: told which blocks L1 holds; None: nobody listens.
        hash_block_size, scales: tokens of a hash block, and hash blocks per block of each group; known before the first request.
    """

    def __init__(
        self, config: ConnectorConfig, layout: CacheLayout, num_ranks: int, num_slots: int, ids: Iterator[int], clock: Callable[[], float]
    ) -> None:
        self.settles = False
        self.config = config
        self.layout = layout
        self.ids = ids
        self.clock = clock
        self.is_usable = layout.problem() is None and num_slots > 0
        self.counts: Counter[str] = Counter()
        self.index = HostIndex(num_slots, max(1, len(layout.groups)), config.local is not None, self._left)
        self.known = RecentBlocks(KNOWN_IN_STORE_CAPACITY)
        self.doubts = Doubts(clock)
        self.jobs = Jobs(num_ranks)
        self.loading: dict[Key, tuple[str, float]] = {}
        self.listener: Listener | None = None
        self.hash_block_size = 0
        self.scales: Sequence[int] = ()
        self._root: bytes | None = None

    def namespace(self, snap: Snapshot) -> str | None:
        """Prefix of the L2 keys of what holds now; None: nothing is looked for in L2, nor put there."""
        return snap.namespace if snap.shared and self.config.distributed is not None else None

    def loader(self, last: Key) -> str:
        """The request whose load brings this block last; empty: none that is worth waiting for."""
        request_id, until = self.loading.get(last, ("", 0.0))
        return request_id if self.clock() < until else ""

    def begin_load(self, request_id: str, last: BlockMove) -> None:
        if not self.loader(key := (last.group, last.block_hash)):
            self.loading[key] = request_id, self.clock() + 2 * self.config.job_deadline_seconds

    def end_load(self, request_id: str, last: BlockMove) -> None:
        key = last.group, last.block_hash
        if key in self.loading and self.loading[key][0] == request_id:
            del self.loading[key]

    def loaded(self, done: Loaded) -> None:
        """Verified L2 bytes in a slot are good on every rank, even when the copy to the GPU came too late."""
        self.insert(done.filled)
        came = block_keys(done.filled)
        self.known.add(came)
        self.doubts.discard(came)
        filled = {move.slot for move in done.filled}
        for move in done.doubted:
            if move.source is Tier.HOST:
                self.index.forget(move.group, move.block_hash)
            elif move.slot not in filled:
                self.known.discard(block_keys((move,)))

    def insert(self, moves: Iterable[BlockMove]) -> None:
        keys = block_keys(move for move in moves if self.index.insert(move.slot, move.group, move.block_hash))
        if self.listener is not None:
            self.listener.arrived(keys)

    def _left(self, key: Key) -> None:
        if self.listener is not None:
            self.listener.left(key)

    def rename(self, root: bytes) -> bool:
        """Names are made of this root from now on. Returns whether it is another one: then only L1's blocks of this very root, which
        may have been current before, count."""
        if root == self._root:
            return False
        self._root = root
        self._forget_names()
        found_again = self.index.renew(root)
        if self.listener is not None:
            self.listener.found_again(found_again)
        return True

    def clear(self) -> None:
        """Clear means clear: L1 is empty at once."""
        self._forget_names()
        self.index.clear()

    def _forget_names(self) -> None:
        self.jobs.abandon_all()
        self.known.clear()
        self.doubts = Doubts(self.clock)


def block_keys(moves: Iterable[BlockMove]) -> list[Key]:
    return [(move.group, move.block_hash) for move in moves]
