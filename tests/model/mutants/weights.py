"""Rules of what a hub shows of weights (design page "weights"), each taken away."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.holdings import Holdings, groups, with_divergence
from epochkv_fence.hub.machine import Hub
from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.protocol.messages import Heartbeat, Label, Labelled, Status
from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolSnapshot
from tests.model.mutants.kind import Mutant
from tests.model.mutants.outside import LABELLING
from tests.model.parts import Rules


class _LateBeatsCount(Hub):
    """The heartbeat that came last says what an engine holds, not the one that was sent last."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        record = self._boots.get(beat.boot)
        if record is not None:
            record.seq = min(record.seq, beat.seq - 1)
        return super()._heartbeat(peer, beat, now, key_index)


class _SaysNothing(Hub):
    """Other weights are no change."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        record = self._boots.get(beat.boot)
        before = record.newest.weights if record is not None else beat.weights
        actions = super()._heartbeat(peer, beat, now, key_index)
        return [action for action in actions if not isinstance(action, ev.Changed)] if before != beat.weights else actions


class _SinceTheLastBeat(Hub):
    """Weights are held since they were told last."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        actions = super()._heartbeat(peer, beat, now, key_index)
        record = self._boots.get(beat.boot)
        if record is not None:
            record.weights_at = record.heard_at
        return actions


class _BeginsAnew(Hub):
    """Weights are held since this hub heard of them first."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        return super()._heartbeat(peer, msgspec.structs.replace(beat, weights_age_seconds=0.0), now, key_index)


class _Shows(Hub):
    """Compares engines as `seen` by somebody who got something wrong."""

    def seen(self, engine: EngineView) -> EngineView:
        return engine

    def snapshot(self, now: float) -> PoolSnapshot:
        shown = super().snapshot(now)
        wrong = with_divergence([self.seen(engine) for engine in shown.engines], self._holdings, now)
        engines = [
            replace(engine, diverged_seconds=None if other.diverged_seconds is None else self._seconds(engine, now))
            for engine, other in zip(shown.engines, wrong, strict=True)
        ]
        return replace(shown, engines=engines, diverged=[engine for engine in engines if engine.diverged_seconds is not None])

    def _seconds(self, engine: EngineView, now: float) -> float:
        return min(engine.weights_since, self._holdings.unequal_seconds(engine.fingerprint, now))


class _OneFingerprint(_Shows):
    """Engines that cannot share are compared."""

    def seen(self, engine: EngineView) -> EngineView:
        return replace(engine, fingerprint="", diverged_seconds=None)


class _UnknownIsDifferent(_Shows):
    """An engine that cannot say what it holds counts as holding something of its own."""

    def seen(self, engine: EngineView) -> EngineView:
        return replace(engine, weights=engine.weights or bytes(16), diverged_seconds=None)


class _TheOldestLead(_Shows):
    """Of as many engines those count that have held theirs for longest."""

    def seen(self, engine: EngineView) -> EngineView:
        return replace(engine, weights_since=-engine.weights_since, diverged_seconds=None)


class _CountsTheSilent(Hub):
    """Engines that are silent count."""

    def snapshot(self, now: float) -> PoolSnapshot:
        shown = super().snapshot(now)
        return replace(shown, weights=groups([replace(engine, alive=True) for engine in shown.engines], shown.labels))


class _Counting(Holdings):
    def change(self, before: Heartbeat | None, after: Heartbeat | None, since: float) -> None:
        if after is not None:
            super().change(before, after, since)


class _CountsTheForgotten(Hub):
    """Engines that are forgotten go on holding what they held."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self._holdings = _Counting()


class _Agreeing(Holdings):
    def change(self, before: Heartbeat | None, after: Heartbeat | None, since: float) -> None:
        if before is not None and after is not None and before.weights != after.weights:
            super().change(before, None, since)
            before = None
        super().change(before, after, since)


class _AgreesInBetween(Hub):
    """While one of two engines takes other weights, they differ in nothing."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self._holdings = _Agreeing()


class _KnowsEverybody(Hub):
    """A hub that has only begun to lead does not say that it may not know every engine."""

    def _status(self, question: Status, now: float) -> Status:
        return msgspec.structs.replace(super()._status(question, now), settling_seconds=0.0)


# ---------------------------------------------------------------------------------------------------------------- labels


class _LabelsAtOnce(Hub):
    """A label is answered before it is durable."""

    def _label(self, peer: bytes, asked: Label) -> list[ev.Action]:
        actions = super()._label(peer, asked)
        return actions or [ev.Send(peer, Labelled(asked.request, asked.weights, asked.label))]


class _ReadsNoLabels(Hub):
    """A new leader takes no labels from the record."""

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        return super()._acquire(term, replace(record, labels={}), now)


class _ObservesNoLabels(Hub):
    """Labels that another hub wrote after this one began to lead are not taken from the record."""

    def _observe(self, record: PoolRecord, now: float) -> list[ev.Action]:
        return super()._observe(replace(record, labels={}), now)


class _BelievesItsLabels(Hub):
    """A new leader goes on with the labels that it remembers."""

    def _acquire(self, term: Term, record: PoolRecord, now: float) -> list[ev.Action]:
        remembered = self._labels.known
        actions = super()._acquire(term, record, now)
        self._labels.known = {**record.labels, **remembered}
        return actions


PUSHING = {"pushes": 3.0, "trouble": 0.3}

WEIGHTS_MUTANTS = {
    "late heartbeats say what an engine holds": Mutant(Rules(hub=_LateBeatsCount), "4", {**PUSHING, "disorder": 0.9}),
    "other weights are no change": Mutant(Rules(hub=_SaysNothing), "4", PUSHING),
    "weights are held since the last heartbeat": Mutant(Rules(hub=_SinceTheLastBeat), "4"),
    "weights are held since this hub heard of them": Mutant(Rules(hub=_BeginsAnew), "4"),
    "silent engines hold weights": Mutant(Rules(hub=_CountsTheSilent), "4", PUSHING),
    "engines of different fingerprints diverge": Mutant(Rules(hub=_OneFingerprint), "4", {**PUSHING, "fingerprints": 2}),
    "an engine that cannot say has diverged": Mutant(Rules(hub=_UnknownIsDifferent), "4", PUSHING),
    "of as many engines the oldest count": Mutant(Rules(hub=_TheOldestLead), "4", PUSHING),
    "forgotten engines diverge": Mutant(Rules(hub=_CountsTheForgotten), "4", {**PUSHING, "fingerprints": 1}),
    "engines that change agree in between": Mutant(Rules(hub=_AgreesInBetween), "4", {**PUSHING, "fingerprints": 1, "engines": 2}),
    "a new leader claims to know every engine": Mutant(
        Rules(hub=_KnowsEverybody), "4", {"orders": ("client, weight update",), "restores": False, "takeovers": 1.0, "idle": 0.0}
    ),
    "a label is answered before it is durable": Mutant(Rules(hub=_LabelsAtOnce), "4", LABELLING),
    "a new leader reads no labels": Mutant(Rules(hub=_ReadsNoLabels), "4", {**LABELLING, "takeovers": 0.3}),
    "labels that another hub wrote are not taken": Mutant(Rules(hub=_ObservesNoLabels), "4", {**LABELLING, "takeovers": 0.3}),
    "a new leader believes the labels it remembers": Mutant(Rules(hub=_BelievesItsLabels), "4", {**LABELLING, "takeovers": 1.0}),
}
