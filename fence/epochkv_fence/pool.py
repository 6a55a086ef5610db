"""Values about one pool that the hub takes and gives: its configuration, and what it looks like right now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from epochkv_fence.authority import Origin
from epochkv_fence.messages import Mode

ReclaimPolicy = Literal["Delete", "RemoveAll", "Retain"]
RECLAIM_POLICIES: Final = ("Delete", "RemoveAll", "Retain")
EngineState = Literal["use", "bypass", "private", "behind", "silent"]
ENGINE_STATES: Final[tuple[EngineState, ...]] = ("use", "bypass", "private", "behind", "silent")


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
        join_after_seconds: with pushed weights, how old a boot must have been when an epoch was asked for to use it.
        weights_source: `Pushed`: weights change under a running engine. `Model`: never.
        reclaim: what becomes of the keys of older epochs. `Delete`: after publication an engine removes them by prefix.
            `RemoveAll`: before publication all loads are held and drained and the store is wiped, which needs
            `store_admin`. `Retain`: the store's own eviction gets them; also for a pool without a store.
        reclaim_seconds: pause between two requests to do so (at least the store's lease time).
        store_admin: the hub's process reaches the store's admin endpoint, and the store is this pool's alone, so that it
            may be emptied as a whole.
    """

    uid: str
    name: str
    client_public_keys: tuple[str, ...]
    lease_seconds: float = 30.0
    join_after_seconds: float = 60.0
    weights_source: Literal["Pushed", "Model"] = "Pushed"
    reclaim: ReclaimPolicy = "Delete"
    reclaim_seconds: float = 10.0
    store_admin: bool = False

    def __post_init__(self) -> None:
        if not self.uid:
            raise ValueError(f"pool {self.name!r}: uid is empty; give the pool's uid")
        for key, low, high in (
            ("lease_seconds", 0.1, 86_400.0),
            ("join_after_seconds", 0.0, 1e9),
            ("reclaim_seconds", 0.1, 1e9),
        ):
            value = getattr(self, key)
            if not low <= value <= high:
                raise ValueError(f"pool {self.name!r}: {key} is {value}; it must be from {low} to {high}")
        if self.weights_source not in ("Pushed", "Model"):
            raise ValueError(f"pool {self.name!r}: weights_source is {self.weights_source!r}; use 'Pushed' or 'Model'")
        if self.reclaim not in RECLAIM_POLICIES:
            raise ValueError(f"pool {self.name!r}: reclaim is {self.reclaim!r}; use one of {', '.join(RECLAIM_POLICIES)}")

    @property
    def hold_seconds(self) -> float:
        """Lease and margin: after this a grant is dead by anybody's clock."""
        return self.lease_seconds + margin_seconds(self.lease_seconds)

    @property
    def max_clock_rate(self) -> float:
        """How much faster than ours another machine's clock may run: what the margin allows for."""
        return self.hold_seconds / self.lease_seconds


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine boot as the hub knows it.

    Attributes:
        epoch: highest epoch it acknowledged; None before the first.
        mode: mode it reports for that epoch; BYPASS at the target with pushed weights means that its weights are pending.
        converged: `epoch` is the target or above.
        alive: heard from within the last lease.
        carried: requests it still runs under an older root.
        age_seconds: age of its process when it sent its newest heartbeat.
        silent_seconds: since it was last heard from.
        loading: reads from the store that it has not finished; None: it did not say.
        key_index: which of the pool's accepted keys it used last, 0 the newest; their number: one that is not accepted any more.
        private: its caches were reset alone, and it shares nothing before the next epoch, whatever its mode.
    """

    boot: bytes
    engine: str
    pod: str
    rank: int
    epoch: int | None
    mode: Mode
    converged: bool
    alive: bool
    carried: int
    age_seconds: float
    silent_seconds: float
    fingerprint: str
    stats: dict[str, float] = field(default_factory=dict)
    loading: int | None = None
    key_index: int = 0
    private: bool = False

    @property
    def state(self) -> EngineState:
        """One word for metrics."""
        if not self.alive:
            return "silent"
        if not self.converged:
            return "behind"
        if self.mode is Mode.BYPASS:
            return "bypass"
        return "private" if self.private else "use"


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool as its hub knows it.

    Attributes:
        leading: this hub leads and has read the pool's record; nothing else here counts when it is False.
        target, published: recorded durably.
        asked: highest epoch asked for so far, recorded or not.
        engines: all boots known, by engine, pod, rank.
        laggards: those alive that are not at the target.
        carried: requests under older roots, over all engines.
        started_at: when the newest epoch was asked for (when recorded, if that is unknown); Unix seconds.
        published_at: when the newest published epoch was published by this hub; Unix seconds.
        reset_seconds: duration of the latest reset published by this hub, measured on one monotonic clock.
        reclaimed: highest epoch below which no keys are left, as an engine or the store reported.
        weights_version: of the target; empty: nobody said.
        origin: of the target; None: target 0, or not known.
        weights_pending: live boots at the target that are in bypass because nobody said that they have its weights.
        held: the target waits for its owner to say that the weights are ready.
        reclaim_policy: as configured.
        reclaimed_keys, reclaimed_bytes: removed from the store so far, as known to this hub.
        wipe_failed: the store could not be wiped in time for the newest published epoch (`RemoveAll`).
    """

    uid: str
    leading: bool
    target: int
    published: int
    asked: int
    engines: list[EngineView]
    laggards: list[EngineView]
    carried: int
    started_at: float | None
    published_at: float | None
    reset_seconds: float | None
    reclaimed: int
    weights_version: str = ""
    origin: Origin | None = None
    weights_pending: list[EngineView] = field(default_factory=list)
    held: bool = False
    reclaim_policy: ReclaimPolicy = "Delete"
    reclaimed_keys: int = 0
    reclaimed_bytes: int = 0
    wipe_failed: bool = False

    @property
    def converged(self) -> bool:
        """Everything asked for is published."""
        return self.leading and self.published >= max(self.target, self.asked)
