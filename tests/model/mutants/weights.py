"""Rules of the gate (design page "fence", section 5): who has the weights of an epoch. Each taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from epochkv_fence import hub_events as ev
from epochkv_fence.asks import Ask
from epochkv_fence.authority import PoolRecord
from epochkv_fence.boots import BootRecord, Gate
from epochkv_fence.hub import Hub
from epochkv_fence.messages import Bump, Grant, Heartbeat, Mode, Moment
from epochkv_fence.pool import PoolConfig
from tests.model.mutants.kind import CALM, Mutant
from tests.model.parts import Rules


class _EveryoneJoins(Hub):
    def _mode(self, record: BootRecord, now: float) -> Mode:
        return Mode.BYPASS if self._holds_loads(now) else Mode.USE


class _AskedNow(Hub):
    """An ask counts as made when it is found."""

    def _asked(self, ask: Ask, now: float) -> list[ev.Action]:
        if not ask.listed:
            ask.at = now
        return super()._asked(ask, now)


class _ProposedNow(Hub):
    """A proposal counts as made when it arrives."""

    def _propose(self, epoch: int, moment: Moment | None, now: float) -> list[ev.Action]:
        assert self._instance is not None
        return super()._propose(epoch, Moment(self._instance, now), now)


class _BumpedNow(Hub):
    """A trainer's ask counts as made when it arrives."""

    def _bump(self, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
        assert self._instance is not None
        return super()._bump(peer, msgspec.structs.replace(bump, moment=Moment(self._instance, now), ago_seconds=0.0), now)


class _AnyonesMoment(Hub):
    """Reads a moment of another hub's clock as one of its own."""

    def _bump(self, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
        if bump.moment is not None and self._instance is not None:
            bump = msgspec.structs.replace(bump, moment=Moment(self._instance, min(bump.moment.at, now)))
        return super()._bump(peer, bump, now)


class _ForgetsAgo(Hub):
    """Does not count the time from the ask to the moment."""

    def _bump(self, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
        return super()._bump(peer, msgspec.structs.replace(bump, ago_seconds=0.0), now)


def _with_gate(kind: Callable[[Gate], Gate]) -> type[Hub]:
    class _Hub(Hub):
        def _gate_of(self, ask: Ask | None, target: int) -> Gate:
            return kind(super()._gate_of(ask, target))

    return _Hub


class _KeepsUse(Gate):
    """Keeps `Use` although it was granted for another epoch."""

    def mode(self, boot: BootRecord, target: int, config: PoolConfig) -> Mode:
        return Mode.USE if boot.mode is Mode.USE else super().mode(boot, target, config)


class _ForgetsUse(Gate):
    """Takes away what was granted before, by another hub."""

    def mode(self, boot: BootRecord, target: int, config: PoolConfig) -> Mode:
        if boot.epoch != target or config.weights_source == "Model" or target == 0:
            return super().mode(boot, target, config)
        before, boot.mode = boot.mode, Mode.BYPASS
        mode = super().mode(boot, target, config)
        boot.mode = before
        return mode


class _NeverHeld(Gate):
    """Does not wait for `weightsReady`."""

    def mode(self, boot: BootRecord, target: int, config: PoolConfig) -> Mode:
        self.held = False
        return super().mode(boot, target, config)


def _copy(kind: type[Gate]) -> Callable[[Gate], Gate]:
    return lambda gate: kind(gate.asked_at, gate.marked, gate.held, gate.listed, gate.request)


class _AgeAtGrant(Hub):
    """Looks at how old a boot is when it is granted, not at how old it was when the epoch was asked for."""

    def _grant(self, record: BootRecord, seq: int, now: float) -> Grant:
        if self._gate.asked_at is not None:
            self._gate.asked_at = now
        return super()._grant(record, seq, now)


class _BelievesAges(Hub):
    """Takes an engine's clock for as fast as its own."""

    def _heartbeat(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> list[ev.Action]:
        actions = super()._heartbeat(peer, beat, now, key_index)
        record = self._boots.get(beat.boot)
        if record is not None:
            record.born = min(record.born, now - beat.boot_age_seconds)
        return actions


class _ListLeavesAge(Hub):
    """A list does not close the age rule."""

    def _bump(self, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
        listed = bump.boots is not None
        actions = super()._bump(peer, bump, now)
        if listed and self._ask is not None and self._ask.epoch == bump.epoch:
            self._ask.listed, self._ask.at = False, now
        return actions

    def _gate_of(self, ask: Ask | None, target: int) -> Gate:
        gate = super()._gate_of(ask, target)
        if ask is not None:
            gate.asked_at, gate.listed = ask.at if ask.at is not None else ask.seen, False
        return gate


class _MarksForAnyEpoch(Hub):
    """A list for one epoch marks boots for the next ones, too."""

    def _gate_of(self, ask: Ask | None, target: int) -> Gate:
        before = self._gate.marked
        gate = super()._gate_of(ask, target)
        gate.marked = gate.marked | before
        return gate


class _MarksOfAnyVersion(Hub):
    """A list for other weights marks boots of the same epoch."""

    def _same_weights(self, version: str) -> bool:
        return True


class _AnyoneReleases(Hub):
    """Any repetition of an ask opens a gate that waits for its owner."""

    def _asked(self, ask: Ask, now: float) -> list[ev.Action]:
        ask.ready = True
        return super()._asked(ask, now)


class _ReadyAsksAnew(Hub):
    """When the weights are ready, ages count from then on, not from the ask."""

    def _release(self, ask: Ask, now: float) -> list[ev.Action]:
        if ask.releases() and self.target == ask.epoch and self._gate.held:
            self._gate.asked_at = now
        return super()._release(ask, now)


class _OpensAList(Hub):
    """A later ask of the owner opens a gate that a trainer's list closed."""

    def _release(self, ask: Ask, now: float) -> list[ev.Action]:
        if self.target == ask.epoch and self._gate.listed:
            self._gate.asked_at, self._gate.listed = now, False
        return super()._release(ask, now)


class _ListsAreForgotten(Hub):
    """A mark for an epoch to come is lost."""

    def _mark(self, bump: Bump, now: float) -> list[ev.Action]:
        return []


class _ForgetsTheDead(Hub):
    """An update whose trainer died is over."""

    def _failing_epoch(self, now: float) -> int | None:
        updates = self._trainers.updates
        if self.term is not None and now >= updates.expires_at() and updates._open is not None:
            updates.end(updates._open.number)
        return None


class _AgeInTheMiddle(Hub):
    """A plain reset in the middle of a push counts as one after it."""

    def _pushed_meanwhile(self, ask: Ask | None) -> bool:
        return False


class _IgnoresTheNote(Hub):
    """A new hub takes no update for open that nobody tells it of."""

    def _lead_updates(self, record: PoolRecord, now: float) -> None:
        super()._lead_updates(replace(record, update=None), now)


class _ForgetsTheList(Hub):
    """A plain reset goes by age as soon as somebody uses what a list named."""

    def _goes_on(self, ask: Ask | None) -> bool:
        return super()._goes_on(ask) and not self._heirs()

    def _listed(self) -> bool:
        return False


PUSHED = {"pushed": True, "restores": False}
RESTLESS = {**PUSHED, **CALM, "policy": "Retain", "push_crashes": 0.3, "idle": 0.0, "steps": 3000, "disorder": 0.1, "pace": 0.4}
DYING = {
    **RESTLESS,
    "push_crashes": 0.0,
    "trainer_restarts": 0.04,
    "engines": 2,
    "pace": 0.2,
    "orders": ("client, push under pause",),
}
"""Trainers that die in the middle of a push."""
CRASHING = {**RESTLESS, "push_crashes": 0.0, "trainer_restarts": 0.5}


WEIGHTS_MUTANTS = {
    "every boot joins": Mutant(Rules(hub=_EveryoneJoins), "5", PUSHED),
    "an ask counts as made when it is found": Mutant(Rules(hub=_AskedNow), "5", {**RESTLESS, "orders": ("spec, push under pause",)}),
    "a proposal counts as made on arrival": Mutant(
        Rules(hub=_ProposedNow), "5", {**RESTLESS, "orders": ("engines reset together",), "local": "propose"}
    ),
    "a trainer's ask counts as made on arrival": Mutant(
        Rules(hub=_BumpedNow), "5", {**RESTLESS, "orders": ("client, reset after a push",)}
    ),
    "another hub's moment is read as ours": Mutant(
        Rules(hub=_AnyonesMoment),
        "5",
        {**RESTLESS, "takeovers": 0.1, "trouble": 0.3, "engines": 4, "wander": 0.6, "orders": ("client, reset after a push",)},
    ),
    "the time from ask to moment is not counted": Mutant(
        Rules(hub=_ForgetsAgo), "5", {**RESTLESS, "orders": ("client, reset after a push",)}
    ),
    "Use is kept over epochs": Mutant(Rules(hub=_with_gate(_copy(_KeepsUse))), "5", PUSHED),
    "age taken when granted": Mutant(Rules(hub=_AgeAtGrant), "5", RESTLESS),
    "an engine's clock is believed": Mutant(Rules(hub=_BelievesAges), "5", {**RESTLESS, "orders": ("spec, push under pause",)}),
    "weightsReady is not waited for": Mutant(Rules(hub=_with_gate(_copy(_NeverHeld))), "5", {**PUSHED, "orders": ("spec, fence first",)}),
    "ages count from weightsReady": Mutant(Rules(hub=_ReadyAsksAnew), "5", {**RESTLESS, "orders": ("spec, fence first",)}),
    "any repetition releases a held epoch": Mutant(Rules(hub=_AnyoneReleases), "5", {**PUSHED, "orders": ("spec, fence first",)}),
    "a list leaves the age rule open": Mutant(Rules(hub=_ListLeavesAge), "5", {**PUSHED, "orders": ("client, fence first",)}),
    "the owner's ask opens a trainer's list": Mutant(
        Rules(hub=_OpensAList), "5", {**PUSHED, "orders": ("client, fence first", "client, push under pause")}
    ),
    "marks hold for later epochs": Mutant(
        Rules(hub=_MarksForAnyEpoch), "5", {**RESTLESS, "push_crashes": 0.1, "orders": ("client, push under pause", "client, fence first")}
    ),
    "marks for other weights count": Mutant(
        Rules(hub=_MarksOfAnyVersion), "5", {**CRASHING, "orders": ("client, push under pause", "client, fence first")}
    ),
    "a plain reset after an update goes by age": Mutant(
        Rules(hub=_ForgetsTheList), "5", {**RESTLESS, "orders": ("client, push under pause", "client, reset of listed weights")}
    ),
    "a list is not kept": Mutant(Rules(hub=_ListsAreForgotten), "5", {**PUSHED, "orders": ("client, push under pause",)}),
    "a trainer that died is forgotten": Mutant(
        Rules(hub=_ForgetsTheDead), "5", {**DYING, "trainer_restarts": 0.3, "engines": 3, "steps": 1200, "pace": 0.4}
    ),
    "a plain reset in the middle of a push opens by age": Mutant(Rules(hub=_AgeInTheMiddle), "5", DYING),
    "a new hub ignores the note of an update": Mutant(Rules(hub=_IgnoresTheNote), "5", {**DYING, "takeovers": 0.1}),
    "a new hub takes Use away": Mutant(
        Rules(hub=_with_gate(_copy(_ForgetsUse))), "5", {**PUSHED, "takeovers": 1.0, "policy": "Retain", "reconfigures": False}
    ),
}
