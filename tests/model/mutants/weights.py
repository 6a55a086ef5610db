"""Rules of what a hub shows of weights (design page "weights"), each taken away."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from epochkv_fence.hub.machine import Hub, HubState, groups, with_majority
from epochkv_fence.hub.record import Labels
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Heartbeat, Label, Labelled, Status
from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolSnapshot
from tests.model.mutants.agent import LABELLING
from tests.model.mutants.kind import misreading, of_hub, with_part


def _as_the_newest(hub: HubState, event: ev.Heard) -> ev.Event:
    instance = hub.instances.known.get(event.message.instance) if isinstance(event.message, Heartbeat) else None
    if instance is not None and isinstance(event.message, Heartbeat):
        instance.seq = min(instance.seq, event.message.seq - 1)
    return event


def _of_no_age(hub: HubState, event: ev.Heard) -> ev.Event:
    if not isinstance(event.message, Heartbeat):
        return event
    return msgspec.structs.replace(event, message=msgspec.structs.replace(event.message, weights_age_seconds=0.0))


class _SaysNothing(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        beat = event.message if isinstance(event, ev.Heard) else None
        instance = self.state.instances.known.get(beat.instance) if isinstance(beat, Heartbeat) else None
        same = instance is None or not isinstance(beat, Heartbeat) or instance.newest.weights == beat.weights
        actions = super().step(event, now)
        return actions if same else [action for action in actions if not isinstance(action, ev.Changed)]


class _SinceTheLastBeat(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().step(event, now)
        beat = event.message if isinstance(event, ev.Heard) else None
        instance = self.state.instances.known.get(beat.instance) if isinstance(beat, Heartbeat) else None
        if instance is not None:
            instance.weights_at = instance.heard_at
        return actions


class _Misjudging(Hub):
    """Compares engines as `seen` by somebody who got something wrong."""

    def __init__(self, config: PoolConfig, seen: Callable[[EngineView], EngineView]) -> None:
        super().__init__(config)
        self._seen = seen

    def snapshot(self, now: float) -> PoolSnapshot:
        shown = super().snapshot(now)
        wrong = with_majority([msgspec.structs.replace(self._seen(engine), majority=None) for engine in shown.engines])
        engines = [msgspec.structs.replace(engine, majority=other.majority) for engine, other in zip(shown.engines, wrong, strict=True)]
        return replace(shown, engines=engines)


def _of_one_fingerprint(engine: EngineView) -> EngineView:
    return msgspec.structs.replace(engine, fingerprint="")


def _holding_something(engine: EngineView) -> EngineView:
    """An engine that cannot say what it holds counts as holding something of its own."""
    return msgspec.structs.replace(engine, weights=engine.weights or bytes(16))


def _oldest_first(engine: EngineView) -> EngineView:
    return msgspec.structs.replace(engine, weights_since=-engine.weights_since)


class _CountsTheSilent(Hub):
    def snapshot(self, now: float) -> PoolSnapshot:
        shown = super().snapshot(now)
        return replace(shown, weights=groups([msgspec.structs.replace(engine, alive=True) for engine in shown.engines], shown.labels))


class _KnowsEverybody(Hub):
    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        return [self._settled(action) for action in super().step(event, now)]

    def _settled(self, action: ev.Action) -> ev.Action:
        if isinstance(action, ev.Send) and isinstance(action.message, Status):
            return ev.Send(action.peer, msgspec.structs.replace(action.message, settling_seconds=0.0))
        return action


# ---------------------------------------------------------------------------------------------------------------- labels


class _LabelsAtOnce(Labels):
    def ask(self, peer: bytes, asked: Label) -> Labelled | None:
        super().ask(peer, asked)
        return Labelled(asked.request, asked.weights, asked.label)


class _BelievesItsLabels(Labels):
    def lead(self, recorded: Mapping[bytes, str]) -> None:
        remembered = self.known
        super().lead(recorded)
        self.known |= remembered


def _without_labels(hub: HubState, event: ev.Acquired | ev.Observed) -> ev.Event:
    return msgspec.structs.replace(event, record=replace(event.record, labels={}))


PUSHING = {"pushes": 3.0, "trouble": 0.3}

WEIGHTS_MUTANTS = {
    "late heartbeats say what an engine holds": of_hub(misreading(ev.Heard, _as_the_newest), {**PUSHING, "disorder": 0.9}),
    "other weights are no change": of_hub(_SaysNothing, PUSHING),
    "weights are held since the last heartbeat": of_hub(_SinceTheLastBeat),
    "weights are held since this hub heard of them": of_hub(misreading(ev.Heard, _of_no_age)),
    "silent engines hold weights": of_hub(_CountsTheSilent, PUSHING),
    "engines of different fingerprints diverge": of_hub(partial(_Misjudging, seen=_of_one_fingerprint), {**PUSHING, "fingerprints": 2}),
    "an engine that cannot say has diverged": of_hub(partial(_Misjudging, seen=_holding_something), PUSHING),
    "of as many engines the oldest count": of_hub(partial(_Misjudging, seen=_oldest_first), PUSHING),
    "a new leader claims to know every engine": of_hub(
        _KnowsEverybody, {"orders": ("client, weight update",), "restores": False, "takeovers": 1.0, "idle": 0.0}, seen=193
    ),
    "a label is answered before it is durable": of_hub(with_part(labels=_LabelsAtOnce), LABELLING),
    "a new leader reads no labels": of_hub(misreading(ev.Acquired, _without_labels), {**LABELLING, "takeovers": 0.3}),
    "labels that another hub wrote are not taken": of_hub(misreading(ev.Observed, _without_labels), {**LABELLING, "takeovers": 0.3}),
    "a new leader believes the labels it remembers": of_hub(with_part(labels=_BelievesItsLabels), {**LABELLING, "takeovers": 1.0}),
}
