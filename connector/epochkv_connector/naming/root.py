"""Which root names blocks now, and why; and the pin of each request: the root that its blocks are named with.

The epoch, the lease, the weights and the resets of this engine decide the root. Two threads meet here. The agent's thread adopts
epochs. The scheduler's thread reads the root, hashes with it and stores the pin. Both hold `RootState.lock` meanwhile. Without it
5 of 57 names were wrong under fast adoption, with it 0 of 824 (docs/design/fence.md, section 3).

`RootState._decide` lists every fact that decides. It is evaluated afresh, never patched. Each way into bypass has a name (`Reason`)
and one line in the log, with what ends it.

A pin is made under one `RootState.snapshot`, and is current as long as that holds. Requests that hold blocks go on over a change of
weights. Weights return (A, B, A); epochs never do. A request that went on naming under its root would put KV of B under a name of A.
This engine, and after a save every other one, would find it (4 of 36 answers wrong without this). So such a request is *detached*:
its further blocks get random names.
"""

from __future__ import annotations

import enum
import hmac
import json
import logging
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epochkv_connector.naming.identity import ROOT_BYTES, Pin, Snapshot, adapter_root, embeddings_root, engine_root, namespace, shared_root
from epochkv_connector.weights.adapters import Adapters
from epochkv_fence.common import lease_clock

if TYPE_CHECKING:
    from epochkv_connector.engine.blocks import BlockHashing, GlobalRoot, Hasher

logger = logging.getLogger("vllm.epochkv.fence")


class Reason(enum.Enum):
    """What decides between the pool's root, a private one and bypass, by precedence."""

    OVERWRITTEN = "overwritten"  # somebody else bound vLLM's global
    FORBIDDEN = "forbidden"  # a change of weights could not be followed; said then
    NO_WEIGHTS = "weights unknown"  # said by `weights.watch`
    OWN = "own"  # this engine may never share; said at start
    NO_HUB = "no hub"  # said at start
    UNASSIGNED = "unassigned"  # no grant yet
    LOCAL_RESET = "local reset"
    WEIGHTS_ENDED = "weights ended"
    NO_LEASE = "no lease"
    IN_USE = "in use"


_LINES = {
    Reason.OVERWRITTEN: (
        logging.WARNING,
        "vLLM's block-hash root (kv_cache_utils.NONE_HASH) was overwritten by somebody else, such as a second engine in this process: "
        "bypass until this process is restarted",
    ),
    Reason.LOCAL_RESET: (
        logging.INFO,
        "the caches of this engine were reset: bypass until the pool's next epoch, {next_epoch}, which is asked for",
    ),
    Reason.WEIGHTS_ENDED: (
        logging.WARNING,
        "blocks of epoch {epoch} were computed with other weights than they are named after: bypass with these weights until the pool's "
        "next epoch, which is asked for",
    ),
    Reason.NO_LEASE: (logging.WARNING, "the lease on epoch {epoch} is over (no grant from the hub in time): bypass until the next one"),
    Reason.IN_USE: (logging.INFO, "epoch {epoch} in use"),
}
"""What the log says of a reason, and how loud. Every other one is said where it is found out."""


class BypassLog:
    """Logs each change of (reason, highest epoch adopted in this engine instance or -1) once."""

    def __init__(self) -> None:
        self.over = False  # the engine ends, and a lease that it gives back is no news
        self._told = (Reason.UNASSIGNED, -1)

    def tell(self, reason: Reason, epoch: int) -> None:
        """Say what has changed; nothing if nothing has."""
        before, epoch_before = self._told
        if reason is Reason.NO_LEASE and epoch != epoch_before:
            return  # an adoption: the lease of its grant begins when the epoch is bound
        self._told = (reason, epoch)
        said = self.over or (reason, epoch) == (before, epoch_before) or reason is before is Reason.OVERWRITTEN
        if said or reason not in _LINES:
            return
        level, line = _LINES[reason]
        back = reason is Reason.IN_USE and before in (Reason.LOCAL_RESET, Reason.NO_LEASE, Reason.WEIGHTS_ENDED)
        line = line.format(epoch=epoch, next_epoch=epoch + 1)
        logger.log(level, "EpochKV: %s%s", line, ", back from bypass" if back else "")


@dataclass(frozen=True, slots=True)
class PoolMembership:
    """What is known at start of this engine's part in its pool: what names are made of, and what may be shared."""

    pool_uid: str
    fingerprint: str
    secret: bytes | None = field(repr=False)  # the pool's root secret; None: there is no way to the hub, so nothing is ever shared
    l2_allowed: bool = True  # False keeps every name inside this engine (random hash seed, or routes of experts that stay there)
    adapters_applied: str = ""  # how this engine applies adapters (`describe.describe_adapters`)
    is_own_pool: bool = False  # no hub is configured, so tiers may be used under a private root
    handoff_seconds: float = 15.0  # how long blocks that are handed over to another engine are kept at least, whatever our clocks say


class RootState:
    """One per EngineCore. Methods are for the scheduler thread unless their docstring says otherwise.

    Attributes:
        lock: guards everything here and in `Pins`.
        snapshot: what `refresh` found last. Any thread.
        epoch: the highest one adopted in this engine instance; -1 before the first.
        weights: digest of what the ranks hold; None: unknown. Any thread.
        overwritten: somebody else has bound vLLM's global: bypass for this engine instance. Any thread.
        names_alone: no digest can say what KV of this engine depends on. Its root is private, and each epoch, reset and possible write
            to the weights replaces it. Any thread.
    """

    def __init__(self, member: PoolMembership, global_root: GlobalRoot, lease_until: Callable[[], float]) -> None:
        self.member = member
        self.lock = threading.RLock()
        self.counters: Counter[str] = Counter()
        self.epoch = -1
        self.weights: bytes | None = None
        self.overwritten = False
        self.names_alone = False
        self._global = global_root
        self._lease_until = lease_until
        self._forbidden = False
        self._ended: set[tuple[int, bytes]] = set()  # (epoch, weights or adapter): blocks under these names may be wrong here
        self._reset_at_epoch: int | None = None  # local reset: private until the pool's epoch exceeds this one
        self._bound = False
        self._settled = False  # in use, and nothing but lease and global can have changed since that was found out
        self._admitted_since_swap = False
        self._used_epoch = -1  # latest epoch under whose shared root something was admitted
        self._last_generation = 0
        self._shared_generation: tuple[int, int] | None = None  # (epoch, generation) of the latest shared snapshot of these weights
        self._log = BypassLog()
        self._reason = Reason.UNASSIGNED
        self._state: tuple[str, int, bytes | None] | None = None
        self.snapshot = Snapshot(-1, in_use=False, root=os.urandom(ROOT_BYTES), namespace=None, shared=False)
        self._refresh()

    # ------------------------------------------------------------------ what holds now

    def refresh(self) -> Snapshot:
        """What holds now, by the lease and vLLM's global as well. Any thread."""
        with self.lock:
            self._refresh()
            return self.snapshot

    def leave(self) -> None:
        """The engine ends, and says no more of its leases. Any thread."""
        self._log.over = True

    @property
    def waiting_after_reset(self) -> bool:
        """This engine's caches were reset alone; it waits for the pool's next epoch. Any thread."""
        return self._reset_at_epoch is not None and self.epoch <= self._reset_at_epoch

    def isolated(self) -> bool:
        """It shares nothing before the pool's next epoch, which it has asked for: after a reset of its own, or blocks of other weights
        than their names say. Any thread."""
        return self.waiting_after_reset or (self.epoch, self.weights) in self._ended

    @property
    def lost(self) -> str:
        """Why it names nothing until it restarts, and what to do; empty: it does, or the weights say why not. Any thread."""
        if self.overwritten:
            return "somebody else has overwritten vLLM's block-hash root: restart the engine"
        if self._forbidden:
            return "a change of its weights could not be followed: restart the engine"
        return ""

    def _refresh(self) -> None:
        if self._settled and lease_clock() < self._lease_until() and self._global.is_bound(self.snapshot.root):
            return
        if self._bound and not self.overwritten and not self._global.is_bound(self.snapshot.root):
            self.overwritten = True
            self.counters["root_overwritten"] += 1
        if not self._bound and self._global.ready():
            self._bound = True
            self._global.bind(self.snapshot.root)
        state = self._derive()
        if state != self._state:
            self._swap(state)
        self._log.tell(self._reason, self.epoch)
        self._settled = self._bound and self._reason is Reason.IN_USE

    def _derive(self) -> tuple[str, int, bytes | None]:
        """(kind, epoch, weights): everything a snapshot depends on. A private kind with a new epoch means a new private root."""
        self._reason = self._decide()
        if self._reason is Reason.IN_USE:
            return "shared", self.epoch, self.weights
        private = self._reason is Reason.OWN or (self._reason is Reason.NO_HUB and self.member.is_own_pool)
        return "private" if private else "bypass", self.epoch, self.weights

    def _decide(self) -> Reason:
        reasons = (
            (self.overwritten, Reason.OVERWRITTEN),
            (self._forbidden, Reason.FORBIDDEN),
            (self.weights is None, Reason.NO_WEIGHTS),
            (self.names_alone, Reason.OWN),
            (self.member.secret is None, Reason.NO_HUB),
            (self.epoch < 0, Reason.UNASSIGNED),
            (self.waiting_after_reset, Reason.LOCAL_RESET),
            ((self.epoch, self.weights) in self._ended, Reason.WEIGHTS_ENDED),
            (lease_clock() >= self._lease_until(), Reason.NO_LEASE),
        )
        return next((reason for holds, reason in reasons if holds), Reason.IN_USE)

    def _swap(self, state: tuple[str, int, bytes | None]) -> None:
        kind, epoch, weights = state
        generation = self._last_generation = self._last_generation + 1
        if kind == "shared":
            member = self.member
            assert member.secret is not None
            assert weights is not None
            root = shared_root(member.secret, member.pool_uid, epoch, member.fingerprint, weights)
            space = namespace(member.pool_uid, member.fingerprint, epoch, weights) if member.l2_allowed else None
            if self._shared_generation is None or self._shared_generation[0] != epoch:
                self._shared_generation = (epoch, generation)
            # Back from a lost lease: requests pinned to this very root before are current again. Not if weights changed meanwhile.
            fresh = Snapshot(epoch, True, root, space, shared=True, generation=self._shared_generation[1], weights=weights)
        else:
            fresh = Snapshot(epoch, kind == "private", os.urandom(ROOT_BYTES), None, shared=False, generation=generation, weights=weights)
        if self._bound and not self.overwritten:
            self._global.bind(fresh.root)
        self.snapshot, self._state = fresh, state
        self._admitted_since_swap = False
        self.counters["snapshots"] += 1

    # ------------------------------------------------------------------ epochs

    def ready(self) -> bool:
        """vLLM has set its own global: epochs may be adopted. Agent thread."""
        return self._global.ready()

    def adopt(self, epoch: int) -> None:
        """Rebind the root and swap the snapshot. Agent thread; the acknowledgement is sent after this returns."""
        with self.lock:
            assert epoch >= self.epoch, "the agent takes no grant of a lower epoch"
            self.epoch, self._settled = epoch, False
            self.counters["adoptions"] += 1
            self._refresh()

    def proposal(self) -> int | None:
        """The epoch to propose after a local reset, or None when there is none to exceed, or nobody else has names of this engine's."""
        return None if self.epoch < 0 or self.names_alone else self.epoch + 1

    # ------------------------------------------------------------------ weights

    def hold(self, weights: bytes | None) -> bool:
        """The ranks hold these weights from now on (None: unknown). Returns whether they changed. Requests then never reuse their old
        names, even if these weights return, and the caller detaches requests that hold blocks."""
        with self.lock:
            if weights == self.weights:
                return False
            self.weights, self._settled, self._shared_generation = weights, False, None
            self._refresh()
            return True

    def end(self, weights: bytes) -> None:
        """Blocks that this engine has named after these weights, or this adapter, in this epoch may have been computed with others."""
        with self.lock:
            self._ended = {ended for ended in self._ended if ended[0] >= self.epoch} | {(self.epoch, weights)}
            self._settled = False
            self._refresh()

    def has_ended(self, digest: bytes) -> bool:
        """Whether `end` was called for these weights, or this adapter, in this epoch."""
        return (self.epoch, digest) in self._ended

    def keep_own(self) -> None:
        """From now on this engine names for itself alone."""
        with self.lock:
            self.names_alone, self._settled = True, False
            self._refresh()

    def forbid(self) -> None:
        """Nothing is named any more for others to find, nor for later requests of this engine."""
        with self.lock:
            self._forbidden, self._settled = True, False
            self._refresh()

    # ------------------------------------------------------------------ local reset

    def note_use(self) -> None:
        """A request was admitted under the root of `snapshot`. The caller holds `lock`."""
        self._admitted_since_swap = True
        if self.snapshot.shared:
            self._used_epoch = self.snapshot.epoch

    def reset(self) -> bool:
        """Somebody called vLLM's own reset. Returns whether a root that names something was given up.

        A shared root that this engine used is left at once, until the pool's next epoch, also when the lease is lost at this
        moment: it may come back. A private root that was used is replaced; one under which nothing was admitted names nothing yet
        and is kept: of engines that are reset together, the first one's proposal may have brought the others to their next epoch
        before their turn.
        """
        with self.lock:
            self._refresh()
            self._settled = False
            rotated = self._admitted_since_swap
            if self.epoch >= 0 and self._used_epoch == self.epoch:
                self._reset_at_epoch = self.epoch
                rotated = True
            if not rotated:
                self.counters["resets_kept"] += 1
                return False
            self.counters["resets_rotated"] += 1
            state = self._derive()
            if state != self._state or self._admitted_since_swap:
                self._swap(state)
            self._log.tell(self._reason, self.epoch)
            return True


PIN_ATTRIBUTE = "epochkv_pin"


def plain_hasher(request: Any) -> Hasher | None:
    """vLLM's own hasher of this request, beneath one of ours (which names it `inner`); None: prefix hashing is off for it."""
    hasher = getattr(request, "_block_hasher", None)
    return getattr(hasher, "inner", hasher)


def is_session(request: Any) -> bool:
    """Whether it takes more inputs (streaming input)."""
    return bool(getattr(request, "resumable", False))


@dataclass(slots=True, eq=False)
class PinnedHasher:
    """vLLM's request hasher with the pin as explicit first parent.

    One object for all requests, reading the pin from the request: a closure per request would make a reference cycle.
    A prompt below the hash block size gets its first hash during decode, long after admission. With vLLM's global, KV of the old
    epoch would get a name of the new one (128 stale tokens). With the pin, none does.

    vLLM calls a hasher for every token, and later blocks continue from the hash before them. So it stands before vLLM's own
    only while the first hash is awaited, and then takes itself away. A session's first hash can come twice: vLLM cuts tokens off its
    end, and their hashes with them.
    """

    inner: Hasher
    hashing: BlockHashing

    def __call__(self, request: Any) -> list[bytes]:
        pin: Pin | None = getattr(request, PIN_ATTRIBUTE, None)
        session = is_session(request)
        if session:
            self._cut_off(request)
        if request.block_hashes or pin is None:
            return self.inner(request)
        hashes = self.hashing.chain(request, pin.root, self.inner)
        if hashes and not session:
            request._block_hasher = self.inner
        return hashes

    def _cut_off(self, request: Any) -> None:
        """A session's next input replaces the last token that it sampled. vLLM 0.30 keeps the hash of a block that the token
        completed, so other tokens would get its name. Later versions cut it off themselves."""
        size = self.hashing.hash_block_size
        if size > 0 and not request.num_output_tokens:
            del request.block_hashes[request.num_computed_tokens // size :]


@dataclass(slots=True, eq=False)
class DetachedHasher:
    """Names blocks of one request at random, as many as its own hasher would."""

    inner: Hasher

    def __call__(self, request: Any) -> list[bytes]:
        return [os.urandom(len(name)) for name in self.inner(request)]


def detach(request: Any, num_named: int) -> None:
    """Give every block of the request but its first `num_named` (hash blocks) a random name, now and later."""
    hashes = request.block_hashes
    if len(hashes) > num_named:  # a new list, never in place: the old one may sit in metadata already sent
        request.block_hashes = [*hashes[:num_named], *(os.urandom(len(name)) for name in hashes[num_named:])]
    plain = plain_hasher(request)
    if plain is not None:
        request._block_hasher = DetachedHasher(plain)


def is_detached(request: Any) -> bool:
    """Whether the request's further blocks get random names. Once it holds no block it is named anew, also where its first name is
    right again: others of its names may not be."""
    return isinstance(getattr(request, "_block_hasher", None), DetachedHasher)


REHASH_BUDGET_SECONDS = 0.005
"""Re-hashing allowed per scheduler step; 100,000 tokens of 16-token blocks take about 11 ms."""

TAG_KEY = "epochkv_tag"


class Repin(enum.Enum):
    """What became of a request that was brought to what holds now."""

    CURRENT = enum.auto()  # nothing to do
    DONE = enum.auto()  # re-pinned and re-hashed: drop the local hit, ask again
    DEFERRED = enum.auto()  # the step's budget is spent: ask again
    CARRIED = enum.auto()  # it holds blocks, and keeps its names: no external hit


class PinMaker:
    """Makes pins of what holds now, and the tag that vouches for a name towards other engines. The caller of `make` holds the lock."""

    def __init__(self, root: RootState, adapters: Adapters) -> None:
        self._root = root
        self._adapters = adapters
        self.clock: Callable[[], float] = time.time  # as another machine can tell it, too
        self.stays_here: Callable[[Any], bool] = lambda request: False  # no other engine may find what is computed for this request
        self._engine = os.urandom(ROOT_BYTES)

    def make(self, request: Any, *, session: bool) -> Pin:
        """For what holds now; it is not stored yet."""
        snapshot, adapter = self._root.snapshot, getattr(request, "lora_request", None)
        if not snapshot.in_use or not self._may_share(request):
            pin = self.make_alone(adapter)
        elif adapter is None:
            pin = Pin(snapshot.root, snapshot.generation)
        else:
            pin = self._make_for_adapter(adapter, snapshot)
        embeddings = getattr(request, "prompt_embeds", None)
        if embeddings is not None and not pin.alone:
            is_token = bytes(map(bool, request.prompt_is_token_ids or ()))
            pin.root = embeddings_root(pin.root, str(embeddings.dtype), request.prompt_token_ids is not None, is_token)
        if not pin.alone and self.stays_here(request):
            pin.root = engine_root(pin.root, self._engine)
        pin.session, pin.epoch = session, snapshot.epoch
        return pin

    def make_alone(self, adapter: Any | None) -> Pin:
        snapshot = self._root.snapshot
        pin = Pin(os.urandom(ROOT_BYTES), snapshot.generation, saveable=False, alone=True, epoch=snapshot.epoch)
        if adapter is not None:
            pin.adapter, pin.version = adapter.lora_int_id, self._adapters.of(adapter).version
        return pin

    def _make_for_adapter(self, adapter: Any, snapshot: Snapshot) -> Pin:
        """By the tensors that the ranks hold of it; while nobody knows them, or their names are ended here, by itself."""
        known = self._adapters.of(adapter)
        if known.value is None or self._root.has_ended(known.value):
            return self.make_alone(adapter)
        root, may_save = adapter_root(snapshot.root, known.value, self._root.member.adapters_applied), self._adapters.why_alone is None
        return Pin(root, snapshot.generation, may_save, adapter=adapter.lora_int_id, version=known.version)

    def _may_share(self, request: Any) -> bool:
        """False for a request whose KV may come from another engine under a name we cannot vouch for (P/D)."""
        if not brings_kv(request) or self.vouches(request):
            return True
        self._root.counters["foreign_kv_requests"] += 1
        return False

    def vouches(self, request: Any) -> bool:
        """Whether KV that another engine brings for this request may have our names: that engine has shown our tag, a short time ago."""
        shown = _params_of(request).get(TAG_KEY)
        if not isinstance(shown, Mapping):
            return False
        made, seconds = shown.get("made"), shown.get("seconds")
        if not isinstance(made, (int, float)) or not isinstance(seconds, (int, float)):
            return False
        return abs(self.clock() - made) <= seconds and self._signed(request, made, seconds) == shown

    def tag(self, request: Any) -> dict[str, Any] | None:
        """`(pool, epoch, fingerprint, weights)` of what holds now and the adapter, for `kv_transfer_params`; with the time, and for how
        many seconds the blocks are surely kept. None unless the root is shared."""
        return self._signed(request, self.clock(), self._root.member.handoff_seconds)

    def _signed(self, request: Any, made: float, seconds: float) -> dict[str, Any] | None:
        """Signed with the pool's secret, for this prompt alone: clients see tags, and send them. NIXL counts blocks from the prompt's end,
        so with another length it writes them to the wrong places (vllm#50558)."""
        snapshot, member, adapter = self._root.snapshot, self._root.member, getattr(request, "lora_request", None)
        if not snapshot.shared or snapshot.weights is None or member.secret is None or getattr(request, "prompt_embeds", None) is not None:
            return None
        weights = snapshot.weights.hex()
        tag = {"pool": member.pool_uid, "epoch": snapshot.epoch, "fingerprint": member.fingerprint, "weights": weights}
        if adapter is not None:
            if (value := self._adapters.of(adapter).value) is None:
                return None
            tag |= {"adapter": value.hex(), "applied": member.adapters_applied}
        tag |= {"made": float(made), "seconds": float(seconds)}  # a proxy may write 15 for 15.0
        media = [feature.identifier for feature in request.mm_features or ()]
        text = json.dumps([tag, media], sort_keys=True).encode() + array("q", request.prompt_token_ids).tobytes()
        return {**tag, "signature": hmac.digest(member.secret, text, "sha256").hex()}


class Pins:
    """One per EngineCore. Methods are for the scheduler thread unless their docstring says otherwise.

    Attributes:
        on_rename: told of each request that gets other names, and how many of its hash blocks keep theirs. The lock is held.
    """

    def __init__(self, root: RootState, hashing: BlockHashing, adapters: Adapters) -> None:
        self.root = root
        self.maker = PinMaker(root, adapters)
        self.counters = root.counters
        self.on_rename: Callable[[Any, int], object] = lambda request, num_kept: None
        self._lock = root.lock
        self._hashing = hashing
        self._adapters = adapters
        self._inside_schedule = False
        self._reporting = False
        self._rehash_seconds = 0.0
        self._admitted: Counter[tuple[int, bool]] = Counter()  # (generation, is a session) -> requests
        self._hasher: PinnedHasher | None = None

    @staticmethod
    def pin_of(request: Any) -> Pin | None:
        """The request's pin, or None when it was never pinned."""
        return getattr(request, PIN_ATTRIBUTE, None)

    def is_current(self, pin: Pin) -> bool:
        """Whether the pin was made under what holds now, and its adapter's id still stands for what it did."""
        return pin.generation == self.root.snapshot.generation and (not pin.adapter or self._adapters.version(pin.adapter) == pin.version)

    def may_save(self, pin: Pin) -> bool:
        """Whether what this pin names may be offered to a tier."""
        return pin.saveable and self.is_current(pin)

    # ------------------------------------------------------------------ the scheduler's step

    def enter_schedule(self) -> None:
        """The first question of a `schedule()` (`Admission.name`): acknowledgements wait until `leave_schedule`."""
        self._inside_schedule = True

    def leave_schedule(self) -> None:
        """The step's metadata is built (`Steps.build`; without our connector, `engine.fenced`); the re-hash budget is full again."""
        self._inside_schedule = False
        self._rehash_seconds = 0.0

    def enter_report(self) -> None:
        """Load results are being recorded (`Steps.take`): an acknowledgement must not fall between the check and the record."""
        self._reporting = True

    def leave_report(self) -> None:
        self._reporting = False

    def busy(self) -> bool:
        """The scheduler is between its first lookup of a step and the end of it, or records results. Agent thread."""
        return self._inside_schedule or self._reporting

    # ------------------------------------------------------------------ making pins

    def pin(self, request: Any) -> None:
        """Pin a new request to what holds now, and re-hash it if its hashes were made with anything else."""
        with self._lock:
            self.root.refresh()
            self._name(request, self.maker.make(request, session=is_session(request)))

    def repin(self, request: Any, *, must: bool) -> Repin:
        """Bring a request that holds no blocks to what holds now. `must`: the scheduler goes on with this request in the same step
        whatever is answered (`skip_reading_prefix_cache`), so nothing may be deferred."""
        with self._lock:
            self.root.refresh()
            pin = self.pin_of(request)
            if pin is not None:
                # In bypass the weights may be unknown, or not followed any more, so a preempted request's own blocks may be of others.
                unwatched = not self.root.snapshot.in_use and pin.alone and pin.admitted
                if self.is_current(pin) and not unwatched:
                    return Repin.CURRENT
                if self._rehash_seconds >= REHASH_BUDGET_SECONDS and not must:
                    self.counters["rehash_deferred"] += 1
                    return Repin.DEFERRED
                self.release(request)
            self._name(request, self.maker.make(request, session=pin.session if pin else is_session(request)))
            self.counters["repinned_requests"] += 1
            return Repin.DONE

    def isolate(self, request: Any) -> None:
        """Give the request a random root: the answer to an error of ours, after which nothing may be shared with it."""
        with self._lock:
            self.release(request)
            self._name(request, self.maker.make_alone(getattr(request, "lora_request", None)))

    def detach(self, request: Any, num_named: int) -> None:
        """The request holds blocks, of which `num_named` (in hash blocks) have names, and goes on with other weights."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is not None:
                pin.saveable = False
            detach(request, num_named)
            self.on_rename(request, num_named)

    def _name(self, request: Any, pin: Pin) -> None:
        """Store the pin, and hash the request's blocks again unless the pin names them already. If the first block comes later, our
        hasher gives it the pin as its parent. vLLM's own hasher names all later blocks."""
        detached, inner = is_detached(request), plain_hasher(request)
        setattr(request, PIN_ATTRIBUTE, pin)
        if inner is None:  # prefix hashing is off for this request
            return
        if request.block_hashes and (detached or request.block_hashes[0] != self._hashing.first(request, pin.root)):
            started = time.perf_counter()
            # A new list, never in place: the old list object may sit in metadata already sent.
            request.block_hashes = self._hashing.chain(request, pin.root, inner)
            self._rehash_seconds += time.perf_counter() - started
            self.counters["rehashed_requests"] += 1
        if self._hasher is None or self._hasher.inner is not inner:
            self._hasher = PinnedHasher(inner, self._hashing)
        request._block_hasher = self._hasher if is_session(request) or not request.block_hashes else inner
        self.on_rename(request, 0)

    # ------------------------------------------------------------------ requests on an old epoch

    def old_epoch_requests(self, *, sessions: bool = False) -> int:
        """Requests, or streaming-input sessions, that were admitted under a root that is no longer current. Any thread."""
        with self._lock:
            current = self.root.snapshot.generation
            return sum(num for (generation, session), num in self._admitted.items() if generation != current and session is sessions)

    def admit(self, request: Any) -> None:
        """The request's hit was answered and accepted, or its tokens are being computed."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is None or pin.admitted:
                return
            pin.admitted, pin.loading = True, False
            self._admitted[pin.generation, pin.session] += 1
            if self.is_current(pin):
                self.root.note_use()

    def begin_load(self, request: Any) -> None:
        """A load of ours was committed for the request; it does not run on: an adoption invalidates it."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is not None:
                pin.loading = True
                if self.is_current(pin):
                    self.root.note_use()

    def end_load(self, request: Any, succeeded: bool) -> None:
        """The load's result was recorded by vLLM: on success the request now holds KV under its pin."""
        pin = self.pin_of(request)
        if pin is None or not pin.loading:
            return
        pin.loading = False
        if succeeded:
            self.admit(request)

    def release(self, request: Any) -> None:
        """The request has finished, or holds nothing under its pin any more."""
        with self._lock:
            pin = self.pin_of(request)
            if pin is None or not pin.admitted:
                return
            pin.admitted = False
            admitted = (pin.generation, pin.session)
            self._admitted[admitted] -= 1
            if not self._admitted[admitted]:
                del self._admitted[admitted]


def is_private(pins: Pins, request: Any) -> bool:
    """Whether nobody else will ask for blocks that this request names now."""
    pin = pins.pin_of(request)
    return pins.root.names_alone or pin is None or pin.alone or is_detached(request) or not pins.is_current(pin)


def awaits_transfer(request: Any) -> bool:
    """Whether another engine keeps this request's KV until it is fetched (P/D): no tier of ours answers for it."""
    return bool(_params_of(request).get("do_remote_prefill"))


def _params_of(request: Any) -> Mapping[str, Any]:
    return getattr(request, "kv_transfer_params", None) or {}


def brings_kv(request: Any) -> bool:
    """Whether the request's `kv_transfer_params` name KV that another engine brings in (P/D)."""
    named = (str(key).startswith("remote_") and value is not None for key, value in _params_of(request).items())
    return awaits_transfer(request) or any(named)
