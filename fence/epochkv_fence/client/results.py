"""What the trainer client returns: plain values, JSON when `msgspec.to_builtins` or `asdict` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epochkv_fence.messages import EngineStatus, Mode, Status

OnFailure = Literal["bypass", "crash"]
Order = Literal["push_under_pause", "fence_first"]


@dataclass(frozen=True, slots=True)
class Engine:
    """One live engine process (one per data-parallel rank), as its newest heartbeat told the hub.

    Attributes:
        boot: hex digits drawn when it started.
        name: its pod, or its engine's name, with `/rank` above rank 0.
        epoch: highest epoch it acknowledged; None before the first.
        state: `use`: it shares the pool's KV; `bypass`: at the target, without reuse, until it has the weights;
            `private`: at the target with the weights, but its caches were reset alone, so it shares nothing before the next
            epoch; `behind`: not at the target yet.
        carried: requests it still runs under an older epoch, each with the KV it already held.
        loading: reads from the store that it has not finished; None: it did not say.
    """

    boot: str
    name: str
    engine: str
    pod: str
    rank: int
    epoch: int | None
    state: Literal["use", "bypass", "private", "behind"]
    carried: int
    loading: int | None
    age_seconds: float
    silent_seconds: float
    fingerprint: str

    @classmethod
    def of(cls, status: EngineStatus, target: int) -> Engine:
        """From the wire."""
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
            loading=status.loading,
            age_seconds=status.age_seconds,
            silent_seconds=status.silent_seconds,
            fingerprint=status.fingerprint,
        )


def _state(status: EngineStatus, target: int) -> Literal["use", "bypass", "private", "behind"]:
    if status.epoch is None or status.epoch < target:
        return "behind"
    if status.mode is Mode.BYPASS:
        return "bypass"
    return "private" if status.private else "use"


@dataclass(frozen=True, slots=True)
class OpenUpdate:
    """A weight update that a trainer has open; others wait.

    Attributes:
        holder: who that is: its process and machine.
        version: of the weights that it pushes.
        since_seconds: how long it has been open.
        left_seconds: it ends then if its trainer is heard no more.
    """

    holder: str
    version: str
    since_seconds: float
    left_seconds: float

    @classmethod
    def of(cls, page: Status) -> OpenUpdate | None:
        """From the wire."""
        found = page.update
        return None if found is None else cls(found.holder, found.version, found.since_seconds, found.left_seconds)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as its hub knows it.

    Attributes:
        target: highest epoch recorded; engines are told this one.
        published: highest epoch of which it is proved that no engine uses an older one.
        weights_version: of the target; empty: nobody said.
        origin: who asked for the target: `Spec`, `Trainer` or `Engine`.
        lease_seconds: an engine that cannot be reached leaves the epoch within this and its margin.
        engines: the live ones, by name.
        update: the weight update that is open; None: there is none, or the hub has led for too short to know.
    """

    name: str
    uid: str
    target: int
    published: int
    weights_version: str
    origin: str
    lease_seconds: float
    engines: tuple[Engine, ...]
    update: OpenUpdate | None = None

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
        """From the wire: the newest page and all engines."""
        found = [Engine.of(engine, page.target) for engine in engines]
        found.sort(key=lambda engine: (engine.name, engine.rank, engine.boot))
        origin = page.origin.value if page.target else ""
        update = OpenUpdate.of(page)
        return cls(name, uid, page.target, page.published, page.weights_version, origin, page.lease_seconds, tuple(found), update)


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
        bypassed: engines at the epoch that do not share because nobody said that they have its weights.
        weights_version: of the pool's target.
    """

    epoch: int
    published: bool
    duration_s: float
    engines: int
    laggards: tuple[str, ...]
    carried: int
    noop: bool
    bypassed: int
    weights_version: str = ""
