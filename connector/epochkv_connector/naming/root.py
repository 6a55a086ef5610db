"""Which root names blocks now, and why: the epoch, the lease, the weights and the resets of this engine.

Two threads meet here. The agent's thread adopts epochs. The scheduler's thread reads the root, hashes with it and stores the pin
(`pins`). Both hold `RootState.lock` meanwhile. Without it 5 of 57 names were wrong under fast adoption, with it 0 of 824
(docs/design/fence.md, section 3).

`RootState._decide` lists every fact that decides. It is evaluated afresh, never patched. Each way into bypass has a name (`Reason`)
and one line in the log, with what ends it.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epochkv_connector.naming.identity import ROOT_BYTES, Snapshot, namespace, shared_root

if TYPE_CHECKING:
    from epochkv_connector.engine.blocks import GlobalRoot

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
    """Logs each change of (reason, highest epoch granted in this engine instance or -1) once."""

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
        lock: guards everything here and in `pins.Pins`.
        snapshot: what `refresh` found last. Any thread.
        epoch: the highest one granted in this engine instance; -1 before the first.
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
        self.snapshot = Snapshot(-1, False, os.urandom(ROOT_BYTES), None, False)
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

    @property
    def waiting_for_epoch(self) -> bool:
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
        if self._settled and time.monotonic() < self._lease_until() and self._global.is_bound(self.snapshot.root):
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
            (time.monotonic() >= self._lease_until(), Reason.NO_LEASE),
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
            fresh = Snapshot(epoch, True, root, space, True, self._shared_generation[1], weights)
        else:
            fresh = Snapshot(epoch, kind == "private", os.urandom(ROOT_BYTES), None, False, generation, weights)
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
        """Rebind the root and swap the snapshot. Agent thread; the acknowledgement is sent after this returns. An epoch below the one
        adopted is ignored: it cannot come from a correct agent."""
        with self.lock:
            if epoch < self.epoch:
                self.counters["lower_epoch_refused"] += 1
                return
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

    def end(self, weights: bytes) -> bool:
        """Blocks that this engine has named after these weights, or this adapter, in this epoch may have been computed with others.
        Returns whether others may have been told of such names."""
        with self.lock:
            self._ended = {ended for ended in self._ended if ended[0] >= self.epoch} | {(self.epoch, weights)}
            self._settled = False
            self._refresh()
            return self.member.secret is not None and self.epoch >= 0

    def has_ended(self, adapter: bytes) -> bool:
        """Whether `end` was called for this adapter in this epoch."""
        return (self.epoch, adapter) in self._ended

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
