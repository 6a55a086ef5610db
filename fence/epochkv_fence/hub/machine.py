"""The hub side of the fence as a pure state machine: one pool's target and published epoch, and its grants.

No I/O, no clock: `step(event, now)` returns what the driver has to do. The driver (`net.server`) runs the leadership reads
that serve all pools; the model tests run two of these against one authority under a virtual clock.
`HubState` is what a hub knows, and `record` has the rules of the design page "fence", section 4.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from epochkv_fence.hub.reclaim import Reclaimer, Reported, Wiper
from epochkv_fence.hub.record import (
    MAX_INSTANCES,
    NEVER,
    RULES,
    Ask,
    HubRules,
    InstanceRecord,
    Instances,
    Labels,
    Leadership,
    Record,
    Round,
    Rounds,
    Waiters,
)
from epochkv_fence.protocol import messages as ms
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolRecord, PoolSnapshot, Term, WeightsView
from epochkv_fence.version import VERSION

ROUND_SECONDS: Final = 1.0
"""Longest pause between grant rounds, unless a reset is open and an engine waits that is behind."""
ROUNDS_PER_LEASE: Final = 10
"""A grant is worth what is left of its lease since the heartbeat was sent, so short leases need quicker rounds."""
JOIN_SECONDS: Final = 0.05
"""The same while an engine instance waits that has no grant of this hub: it may share nothing because of that, as after a restart."""
QUESTION_SECONDS: Final = 0.05
"""Shortest pause between rounds that are for a trainer's question alone."""


class HubState:
    """One pool, as the hub in this process knows it; `rules` decide what the hub may do."""

    def __init__(self, config: PoolConfig, rules: HubRules) -> None:
        self.config = config
        self.rules = rules
        self.lead = Leadership()
        self.record = Record()
        self.instances = Instances()
        self.rounds = Rounds()
        self.waiters = Waiters()
        self.labels = Labels()
        self.wiper = Wiper()
        self.reclaimer = Reclaimer()
        self.reported = Reported()

    @property
    def leading(self) -> bool:
        """This hub leads, and has read the record."""
        return self.lead.term is not None

    @property
    def open(self) -> bool:
        """A reset is under way."""
        return self.leading and (self.record.target > self.record.published or self.record.recording is not None)


class Hub:
    """One pool's hub. A test passes other `rules` to show that the fence needs its own."""

    def __init__(self, config: PoolConfig, rules: HubRules = RULES) -> None:
        self.state = HubState(config, rules)

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event at `now` (seconds on this hub's monotonic clock)."""
        actions = self._take(event, now)
        if not (self.state.leading and self.state.labels.unwritten):
            return actions
        held = frozenset(one.newest.weights for one in self.state.instances.known.values() if one.newest.weights is not None)
        return [*actions, ev.NoteLabels(self.state.labels.write(), held)]

    def _take(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: PLR0911 - one line per event
        hub = self.state
        match event:
            case ev.Heard(peer, message, key_index):
                return hear(hub, peer, message, key_index, now)
            case ev.RoundBegan(number):
                self._begin_round(number, now)
            case ev.RoundVerified(number):
                return self._finish_round(number, now)
            case ev.RoundDropped(number):
                hub.rounds.put_back(number, hub.lead.term)
            case ev.Tick():
                return self._tick(now)
            case ev.Asked(epoch, origin):
                return ask(hub, epoch, origin, now)
            case ev.Acquired(term, record):
                return acquire(hub, term, record, now)
            case ev.SteppedDown():
                return [*abandon(hub), ev.Changed()]
            case ev.Observed(record):
                return observe(hub, record, now)
            case ev.Done(call, ok, removed):
                return self._done(call, ok, removed, now)
            case ev.Configured(config):
                return configure(hub, config, now)
        return []

    def _done(self, call: ev.Call, ok: bool, removed: tuple[int, int | None], now: float) -> list[ev.Action]:
        hub, record = self.state, self.state.record
        match call:
            case ev.RecordTarget(epoch) if ok:
                record.written(epoch)
                return [*raise_target(hub, epoch, None, now), *write_target(hub, now)]
            case ev.RecordTarget():
                record.write_failed(now)
            case ev.NoteGranting() if ok:
                record.note_written()
            case ev.NoteGranting():
                record.note_failed(now)
            case ev.NoteLabels(labels, held) if ok:
                answers = hub.labels.written(labels, held)
                return [ev.Changed(), *(ev.Send(peer, answer) for peer, answer in answers)] if answers else []
            case ev.NoteLabels(labels):
                hub.labels.write_failed(labels)
            case ev.Publish(epoch) if ok:
                record.publish_written(epoch)
                return raise_published(hub, epoch, now)
            case ev.Publish():
                record.publish_failed(now)
            case ev.RemoveAll() if ok:
                return emptied(hub, call, *removed, now)
            case ev.RemoveAll(epoch, sweep):
                hub.reclaimer.sweep_failed(epoch) if sweep else hub.wiper.missed(epoch, now)
        return []

    # ------------------------------------------------------------------ for the driver

    def snapshot(self, now: float) -> PoolSnapshot:
        """The pool at `now`; times are on this hub's clock (the driver turns them into Unix seconds)."""
        hub = self.state
        record, reclaimer = hub.record, hub.reclaimer
        views = sorted(
            (instance.view(record.target, hub.config, now) for instance in hub.instances.known.values()),
            key=lambda view: (view.engine, view.pod, view.rank, view.instance),
        )
        engines = with_majority(views)
        return PoolSnapshot(
            leading=hub.leading,
            target=record.target,
            published=record.published,
            asked=record.wanted,
            engines=engines,
            started_at=record.started_at,
            behind_since=record.behind_since,
            published_at=record.published_at,
            reset_seconds=record.reset_seconds,
            reclaimed=reclaimer.done_below,
            origin=record.origin,
            reclaimed_keys=reclaimer.keys,
            reclaimed_bytes=reclaimer.num_bytes,
            wipe_failed=hub.wiper.failed,
            labels=dict(hub.labels.known),
            weights=groups(engines, hub.labels.known),
        )

    # ------------------------------------------------------------------ rounds

    @property
    def round_open(self) -> bool:
        """Something in the present round needs its leadership read."""
        current = self.state.rounds.current
        if current is None:
            return False
        return bool(current.beats or current.questions) or self._proof_wanted() or current.publish is not None

    def _proof_wanted(self) -> bool:
        """Trainers wait to hear that the target is on record."""
        record = self.state.record
        return record.durable >= record.target > record.proven and bool(self.state.waiters)

    def round_at(self, now: float) -> float:
        """When the next round should begin; infinity while there is nothing to do."""
        hub, rounds = self.state, self.state.rounds
        if not hub.leading or rounds.current is not None:
            return math.inf
        due = publish_at(hub)
        if rounds.beats and hub.rules.may_grant(hub.record):
            pause = min(JOIN_SECONDS if rounds.joining else ROUND_SECONDS, hub.config.lease_seconds / ROUNDS_PER_LEASE)
            urgent = hub.open and not rounds.beats.keys().isdisjoint(hub.instances.behind.keys())
            due = min(due, max(now, rounds.last_at + (0.0 if urgent else pause)))
        if rounds.questions or self._proof_wanted():
            due = min(due, max(now, rounds.last_at + QUESTION_SECONDS))
        return due

    def _begin_round(self, number: int, now: float) -> None:
        hub, record = self.state, self.state.record
        if hub.lead.term is None:
            hub.rounds.current = None
            return
        publish = record.target if now >= publish_at(hub) else None
        # Also when nobody waits: what is heard from now on must not get into this round.
        grant = hub.rules.may_grant(record)
        hub.rounds.begin(number, hub.lead.term, min(record.durable, record.target), publish, grant=grant, now=now)
        if not self.round_open:
            hub.rounds.current = None

    def _finish_round(self, number: int, now: float) -> list[ev.Action]:
        """The read shows that this hub leads. In one step, it takes the epoch from memory, grants it, and answers questions.

        It publishes only what `_begin_round` evaluated, because the read shows that this hub led after that.
        """
        hub, record = self.state, self.state.record
        current = hub.rounds.take(number, hub.lead.term)
        if current is None:
            return []
        actions = self._grants(current, now)
        if current.target > record.proven:
            record.proven = current.target
            actions += answers(hub, [waiter for waiter in hub.waiters.all() if hub.rules.may_tell(record, waiter[2])])
        actions += [ev.Send(peer, status(hub, question, now)) for peer, question in current.questions]
        return actions + (record.publish(current.publish) if current.publish is not None else [])

    def _grants(self, current: Round, now: float) -> list[ev.Action]:
        hub = self.state
        actions: list[ev.Action] = []
        for name, (peer, seq) in current.beats.items():
            instance = hub.instances.known.get(name)
            if instance is not None:
                instance.live_until = max(instance.live_until, now + hub.rules.fence_timeout_seconds(hub.config))
                weights = instance.newest.weights
                label = hub.labels.known.get(weights, "") if weights is not None else ""
                grant = ms.Grant(name, seq, hub.record.target, hub.config.lease_seconds, weights if label else None, label)
                actions.append(ev.Send(peer, grant))
        return actions

    # ------------------------------------------------------------------ time

    def tick_at(self) -> float:
        """When the next `Tick` is due."""
        hub, record = self.state, self.state.record
        if not hub.leading:
            return hub.instances.forget_at
        due = min(hub.instances.forget_at, hub.reclaimer.due_at, hub.wiper.due_at(), hub.reported.check_at)
        if hub.open and hub.instances.behind:
            due = min(due, hub.instances.nudge_at)
        pending = record.unwritten or (bool(hub.rounds.beats) and not record.noted and not record.noting)
        return min(due, record.retry_at) if pending else due

    def _tick(self, now: float) -> list[ev.Action]:
        hub = self.state
        actions = self._forget(now) if now >= hub.instances.forget_at else []
        if not hub.leading:
            return actions
        if hub.open and hub.instances.behind and now >= hub.instances.nudge_at:
            actions += hub.instances.nudge(now)
        return [*actions, *write_target(hub, now), *note_granting(hub, now), *tick(hub, now)]

    def _forget(self, now: float) -> list[ev.Action]:
        hub = self.state
        over = hub.instances.forget(lambda instance: hub.rules.may_forget(instance, hub.config, now), hub.config.fence_timeout_seconds, now)
        for instance in over:
            hub.rounds.beats.pop(instance, None)
        if not over:
            return []
        engines_changed(hub, now)
        return [ev.Changed()]


# ----------------------------------------------------------------------------------------------------------------------
# What a hub does with the messages of engines and trainers.


def hear(hub: HubState, peer: bytes, message: ms.Message, key_index: int, now: float) -> list[ev.Action]:  # noqa: PLR0911 - one line per message
    match message:
        case ms.Heartbeat():
            return _heartbeat(hub, peer, message, key_index, now)
        case ms.Propose():
            counts = hub.leading and hub.rules.proposal_counts(hub.record, message.epoch)
            return ask(hub, hub.record.target + 1, ms.Source.ENGINE, now) if counts else []
        case ms.Bump():
            return _bump(hub, peer, message, now)
        case ms.Status():
            return _question(hub, peer, message, now)
        case ms.Reclaimed():
            return [ev.Changed()] if hub.reclaimer.answered(message, hub.record.published) else []
        case ms.Label():
            return _label(hub, peer, message)
        case ms.Leave():
            return _leave(hub, message.instance, now)
        case ms.Error():
            return []
        case _:
            return [ev.Send(peer, ms.Error(ms.Refusal.UNEXPECTED, f"a hub takes no {type(message).__name__}"))]


# ------------------------------------------------------------------ engines


def _heartbeat(hub: HubState, peer: bytes, beat: ms.Heartbeat, key_index: int, now: float) -> list[ev.Action]:
    instances, config = hub.instances, hub.config
    if beat.instance in instances.departed:
        return []
    if beat.pool and beat.pool != config.uid:
        # It was given the keys of a pool that took its pool's name. Its names are not found here, and its epoch is not this pool's.
        text = (
            f"this engine is of the pool with uid {beat.pool}, its keys are of {config.name} with uid {config.uid}: start it again, with"
            " connection.json and keys of one pool"
        )
        return [ev.Send(peer, ms.Error(ms.Refusal.POOL, text))]
    if beat.instance not in instances.known and len(instances.known) >= MAX_INSTANCES:
        text = f"pool {config.name} already has {MAX_INSTANCES} engine instances; wait until some are forgotten"
        return [ev.Send(peer, ms.Error(ms.Refusal.LIMIT, text))]
    changed = instances.hear(peer, beat, key_index, target=hub.record.target, fence_timeout_seconds=config.fence_timeout_seconds, now=now)
    instance = instances.known[beat.instance]
    if beat.weights is not None:
        hub.reported.hear(beat.weights, config.grace_seconds, now)
    hub.rounds.wait(instance, peer, beat.seq, now)
    if changed:
        engines_changed(hub, now)
    return [*([ev.Changed()] if changed else []), *heal(hub, instance.epoch or 0, now), *note_granting(hub, now)]


def _leave(hub: HubState, instance: bytes, now: float) -> list[ev.Action]:
    hub.rounds.beats.pop(instance, None)
    if not hub.instances.leave(instance):
        return []
    engines_changed(hub, now)
    return [ev.Changed()]


# ------------------------------------------------------------------ trainers


def _bump(hub: HubState, peer: bytes, bump: ms.Bump, now: float) -> list[ev.Action]:
    """A hub that does not lead yet takes the ask, too, and answers it when it leads."""
    actions = ask(hub, bump.epoch, ms.Source.TRAINER, now)
    if hub.leading and bump.epoch > hub.record.wanted:
        text = f"epoch {bump.epoch} is more than {ms.MAX_EPOCH_STEP} above {hub.record.wanted}, and an epoch never goes down again"
        return [ev.Send(peer, ms.Error(ms.Refusal.LIMIT, text))]
    if bump.epoch > hub.record.published:
        hub.waiters.wait(peer, bump.request, bump.epoch)
    if not hub.leading:
        return [*actions, not_leading(hub, peer)]
    told = hub.rules.may_tell(hub.record, bump.epoch)
    return [*actions, *(answers(hub, [(peer, bump.request, bump.epoch)]) if told else [])]


def _question(hub: HubState, peer: bytes, question: ms.Status, now: float) -> list[ev.Action]:
    if not hub.leading:
        return [not_leading(hub, peer)]
    if not hub.rules.needs_read(question):
        return [ev.Send(peer, status(hub, question, now))]
    hub.rounds.ask(peer, question)
    return []


def _label(hub: HubState, peer: bytes, asked: ms.Label) -> list[ev.Action]:
    if not hub.leading:
        return [not_leading(hub, peer)]
    answer = hub.labels.ask(peer, asked)
    return [] if answer is None else [ev.Send(peer, answer)]


# ----------------------------------------------------------------------------------------------------------------------
# How an epoch becomes durable, is told to engines and is published, and what a change of leadership does to it.


# ------------------------------------------------------------------ leadership


def acquire(hub: HubState, term: Term, found: PoolRecord, now: float) -> list[ev.Action]:
    """This hub leads, and `found` is what it read after it won the term."""
    abandon(hub)
    hub.lead.term, hub.lead.since = term, now
    # Nobody was ever granted anything: there is no older grant to wait for.
    hub.lead.settled_at = now + hub.rules.fence_timeout_seconds(hub.config) if found.granting else NEVER
    hub.record.lead(found)
    hub.labels.lead(found.labels)
    hub.instances.forget_at = now + hub.config.fence_timeout_seconds
    older_epochs(hub, now + hub.config.reclaim_seconds, sweep=False)
    unheld_weights(hub, now + hub.config.grace_seconds)
    actions = raise_target(hub, found.target, found.origin, now) or [ev.Changed(), *hub.instances.nudge(now)]
    highest = max((instance.epoch or 0 for instance in hub.instances.known.values()), default=0)
    return [*actions, *heal(hub, highest, now), *write_target(hub, now), *note_granting(hub, now)]


def abandon(hub: HubState) -> list[ev.Action]:
    """The term ends. The hub forgets what belongs to it, and tells those who wait for an answer."""
    hub.lead.term = None
    hub.lead.since = hub.lead.settled_at = math.inf
    hub.record.abandon()
    stop(hub)
    return [not_leading(hub, peer) for peer in [*hub.rounds.abandon(), *hub.labels.forget()]]


def not_leading(hub: HubState, peer: bytes) -> ev.Action:
    """The answer of a hub that does not lead. It does not know the target, and an old target would mislead a trainer.

    The trainer would ask for an epoch that is published already, and take its reset for done.
    """
    return ev.Send(peer, ms.Error(ms.Refusal.NOT_LEADING, f"this hub does not lead pool {hub.config.name} now; ask again"))


def configure(hub: HubState, config: PoolConfig, now: float) -> list[ev.Action]:
    """The pool's configuration changes. Grants of other hubs may be made under the longer lease, so the wait for them grows."""
    if hub.leading and hub.lead.settled_at > now:
        hub.lead.settled_at += max(0.0, config.fence_timeout_seconds - hub.config.fence_timeout_seconds)
    before, hub.config = hub.config, config
    if config.client_public_keys != before.client_public_keys:
        for instance in hub.instances.known.values():
            instance.keys_changed(before.client_public_keys, config.client_public_keys)
    if config.reclaim != before.reclaim:
        stop(hub)
        older_epochs(hub, now, sweep=False)
        unheld_weights(hub, now)
    return [ev.Changed()]


# ------------------------------------------------------------------ the target


def ask(hub: HubState, epoch: int, source: ms.Source, now: float) -> list[ev.Action]:
    """Somebody asks for `epoch`. A hub that does not lead yet remembers it, too."""
    return write_target(hub, now) if hub.record.ask(Ask(epoch, now, source)) else []


def heal(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """An engine reports `epoch`. If a restored record has lost it, the hub asks for it again."""
    if not hub.leading or not hub.rules.above_record(hub.record, epoch):
        return []
    actions = ask(hub, epoch, ms.Source.ENGINE, now)
    if hub.record.wanted >= epoch:
        hub.lead.settled_at = max(hub.lead.settled_at, now + hub.rules.fence_timeout_seconds(hub.config))
    return actions


def write_target(hub: HubState, now: float) -> list[ev.Action]:
    """Make the highest ask durable, if that is due."""
    return hub.record.write(now) if hub.leading else []


def note_granting(hub: HubState, now: float) -> list[ev.Action]:
    """Before its first grant, the hub notes durably that grants may be out, so that a later hub waits for them."""
    return hub.record.note(now) if hub.leading and hub.rounds.beats else []


def observe(hub: HubState, found: PoolRecord, now: float) -> list[ev.Action]:
    """Somebody saw the record. A durable target above our own raises ours, so an old leader's late write is harmless."""
    if not hub.leading:
        return []
    hub.record.durable = max(hub.record.durable, found.target)
    raised = raise_target(hub, found.target, found.origin, now)
    labelled = [ev.Changed()] if hub.labels.found(found.labels) else []
    return [*raised, *labelled, *raise_published(hub, found.published, now)]


def raise_target(hub: HubState, target: int, origin: ms.Source | None, now: float) -> list[ev.Action]:
    """`target` is durable. If it is new, the hub tells engines, and may grant it from now on."""
    if not hub.record.raise_target(target, origin, now):
        return []
    hub.instances.expect(target)
    nudges = hub.instances.nudge(now)
    return [ev.Changed(), *(nudges if hub.leading else [])]


# ------------------------------------------------------------------ publication


def publish_at(hub: HubState) -> float:
    """When the hub may publish the target, because by then no grant of any hub lets an engine use a lower epoch.

    Infinity: there is nothing to publish.
    """
    if not hub.record.unpublished:
        return math.inf
    fenced = (hub.rules.fenced_at(hub.instances.known[instance]) for instance in reversed(hub.instances.behind))
    last = next((at for at in fenced if at > NEVER), NEVER)  # those that joined since may use no lower epoch, and come last
    return max(hub.rules.settled_at(hub.lead), hub.record.retry_at, last)


def raise_published(hub: HubState, epoch: int, now: float) -> list[ev.Action]:
    """This hub or another one published `epoch`. If that is new, the hub tells trainers and has old keys removed."""
    if not hub.record.raise_published(epoch, now):
        return []
    after_publication(hub, now)
    return [ev.Changed(), *answers(hub, hub.waiters.served(epoch))]


# ----------------------------------------------------------------------------------------------------------------------
# When the hub has keys removed from the store: after a publication, and when no engine holds certain weights any more.


def after_publication(hub: HubState, now: float) -> None:
    """An epoch is published. Where no hub ever granted anything, the store holds no keys to wipe."""
    if hub.leading and hub.config.reclaim == "RemoveAll" and hub.record.noted:
        hub.wiper.begin(hub.record.published, now)
    else:
        older_epochs(hub, now)


def older_epochs(hub: HubState, at: float, *, sweep: bool = True) -> None:
    """The store may hold keys of epochs below the published one. `sweep`: see `Reclaimer.start`."""
    if hub.leading and hub.rules.may_remove(hub.config):
        hub.reclaimer.start(hub.record.published, at, sweep=sweep)


def unheld_weights(hub: HubState, at: float) -> None:
    """The store may hold keys of weights that no engine holds."""
    if hub.leading and hub.rules.may_remove(hub.config):
        hub.reclaimer.start_weights(at)


def engines_changed(hub: HubState, now: float) -> None:
    """Engines came, went, or reported other weights, so the hub may know more about which weights somebody holds."""
    if hub.leading and hub.rules.may_remove(hub.config):
        hub.reclaimer.check_again(max(now, hub.rules.engines_known_at(hub.lead, hub.config)))


def stop(hub: HubState) -> None:
    """Another hub leads, or the policy changes."""
    hub.reclaimer.stop()
    hub.wiper.stop()


def tick(hub: HubState, now: float) -> list[ev.Action]:
    actions: list[ev.Action] = []
    if now >= hub.wiper.due_at():
        actions += _wipe(hub, now)
    if now >= hub.reported.check_at and hub.reported.expire(hub.config.grace_seconds, now):
        unheld_weights(hub, now)
    if now >= hub.reclaimer.due_at:
        actions += _ask_engine(hub, now)
    return actions


def _wipe(hub: HubState, now: float) -> list[ev.Action]:
    epoch = hub.wiper.next(now)
    if epoch is not None:
        return [ev.RemoveAll(epoch)]
    older_epochs(hub, now)
    return [ev.Changed()]


def _ask_engine(hub: HubState, now: float) -> list[ev.Action]:
    able = [instance for instance in _who_removes(hub) if hub.rules.can_reclaim(instance, hub.record, hub.config, now)]
    known_at = hub.rules.engines_known_at(hub.lead, hub.config)
    actions = hub.reclaimer.next(hub.record.published, _kept(hub, now), able, hub.config, now)
    if now < known_at:
        hub.reclaimer.check_again(known_at)
    return actions


def _who_removes(hub: HubState) -> list[InstanceRecord]:
    """Engines with a client of the store. Where the hub knows none and cannot sweep, what any engine says is all there is."""
    known = list(hub.instances.known.values())
    removing = [instance for instance in known if instance.newest.removes]
    return removing if removing or hub.config.store_admin else known


def _kept(hub: HubState, now: float) -> list[bytes]:
    """The weights that some engine may hold, so that their keys stay. Empty: the hub cannot tell now."""
    held = hub.reported.within(hub.config.grace_seconds, now)
    if held is None or now < hub.rules.engines_known_at(hub.lead, hub.config):
        return []
    live = [instance for instance in hub.instances.known.values() if instance.alive(hub.config, now)]
    return held if all(map(hub.rules.says_weights, live)) else []


def emptied(hub: HubState, call: ev.RemoveAll, keys: int, num_bytes: int | None, now: float) -> list[ev.Action]:
    """The store removed everything that nobody read."""
    if call.sweep:
        return [ev.Changed()] if hub.reclaimer.swept(call.epoch, keys, num_bytes, hub.record.published) else []
    hub.reclaimer.count(keys, num_bytes)
    if hub.wiper.answered(call.epoch):
        older_epochs(hub, now + hub.config.reclaim_seconds)
    return [ev.Changed()]


# ----------------------------------------------------------------------------------------------------------------------
# What a hub shows of a pool: engines by their weights, for people and metrics, and answers for trainers.


STATUS_PAGE: Final = 64
STATUS_PAGE_BYTES: Final = 60_000
"""At most so many bytes of engines and labels go into one page, so that it always fits into a message."""


# -------------------------------------------------------------------------------------------------------------- weights


def groups(engines: Iterable[EngineView], labels: Mapping[bytes, str]) -> list[WeightsView]:
    """The live engines by the weights they hold. The largest group comes first; of equal groups, the one with the newest weights."""
    by_weights: dict[bytes, list[float]] = {}
    for engine in engines:
        if engine.alive and engine.weights is not None:
            by_weights.setdefault(engine.weights, []).append(engine.weights_since)
    found = (WeightsView(held, labels.get(held, ""), len(since), max(since)) for held, since in by_weights.items())
    return sorted(found, key=lambda group: (-group.engines, group.since_seconds, group.weights))


def with_majority(engines: Sequence[EngineView]) -> list[EngineView]:
    """`engines`; those that hold other weights than most live engines of their fingerprint say what these hold."""
    fingerprints: dict[str, list[EngineView]] = {}
    for engine in engines:
        fingerprints.setdefault(engine.fingerprint, []).append(engine)
    most = {fingerprint: found[0].weights for fingerprint, members in fingerprints.items() if (found := groups(members, {}))}
    return [
        msgspec.structs.replace(engine, majority=most[engine.fingerprint])
        if engine.alive and engine.weights is not None and engine.weights != most[engine.fingerprint]
        else engine
        for engine in engines
    ]


# ------------------------------------------------------------------------------------------------------------- trainers


def answers(hub: HubState, waiters: Sequence[tuple[bytes, int, int]]) -> list[ev.Action]:
    """Tell trainers that wait, as (peer, request, epoch), how far the reset is. It counts all instances once, however many ask."""
    if not waiters:
        return []
    counted = ms.BumpStatus(
        request=0,
        epoch=0,
        target=hub.record.target,
        published=hub.record.published,
        engines=len(hub.instances.known),
        laggards=len(hub.instances.behind),
        old_epoch_requests=hub.instances.old_epoch_requests,
        lease_seconds=hub.config.lease_seconds,
    )
    return [ev.Send(peer, msgspec.structs.replace(counted, request=request, epoch=epoch)) for peer, request, epoch in waiters]


def status(hub: HubState, question: ms.Status, now: float) -> ms.Status:
    """The pool, with its live instances after `question.after`, by instance; fewer where their names are long."""
    labels = {weights.hex(): label for weights, label in hub.labels.known.items()} if question.after is None else {}
    alive = sorted((one for one in hub.instances.known.values() if one.alive(hub.config, now)), key=attrgetter("instance"))
    start = 0 if question.after is None else bisect_right(alive, question.after, key=attrgetter("instance"))
    engines: list[ms.EngineStatus] = []
    room = STATUS_PAGE_BYTES - len(msgspec.msgpack.encode(labels))
    for record in alive[start : start + STATUS_PAGE]:
        shown = _engine_status(record, now)
        room -= len(msgspec.msgpack.encode(shown))
        if room < 0:
            break
        engines.append(shown)
    return ms.Status(
        question.request,
        hub.record.target,
        hub.record.published,
        total=len(alive),
        engines=engines,
        lease_seconds=hub.config.lease_seconds,
        origin=hub.record.origin if hub.record.origin is not None else ms.Source.SPEC,
        pool=hub.config.uid[: ms.MAX_NAME],
        after=question.after,
        labels=labels,
        settling_seconds=max(0.0, hub.lead.settled_at - now),
        version=VERSION,
    )


def _engine_status(record: InstanceRecord, now: float) -> ms.EngineStatus:
    return ms.EngineStatus(
        instance=record.instance,
        epoch=record.epoch,
        age_seconds=record.newest.instance_age_seconds,
        silent_seconds=max(0.0, now - record.heard_at),
        since_seconds=max(0.0, now - record.weights_at),
        **record.newest.report(),
    )
