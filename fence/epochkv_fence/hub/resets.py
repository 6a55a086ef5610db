"""The way of an epoch: asked for, durable, told to engines, published. And what becomes of it when leadership changes."""

from __future__ import annotations

import math

from epochkv_fence.hub import events as ev
from epochkv_fence.hub import removal, snapshot
from epochkv_fence.hub.boots import NEVER
from epochkv_fence.hub.record import Ask
from epochkv_fence.hub.state import HubState
from epochkv_fence.protocol.authority import Origin, PoolRecord, Term
from epochkv_fence.protocol.messages import Error, Refusal, Source
from epochkv_fence.protocol.pool import PoolConfig

# ------------------------------------------------------------------ leadership


def acquire(hub: HubState, term: Term, found: PoolRecord, now: float) -> list[ev.Action]:
    """This hub leads, and has read the record."""
    abandon(hub)
    hub.lead.term, hub.lead.since = term, now
    # Nobody was ever granted anything: there is no older grant to wait for.
    hub.lead.settled_at = now + hub.rules.hold_seconds(hub.config) if found.granting else NEVER
    hub.record.lead(found)
    hub.labels.lead(found.labels)
    hub.boots.forget_at = now + hub.config.hold_seconds
    removal.older_epochs(hub, now + hub.config.reclaim_seconds)
    removal.unheld_weights(hub, now + hub.config.grace_seconds)
    actions = raise_target(hub, found.target, found.origin, now) or [ev.Changed(), *hub.boots.nudge(now)]
    return [*actions, *heal(hub, hub.boots.highest_epoch, now), *write_target(hub, now), *note_granting(hub)]


def abandon(hub: HubState) -> list[ev.Action]:
    """Forget everything that belongs to a term: what was evaluated and not yet read is void."""
    hub.lead.term = None
    hub.lead.since = hub.lead.settled_at = math.inf
    hub.record.abandon()
    removal.stop(hub)
    return [not_leading(hub, peer) for peer in [*hub.rounds.abandon(), *hub.labels.forget()]]


def not_leading(hub: HubState, peer: bytes) -> ev.Action:
    """Who does not lead, or has not read the record, does not know the target: a trainer that took an old one for it
    would ask for an epoch that is long published, and believe that its reset is done."""
    return ev.Send(peer, Error(Refusal.NOT_LEADING, f"this hub does not lead pool {hub.config.name} now; ask again"))


def configure(hub: HubState, config: PoolConfig, now: float) -> list[ev.Action]:
    """The pool's configuration was changed: grants made under a longer lease hold for as long."""
    if hub.leading and hub.lead.settled_at > now:
        hub.lead.settled_at += max(0.0, config.hold_seconds - hub.config.hold_seconds)
    before, hub.config = hub.config, config
    if config.client_public_keys != before.client_public_keys:
        for boot in hub.boots.known.values():
            boot.keys_changed(before.client_public_keys, config.client_public_keys)
    if config.reclaim != before.reclaim:
        removal.stop(hub)
        removal.older_epochs(hub, now)
        removal.unheld_weights(hub, now)
    return [ev.Changed()]


# ------------------------------------------------------------------ the target


def ask(hub: HubState, epoch: int, source: Origin, now: float) -> list[ev.Action]:
    """Somebody asks for `epoch`. Taken also by a hub that does not lead yet."""
    return write_target(hub, now) if hub.record.ask(Ask(epoch, now, source)) else []


def heal(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """Engines report `epoch`: ask for it again if a restored record has lost it."""
    if not hub.leading or not hub.rules.above_record(hub.record, epoch):
        return []
    hub.lead.settled_at = max(hub.lead.settled_at, now + hub.rules.hold_seconds(hub.config))
    return ask(hub, epoch, Origin(Source.ENGINE), now)


def write_target(hub: HubState, now: float) -> list[ev.Action]:
    """Make durable what was asked for, if that is due."""
    return hub.record.write(now) if hub.leading else []


def note_granting(hub: HubState) -> list[ev.Action]:
    """Before the first grant of all, note durably that grants may be out."""
    return hub.record.note() if hub.leading and hub.rounds.beats else []


def recorded(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """Only now `epoch` may be granted."""
    hub.record.written(epoch)
    return [*raise_target(hub, epoch, None, now), *write_target(hub, now)]


def observe(hub: HubState, found: PoolRecord, now: float) -> list[ev.Action]:
    """A durable target above our own raises ours: an old leader's late Record is harmless."""
    if not hub.leading:
        return []
    hub.record.noted = hub.record.noted or found.granting
    hub.record.durable = max(hub.record.durable, found.target)
    actions = raise_target(hub, found.target, found.origin, now)
    if hub.labels.found(found.labels):
        actions = [*actions, ev.Changed()]
    return [*actions, *raise_published(hub, found.published, now)]


def raise_target(hub: HubState, target: int, origin: Origin | None, now: float) -> list[ev.Action]:
    """`target` is durable: engines are told, if it is new."""
    if not hub.record.raise_target(target, origin, now):
        return []
    hub.boots.expect(target)
    nudges = hub.boots.nudge(now)
    return [ev.Changed(), *(nudges if hub.leading else [])]


# ------------------------------------------------------------------ publication


def publish_at(hub: HubState) -> float:
    """When the target may be published: nobody can be using an epoch below it any more, by anybody's grants. Infinity: there
    is nothing to publish."""
    if not hub.record.unpublished:
        return math.inf
    behind = (hub.rules.fenced_at(hub.boots.known[boot]) for boot in hub.boots.behind)
    return max(hub.rules.settled_at(hub.lead), hub.record.retry_at, max(behind, default=NEVER))


def published(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """It is durable that `epoch` is published."""
    hub.record.publish_written(epoch)
    return raise_published(hub, epoch, now)


def raise_published(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """`epoch` is published, by this hub or another one: trainers are told, and the store is cleaned, if that is new."""
    if not hub.record.raise_published(epoch, now):
        return []
    removal.after_publication(hub, now)
    return [ev.Changed(), *snapshot.answers(hub, hub.waiters.served(epoch))]
