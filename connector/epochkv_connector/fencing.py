"""The fence inside vLLM: which root a request's blocks are named with, and when that changes.

Two threads meet here. The agent thread adopts epochs; the scheduler thread pins requests. *Read the root, hash, store
the pin* is one operation under the adoption lock: without it 5 of 57 names were wrong under fast adoption, with it 0 of
824 (`fence.md` section 3). Everything that vLLM could change under us is behind `compat`.

What holds now follows from six facts, and is computed from them afresh, never patched: which weights the ranks hold, what the
hub granted, whether the lease lives, whether somebody reset this engine's caches alone, whether vLLM's global was overwritten,
and whether weights are pushed.
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

from epochkv_connector.adapter_ids import AdapterIds
from epochkv_connector.adapters import Version
from epochkv_connector.identity import ROOT_BYTES, Pin, Snapshot, adapter_root, namespace, shared_root, transfer_tag
from epochkv_connector.naming.strand import StrandedHasher, strand, unstrand
from epochkv_connector.pinning import PIN_ATTRIBUTE, FencedHasher, HashPort, RootPort, brings_kv
from epochkv_connector.standing import Herald, Standing, Why
from epochkv_fence.messages import Mode

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
    """

    pool_uid: str
    fingerprint: str
    secret: bytes | None = field(repr=False)
    l2_allowed: bool = True


@dataclass(frozen=True, slots=True)
class FencePolicy:
    """Static facts of the engine.

    Attributes:
        weights_pushed: bypassed requests get a random root each instead of one private root.
        has_hub: a hub is configured and can be spoken to in principle; without one the root stays private.
        use_private: tiers may be used under the private root (no hub and weights never pushed).
        forced_bypass: why this engine may never use a shared root, or None.
        proposes: after a local reset the pool is asked for its next epoch.
        others_save: other engines save where this one loads (there is an L2).
    """

    weights_pushed: bool
    has_hub: bool
    use_private: bool = False
    forced_bypass: str | None = None
    proposes: bool = False
    others_save: bool = True

    @property
    def leaves_unused(self) -> bool:
        """A local reset also leaves a shared root that this engine never used: others may have saved under it, with the
        weights from before. Not with `proposes`, whose frameworks reset every engine: the first one's proposal may have
        brought the others to their next epoch before their turn."""
        return self.weights_pushed and self.others_save and not self.proposes


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
        *,
        lease_until: Callable[[], float] = lambda: 0.0,
        adapter_version: Callable[[Any], Version] = lambda adapter: Version("", shareable=False),
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
        self._ended: set[tuple[int, bytes]] = set()  # (epoch, weights): blocks under these names may be wrong here
        self._granted: tuple[int, Mode] | None = None
        self._reset_at_epoch: int | None = None  # local reset: private until the pool's epoch exceeds this one
        self._reset_unseen = False  # local reset without a lease: private until an epoch after the next one granted
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
        self._adapter_version = adapter_version
        self._adapters = AdapterIds()
        self._adapter_secret = random_bytes(ROOT_BYTES)
        self.counters: Counter[str] = Counter()
        self._fenced_hasher: FencedHasher | None = None
        self._herald = Herald(proposes=policy.proposes)
        self._swapped_at = clock()
        self._state: tuple[str, int, bytes | None] | None = None
        self._standing = Standing(Why.UNASSIGNED)
        self._snapshot = Snapshot(-1, Mode.BYPASS, random_bytes(ROOT_BYTES), None, False, 0, policy.weights_pushed)
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
        return self._reset_at_epoch is not None and (granted is None or granted[0] <= self._reset_at_epoch)

    def bypass_seconds(self) -> float:
        """For how long nothing was loaded or saved; 0 in use. Any thread."""
        with self._lock:
            return self._clock() - self._swapped_at if self._snapshot.mode is Mode.BYPASS else 0.0

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
        self._standing = Standing(self._why(), self._granted[0] if self._granted else -1)
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
            (granted is not None and granted[1] is not Mode.USE, Why.GRANTED_BYPASS),
            (self.waiting_after_reset, Why.LOCAL_RESET),
            (granted is not None and (granted[0], self._weights) in self._ended, Why.WEIGHTS_ENDED),
            (self._clock() >= self._lease_until(), Why.NO_LEASE),
        )
        return next((why for holds, why in reasons if holds), Why.IN_USE)

    def _swap(self, state: tuple[str, int, bytes | None]) -> None:
        kind, epoch, weights = state
        self._swapped_at = self._clock()
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
            fresh = Snapshot(epoch, Mode.USE, root, space, True, self._shared_generation[1], False, weights)
        else:
            mode = Mode.USE if kind == "private" else Mode.BYPASS
            alone = mode is Mode.BYPASS and (self._policy.weights_pushed or weights is None or self._forbidden)
            fresh = Snapshot(epoch, mode, self._random(ROOT_BYTES), None, False, generation, alone, weights)
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
        """Blocks that this engine has named after these weights in this epoch may have been computed with others. Returns whether
        others may have been told of such names."""
        with self._lock:
            epoch = self._granted[0] if self._granted is not None else -1
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

    def adopt(self, epoch: int, mode: Mode) -> None:
        """Rebind the root and swap the snapshot. Agent thread; the acknowledgement is sent after this returns.

        An epoch below the one adopted is ignored: it cannot come from a correct agent.
        """
        with self._lock:
            if self._granted is not None and epoch < self._granted[0]:
                self.counters["lower_epoch_refused"] += 1
                return
            self._granted, self._settled = (epoch, mode), False
            if self._reset_unseen:
                self._reset_unseen, self._reset_at_epoch = False, epoch
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
        """Whether the pin was made under what holds now, and its adapter is still the one that it was made for."""
        return pin.generation == self._snapshot.generation and (not pin.adapter or self._adapters.holds(pin))

    @property
    def adapter_changes(self) -> int:
        """Another number than before: weights of an adapter were replaced, and its pins are not current."""
        return self._adapters.num_changes

    def pin(self, request: Any) -> Snapshot:
        """Pin a new request to what holds now, and re-hash it if its hashes were made with anything else."""
        with self._lock:
            self._refresh()
            self._wrap_hasher(request)
            self._pin_locked(request, session=bool(getattr(request, "resumable", False)))
            return self._snapshot

    def _pin_locked(self, request: Any, session: bool) -> None:
        stranded = unstrand(request)
        pin = self._make_pin(request)
        pin.session = session
        setattr(request, PIN_ATTRIBUTE, pin)
        if request.block_hashes and (stranded or request.block_hashes[0] != self._hashing.first(request, pin.root)):
            self._rehash(request, pin)

    def _make_pin(self, request: Any) -> Pin:
        snapshot, adapter = self._snapshot, getattr(request, "lora_request", None)
        if adapter is not None:
            self._adapters.asked(adapter)
        if snapshot.fresh_pins or not self._may_share(request):
            return self._lone_pin(adapter)
        return Pin(snapshot.root, snapshot.generation) if adapter is None else self._adapter_pin(adapter, snapshot)

    def _lone_pin(self, adapter: Any | None) -> Pin:
        number = adapter.lora_int_id if adapter is not None else 0
        loads = self._adapters.loads(number)
        root = self._random(ROOT_BYTES)
        return Pin(root, self._snapshot.generation, False, alone=True, adapter=0 if loads is None else number, loads=loads or 0)

    def _adapter_pin(self, adapter: Any, snapshot: Snapshot) -> Pin:
        """An adapter is named by what its files hold, where that is known and nothing has taken its place: else nobody can know
        which version this engine has, and the next boot will give the same ids again, so its names are this boot's own and go
        to no tier."""
        name, number = adapter.lora_name, adapter.lora_int_id
        version = self._look(adapter) if self._adapters.may_name(number) else None
        loads = self._adapters.loads(number)
        if version is None or not version.stable or loads is None:
            return self._lone_pin(adapter)
        root = adapter_root(snapshot.root, name, version.name)
        shared = version.shareable and self._adapters.share(number, root)
        if not shared:
            root = adapter_root(self._adapter_secret + snapshot.root, name, version.name, number)
        return Pin(root, snapshot.generation, saveable=shared, adapter=number, loads=loads, version=version.name)

    def _look(self, adapter: Any) -> Version:
        """What the adapter's files say now. May wait for a disk (`adapters.WAIT_SECONDS`)."""
        version = self._adapter_version(adapter)
        if version.changed:
            self._adapters.changed(adapter.lora_int_id)
        return version

    def _is_as_pinned(self, request: Any, pin: Pin) -> bool:
        """Also whether the adapter's files are: vLLM may read them (again) when the request is scheduled."""
        if not self.is_current(pin):
            return False
        return not pin.adapter or pin.alone or self._look(request.lora_request).name == pin.version

    def adapter_loading(self, adapter: Any) -> None:
        """vLLM is about to read an adapter's files. In place of another: what was pinned to that one is not current from now on,
        its requests, which go on with this one, save nothing more, and what is being loaded for them fails. Scheduler thread."""
        with self._lock:
            self._adapters.loading(adapter)
        self._look(adapter)  # not under the lock: a disk may be slow

    def may_save(self, request: Any, pin: Pin) -> bool:
        """Whether what this pin names may be offered to a tier. An adapter's files are looked at once more: the engine may have
        read them since it was pinned."""
        return pin.saveable and self._is_as_pinned(request, pin)

    def _may_share(self, request: Any) -> bool:
        """False for a request whose KV may come from another engine under a name we cannot vouch for (P/D)."""
        params = getattr(request, "kv_transfer_params", None) or {}
        shown = params.get(TAG_KEY)  # without one nothing is vouched for, also where we have none ourselves
        if not brings_kv(params) or (shown is not None and shown == self.tag()):
            return True
        self.counters["foreign_kv_requests"] += 1
        return False

    def tag(self) -> dict[str, Any] | None:
        """`(pool, epoch, fingerprint)` of what holds now for `kv_transfer_params`; None unless the root is shared."""
        snapshot = self._snapshot
        if not snapshot.shared or snapshot.weights is None:
            return None
        return transfer_tag(self._identity.pool_uid, snapshot.epoch, self._identity.fingerprint, snapshot.weights)

    def _rehash(self, request: Any, pin: Pin) -> None:
        inner = getattr(request, "_block_hasher", None)
        if not isinstance(inner, FencedHasher):
            return  # prefix hashing is off for this request
        started = time.perf_counter()
        # A new list, never in place: the old list object may sit in metadata already sent.
        request.block_hashes = self._hashing.chain(request, pin.root, inner.inner)
        self._rehash_seconds += time.perf_counter() - started
        self.counters["rehashed_requests"] += 1

    def _wrap_hasher(self, request: Any) -> None:
        inner = getattr(request, "_block_hasher", None)
        if inner is None or isinstance(inner, FencedHasher):
            return
        if self._fenced_hasher is None or self._fenced_hasher.inner is not inner:
            self._fenced_hasher = FencedHasher(inner, self._hashing)
        request._block_hasher = self._fenced_hasher

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
            if pin is None:
                self._wrap_hasher(request)
            elif self._is_as_pinned(request, pin) and not self._left_blocks_unwatched(pin):
                return Repin.CURRENT
            elif pin.session and pin.admitted and not isinstance(request._block_hasher, StrandedHasher):
                return Repin.CARRIED
            elif self._rehash_seconds >= REHASH_BUDGET_SECONDS and not must:
                self.counters["rehash_deferred"] += 1
                return Repin.DEFERRED
            if pin is not None:
                self._drop(pin)
            self._pin_locked(request, session=pin.session if pin else bool(getattr(request, "resumable", False)))
            self.counters["repinned_requests"] += 1
            return Repin.DONE

    def _left_blocks_unwatched(self, pin: Pin) -> bool:
        """In bypass no step is compared with what was known of the weights, so a preempted request's own blocks may be of others."""
        return self._snapshot.mode is Mode.BYPASS and pin.alone and pin.admitted

    def isolate(self, request: Any) -> None:
        """Give the request a random root: the answer to an error of ours, after which nothing may be shared with it."""
        with self._lock:
            old = self.pin_of(request)
            if old is not None:
                self._drop(old)
            unstrand(request)
            self._wrap_hasher(request)
            pin = self._lone_pin(getattr(request, "lora_request", None))
            setattr(request, PIN_ATTRIBUTE, pin)
            if request.block_hashes:
                self._rehash(request, pin)

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

        A shared root that was used, or that others may have used (`FencePolicy.leaves_unused`), is left at once, until the
        pool's next epoch, also when the lease is lost at this moment: it may come back. Then it may come back with an epoch
        from before the reset, which is left, too. A private root that was used is replaced; one under which nothing was
        admitted names nothing yet and is kept.
        """
        with self._lock:
            self._refresh()
            self._settled = False
            epoch, mode = self._granted or (-1, Mode.BYPASS)
            rotated = self._admitted_since_swap
            if epoch >= 0 and (self._used_epoch == epoch or (mode is Mode.USE and self._policy.leaves_unused)):
                self._reset_at_epoch = epoch
                rotated = True
            if self._policy.has_hub and self._policy.leaves_unused and self._clock() >= self._lease_until():
                self._reset_unseen = True
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
        return None if granted is None else granted[0] + 1
