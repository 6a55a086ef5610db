"""What a hub remembers of a pool, and the rules by which it judges that (design page "fence", section 4).

It remembers engine instances, what is durable, labels, and who waits for it. It keeps engine instances in memory only: a new leader
waits until older grants are dead, and every engine sends heartbeats.

Each rule is a function of what it judges and of nothing else. `HubRules` holds all rules, so that a model test can replace one
of them and show that the fence needs it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_COUNT, MAX_EPOCH, MAX_EPOCH_STEP, Heartbeat, Label, Labelled, Nudge, Source, Status
from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolRecord, Term, merged_labels

NEVER: Final = -math.inf
MAX_INSTANCES: Final = 10_000
NUDGE_SECONDS: Final = 0.25
NUDGES_PER_SECOND: Final = 2_000
"""Thousands of instances that were just nudged are on their way: nudged again, each would only send another heartbeat."""


@dataclass(slots=True)
class InstanceRecord:
    """One engine instance.

    Attributes:
        newest: its newest heartbeat, for status.
        peer: where that came from.
        seq: of that heartbeat.
        key_index: which of the keys that the pool accepts now it came with, 0 the newest.
        epoch: highest epoch heard; a late heartbeat never lowers it.
        weights_at: when it first reported the weights of its newest heartbeat, to whatever hub.
        heard_at: when it was last heard from.
        live_until: when every grant of the present target is dead by its clock.
        below_until: when every grant below the present target is dead by its clock.
    """

    instance: bytes
    newest: Heartbeat
    peer: bytes = b""
    seq: int = -1
    key_index: int = 0
    epoch: int | None = None
    weights_at: float = NEVER
    heard_at: float = NEVER
    live_until: float = NEVER
    below_until: float = NEVER

    def hear(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> bool:
        """Take a heartbeat; return whether it changes anything that status shows."""
        before = self._shown()
        self.heard_at = now
        if beat.seq > self.seq:
            if self.seq < 0 or (beat.weights, beat.asleep) != (self.newest.weights, self.newest.asleep):
                self.weights_at = now - beat.weights_age_seconds
            self.seq, self.peer, self.newest, self.key_index = beat.seq, peer, beat, key_index
        if beat.epoch is not None and (self.epoch is None or beat.epoch > self.epoch):
            self.epoch = beat.epoch
        return before != self._shown()

    def keys_changed(self, before: Sequence[str], now: Sequence[str]) -> None:
        """The pool accepts other keys, so this instance's key has another place among them. A key that is gone counts as the oldest."""
        key = before[self.key_index] if self.key_index < len(before) else None
        self.key_index = now.index(key) if key in now else len(now)

    def _shown(self) -> tuple[object, ...]:
        beat = self.newest
        tiers = beat.tiers_off, beat.tiers_note
        return self.epoch, beat.old_epoch_requests, beat.isolated, beat.weights, beat.weights_note, tiers, self.key_index

    def at_least(self, epoch: int) -> bool:
        return self.epoch is not None and self.epoch >= epoch

    def alive(self, config: PoolConfig, now: float) -> bool:
        """The hub heard from it within the last lease."""
        return now < self.heard_at + config.lease_seconds

    def view(self, target: int, config: PoolConfig, now: float) -> EngineView:
        """This engine instance as status shows it; `majority` is left for who knows the others."""
        return EngineView(
            instance=self.instance,
            epoch=self.epoch,
            converged=self.at_least(target),
            alive=self.alive(config, now),
            age_seconds=self.newest.instance_age_seconds,
            silent_seconds=max(0.0, now - self.heard_at),
            stats=dict(self.newest.stats),
            key_index=self.key_index,
            weights_since=max(0.0, now - self.weights_at),
            **self.newest.report(),
        )


class Instances:
    """All instances of one pool.

    Attributes:
        known: the instances that the hub remembers.
        behind: those of them below the target, in an order that a replay repeats.
        departed: instances that have left, the newest last.
        forget_at: when to look for instances to forget.
        nudge_at: when to nudge the instances behind again.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, InstanceRecord] = {}
        self.behind: dict[bytes, None] = {}
        self.departed: dict[bytes, None] = {}
        self.forget_at = math.inf
        self.nudge_at = math.inf

    def hear(self, peer: bytes, beat: Heartbeat, key_index: int, *, target: int, fence_timeout_seconds: float, now: float) -> bool:
        """Take a heartbeat; return whether status changes by it. The hub remembers a silent instance for `fence_timeout_seconds`."""
        record = self.known.get(beat.instance)
        new = record is None
        if record is None:
            record = self.known[beat.instance] = InstanceRecord(beat.instance, beat)
            self.behind[beat.instance] = None
            self.forget_at = min(self.forget_at, now + fence_timeout_seconds)
        changed = record.hear(peer, beat, now, key_index)
        if record.at_least(target):
            self.behind.pop(beat.instance, None)
        return changed or new

    def leave(self, instance: bytes) -> bool:
        """This instance gave up its lease and takes no other, so late heartbeats must not bring it back. Returns whether it was known."""
        self.departed[instance] = None
        while len(self.departed) > MAX_INSTANCES:
            del self.departed[next(iter(self.departed))]
        return self._drop(instance)

    def forget(self, may_forget: Callable[[InstanceRecord], bool], fence_timeout_seconds: float, now: float) -> list[bytes]:
        """Forget the instances that `may_forget` names; return them."""
        over = [instance for instance, record in self.known.items() if may_forget(record)]
        for instance in over:
            self._drop(instance)
        self.forget_at = now + fence_timeout_seconds / 3 if self.known else math.inf
        return over

    def _drop(self, instance: bytes) -> bool:
        self.behind.pop(instance, None)
        return self.known.pop(instance, None) is not None

    def expect(self, target: int) -> None:
        """The target has risen: every grant so far may be below it."""
        for record in self.known.values():
            record.below_until = max(record.below_until, record.live_until)
            record.live_until = NEVER
        ordered = sorted(self.known.items(), key=lambda one: one[1].below_until)
        self.behind = {instance: None for instance, record in ordered if not record.at_least(target)}

    def nudge(self, now: float) -> list[ev.Action]:
        """Ask the instances behind for a heartbeat, which a grant of the new target can answer."""
        self.nudge_at = now + max(NUDGE_SECONDS, len(self.behind) / NUDGES_PER_SECOND)
        return [ev.Send(self.known[instance].peer, Nudge(instance)) for instance in self.behind]

    @property
    def old_epoch_requests(self) -> int:
        """How many requests all known instances carry under older roots."""
        return min(sum(record.newest.old_epoch_requests for record in self.known.values()), MAX_COUNT)


# ----------------------------------------------------------------------------------------------------------------------
# The pool's epochs: the record, who asks and who waits, the labels, and the leadership that all of it rests on.


MAX_LABELLING: Final = 256


class Ask(NamedTuple):
    """One ask for an epoch, which the hub first saw at `seen`."""

    epoch: int
    seen: float
    origin: Source


@dataclass(slots=True)
class Leadership:
    """Whether this hub leads.

    Attributes:
        term: the term in which it leads; None while it does not lead or has not read the record.
        since: when it began to lead.
        settled_at: when every grant of an older leader is dead.
    """

    term: Term | None = None
    since: float = math.inf
    settled_at: float = math.inf


class Record:
    """What is durable, as far as this hub knows. At most one write of each kind is under way.

    Attributes:
        target, published: both were durable before this hub raised them here.
        origin: who asked for the target.
        asked: the highest ask.
        durable: the target that is surely durable in this term.
        proven: the target that no hub can miss any more when it grants.
        stored: what the record says is published, as this hub read it in this term and wrote it since.
        noted, noting: the note that grants may be out is durable, or its write is under way.
        recording, publishing: the epochs of the writes under way.
        retry_at: no write begins before this.
        started_at, published_at, reset_seconds: when the newest reset began and ended, and how long it took; None: another one overtook it.
        behind_since: since when the target has not been published; newer targets leave it alone. None: it is published.
    """

    def __init__(self) -> None:
        self.target = self.published = 0
        self.origin: Source | None = None
        self.asked: Ask | None = None
        self.durable = self.proven = self.stored = 0
        self.noted = self.noting = False
        self.recording: int | None = None
        self.publishing: int | None = None
        self.retry_at = NEVER
        self.started_at: float | None = None
        self.behind_since: float | None = None
        self.published_at: float | None = None
        self.reset_seconds: float | None = None

    def lead(self, found: PoolRecord) -> None:
        """A term begins, in which `found` was read."""
        self.noted = found.granting
        self.durable = self.proven = found.target
        self.published = max(self.published, found.published)
        if self.published >= self.target:
            self.behind_since = None
        self.stored = found.published  # less than `published` after a restore: then it is published again

    def abandon(self) -> None:
        """A term ends. The next one starts from what it reads, whatever becomes of the writes under way."""
        self.recording = self.publishing = None
        self.noting = False
        self.retry_at = NEVER

    # ------------------------------------------------------------------ the target

    @property
    def wanted(self) -> int:
        """The target that must become durable: the highest ask, and never less than what this hub granted."""
        return max(self.target, self.asked.epoch if self.asked is not None else 0)

    @property
    def unwritten(self) -> bool:
        """A higher target must become durable, and no write is under way."""
        return self.recording is None and self.wanted > self.durable

    def ask(self, ask: Ask) -> bool:
        """The highest epoch asked for counts, and of asks for one epoch the first. Returns whether this one counts."""
        # The API server limits the steps of the spec.
        limit = MAX_EPOCH if ask.origin is Source.SPEC else min(MAX_EPOCH, self.wanted + MAX_EPOCH_STEP)
        counts = self.wanted < ask.epoch <= limit
        if counts:
            self.asked = ask
        return counts

    def write(self, now: float) -> list[ev.Action]:
        """The write of the target, if one is due. After a failure it waits, because the authority may be overloaded."""
        if not self.unwritten or now < self.retry_at:
            return []
        self.recording = self.wanted
        ask = self.asked
        origin = ask.origin if ask is not None and ask.epoch == self.recording > self.target else self.origin
        return [ev.RecordTarget(self.recording, origin)]

    def written(self, epoch: int) -> None:
        self.recording = None
        self.durable = max(self.durable, epoch)

    def write_failed(self, now: float) -> None:
        """The target may be durable or not, so the hub writes it again."""
        self.recording = None
        self.retry_at = now + ev.RETRY_SECONDS

    def raise_target(self, target: int, origin: Source | None, now: float) -> bool:
        """`target` is durable; return whether it is new. The record names its `origin`, or None where nobody read the record."""
        if target <= self.target:
            if origin is not None and target == self.target:
                self.origin = origin
            return False
        ask = self.asked if self.asked is not None and self.asked.epoch == target else None
        self.origin = ask.origin if origin is None and ask is not None else origin
        self.target = target
        self.started_at = ask.seen if ask is not None else now
        if self.behind_since is None and self.published < target:
            self.behind_since = self.started_at
        return True

    # ------------------------------------------------------------------ the note that grants may be out

    def note(self, now: float) -> list[ev.Action]:
        """The write of the note, unless it is durable or under way. After a failure it waits, as the target's does."""
        if self.noted or self.noting or now < self.retry_at:
            return []
        self.noting = True
        return [ev.NoteGranting()]

    def note_written(self) -> None:
        self.noting, self.noted = False, True

    def note_failed(self, now: float) -> None:
        """The note may be durable or not, so the hub writes it again."""
        self.noting = False
        self.retry_at = now + ev.RETRY_SECONDS

    # ------------------------------------------------------------------ publication

    @property
    def unpublished(self) -> bool:
        """The target is durable but not published, and no publication is under way."""
        return self.durable >= self.target > self.stored and self.publishing is None

    def publish(self, epoch: int) -> list[ev.Action]:
        """The write that publishes `epoch`, unless it is on record or a publication is under way."""
        if epoch <= self.stored or self.publishing is not None:
            return []
        self.publishing = epoch
        return [ev.Publish(epoch)]

    def publish_written(self, epoch: int) -> None:
        self.publishing, self.stored = None, max(self.stored, epoch)

    def publish_failed(self, now: float) -> None:
        """The record may be lost (a wiped status, a restored store), so the hub records the target again before the next try."""
        self.publishing = None
        self.durable = self.proven = 0
        self.retry_at = now + ev.RETRY_SECONDS

    def raise_published(self, epoch: int, now: float) -> bool:
        """This hub or another one published `epoch`; return whether that is new."""
        if epoch <= self.published:
            return False
        self.published, self.published_at = epoch, now
        self.behind_since = None if epoch >= self.target else self.started_at
        self.reset_seconds = now - self.started_at if epoch == self.target and self.started_at is not None else None
        return True


class Labels:
    """The labels of one pool. `known`: the durable labels by the digest of their weights, the newest last."""

    def __init__(self) -> None:
        self.known: dict[bytes, str] = {}
        self._waiting: list[tuple[bytes, Label]] = []
        self._writing: list[tuple[bytes, Label]] = []

    def lead(self, recorded: Mapping[bytes, str]) -> None:
        """A term begins. Another hub may have written since, so the record counts, not what this one remembers."""
        self.known = dict(recorded)

    def found(self, recorded: Mapping[bytes, str]) -> bool:
        """These labels are on record, or were; return whether any of them is new here."""
        before, self.known = self.known, merged_labels(recorded, self.known)
        return before != self.known

    def forget(self) -> list[bytes]:
        """A term ends, and another hub may write other labels. Returns who waits for an answer."""
        peers = [peer for peer, _ in [*self._writing, *self._waiting]]
        self._waiting, self._writing = [], []
        return peers

    # ------------------------------------------------------------------ asks and writes

    def ask(self, peer: bytes, asked: Label) -> Labelled | None:
        """A trainer wants this label; return the answer if the label is durable already.

        Beyond a limit the oldest ask goes, because its trainer asks again.
        """
        under_way = any(other.weights == asked.weights for _, other in [*self._writing, *self._waiting])
        if self.known.get(asked.weights) == asked.label and not under_way:
            return _answer(asked)
        self._waiting.append((peer, asked))
        del self._waiting[:-MAX_LABELLING]
        return None

    @property
    def unwritten(self) -> bool:
        """A label waits to be written, and no write is under way."""
        return bool(self._waiting) and not self._writing

    def write(self) -> dict[bytes, str]:
        """Begin to write what waits; return it."""
        self._writing, self._waiting = self._waiting, []
        return self._batch()

    def written(self, labels: Mapping[bytes, str], held: Collection[bytes]) -> list[tuple[bytes, Labelled]]:
        """These labels are durable; return the answers, to everyone who asked."""
        if labels != self._batch():
            return []
        self.known = merged_labels(self.known, labels, held)
        answers = [(peer, _answer(asked)) for peer, asked in self._writing if asked.weights in labels]
        self._writing = []
        return answers

    def write_failed(self, labels: Mapping[bytes, str]) -> None:
        """These labels may be durable or not. Whoever wants them asks again."""
        if labels == self._batch():
            self._writing = []

    def _batch(self) -> dict[bytes, str]:
        batch: dict[bytes, str] = {}
        for _, asked in self._writing:
            batch = merged_labels(batch, {asked.weights: asked.label})
        return batch


def _answer(asked: Label) -> Labelled:
    return Labelled(asked.request, asked.weights, asked.label)


# ----------------------------------------------------------------------------------------------------------------------
# Who waits for a hub: engines for a grant, trainers for the state of the pool or for the publication of their epoch.
#
# A grant, or an answer to a question, needs a leadership read that began after the heartbeat or question came. One read serves
# everything that came before it; that is a round.


MAX_QUESTIONS: Final = 256
MAX_WAITERS: Final = 1_000


@dataclass(slots=True)
class Round:
    """A round whose leadership read is under way.

    Attributes:
        beats: the peer and the number of the heartbeat to answer, by instance.
        target: the durable target when the round began.
        publish: the epoch that the hub may publish after the read; None: there is none.
    """

    number: int
    term: Term
    beats: dict[bytes, tuple[bytes, int]]
    questions: list[tuple[bytes, Status]]
    target: int
    publish: int | None


class Rounds:
    """The rounds of one pool, one after the other.

    Attributes:
        beats, questions: what the next round answers.
        joining: an engine instance without a live grant of this hub waits among `beats`.
        current: the round whose leadership read is under way.
        last_at: when the newest round began.
    """

    def __init__(self) -> None:
        self.beats: dict[bytes, tuple[bytes, int]] = {}
        self.questions: list[tuple[bytes, Status]] = []
        self.joining = False
        self.current: Round | None = None
        self.last_at = NEVER

    def wait(self, record: InstanceRecord, peer: bytes, seq: int, now: float) -> None:
        """The next round answers this heartbeat, unless a younger one of the same instance waits already."""
        if seq >= self.beats.get(record.instance, (b"", -1))[1]:
            self.beats[record.instance] = (peer, seq)
            self.joining = self.joining or now >= max(record.live_until, record.below_until)

    def ask(self, peer: bytes, question: Status) -> None:
        """The next round answers this question. Beyond a limit the oldest question goes, because its client asks again."""
        self.questions.append((peer, question))
        del self.questions[:-MAX_QUESTIONS]

    def begin(self, number: int, term: Term, target: int, publish: int | None, *, grant: bool, now: float) -> None:
        """A round begins, which answers what came before it and nothing later. Without `grant` it leaves heartbeats to the next one."""
        beats: dict[bytes, tuple[bytes, int]] = {}
        if grant:
            beats, self.beats, self.joining = self.beats, {}, False
        questions, self.questions = self.questions, []
        self.current = Round(number, term, beats, questions, target, publish)
        self.last_at = now

    def take(self, number: int, term: Term | None) -> Round | None:
        """A round ends. None: the number is not that of the current round, or the round is of another term."""
        current = self.current
        if current is None or current.number != number:
            return None
        self.current = None
        return current if current.term == term else None

    def put_back(self, number: int, term: Term | None) -> None:
        """A round ends because the read gave no answer. The next round answers those who waited."""
        current = self.take(number, term)
        if current is not None:
            self.questions[:0] = current.questions
            for instance, beat in current.beats.items():
                self.beats.setdefault(instance, beat)

    def abandon(self) -> list[bytes]:
        """The term ends, and with it the round and what it evaluated. Returns who asked questions."""
        questions = self.questions + (self.current.questions if self.current is not None else [])
        self.questions, self.current = [], None
        return [peer for peer, _ in questions]


class Waiters:
    """Trainers that wait for epochs. The hub may forget them, because a trainer asks again until its epoch is published."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[bytes, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._epochs)

    def wait(self, peer: bytes, request: int, epoch: int) -> None:
        """`peer` wants to hear when `epoch` is published. Beyond a limit it must ask again."""
        if len(self._epochs) < MAX_WAITERS:
            self._epochs[peer, request] = epoch

    def all(self) -> list[tuple[bytes, int, int]]:
        """(peer, request, epoch) of every trainer that waits."""
        return [(peer, request, epoch) for (peer, request), epoch in self._epochs.items()]

    def served(self, published: int) -> list[tuple[bytes, int, int]]:
        """Take out the trainers whose epoch is published; return them as `all` does."""
        done = [waiter for waiter in self.all() if waiter[2] <= published]
        for peer, request, _ in done:
            del self._epochs[peer, request]
        return done


# ------------------------------------------------------------------ granting


def may_grant(record: Record) -> bool:
    """The note must be durable before the leadership read that a grant rests on; otherwise a later hub may miss it."""
    return record.noted


def fence_timeout_seconds(config: PoolConfig) -> float:
    """After this time a grant made now is dead: the lease, and a margin for clocks at different rates.

    A new leader waits as long, because every grant of an older leader answers a heartbeat sent before now.
    """
    return config.fence_timeout_seconds


def may_forget(instance: InstanceRecord, config: PoolConfig, now: float) -> bool:
    """The engine instance was silent for a lease and margin, so all its grants are dead."""
    return now >= max(instance.heard_at + config.fence_timeout_seconds, instance.live_until, instance.below_until)


# ------------------------------------------------------------------ asks and answers


def above_record(record: Record, epoch: int) -> bool:
    """An engine reports an epoch above the record. A hub granted it, so it was durable once: somebody rolled the record back.

    What such a record says about older grants is void, too.
    """
    return epoch > max(record.target, record.durable)


def proposal_counts(record: Record, epoch: int) -> bool:
    """A proposal made from an older epoch does not count: another one came first, and one reset serves all."""
    return epoch == record.target + 1


def may_tell(record: Record, epoch: int) -> bool:
    """Whether a trainer may hear that its epoch is the target. It then trusts that nobody uses older epochs after a lease.

    A deposed hub's write may land late, while the leader goes on granting the epoch before. Only a leadership read that began
    after the target was durable shows that this hub leads.
    """
    return record.target <= record.proven or epoch <= record.published


def needs_read(question: Status) -> bool:
    """The first page waits for a leadership read, because a hub that does not know it was deposed tells an old target."""
    return question.after is None


# ------------------------------------------------------------------ publication


def settled_at(lead: Leadership) -> float:
    """When no grant of an older hub can be live."""
    return lead.settled_at


def fenced_at(instance: InstanceRecord) -> float:
    """When this engine instance can use no epoch below the target. Its grants of the target itself never delay publication."""
    return instance.below_until


# ------------------------------------------------------------------ the store


def may_remove(config: PoolConfig) -> bool:
    """The pool wants unused keys removed. With `Retain` the store's own eviction removes them."""
    return config.reclaim != "Retain"


def can_reclaim(instance: InstanceRecord, record: Record, config: PoolConfig, now: float) -> bool:
    """The engine instance can answer, and names its own keys with the published epoch or a later one."""
    return instance.at_least(record.published) and instance.alive(config, now)


def engines_known_at(lead: Leadership, config: PoolConfig) -> float:
    """By then every engine has had the time to tell a new leader which weights it holds."""
    return lead.since + config.grace_seconds


def says_weights(instance: InstanceRecord) -> bool:
    """The engine says which weights it holds. One that cannot say may hold any."""
    return instance.newest.weights is not None


@dataclass(frozen=True, slots=True)
class HubRules:
    """The rules that a hub goes by."""

    may_grant: Callable[[Record], bool] = may_grant
    fence_timeout_seconds: Callable[[PoolConfig], float] = fence_timeout_seconds
    may_forget: Callable[[InstanceRecord, PoolConfig, float], bool] = may_forget
    above_record: Callable[[Record, int], bool] = above_record
    proposal_counts: Callable[[Record, int], bool] = proposal_counts
    may_tell: Callable[[Record, int], bool] = may_tell
    needs_read: Callable[[Status], bool] = needs_read
    settled_at: Callable[[Leadership], float] = settled_at
    fenced_at: Callable[[InstanceRecord], float] = fenced_at
    may_remove: Callable[[PoolConfig], bool] = may_remove
    can_reclaim: Callable[[InstanceRecord, Record, PoolConfig, float], bool] = can_reclaim
    engines_known_at: Callable[[Leadership, PoolConfig], float] = engines_known_at
    says_weights: Callable[[InstanceRecord], bool] = says_weights


RULES: Final = HubRules()
