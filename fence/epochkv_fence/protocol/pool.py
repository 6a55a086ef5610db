"""Values about one pool that the hub takes and gives: its configuration, and what it looks like right now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import msgspec

from epochkv_fence.protocol.messages import EngineReport, Source

ReclaimPolicy = Literal["Delete", "RemoveAll", "Retain"]
RECLAIM_POLICIES: Final[tuple[ReclaimPolicy, ...]] = get_args(ReclaimPolicy)
EngineState = Literal["sharing", "isolated", "unknown", "behind", "silent"]
ENGINE_STATES: Final[tuple[EngineState, ...]] = get_args(EngineState)


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

    def __post_init__(self) -> None:
        assert self.uid
        assert 0.1 <= self.lease_seconds <= 86_400.0
        assert self.reclaim_seconds >= 0.1
        assert self.weights_grace_seconds >= 0.0
        assert self.reclaim in RECLAIM_POLICIES

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
        weights_since: seconds for which it has reported its weights.
        diverged_seconds: for so long it has held these while others of its fingerprint hold other ones. None: it is not live,
            its weights are not known, or they are those of most of its fingerprint.
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
    diverged_seconds: float | None = None

    @property
    def state(self) -> EngineState:
        """One word for metrics."""
        if not self.alive:
            return "silent"
        if not self.converged:
            return "behind"
        if self.weights is None:
            return "unknown"
        return "isolated" if self.isolated else "sharing"


@dataclass(frozen=True, slots=True)
class WeightsView:
    """The live instances that hold the same weights.

    Attributes:
        label: what these weights were called last; empty: nobody said.
        engines: how many instances.
        since_seconds: for how long the first of them has reported these.
        fingerprints: how many different ones they have.
    """

    weights: bytes
    label: str
    engines: int
    since_seconds: float
    fingerprints: int


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool as its hub knows it.

    Attributes:
        leading: this hub leads and has read the pool's record; nothing else here counts when it is False.
        target, published: recorded durably.
        asked: highest epoch asked for so far, recorded or not.
        engines: all instances known, by engine, pod, rank.
        laggards: those alive that are not at the target.
        old_epoch_requests: requests under older roots, over all engines.
        started_at: when the newest epoch was asked for (when recorded, if that is unknown); Unix seconds.
        behind_since: since when the target is not published, which newer epochs leave alone; Unix seconds. None: it is published.
        published_at: when the newest published epoch was published by this hub; Unix seconds.
        reset_seconds: duration of the latest reset published by this hub, measured on one monotonic clock.
        reclaimed: highest epoch below which no keys are left, as an engine or the store reported.
        origin: of the target; None: target 0, or not known.
        reclaim_policy: as configured.
        reclaimed_keys, reclaimed_bytes: removed from the store so far, as known to this hub.
        wipe_failed: the store could not be wiped after the newest published epoch (`RemoveAll`); the keys of older epochs are
            removed one by one instead.
        labels: what weights were called, newest last.
        weights: the live instances by the weights they hold; most first, of as many the newest.
        diverged: live instances whose weights are not those of most of their fingerprint (of as many, not the newest).
        limited: live instances that cannot use their tiers, or not all of them.
    """

    uid: str
    leading: bool
    target: int
    published: int
    asked: int
    engines: list[EngineView]
    laggards: list[EngineView]
    old_epoch_requests: int
    started_at: float | None
    published_at: float | None
    reset_seconds: float | None
    reclaimed: int
    origin: Source | None = None
    reclaim_policy: ReclaimPolicy = "Delete"
    reclaimed_keys: int = 0
    reclaimed_bytes: int = 0
    wipe_failed: bool = False
    labels: dict[bytes, str] = field(default_factory=dict)
    weights: list[WeightsView] = field(default_factory=list)
    diverged: list[EngineView] = field(default_factory=list)
    behind_since: float | None = None

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
