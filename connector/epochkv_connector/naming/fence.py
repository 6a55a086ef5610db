"""The fence inside vLLM: which root a request's blocks are named with, and when that changes.

Two threads meet here. The agent thread adopts epochs; the scheduler thread pins requests. Both take one lock: to read the root,
to hash, to store the pin. Without it 5 of 57 names were wrong under fast adoption, with it 0 of 824 (docs/design/fence.md,
section 3). Everything that vLLM could change under us is behind `engine`.

`_why` lists every fact that decides. It is evaluated afresh, never patched. This file is longer than others: it holds what one lock
protects.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epochkv_connector.naming.bypass import Herald, Standing, Why
from epochkv_connector.naming.identity import ROOT_BYTES, Pin, Snapshot, adapter_root, namespace, shared_root, transfer_tag
from epochkv_connector.naming.pins import PIN_ATTRIBUTE, FencedHasher, HashPort, RootPort, awaits_first_hash, brings_kv, plain_hasher
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.strand import is_stranded, strand

REHASH_BUDGET_SECONDS = 0.005
"""Re-hashing allowed per scheduler step; 100,000 tokens of 16-token blocks take about 11 ms."""

TAG_KEY = "epochkv"


class Repin(enum.Enum):
    """What became of a request that was brought to what holds now."""

    CURRENT = enum.auto()  # nothing to do
    DONE = enum.auto()  # re-pinned and re-hashed: drop the local hit, ask again
    DEFERRED = enum.auto()  # the step's budget is spent: ask again
    CARRIED = enum.auto()  # a session that keeps its root to its end: no external hit


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """What shared roots and L2 names are derived from.

    Attributes:
        secret: the pool's root secret; None: no shared root can be made, so nothing is ever shared.
        l2_allowed: False keeps every name inside this engine (random hash seed).
        adapters_applied: how this engine applies adapters (`describe.describe_adapters`).
    """

    pool_uid: str
    fingerprint: str
    secret: bytes | None = field(repr=False)
    l2_allowed: bool = True
    adapters_applied: str = ""


@dataclass(frozen=True, slots=True)
class FencePolicy:
    """Static facts of the engine.

    Attributes:
        has_hub: a hub is configured and can be spoken to in principle; without one the root stays private.
        use_private: no hub is configured, so this engine is a pool of its own: tiers may be used under its private root.
        forced_bypass: why this engine may never use a shared root, or None.
    """

    has_hub: bool
    use_private: bool = False
    forced_bypass: str | None = None


class Fence:
    """Snapshot, pins and what is carried.

    Methods are for the scheduler thread unless their docstring says otherwise.
    """

    def __init__(
        self,
        identity: PoolIdentity,
        policy: FencePolicy,
        root_port: RootPort,
        hash_port: HashPort,
        adapters: Adapters,
        *,
        lease_until: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._identity = identity
        self._policy = policy
        self._roots = root_port
        self._hashing = hash_port
        self._lease_until = lease_until
        self._clock = clock
        self._random = random_bytes
        self._lock = threading.RLock()
        self._weights: bytes | None = None
        self._forbidden = policy.forced_bypass is not None
        self._ended: set[tuple[int, bytes]] = set()  # (epoch, weights or adapter): blocks under these names may be wrong here
        self._granted: int | None = None
        self._reset_at_epoch: int | None = None  # local reset: private until the pool's epoch exceeds this one
        self._distrusted = False
        self._bound = False
        self._settled = False  # in use, and nothing but lease and global can have changed since that was found out
        self._inside_schedule = False
        self._reporting = False
        self._rehash_seconds = 0.0
        self._admitted: Counter[int] = Counter()
        self._sessions: Counter[int] = Counter()
        self._admitted_since_swap = False
        self._used_epoch = -1  # latest epoch under whose shared root something was admitted
        self._last_generation = 0
        self._shared_generation: tuple[int, int] | None = None  # (epoch, generation) of the latest shared snapshot of these weights
        self._adapters = adapters
        self.counters: Counter[str] = Counter()
        self._fenced_hasher: FencedHasher | None = None
        self._herald = Herald()
        self._state: tuple[str, int, bytes | None] | None = None
        self._standing = Standing(Why.UNASSIGNED)
        self._snapshot = Snapshot(-1, False, random_bytes(ROOT_BYTES), None, False)
        self._refresh()

    # ------------------------------------------------------------------ what holds now

    @property
    def policy(self) -> FencePolicy:
        """Static facts of the engine."""
        return self._policy

    def set_lease_source(self, lease_until: Callable[[], float]) -> None:
        """Where the end of the lease (monotonic seconds) is read from."""
        with self._lock:
            self._lease_until = lease_until

    @property
    def snapshot(self) -> Snapshot:
        """What was swapped in last. Any thread."""
        return self._snapshot

    @property
    def distrusted(self) -> bool:
        """The global was overwritten by somebody else: bypass for this boot. Any thread."""
        return self._distrusted

    @property
    def waiting_after_reset(self) -> bool:
        """This engine's caches were reset alone; it waits for the pool's next epoch. Any thread."""
        granted = self._granted
        return self._reset_at_epoch is not None and (granted is None or granted <= self._reset_at_epoch)

    def current(self) -> Snapshot:
        """Refresh from lease and global, and return what holds now. Any thread."""
        with self._lock:
            self._refresh()
            return self._snapshot

    def _refresh(self) -> None:
        if self._settled and self._clock() < self._lease_until() and self._roots.is_bound(self._snapshot.root):
            return
        if self._bound and not self._distrusted and not self._roots.is_bound(self._snapshot.root):
            self._distrusted = True
            self.counters["root_overwritten"] += 1
        if not self._bound and self._roots.ready():
            self._bound = True
            self._roots.bind(self._snapshot.root)
        state = self._derive()
        if state != self._state:
            self._swap(state)
        self._herald.tell(self._standing)
        self._settled = self._bound and self._standing.why is Why.IN_USE

    def _derive(self) -> tuple[str, int, bytes | None]:
        """(kind, epoch, weights): everything a snapshot depends on. A private kind with a new epoch means a new private root."""
        self._standing = Standing(self._why(), -1 if self._granted is None else self._granted)
        if self._standing.why is Why.IN_USE:
            return "shared", self._standing.epoch, self._weights
        private = self._standing.why is Why.NO_HUB and self._policy.use_private
        return "private" if private else "bypass", self._standing.epoch, self._weights

    def _why(self) -> Why:
        granted = self._granted
        reasons = (
            (self._distrusted, Why.OVERWRITTEN),
            (self._forbidden, Why.FORBIDDEN),
            (self._weights is None, Why.NO_WEIGHTS),
            (not self._policy.has_hub or self._identity.secret is None, Why.NO_HUB),
            (granted is None, Why.UNASSIGNED),
            (self.waiting_after_reset, Why.LOCAL_RESET),
            ((granted, self._weights) in self._ended, Why.WEIGHTS_ENDED),
            (self._clock() >= self._lease_until(), Why.NO_LEASE),
        )
        return next((why for holds, why in reasons if holds), Why.IN_USE)

    def _swap(self, state: tuple[str, int, bytes | None]) -> None:
        kind, epoch, weights = state
        generation = self._last_generation = self._last_generation + 1
        if kind == "shared":
            known = self._identity
            assert known.secret is not None
            assert weights is not None
            root = shared_root(known.secret, known.pool_uid, epoch, known.fingerprint, weights)
            space = namespace(known.pool_uid, known.fingerprint, epoch, weights) if known.l2_allowed else None
            if self._shared_generation is None or self._shared_generation[0] != epoch:
                self._shared_generation = (epoch, generation)
            # Back from a lost lease: requests pinned to this very root before are current again. Not if weights changed meanwhile.
            fresh = Snapshot(epoch, True, root, space, True, self._shared_generation[1], weights)
        else:
            fresh = Snapshot(epoch, kind == "private", self._random(ROOT_BYTES), None, False, generation, weights)
        if self._bound and not self._distrusted:
            self._roots.bind(fresh.root)
        self._snapshot, self._state = fresh, state
        self._admitted_since_swap = False
        self.counters["snapshots"] += 1

    # ------------------------------------------------------------------ weights

    @property
    def weights(self) -> bytes | None:
        """What the ranks hold, as far as known. Any thread."""
        return self._weights

    def hold(self, weights: bytes | None) -> bool:
        """The ranks hold these weights from now on (None: unknown). Returns whether they are others than before: then no name of
        before is given again by whoever has it, also if these weights return. The caller strands requests that hold blocks."""
        with self._lock:
            if weights == self._weights:
                return False
            self._weights, self._settled, self._shared_generation = weights, False, None
            self._refresh()
            return True

    def end(self, weights: bytes) -> bool:
        """Blocks that this engine has named after these weights, or this adapter, in this epoch may have been computed with others.
        Returns whether others may have been told of such names."""
        with self._lock:
            epoch = -1 if self._granted is None else self._granted
            self._ended = {ended for ended in self._ended if ended[0] >= epoch} | {(epoch, weights)}
            self._settled = False
            self._refresh()
            return self._policy.has_hub and epoch >= 0

    def forbid(self) -> None:
        """Nothing is named any more for others to find, nor for later requests of this engine."""
        with self._lock:
            self._forbidden, self._settled = True, False
            self._refresh()

    def strand(self, request: Any, num_named: int) -> None:
        """The request holds blocks, of which `num_named` (in hash blocks) have names, and goes on with other weights."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is not None:
                pin.saveable = False
            strand(request, num_named, self._random)

    # ------------------------------------------------------------------ agent thread

    def ready(self) -> bool:
        """vLLM has set its own global: epochs may be adopted. Agent thread."""
        return self._roots.ready()

    def adopt(self, epoch: int) -> None:
        """Rebind the root and swap the snapshot. Agent thread; the acknowledgement is sent after this returns.

        An epoch below the one adopted is ignored: it cannot come from a correct agent.
        """
        with self._lock:
            if self._granted is not None and epoch < self._granted:
                self.counters["lower_epoch_refused"] += 1
                return
            self._granted, self._settled = epoch, False
            self.counters["adoptions"] += 1
            self._refresh()

    def busy(self) -> bool:
        """The scheduler is between its first lookup of a step and the end of it, or records results. Agent thread."""
        return self._inside_schedule or self._reporting

    def carried(self) -> int:
        """Requests admitted under a root that is no longer current. Any thread."""
        with self._lock:
            return sum(n for generation, n in self._admitted.items() if generation != self._snapshot.generation)

    def carried_sessions(self) -> int:
        """Streaming-input sessions admitted under a root that is no longer current. Any thread."""
        with self._lock:
            return sum(n for generation, n in self._sessions.items() if generation != self._snapshot.generation)

    # ------------------------------------------------------------------ the scheduler's step

    def enter_schedule(self) -> None:
        """The first question of a `schedule()`: acknowledgements wait until `leave_schedule`."""
        self._inside_schedule = True

    def leave_schedule(self) -> None:
        """The step's metadata is built; the re-hash budget is full again."""
        self._inside_schedule = False
        self._rehash_seconds = 0.0

    def enter_report(self) -> None:
        """Load results are being recorded: an acknowledgement must not fall between the check and the record."""
        self._reporting = True

    def leave_report(self) -> None:
        """Load results are recorded."""
        self._reporting = False

    # ------------------------------------------------------------------ pins

    @staticmethod
    def pin_of(request: Any) -> Pin | None:
        """The request's pin, or None when it was never pinned."""
        return getattr(request, PIN_ATTRIBUTE, None)

    def is_current(self, pin: Pin) -> bool:
        """Whether the pin was made under what holds now, and its adapter's id still stands for what it did."""
        return pin.generation == self._snapshot.generation and (not pin.adapter or self._adapters.turn(pin.adapter) == pin.turn)

    def pin(self, request: Any) -> Snapshot:
        """Pin a new request to what holds now, and re-hash it if its hashes were made with anything else."""
        with self._lock:
            self._refresh()
            self._pin_locked(request, session=bool(getattr(request, "resumable", False)))
            return self._snapshot

    def _pin_locked(self, request: Any, session: bool) -> None:
        stranded = is_stranded(request)
        pin = self._make_pin(request)
        pin.session = session
        setattr(request, PIN_ATTRIBUTE, pin)
        if request.block_hashes and (stranded or request.block_hashes[0] != self._hashing.first(request, pin.root)):
            self._rehash(request, pin)
        self._wrap_hasher(request)

    def _make_pin(self, request: Any) -> Pin:
        snapshot, adapter = self._snapshot, getattr(request, "lora_request", None)
        if not snapshot.in_use or not self._may_share(request):
            return self._lone_pin(adapter)
        return Pin(snapshot.root, snapshot.generation) if adapter is None else self._adapter_pin(adapter, snapshot)

    def _lone_pin(self, adapter: Any | None) -> Pin:
        root, generation = self._random(ROOT_BYTES), self._snapshot.generation
        if adapter is None:
            return Pin(root, generation, False, alone=True)
        return Pin(root, generation, False, alone=True, adapter=adapter.lora_int_id, turn=self._adapters.of(adapter).turn)

    def _adapter_pin(self, adapter: Any, snapshot: Snapshot) -> Pin:
        """By the tensors that the ranks hold of it; while nobody knows them, or their names are ended here, by itself."""
        known = self._adapters.of(adapter)
        epoch = -1 if self._granted is None else self._granted
        if known.value is None or (epoch, known.value) in self._ended:
            return self._lone_pin(adapter)
        root = adapter_root(snapshot.root, known.value, self._identity.adapters_applied)
        return Pin(root, snapshot.generation, adapter=adapter.lora_int_id, turn=known.turn)

    def may_save(self, pin: Pin) -> bool:
        """Whether what this pin names may be offered to a tier."""
        return pin.saveable and self.is_current(pin)

    def _may_share(self, request: Any) -> bool:
        """False for a request whose KV may come from another engine under a name we cannot vouch for (P/D)."""
        params = getattr(request, "kv_transfer_params", None) or {}
        shown = params.get(TAG_KEY)  # without one nothing is vouched for, also where we have none ourselves
        if not brings_kv(params) or (shown is not None and shown == self.tag(getattr(request, "lora_request", None))):
            return True
        self.counters["foreign_kv_requests"] += 1
        return False

    def tag(self, adapter: Any | None = None) -> dict[str, Any] | None:
        """`(pool, epoch, fingerprint, weights)` of what holds now, and the adapter, for `kv_transfer_params`; None unless the root is
        shared."""
        snapshot = self._snapshot
        if not snapshot.shared or snapshot.weights is None:
            return None
        tag = transfer_tag(self._identity.pool_uid, snapshot.epoch, self._identity.fingerprint, snapshot.weights)
        if adapter is None:
            return tag
        value = self._adapters.of(adapter).value
        return None if value is None else {**tag, "adapter": value.hex(), "applied": self._identity.adapters_applied}

    def _rehash(self, request: Any, pin: Pin) -> None:
        inner = plain_hasher(request)
        if inner is None:
            return  # prefix hashing is off for this request
        started = time.perf_counter()
        # A new list, never in place: the old list object may sit in metadata already sent.
        request.block_hashes = self._hashing.chain(request, pin.root, inner)
        self._rehash_seconds += time.perf_counter() - started
        self.counters["rehashed_requests"] += 1

    def _wrap_hasher(self, request: Any) -> None:
        """Have the pin be the parent of the first block; nothing of ours stays in the way of later ones."""
        inner = plain_hasher(request)
        if inner is None:
            return
        if self._fenced_hasher is None or self._fenced_hasher.inner is not inner:
            self._fenced_hasher = FencedHasher(inner, self._hashing)
        request._block_hasher = self._fenced_hasher if awaits_first_hash(request) else inner

    def repin(self, request: Any, *, must: bool) -> Repin:
        """Bring a request that holds no blocks to what holds now.

        Args:
            must: the scheduler goes on with this request in the same step whatever is answered
                (`skip_reading_prefix_cache`), so nothing may be deferred.

        Returns:
            What the caller may answer; see `Repin`.
        """
        with self._lock:
            self._refresh()
            pin = self.pin_of(request)
            if pin is not None:
                if self.is_current(pin) and not self._left_blocks_unwatched(pin):
                    return Repin.CURRENT
                if pin.session and pin.admitted and not is_stranded(request):
                    return Repin.CARRIED
                if self._rehash_seconds >= REHASH_BUDGET_SECONDS and not must:
                    self.counters["rehash_deferred"] += 1
                    return Repin.DEFERRED
                self._drop(pin)
            self._pin_locked(request, session=pin.session if pin else bool(getattr(request, "resumable", False)))
            self.counters["repinned_requests"] += 1
            return Repin.DONE

    def _left_blocks_unwatched(self, pin: Pin) -> bool:
        """In bypass no step is compared with what was known of the weights, so a preempted request's own blocks may be of others."""
        return not self._snapshot.in_use and pin.alone and pin.admitted

    def isolate(self, request: Any) -> None:
        """Give the request a random root: the answer to an error of ours, after which nothing may be shared with it."""
        with self._lock:
            old = self.pin_of(request)
            if old is not None:
                self._drop(old)
            pin = self._lone_pin(getattr(request, "lora_request", None))
            setattr(request, PIN_ATTRIBUTE, pin)
            if request.block_hashes:
                self._rehash(request, pin)
            self._wrap_hasher(request)

    # ------------------------------------------------------------------ carried requests

    def admit(self, request: Any) -> None:
        """The request's hit was answered and accepted, or its tokens are being computed."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is None or pin.admitted:
                return
            pin.admitted, pin.loading = True, False
            (self._sessions if pin.session else self._admitted)[pin.generation] += 1
            self._note_admission(pin)

    def _note_admission(self, pin: Pin) -> None:
        if self.is_current(pin):
            self._admitted_since_swap = True
            if self._snapshot.shared:
                self._used_epoch = self._snapshot.epoch

    def begin_load(self, request: Any) -> None:
        """A load of ours was committed for the request; it is not carried: an adoption poisons it."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is not None:
                pin.loading = True
                self._note_admission(pin)

    def end_load(self, request: Any, succeeded: bool) -> None:
        """The load's result was recorded by vLLM: on success the request now holds KV under its pin."""
        pin = self.pin_of(request)
        if pin is None or not pin.loading:
            return
        pin.loading = False
        if succeeded:
            self.admit(request)

    def release(self, request: Any) -> None:
        """The request has finished."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is not None:
                self._drop(pin)

    def _drop(self, pin: Pin) -> None:
        if not pin.admitted:
            return
        pin.admitted = False
        counter = self._sessions if pin.session else self._admitted
        counter[pin.generation] -= 1
        if counter[pin.generation] <= 0:
            del counter[pin.generation]

    # ------------------------------------------------------------------ local reset

    def reset(self) -> bool:
        """Somebody called vLLM's own reset. Returns whether a root that names something was given up.

        A shared root that this engine used is left at once, until the pool's next epoch, also when the lease is lost at this
        moment: it may come back. A private root that was used is replaced; one under which nothing was admitted names nothing yet
        and is kept: of engines that are reset together, the first one's proposal may have brought the others to their next epoch
        before their turn.
        """
        with self._lock:
            self._refresh()
            self._settled = False
            epoch = -1 if self._granted is None else self._granted
            rotated = self._admitted_since_swap
            if epoch >= 0 and self._used_epoch == epoch:
                self._reset_at_epoch = epoch
                rotated = True
            if not rotated:
                self.counters["resets_kept"] += 1
                return False
            self.counters["resets_rotated"] += 1
            state = self._derive()
            if state != self._state or self._admitted_since_swap:
                self._swap(state)
            self._herald.tell(self._standing)
            return True

    def proposal(self) -> int | None:
        """The epoch to propose after a local reset, or None when there is none to exceed."""
        granted = self._granted
        return None if granted is None else granted + 1
