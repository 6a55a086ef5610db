"""One pool, as its hub takes and gives it: configuration, durable record and the authority that keeps it, the events and actions of the
hub's state machine (`hub.machine`), and what the pool looks like right now."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from epochkv_fence.protocol.messages import MAX_COUNT, MAX_LABELS, EngineReport, Message, SharingState, Source

SHOWN_DIGITS: Final = 8
"""Of a digest of weights."""
ReclaimPolicy = Literal["Delete", "RemoveAll", "Retain"]
EngineState = SharingState | Literal["silent"]
ENGINE_STATES: Final[tuple[EngineState, ...]] = (*get_args(SharingState), "silent")


def margin_seconds(lease_seconds: float) -> float:
    """What a hub waits beyond a lease, for clocks that run at different rates: 10 % of it, at least 1 s."""
    return max(1.0, 0.1 * lease_seconds)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What a hub is told about a pool. May be replaced at any time, for the same `uid`.

    Attributes:
        uid: never reused, also when a pool of the same name is made again.
        name: for logs and errors, such as `namespace/name`.
        client_public_keys: CURVE public keys (z85, 40 characters) of which each speaks for this pool; two while a key is
            being changed.
        lease_seconds: how long a grant lasts. Changing it is safe while this hub leads; a shorter one must not take
            effect together with a change of leader.
        reclaim: what becomes of the keys of older epochs and of weights that no engine holds any more. `Delete`: an engine
            removes them by prefix. `RemoveAll`: the same, and after each publication the store is wiped as a whole, which
            needs `store_admin`. `Retain`: the store's own eviction gets them; also for a pool without a store.
        reclaim_seconds: pause between two requests to do so (at least the store's lease time).
        store_admin: the hub's process reaches the store's admin endpoint, and the store is this pool's alone, so that it
            may be emptied as a whole.
        weights_grace_seconds: keys of weights that no engine has reported for so long are removed; see `grace_seconds`.
    """

    uid: str
    name: str
    client_public_keys: tuple[str, ...]
    lease_seconds: float = 30.0
    reclaim: ReclaimPolicy = "Delete"
    reclaim_seconds: float = 10.0
    store_admin: bool = False
    weights_grace_seconds: float = 600.0

    @property
    def fence_timeout_seconds(self) -> float:
        """Lease and margin: after this a grant is dead by anybody's clock."""
        return self.lease_seconds + margin_seconds(self.lease_seconds)

    @property
    def grace_seconds(self) -> float:
        """`weights_grace_seconds`, and never less than a lease with its margin: a live engine may be silent for a lease."""
        return max(self.weights_grace_seconds, self.fence_timeout_seconds)


class EngineView(EngineReport, frozen=True):
    """One engine instance as the hub knows it: the report of its newest heartbeat, and what the hub adds.

    Attributes:
        epoch: highest epoch it acknowledged; None before the first.
        converged: `epoch` is the target or above.
        alive: heard from within the last lease.
        age_seconds: age of its process when it sent its newest heartbeat.
        silent_seconds: since it was last heard from.
        key_index: which of the pool's accepted keys it used last, 0 the newest; their number: one that is not accepted any more.
        weights_since: seconds for which it has reported its weights, or that it sleeps.
        majority: what most live engines of its fingerprint hold, where this live one holds other weights.
    """

    instance: bytes
    epoch: int | None
    converged: bool
    alive: bool
    age_seconds: float = 0.0
    silent_seconds: float = 0.0
    stats: dict[str, float] = msgspec.field(default_factory=dict)
    key_index: int = 0
    weights_since: float = 0.0
    majority: bytes | None = None

    @property
    def display_name(self) -> str:
        return self.name(self.instance)

    @property
    def updating(self) -> bool:
        """It is alive, and inside a call or a transfer that writes weights."""
        return self.alive and bool(self.stats.get("weights_updating"))

    @property
    def state(self) -> EngineState:
        """One word for metrics."""
        return self.sharing_state(not self.converged) if self.alive else "silent"


class WeightsView(NamedTuple):
    """The live instances that hold the same weights.

    Attributes:
        label: what these weights were called last; empty: nobody said.
        engines: how many instances.
        since_seconds: for how long the first of them has reported these.
    """

    weights: bytes
    label: str
    engines: int
    since_seconds: float

    @property
    def id(self) -> str:
        """32 hex digits."""
        return self.weights.hex()


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool as its hub knows it.

    Attributes:
        leading: this hub leads and has read the pool's record; nothing else here counts when it is False.
        target, published: recorded durably.
        asked: highest epoch asked for so far, recorded or not.
        engines: all instances known, by engine, pod, rank.
        started_at: when the newest epoch was asked for (when recorded, if that is unknown); Unix seconds.
        behind_since: since when the target is not published, which newer epochs leave alone; Unix seconds. None: it is published.
        published_at: when the newest published epoch was published by this hub; Unix seconds.
        reset_seconds: duration of the latest reset published by this hub, measured on one monotonic clock.
        reclaimed: highest epoch below which no keys are left, as an engine or the store reported.
        origin: of the target; None: target 0, or not known.
        reclaimed_keys, reclaimed_bytes: removed from the store so far, as known to this hub.
        wipe_failed: the store could not be wiped after the newest published epoch (`RemoveAll`); the keys of older epochs are
            removed one by one instead.
        labels: what weights were called, newest last.
        weights: the live instances by the weights they hold; most first, of as many the newest.
        diverged: live instances whose weights are not those of most of their fingerprint (of as many, not the newest).
        limited: live instances that cannot use their tiers, or not all of them.
    """

    target: int = 0
    published: int = 0
    engines: Sequence[EngineView] = ()
    leading: bool = True
    asked: int = 0
    started_at: float | None = None
    published_at: float | None = None
    reset_seconds: float | None = None
    reclaimed: int = 0
    origin: Source | None = None
    reclaimed_keys: int = 0
    reclaimed_bytes: int = 0
    wipe_failed: bool = False
    labels: dict[bytes, str] = field(default_factory=dict)
    weights: Sequence[WeightsView] = ()
    behind_since: float | None = None

    @property
    def old_epoch_requests(self) -> int:
        """Requests under older roots, over all engines."""
        return min(sum(engine.old_epoch_requests for engine in self.engines), MAX_COUNT)

    @property
    def diverged(self) -> list[EngineView]:
        return [view for view in self.engines if view.majority is not None]

    @property
    def limited(self) -> list[EngineView]:
        return [view for view in self.engines if view.alive and view.tiers_off]

    def overdue_seconds(self, lease_seconds: float, now: float) -> float:
        """For how long, at `now` (Unix seconds), a reset is unpublished beyond lease and margin; 0 while it is not late."""
        if self.behind_since is None:
            return 0.0
        return max(0.0, now - self.behind_since - lease_seconds - margin_seconds(lease_seconds))

    @property
    def converged(self) -> bool:
        """Everything asked for is published."""
        return self.leading and self.published >= max(self.target, self.asked)


# ----------------------------------------------------------------------------------------------------------------------
# What a hub needs from the outside: durable memory for two numbers, a note and some labels per pool, and a leadership it can check.
#
# Implementations: the pool object's status and a Lease in Kubernetes (in the operator), an SQLite file with a lock
# (`standalone.authority`). All of a hub's safety rests on the three promises below, so an implementation states how it keeps each.
#
# 1. `verify` is linearizable: it is True only if, at some moment between call and return, the stored holder *and*
#    transitions were those of the term asked about.
# 2. `load` is linearizable: it sees every write that returned before it was called. Never a watch cache.
# 3. `record`, `publish` and `note_granting` never decrease anything, whoever calls them and however late they land. `record` writes
#    a target and its origin in one atomic write, and leaves both alone unless it raises the target.
#
# `note_labels` adds to the labels on record in one atomic write, and drops old ones beyond `MAX_LABELS` (`merged_labels`).


class AuthorityError(Exception):
    """The authority did not answer or refused. The outcome of a write is then unknown; the hub tries again."""


class Term(NamedTuple):
    """One stretch of leadership.

    Attributes:
        holder: unique per process start.
        transitions: grows whenever leadership is taken, also when the same holder takes it again.
    """

    holder: str
    transitions: int


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """Everything a hub must remember about a pool.

    Attributes:
        target: highest epoch durably recorded.
        published: highest epoch proved to be the oldest in use; never above `target`.
        granting: some hub has (or may have) granted for this pool; never taken back.
        origin: who asked for `target` first; None: target 0, or a record from before origins were kept.
        labels: what weights were called, by their digest, newest last.
    """

    target: int = 0
    published: int = 0
    granting: bool = False
    origin: Source | None = None
    labels: Mapping[bytes, str] = field(default_factory=dict)


def merged_labels(known: Mapping[bytes, str], added: Mapping[bytes, str], held: Collection[bytes] = ()) -> dict[bytes, str]:
    """Both, newest last, at most `MAX_LABELS`; of the same weights `added` counts, and is the newer.

    The first that got a label stays the first: these are often the base weights, which a framework may load again at any time. Of the
    others, old ones go that are not `held` by engines, and then old ones: `spec.serve` may name what is held.
    """
    first = next(iter(known), None)
    merged = {weights: label for weights, label in known.items() if weights == first or weights not in added} | dict(added)
    unheld = [weights for weights in list(merged)[1:] if weights not in held and weights not in added]
    for weights in unheld[: max(0, len(merged) - MAX_LABELS)]:
        del merged[weights]
    items = list(merged.items())
    return dict(items[:1] + items[1:][1 - MAX_LABELS :])


def relabelled(known: Mapping[bytes, str], weights: bytes, label: str, held: Collection[bytes], *, only_new: bool = False) -> str:
    """What whoever calls these weights `label` should hear; empty: nothing.

    Args:
        known: what weights were called until now.
        held: what live engines hold that may share a label: those of other layouts.
        only_new: tell of weights, too, that have this label already.
    """
    before = known.get(weights)
    if before is not None and (only_new or before != label):
        return f"engines held these weights before, as {before}"
    others = [other.hex()[:SHOWN_DIGITS] for other, name in known.items() if name == label and other != weights and other not in held]
    if not others:
        return ""
    return f"{label} is the label of weights {others[-1]}, too" if before else f"until now {label} was the label of weights {others[-1]}"


def called(weights: str, label: str) -> str:
    """Weights as people see them: `3f2a9c1e`, or `3f2a9c1e (step-42)`."""
    return f"{weights[:SHOWN_DIGITS]} ({label})" if label else weights[:SHOWN_DIGITS]


def listed(names: Iterable[str], shown: int = 10) -> str:
    """The first few, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return ", ".join(found[:shown]) + more


def is_called(weights: str, label: str, name: str) -> bool:
    """Whether these weights (32 hex digits, and their label) are meant by `name`: the label, or the first 8 or more of the digits."""
    return name == label != "" or (len(name) >= 8 and weights.startswith(name))


class Authority(Protocol):
    """All calls are made with a deadline by the caller; a call that is cancelled may still take effect later."""

    async def verify(self, term: Term) -> bool:
        """Whether `term` is the current one, holder and transitions (promise 1). Raises when that is unknown."""

    async def load(self, pool_uid: str) -> PoolRecord:
        """What is durably recorded (promise 2)."""

    async def record(self, pool_uid: str, target: int, origin: Source | None = None) -> None:
        """Raise the durable target to at least `target`; returns after the write is durable.

        `origin` is written with it, in the same atomic write, and only if the target rises.
        """

    async def publish(self, pool_uid: str, epoch: int) -> None:
        """Raise the durable published epoch to at least `epoch`; returns after the write is durable."""

    async def note_granting(self, pool_uid: str) -> None:
        """Set the `granting` note; returns after the write is durable."""

    async def note_labels(self, pool_uid: str, labels: Mapping[bytes, str], held: Collection[bytes] = ()) -> None:
        """Make the record's labels `merged_labels` of them and these; returns after the write is durable."""


# ----------------------------------------------------------------------------------------------------------------------
# What goes into and comes out of the hub's state machine (`hub.machine.Hub.step`).


RETRY_SECONDS: Final = 0.25
"""After a write or a leadership read that failed, before the next one."""

# --------------------------------------------------------------------------------------------------------------- actions


class Send(msgspec.Struct, frozen=True):
    """Send this message to `peer`; it may be lost."""

    peer: bytes
    message: Message


class RecordTarget(msgspec.Struct, frozen=True):
    """Durably raise the target to `epoch`, which `origin` asked for."""

    epoch: int
    origin: Source | None = None


class NoteGranting(msgspec.Struct, frozen=True):
    """Durably note that grants may be out."""


class NoteLabels(msgspec.Struct, frozen=True):
    """Durably add these labels. `held`: weights that engines hold."""

    labels: Mapping[bytes, str]
    held: frozenset[bytes] = frozenset()


class Publish(msgspec.Struct, frozen=True):
    """Durably raise the published epoch to `epoch`."""

    epoch: int


class RemoveAll(msgspec.Struct, frozen=True):
    """`epoch` is published: remove everything that nobody reads from the pool's store.

    Attributes:
        sweep: because no engine can remove the keys of older epochs; else to give their memory back at once.
    """

    epoch: int
    sweep: bool = False


class Changed(msgspec.Struct, frozen=True):
    """What a snapshot shows has changed."""


Call = RecordTarget | NoteGranting | NoteLabels | Publish | RemoveAll
"""What a hub asks of the authority or of a store; each is answered by one `Done`."""
Action = Send | Call | Changed

# ---------------------------------------------------------------------------------------------------------------- events


class Done(msgspec.Struct, frozen=True):
    """A call has ended.

    Attributes:
        ok: what was asked for is durable, or done. Else there was no answer, or it was refused; it may still land.
        removed: by `RemoveAll`: how many keys, and how many bytes when that is known.
    """

    call: Call
    ok: bool
    removed: tuple[int, int | None] = (0, None)


class Acquired(msgspec.Struct, frozen=True):
    """Leadership was won in `term`, and `record` was read, linearizably, after that write had returned."""

    term: Term
    record: PoolRecord


class SteppedDown(msgspec.Struct, frozen=True):
    """This hub does not lead any more, or cannot tell."""


class Configured(msgspec.Struct, frozen=True):
    """The pool's configuration was changed."""

    config: PoolConfig


class Heard(msgspec.Struct, frozen=True):
    """A message from a client of this pool.

    Attributes:
        peer: where an answer goes.
        key_index: which of the pool's accepted keys the peer proved to have, 0 the newest.
    """

    peer: bytes
    message: Message
    key_index: int = 0


class Asked(msgspec.Struct, frozen=True):
    """The pool's owner asks for `epoch`. Also taken before this hub leads."""

    epoch: int
    origin: Source = Source.SPEC


class Observed(msgspec.Struct, frozen=True):
    """The pool's durable record was seen, however late; it never decreases anything."""

    record: PoolRecord


class RoundBegan(msgspec.Struct, frozen=True):
    """Collect the heartbeats received so far and evaluate publication; the leadership read starts after this."""

    round: int


class RoundVerified(msgspec.Struct, frozen=True):
    """The leadership read that was started after `RoundBegan` found the term it was asked about."""

    round: int


class RoundDropped(msgspec.Struct, frozen=True):
    """The leadership read gave no answer in time: no grants this round."""

    round: int


class Tick(msgspec.Struct, frozen=True):
    """`Hub.tick_at` has come, or time has passed."""


Event = Acquired | SteppedDown | Configured | Heard | Asked | Done | Observed | RoundBegan | RoundVerified | RoundDropped | Tick
