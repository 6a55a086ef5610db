"""How an epoch becomes durable, is told to engines and is published, and what a change of leadership does to it."""

from __future__ import annotations

import math

from epochkv_fence.hub import events as ev
from epochkv_fence.hub import removal, snapshot
from epochkv_fence.hub.boots import NEVER
from epochkv_fence.hub.record import Ask
from epochkv_fence.hub.state import HubState
from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.protocol.messages import Error, Refusal, Source
from epochkv_fence.protocol.pool import PoolConfig

# ------------------------------------------------------------------ leadership


def acquire(hub: HubState, term: Term, found: PoolRecord, now: float) -> list[ev.Action]:
    """This hub leads, and `found` is what it read after it won the term."""
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
    """The term ends. The hub forgets what belongs to it, and tells those who wait for an answer."""
    hub.lead.term = None
    hub.lead.since = hub.lead.settled_at = math.inf
    hub.record.abandon()
    removal.stop(hub)
    return [not_leading(hub, peer) for peer in [*hub.rounds.abandon(), *hub.labels.forget()]]


def not_leading(hub: HubState, peer: bytes) -> ev.Action:
    """The answer of a hub that does not lead. It does not know the target, and an old target would mislead a trainer.

    The trainer would ask for an epoch that is published already, and take its reset for done.
    """
    return ev.Send(peer, Error(Refusal.NOT_LEADING, f"this hub does not lead pool {hub.config.name} now; ask again"))


def configure(hub: HubState, config: PoolConfig, now: float) -> list[ev.Action]:
    """The pool's configuration changes. Grants of other hubs may be made under the longer lease, so the wait for them grows."""
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


def ask(hub: HubState, epoch: int, source: Source, now: float) -> list[ev.Action]:
    """Somebody asks for `epoch`. A hub that does not lead yet remembers it, too."""
    return write_target(hub, now) if hub.record.ask(Ask(epoch, now, source)) else []


def heal(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """An engine reports `epoch`. If a restored record has lost it, the hub asks for it again."""
    if not hub.leading or not hub.rules.above_record(hub.record, epoch):
        return []
    hub.lead.settled_at = max(hub.lead.settled_at, now + hub.rules.hold_seconds(hub.config))
    return ask(hub, epoch, Source.ENGINE, now)


def write_target(hub: HubState, now: float) -> list[ev.Action]:
    """Make the highest ask durable, if that is due."""
    return hub.record.write(now) if hub.leading else []


def note_granting(hub: HubState) -> list[ev.Action]:
    """Before its first grant, the hub notes durably that grants may be out, so that a later hub waits for them."""
    return hub.record.note() if hub.leading and hub.rounds.beats else []


def recorded(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """`epoch` is durable, so the hub may grant it from now on."""
    hub.record.written(epoch)
    return [*raise_target(hub, epoch, None, now), *write_target(hub, now)]


def observe(hub: HubState, found: PoolRecord, now: float) -> list[ev.Action]:
    """Somebody saw the record. A durable target above our own raises ours, so an old leader's late write is harmless."""
    if not hub.leading:
        return []
    hub.record.noted = hub.record.noted or found.granting
    hub.record.durable = max(hub.record.durable, found.target)
    actions = raise_target(hub, found.target, found.origin, now)
    if hub.labels.found(found.labels):
        actions = [*actions, ev.Changed()]
    return [*actions, *raise_published(hub, found.published, now)]


def raise_target(hub: HubState, target: int, origin: Source | None, now: float) -> list[ev.Action]:
    """`target` is durable. If it is new, the hub tells engines."""
    if not hub.record.raise_target(target, origin, now):
        return []
    hub.boots.expect(target)
    nudges = hub.boots.nudge(now)
    return [ev.Changed(), *(nudges if hub.leading else [])]


# ------------------------------------------------------------------ publication


def publish_at(hub: HubState) -> float:
    """When the hub may publish the target, because by then no grant of any hub lets an engine use a lower epoch.

    Infinity: there is nothing to publish.
    """
    if not hub.record.unpublished:
        return math.inf
    behind = (hub.rules.fenced_at(hub.boots.known[boot]) for boot in hub.boots.behind)
    return max(hub.rules.settled_at(hub.lead), hub.record.retry_at, max(behind, default=NEVER))


def published(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """The publication of `epoch` is durable."""
    hub.record.publish_written(epoch)
    return raise_published(hub, epoch, now)


def raise_published(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """This hub or another one published `epoch`. If that is new, the hub tells trainers and has old keys removed."""
    if not hub.record.raise_published(epoch, now):
        return []
    removal.after_publication(hub, now)
    return [ev.Changed(), *snapshot.answers(hub, hub.waiters.served(epoch))]
