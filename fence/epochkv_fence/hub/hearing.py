"""What a hub does with the messages of engines and trainers."""

from __future__ import annotations

from epochkv_fence.hub import events as ev
from epochkv_fence.hub import removal, resets, snapshot
from epochkv_fence.hub.boots import MAX_BOOTS
from epochkv_fence.hub.state import HubState
from epochkv_fence.protocol.messages import (
    Bump,
    Error,
    Heartbeat,
    Label,
    Leave,
    Message,
    Propose,
    Reclaimed,
    Refusal,
    Source,
    Status,
)


def hear(hub: HubState, peer: bytes, message: Message, key_index: int, now: float) -> list[ev.Action]:  # noqa: PLR0911 - one line per message
    match message:
        case Heartbeat():
            return _heartbeat(hub, peer, message, key_index, now)
        case Propose():
            return _propose(hub, message.epoch, now)
        case Bump():
            return _bump(hub, peer, message, now)
        case Status():
            return _question(hub, peer, message, now)
        case Reclaimed():
            return [ev.Changed()] if hub.reclaimer.answered(message, hub.record.published) else []
        case Label():
            return _label(hub, peer, message)
        case Leave():
            return _leave(hub, message.boot, now)
        case Error():
            return []
        case _:
            return [ev.Send(peer, Error(Refusal.UNEXPECTED, f"a hub takes no {type(message).__name__}"))]


# ------------------------------------------------------------------ engines


def _heartbeat(hub: HubState, peer: bytes, beat: Heartbeat, key_index: int, now: float) -> list[ev.Action]:
    boots, config = hub.boots, hub.config
    if beat.boot in boots.departed:
        return []
    if beat.pool and beat.pool != config.uid:
        # It was given the keys of a pool that took its pool's name. Its names are not found here, and its epoch counts other resets.
        text = (
            f"this engine is of the pool with uid {beat.pool}, its keys are of {config.name} with uid {config.uid}: start it again, with"
            " connection.json and keys of one pool"
        )
        return [ev.Send(peer, Error(Refusal.POOL, text))]
    if beat.boot not in boots.known and len(boots.known) >= MAX_BOOTS:
        text = f"pool {config.name} already has {MAX_BOOTS} engine boots; wait until some are forgotten"
        return [ev.Send(peer, Error(Refusal.LIMIT, text))]
    changed = boots.hear(peer, beat, key_index, target=hub.record.target, hold=config.hold_seconds, now=now)
    boot = boots.known[beat.boot]
    if beat.weights is not None:
        hub.reported.hear(beat.weights, config.grace_seconds, now)
    hub.rounds.wait(boot, peer, beat.seq, now)
    if changed:
        removal.engines_changed(hub, now)
    return [*([ev.Changed()] if changed else []), *resets.heal(hub, boot.epoch or 0, now), *resets.note_granting(hub)]


def _leave(hub: HubState, boot: bytes, now: float) -> list[ev.Action]:
    hub.rounds.drop(boot)
    if not hub.boots.leave(boot, now):
        return []
    removal.engines_changed(hub, now)
    return [ev.Changed()]


def _propose(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    if not hub.leading or not hub.rules.proposal_counts(hub.record, epoch):
        return []
    return resets.ask(hub, hub.record.target + 1, Source.ENGINE, now)


# ------------------------------------------------------------------ trainers


def _bump(hub: HubState, peer: bytes, bump: Bump, now: float) -> list[ev.Action]:
    """A hub that does not lead yet takes the ask, too, and answers it when it leads."""
    actions = resets.ask(hub, bump.epoch, Source.TRAINER, now)
    if bump.epoch > hub.record.published:
        hub.waiters.wait(peer, bump.request, bump.epoch)
    if not hub.leading:
        return [*actions, resets.not_leading(hub, peer)]
    told = hub.rules.may_tell(hub.record, bump.epoch)
    return [*actions, *(snapshot.answers(hub, [(peer, bump.request, bump.epoch)]) if told else [])]


def _question(hub: HubState, peer: bytes, question: Status, now: float) -> list[ev.Action]:
    if not hub.leading:
        return [resets.not_leading(hub, peer)]
    if not hub.rules.needs_read(question):
        return [ev.Send(peer, snapshot.status(hub, question, now))]
    hub.rounds.ask(peer, question)
    return []


def _label(hub: HubState, peer: bytes, asked: Label) -> list[ev.Action]:
    if not hub.leading:
        return [resets.not_leading(hub, peer)]
    answer = hub.labels.ask(peer, asked)
    return [] if answer is None else [ev.Send(peer, answer)]
