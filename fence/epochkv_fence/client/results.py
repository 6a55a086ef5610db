"""What a client hands out: a pool's status, the weights of its engines, resets, and the errors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from epochkv_fence.protocol.messages import EngineStatus, SharingState, Status
from epochkv_fence.protocol.pool import called, listed

OnFailure = Literal["bypass", "crash"]


@dataclass(frozen=True, slots=True)
class Engine:
    """One live engine process (one per data-parallel rank), as its newest heartbeat told the hub.

    Attributes:
        instance: hex digits drawn when it started.
        name: its pod, or its engine's name, with `/rank` above rank 0.
        epoch: highest epoch it acknowledged; None before the first.
        state: `sharing`: it shares the pool's KV with engines of equal weights. `unknown`: it does not know which weights it holds,
            so it shares nothing, see `weights_note`. `asleep`: vLLM has given the memory of weights or KV back. `own`: it can never
            know its weights, so it keeps its cache to itself. `isolated`: its caches were reset alone, so it shares nothing before the
            next epoch. `behind`: not at the target yet.
        old_epoch_requests: requests it still runs under an older epoch, each with the KV it already held.
        weights: digest of the weights that its ranks hold, 32 hex digits; empty: unknown.
        weights_note: why they are unknown.
        weights_since_s: for how long it has reported them, in seconds.
        tiers_off: why it cannot use its tiers, or not all of them: `LayoutUnsupported`, `TiersBroken`, `TiersOff`, `SavesOnly`,
            `OwnCache`, `L1Only`; empty: it can.
        tiers_note: the same in a sentence, with what to change.
        versions: of what it runs: `epochkv`, `vllm`, `mooncake`; empty: it is older than this.
        namespace: of its pod.
    """

    instance: str
    name: str
    engine: str
    pod: str
    rank: int
    epoch: int | None
    state: SharingState
    old_epoch_requests: int
    age_seconds: float
    silent_seconds: float
    fingerprint: str
    weights: str = ""
    weights_note: str = ""
    weights_since_s: float = 0.0
    tiers_off: str = ""
    tiers_note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""

    @classmethod
    def of(cls, status: EngineStatus, target: int) -> Engine:
        report = {
            **status.report(),
            "weights": status.weights.hex() if status.weights is not None else "",
            "versions": dict(status.versions),
        }
        del report["isolated"], report["pushed"]
        return cls(
            instance=status.instance.hex(),
            name=status.name(status.instance),
            epoch=status.epoch,
            state=status.sharing_state(status.epoch is None or status.epoch < target),
            age_seconds=status.age_seconds,
            silent_seconds=status.silent_seconds,
            weights_since_s=status.since_seconds,
            **report,
        )

    @property
    def base_name(self) -> str:
        """Of all ranks of its pod or engine."""
        return self.pod or self.engine or self.instance[:8]


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as its hub knows it.

    Attributes:
        target: highest epoch recorded; engines are told this one.
        published: highest epoch of which it is proved that no engine uses an older one.
        origin: who asked for the target: `Spec`, `Trainer` or `Engine`.
        lease_seconds: an engine that cannot be reached leaves the epoch within this and its margin.
        engines: the live ones, by name.
        labels: what trainers called weights, by their digests (32 hex digits): 16, the first, those that engines hold, and the newest.
        settling_seconds: the hub became leader just now; until then engines may live that are not among `engines` yet.
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
        found.sort(key=lambda engine: (engine.name, engine.rank, engine.instance))
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
            Published: they never did; their leases have fenced them, or they left (best effort: who fell silent within the first
            half second is not known by name).
        old_epoch_requests: requests that go on under older epochs, each with what it already held.
        noop: the epoch was published before it was asked for, or waited for.
    """

    epoch: int
    published: bool
    duration_s: float
    engines: int
    laggards: tuple[str, ...]
    old_epoch_requests: int
    noop: bool


# ----------------------------------------------------------------------------------------------------------------------
# Which engines hold which weights, and whether a push has reached all of them. Pure: lists of engines in, answers out.
#
# An engine names its KV by a digest of the weights that its ranks hold and reports the digest, so nothing here makes KV safe.
# It is the proof that a push arrived, and it gives the digest a name that people know.


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """Live engines of one fingerprint whose ranks hold the same weights, bit by bit.

    Attributes:
        id: digest of the weights, 32 hex digits; people are shown the first 8.
        label: what a trainer called them last; empty: nobody did, or too long ago.
        engines: their names.
        since_s: for how long the first of them has held these weights, in seconds, as their hub saw it.
        fingerprint: of model, layout and everything else that decides the bytes of KV. Engines of two fingerprints share nothing.
    """

    id: str
    label: str
    engines: tuple[str, ...]
    since_s: float
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class UnknownWeights:
    """A live engine that does not say which weights it holds, and why; it shares nothing meanwhile."""

    name: str
    note: str

    def __str__(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Who holds which weights.

    Attributes:
        groups: most engines first, then those that changed last.
        unknown: engines of which nobody can say.
        notes: of a wait with a label: that these weights had another one before, or the label other weights. One sentence each.
    """

    groups: tuple[WeightsGroup, ...]
    unknown: tuple[UnknownWeights, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """Digests of all weights that somebody holds."""
        return frozenset(group.id for group in self.groups)

    @property
    def common(self) -> frozenset[str]:
        """Digests that all engines of a fingerprint hold, as far as they say: what a push has to replace.

        Where engines differ before a push, bringing them all to the weights of some is a change, so neither is in here.
        """
        kinds = Counter(group.fingerprint for group in self.groups)
        return frozenset(group.id for group in self.groups if kinds[group.fingerprint] == 1)

    @property
    def equal(self) -> bool:
        """There is an engine, and all of each fingerprint hold the same."""
        return bool(self.groups) and not self.unknown and len({group.fingerprint for group in self.groups}) == len(self.groups)

    def __str__(self) -> str:
        parts = [f"{called(group.id, group.label)}: {listed(group.engines)}" for group in self.groups]
        parts += [f"unknown: {listed([str(one) for one in self.unknown])}"] if self.unknown else []
        return "; ".join(parts) or "no engine is there"


@dataclass(frozen=True, slots=True)
class WeightsStanding:
    """How far a wait for weights is, for people who wait.

    Attributes:
        report: who holds what.
        waits_for: names of the engines that are waited for.
        why: what is waited for, in words.
    """

    report: WeightsReport
    waits_for: tuple[str, ...]
    why: str


def report(engines: Sequence[Engine], labels: Mapping[str, str]) -> WeightsReport:
    """Sort engines by what they hold."""
    groups = [
        WeightsGroup(weights, labels.get(weights, ""), tuple(sorted(engine.name for engine in members)), _since(members), fingerprint)
        for (fingerprint, weights), members in _grouped(engines)
        if weights
    ]
    groups.sort(key=lambda group: (-len(group.engines), group.since_s, group.fingerprint, group.id))
    silent = sorted((engine.name, engine.weights_note) for engine in engines if not engine.weights)
    return WeightsReport(tuple(groups), tuple(UnknownWeights(name, note) for name, note in silent))


def chosen(engines: Iterable[Engine], names: Collection[str] | None) -> tuple[list[Engine], tuple[str, ...]]:
    """The engines of these names (all for None), and the names that no live engine has. Without `/rank` a name means all ranks."""
    if names is None:
        return list(engines), ()
    found = [engine for engine in engines if engine.name in names or engine.base_name in names]
    known = {name for engine in found for name in (engine.name, engine.base_name)}
    return found, tuple(sorted(name for name in names if name not in known))


def outliers(engines: Iterable[Engine], other_than: Collection[str]) -> tuple[Engine, ...]:
    """Who keeps engines from holding the same, new weights: those whose weights are unknown or are in `other_than`, and of each
    fingerprint those that hold others than most do. Of two that are held as often, the ones that came last count."""
    late: list[Engine] = []
    settled: dict[str, list[list[Engine]]] = defaultdict(list)
    for (fingerprint, weights), members in _grouped(engines):
        if not weights or weights in other_than:
            late += members
        else:
            settled[fingerprint].append(members)
    for groups in settled.values():
        most = max(groups, key=lambda members: (len(members), -_since(members)))
        late += [engine for members in groups if members is not most for engine in members]
    return tuple(sorted(late, key=lambda engine: engine.name))


def why_not(
    engines: Sequence[Engine], absent: Sequence[str], other_than: Collection[str], labels: Mapping[str, str], live: Sequence[Engine]
) -> str:
    """What is wrong, in words, and who holds what; empty: the engines hold the same, new weights.

    Args:
        live: all engines of the pool, which are shown when none has the names.
    """
    late = outliers(engines, other_than)
    if engines and not late and not absent:
        return ""
    found = report(engines or live, labels)
    parts = [f"no engine is called {listed(absent)}"] if absent else []
    if found.equal and len(late) == len(engines):
        parts.append("the weights did not change")
    elif late:
        parts.append(f"{listed([engine.name for engine in late])} {'does' if len(late) == 1 else 'do'} not")
    return f"{'; '.join(parts)}. Now {found}" if parts else str(found)


def _grouped(engines: Iterable[Engine]) -> Iterable[tuple[tuple[str, str], list[Engine]]]:
    groups: dict[tuple[str, str], list[Engine]] = defaultdict(list)
    for engine in engines:
        groups[engine.fingerprint, engine.weights].append(engine)
    return groups.items()


def _since(engines: Iterable[Engine]) -> float:
    return max(engine.weights_since_s for engine in engines)


# ----------------------------------------------------------------------------------------------------------------------
# What the trainer client raises. Every message says what is known, and what to do with the engines.


class PoolError(Exception):
    """Base of everything that this client raises for reasons outside the caller's code."""

    def __reduce__(self) -> tuple[object, ...]:  # to be raised in another process: of Ray, of multiprocessing
        return type(self).__new__, (type(self), *self.args), vars(self)


class HubUnreachable(PoolError):
    """No hub answered in time. Whether something was asked for and recorded is unknown: ask again."""


class KeyRefused(HubUnreachable):
    """A hub answers and does not take our key (or is not the hub whose key we have)."""


class WrongPool(PoolError):
    """The key speaks for another pool than the one the configuration names. Nothing was asked of it."""


class ResetNotRecorded(HubUnreachable):
    """No hub recorded the epoch in time, so engines go on with the KV they have: ask again.

    Attributes:
        epoch: what was asked for; None: not even the pool's epoch is known. Asking again is harmless.
    """

    def __init__(self, text: str, epoch: int | None) -> None:
        super().__init__(text)
        self.epoch = epoch


class ResetTimeout(PoolError):
    """The epoch is recorded and not published in time. Engines that did not acknowledge are fenced by their leases.

    Attributes:
        reset: what is known, with the laggards by name.
    """

    def __init__(self, text: str, reset: Reset) -> None:
        super().__init__(text)
        self.reset = reset


class WeightsDiverged(PoolError):
    """Engines do not hold the same, new weights in time. No wrong KV comes of it: each shares with its equals alone.

    Attributes:
        engines: names of those that do not hold what they should; of a name that was given and that no engine has, that name.
        report: who held what when the time was over.
    """

    def __init__(self, text: str, engines: tuple[str, ...], report: WeightsReport) -> None:
        super().__init__(text)
        self.engines = engines
        self.report = report


class PoolClosed(PoolError):
    """This object was closed, or belongs to the process that forked this one: connect again."""
