"""What the trainer client returns: plain values, JSON when `msgspec.to_builtins` or `asdict` is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from epochkv_fence.protocol.messages import EngineStatus, Status

OnFailure = Literal["bypass", "crash"]
State = Literal["use", "private", "unknown", "behind"]


@dataclass(frozen=True, slots=True)
class Engine:
    """One live engine process (one per data-parallel rank), as its newest heartbeat told the hub.

    Attributes:
        boot: hex digits drawn when it started.
        name: its pod, or its engine's name, with `/rank` above rank 0.
        epoch: highest epoch it acknowledged; None before the first.
        state: `use`: it shares the pool's KV with engines of equal weights. `unknown`: it does not know which weights it holds, so
            it shares nothing, see `weights_note`. `private`: its caches were reset alone, so it shares nothing before the next
            epoch. `behind`: not at the target yet.
        carried: requests it still runs under an older epoch, each with the KV it already held.
        weights: digest of the weights that its ranks hold, 32 hex digits; empty: unknown.
        weights_note: why they are unknown.
        weights_since_s: for how long it has reported them, in seconds.
        tiers_off: why it cannot use its tiers, or not all of them: `LayoutUnsupported`, `TiersBroken`, `TiersOff`, `SavesOnly`,
            `L1Only`; empty: it can.
        tiers_note: the same in a sentence, with what to change.
        versions: of what it runs: `epochkv`, `vllm`, `mooncake`; empty: it is older than this.
    """

    boot: str
    name: str
    engine: str
    pod: str
    rank: int
    epoch: int | None
    state: State
    carried: int
    age_seconds: float
    silent_seconds: float
    fingerprint: str
    weights: str = ""
    weights_note: str = ""
    weights_since_s: float = 0.0
    tiers_off: str = ""
    tiers_note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, status: EngineStatus, target: int) -> Engine:
        name = status.pod or status.engine or status.boot.hex()[:8]
        return cls(
            boot=status.boot.hex(),
            name=f"{name}/{status.rank}" if status.rank else name,
            engine=status.engine,
            pod=status.pod,
            rank=status.rank,
            epoch=status.epoch,
            state=_state(status, target),
            carried=status.carried,
            age_seconds=status.age_seconds,
            silent_seconds=status.silent_seconds,
            fingerprint=status.fingerprint,
            weights=status.weights.hex() if status.weights is not None else "",
            weights_note=status.weights_note,
            weights_since_s=status.since_seconds,
            tiers_off=status.tiers_off,
            tiers_note=status.tiers_note,
            versions=dict(status.versions),
        )

    @property
    def base_name(self) -> str:
        """Of all ranks of its pod or engine."""
        return self.pod or self.engine or self.boot[:8]


def _state(status: EngineStatus, target: int) -> State:
    if status.epoch is None or status.epoch < target:
        return "behind"
    if status.weights is None:
        return "unknown"
    return "private" if status.private else "use"


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as its hub knows it.

    Attributes:
        target: highest epoch recorded; engines are told this one.
        published: highest epoch of which it is proved that no engine uses an older one.
        origin: who asked for the target: `Spec`, `Trainer` or `Engine`.
        lease_seconds: an engine that cannot be reached leaves the epoch within this and its margin.
        engines: the live ones, by name.
        labels: what trainers called weights, by their digests (32 hex digits): the newest 16, whether somebody holds them or not.
        settling_seconds: the hub has only begun to lead; until then engines may live that are not among `engines` yet.
        hub_version: of EpochKV, as the hub runs it; empty: it is older than this.
    """

    name: str
    uid: str
    target: int
    published: int
    origin: str
    lease_seconds: float
    engines: tuple[Engine, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    settling_seconds: float = 0.0
    hub_version: str = ""

    @property
    def converged(self) -> bool:
        """No reset is open."""
        return self.published >= self.target

    @property
    def laggards(self) -> tuple[str, ...]:
        """Names of live engines that are not at the target."""
        return tuple(engine.name for engine in self.engines if engine.state == "behind")

    @classmethod
    def of(cls, name: str, uid: str, page: Status, engines: list[EngineStatus]) -> PoolStatus:
        found = [Engine.of(engine, page.target) for engine in engines]
        found.sort(key=lambda engine: (engine.name, engine.rank, engine.boot))
        return cls(
            name=name,
            uid=uid,
            target=page.target,
            published=page.published,
            origin=page.origin.value if page.target else "",
            lease_seconds=page.lease_seconds,
            engines=tuple(found),
            labels=dict(page.labels),
            settling_seconds=page.settling_seconds,
            hub_version=page.version,
        )


@dataclass(frozen=True, slots=True)
class Reset:
    """The outcome of a reset.

    Attributes:
        epoch: what was asked for.
        published: it is proved that no engine uses KV named under an older epoch.
        duration_s: from the call to this answer.
        engines: processes that the hub knows.
        laggards: names of those that had not acknowledged. Unpublished: they are waited for, until their leases fence them.
            Published: they never did, and their leases have fenced them (best effort: who fell silent within the first half
            second is not known by name).
        carried: requests that go on under older epochs, each with what it already held.
        noop: the epoch was published before it was asked for, or waited for.
    """

    epoch: int
    published: bool
    duration_s: float
    engines: int
    laggards: tuple[str, ...]
    carried: int
    noop: bool
