"""Which engines hold which weights, and whether a push has reached all of them. Pure: lists of engines in, answers out.

An engine names its KV by a digest of the weights that its ranks hold and reports the digest, so nothing here makes KV safe.
It is the proof that a push arrived, and it gives the digest a name that people know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from epochkv_fence.client.results import Engine

SHOWN_DIGITS: Final = 8
MAX_NAMES: Final = 10


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


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Who holds which weights.

    Attributes:
        groups: most engines first, then those that changed last.
        unknown: engines of which nobody can say.
    """

    groups: tuple[WeightsGroup, ...]
    unknown: tuple[UnknownWeights, ...] = ()

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
        parts += [f"unknown: {listed([_with_note(found) for found in self.unknown])}"] if self.unknown else []
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


def called(weights: str, label: str) -> str:
    """Weights as people see them: `3f2a9c1e`, or `3f2a9c1e (step-42)`."""
    return f"{weights[:SHOWN_DIGITS]} ({label})" if label else weights[:SHOWN_DIGITS]


def listed(names: Sequence[str]) -> str:
    """A list that stays readable."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def report(engines: Iterable[Engine], labels: Mapping[str, str]) -> WeightsReport:
    """Sort engines by what they hold."""
    groups = [
        WeightsGroup(weights, labels.get(weights, ""), _names(members), _since(members), fingerprint)
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


def _names(engines: Iterable[Engine]) -> tuple[str, ...]:
    return tuple(sorted(engine.name for engine in engines))


def _with_note(found: UnknownWeights) -> str:
    return f"{found.name} ({found.note})" if found.note else found.name
