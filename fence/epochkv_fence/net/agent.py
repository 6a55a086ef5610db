"""An engine's half of the fence on a thread of its own: connections to the hub, the engine's hooks, the state machine between them."""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import zmq

from epochkv_fence.common import SayOnce, lease_clock, on_daemon_thread
from epochkv_fence.net.dealer import Link, LinkEvent
from epochkv_fence.net.keys import ClientKeys, KeyReader
from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol import messages as ms
from epochkv_fence.protocol.agent import BEATS_PER_LEASE, Event, RemoveOld


class Mailbox:
    """Events for the state machine and messages for the hub. Any thread may leave one, and wakes the thread that polls `fd`."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()  # they close with this object: who ends may be called late
        for end in (self._read, self._write):
            end.setblocking(False)
        self.fd = self._read.fileno()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._messages: list[ms.Message] = []

    def post(self, event: Event) -> None:
        """Leave an event, unless the same one waits already."""
        with self._lock:
            if event not in self._events:
                self._events.append(event)
        self.wake()

    def send(self, message: ms.Message) -> None:
        with self._lock:
            self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full (it will wake anyhow)
            self._write.send(b"x")

    def take(self, woken: bool) -> tuple[list[Event], list[ms.Message]]:
        """Everything that waits; `woken`: `fd` has input."""
        if woken:
            with contextlib.suppress(OSError):
                while self._read.recv(4096):
                    pass
        with self._lock:
            events, self._events = self._events, []
            messages, self._messages = self._messages, []
        return events, messages


# ----------------------------------------------------------------------------------------------------------------------
# The engine as its agent sees it: who it is, and what its hooks answer.
#
# No hook can harm the agent: it counts and logs what they raise, and goes on with the answer that shares less.


logger = logging.getLogger(__name__)
T = TypeVar("T")


class AgentHooks(Protocol):
    """What the engine offers; called on the agent thread, except `reclaim`."""

    def ready(self) -> bool:
        """False until vLLM has set its own root: adopt nothing."""

    def adopt(self, epoch: int) -> None:
        """Bind the root of `epoch`; the acknowledgement is sent after this returns. The lease moves after it, too."""

    def busy(self) -> bool:
        """The scheduler is inside `schedule()`: the acknowledgement is held back until this is False."""

    def old_epoch_requests(self) -> int:
        """Requests admitted under a root that is no longer current."""

    def isolated(self) -> bool:
        """The caches of this engine alone were reset, so it shares nothing before the next epoch."""

    def weights(self) -> tuple[bytes | None, str]:
        """The digest of the weights that its ranks hold, 16 bytes; or None, and why. Who changes it calls `AgentThread.poke`."""

    def labelled(self, weights: bytes, label: str) -> None:
        """People call these weights so."""

    def tiers(self) -> tuple[str, str]:
        """Why it cannot use its tiers, or not all of them: one of `TIER_REASONS`, and a sentence with what to change. Both empty:
        it can."""

    def stats(self) -> dict[str, float]:
        """Counters for status and metrics; at most 64, of names with at most 64 characters."""

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> int | tuple[int, int]:
        """Remove the pool's keys of epochs below `below`, and unless `keep` is empty those of all weights that are not in it,
        whatever their epoch. Returns how many were removed, 0 if none were left, or (that, bytes).

        Called on a thread of its own; may take long, and may raise when it cannot tell.
        """


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who this engine is, for status. `pod` and `namespace` are empty outside of Kubernetes; `versions` are of what it runs, by package.

    `pool`: uid of its pool; the hub takes it for no other one. Empty: whichever its keys are of. `removes`: it has a client of the
    pool's store.
    """

    engine: str
    pod: str = ""
    rank: int = 0
    fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    pool: str = ""
    removes: bool = True
    namespace: str = ""


@dataclass(eq=False)
class GuardedEngine:
    """Asks the hooks. Used by the agent's thread; `remove_old` begins a thread of its own."""

    instance: bytes
    _identity: EngineIdentity
    _hooks: AgentHooks
    _mailbox: Mailbox
    _counters: Counter[str]
    _say: SayOnce
    _born: float = field(default_factory=time.monotonic)
    _reported_weights: tuple[bytes | None, bool] = None, False  # and whether it sleeps
    _reported_since: float = field(default_factory=time.monotonic)
    _held: bytes | None = None  # the weights that were known last
    _pushed: bool = False
    _removing: bool = False

    def wake(self) -> bytes:
        """Be another engine instance from now on."""
        self.instance, self._born = secrets.token_bytes(ms.INSTANCE_BYTES), time.monotonic()
        return self.instance

    @property
    def ready(self) -> bool:
        return self._ask("ready", self._hooks.ready, False)

    @property
    def busy(self) -> bool:
        return self._ask("busy", self._hooks.busy, True)

    def adopt(self, epoch: int) -> bool:
        try:
            self._hooks.adopt(epoch)
        except Exception as error:
            self._counters["adopt_errors"] += 1
            self._say("adopt", f"failed {epoch}", logging.ERROR, "cannot adopt epoch %d: %r; sharing nothing", epoch, error)
            return False
        self._say("adopt", f"{epoch}", logging.DEBUG, "adopted epoch %d", epoch)
        return True

    def labelled(self, weights: bytes, label: str) -> None:
        self._ask("labelled", lambda: self._hooks.labelled(weights, label), None)

    def _ask(self, name: str, call: Callable[[], T], default: T) -> T:
        try:
            return call()
        except Exception as error:
            self._counters["hook_errors"] += 1
            self._say(f"hook {name}", repr(error), logging.ERROR, "%s() failed: %r", name, error)
            return default

    # ------------------------------------------------------------------ heartbeats

    def heartbeat(self, seq: int, epoch: int | None) -> ms.Heartbeat:
        """What the engine says of itself now, cut to what a message can carry."""
        none: dict[str, float] = {}
        stats = self._ask("stats", self._hooks.stats, none)
        weights, note = self._weights()
        tiers_off, tiers_note = self._ask("tiers", self._hooks.tiers, ("", ""))
        now = time.monotonic()
        if (weights, note == ms.ASLEEP) != self._reported_weights:
            self._reported_weights, self._reported_since = (weights, note == ms.ASLEEP), now
        if weights is not None:
            self._pushed = self._pushed or self._held not in (None, weights)
            self._held = weights
        return ms.Heartbeat(
            instance=self.instance,
            seq=seq,
            epoch=epoch,
            old_epoch_requests=max(0, self._ask("old_epoch_requests", self._hooks.old_epoch_requests, 0)),
            instance_age_seconds=now - self._born,
            engine=_line(self._identity.engine),
            pod=_line(self._identity.pod),
            namespace=_line(self._identity.namespace),
            rank=self._identity.rank,
            fingerprint=_line(self._identity.fingerprint),
            stats={name[: ms.MAX_STAT_NAME]: value for name, value in list(stats.items())[: ms.MAX_STATS]},
            isolated=bool(self._ask("isolated", self._hooks.isolated, False)),
            weights=weights,
            weights_note=note,
            pushed=self._pushed,
            weights_age_seconds=now - self._reported_since,
            tiers_off=_line(tiers_off),
            tiers_note=_line(tiers_note, ms.MAX_TEXT),
            versions={
                _line(name, ms.MAX_VERSION_TEXT): _line(version, ms.MAX_VERSION_TEXT)
                for name, version in list(self._identity.versions.items())[: ms.MAX_VERSIONS]
            },
            pool=self._identity.pool[: ms.MAX_NAME],
            removes=self._identity.removes,
        )

    def _weights(self) -> tuple[bytes | None, str]:
        unknown: tuple[bytes | None, str] = None, "the engine cannot say what it holds"
        weights, note = self._ask("weights", self._hooks.weights, unknown)
        if weights is None:
            return None, _line(note, ms.MAX_TEXT)
        return (weights, "") if len(weights) == ms.WEIGHTS_BYTES else (None, f"a digest of {len(weights)} bytes, not {ms.WEIGHTS_BYTES}")

    # ------------------------------------------------------------------ old keys

    def remove_old(self, asked: RemoveOld) -> None:
        """Have the engine remove old keys, unless it does so already. Its answer goes into the mailbox."""
        if not self._removing:
            self._removing = True
            on_daemon_thread(partial(self._remove_old, asked), "epochkv-reclaim").add_done_callback(self._removed)

    def _remove_old(self, asked: RemoveOld) -> None:
        answer = self._hooks.reclaim(asked.below, asked.keep)
        removed, num_bytes = answer if isinstance(answer, tuple) else (answer, 0)
        self._mailbox.send(ms.Reclaimed(self.instance, asked.below, max(0, removed), max(0, num_bytes), asked.number))

    def _removed(self, done: Future[None]) -> None:
        self._removing = False
        if error := done.exception():
            self._counters["reclaim_errors"] += 1
            logger.warning("cannot remove keys of older epochs or other weights: %r; another engine will be asked", error)


def _line(text: str, length: int = ms.MAX_NAME) -> str:
    return ms.one_line(text)[:length]


# ----------------------------------------------------------------------------------------------------------------------
# The agent's connections: the one in use, and beside it one with newer keys, which takes over when it stands.


KEYS_SECONDS: Final = 10.0
"""Between two reads of the credentials before the length of a lease is known; then it is a third of a lease."""
MIN_KEYS_SECONDS: Final = 0.5


@dataclass(eq=False)
class Links:
    """Used by one thread."""

    endpoint: str
    _keys: ClientKeys
    _reader: KeyReader | None
    _mailbox: Mailbox
    _counters: Counter[str]
    _say: SayOnce
    _current: Link | None = None
    """The connection in use."""
    _next: Link | None = None
    _read_at: float = field(default_factory=lambda: time.monotonic() + KEYS_SECONDS)
    _context: zmq.Context[zmq.Socket[bytes]] | None = None
    _poller: zmq.Poller | None = None

    def open(self) -> None:
        """Dial with the keys that were accepted last. A `Link` is one encrypted socket, which connects again by itself."""
        self._context = zmq.Context()
        self._current = Link(self._context, self.endpoint, self._keys)

    def close(self) -> None:
        for link in self._open:
            link.close()
        self._current = self._next = self._poller = None
        if self._context is not None:
            self._context.destroy(linger=0)

    @property
    def current(self) -> Link:
        """The connection in use, between `open` and `close`."""
        assert self._current is not None
        return self._current

    @property
    def _open(self) -> list[Link]:
        return [link for link in (self._current, self._next) if link is not None]

    def poll(self, milliseconds: int) -> bool:
        """Wait for something to do; return whether another thread left something in the mailbox."""
        if self._poller is None:
            self._poller = zmq.Poller()
            self._poller.register(self._mailbox.fd, zmq.POLLIN)
            for link in self._open:
                self._poller.register(link.socket, zmq.POLLIN)
                self._poller.register(link.monitor, zmq.POLLIN)
        return self._mailbox.fd in dict(self._poller.poll(milliseconds))

    def redial(self, now: float) -> None:
        for link in self._open:
            if now >= link.redial_at:
                link.redial()
                self._counters["redials"] += 1

    # ------------------------------------------------------------------ newer keys

    def read_keys_soon(self) -> None:
        """The hub rejects our keys, so there may be newer ones."""
        self._read_at = time.monotonic()

    def read_keys(self, lease_seconds: float | None, now: float) -> None:
        """Read the credentials when that is due, and dial with keys that are newer."""
        if self._reader is None:
            return
        if now >= self._read_at:
            self._read_at = now + (KEYS_SECONDS if lease_seconds is None else max(MIN_KEYS_SECONDS, lease_seconds / BEATS_PER_LEASE))
            self._reader.begin()
        answer = self._reader.answer()
        if isinstance(answer, ClientKeys):
            self._say("keys", "", logging.DEBUG, "the credentials are readable")
            self._compare(answer)
        elif answer is not None:
            self._counters["credentials_errors"] += 1
            self._say("keys", repr(answer), logging.WARNING, "cannot read the credentials: %s; going on with those in use", answer)

    def _compare(self, keys: ClientKeys) -> None:
        """Dial with these keys beside the connection in use, if they are newer."""
        assert self._context is not None
        if self._next is not None and (keys == self.current.keys or keys != self._next.keys):
            self._next.close()
            self._next = self._poller = None
        if self._next is None and keys != self.current.keys:
            self._next = Link(self._context, self.endpoint, keys)
            self._poller = None
            self._say("next", keys.public, logging.INFO, "there are new keys; connecting to the hub at %s with them", self.endpoint)

    def take_over(self) -> bool:
        """Whether the connection with newer keys stands, and is the one in use from now on."""
        link = self._next
        if link is None:
            return False
        for event in link.events():
            if event is LinkEvent.REFUSED:
                text = "the hub at %s does not take the new keys yet; going on with those in use, retrying"
                self._say("next", "refused", logging.WARNING, text, self.endpoint)
            if event is LinkEvent.CONNECTED:
                self.current.close()
                self._current, self._next, self._poller = link, None, None
                self._keys = link.keys
                self._counters["key_changes"] += 1
                self._say("next", "", logging.INFO, "connected to the hub at %s with the new keys", self.endpoint)
                self._say("hub", "connected", logging.INFO, "connected to the hub at %s", self.endpoint)
                return True
        return False


# ----------------------------------------------------------------------------------------------------------------------
# The agent inside an engine: one daemon thread that keeps this instance's lease and adopts epochs.
#
# It dials the hub, never the other way round. Nothing here raises into the engine. Without a hub, with a wrong key or with garbage
# on the wire the lease runs out. Then the engine shares nothing, which is always correct.


READY_POLL_SECONDS: Final = 0.05
SETTLE_POLL_SECONDS: Final = 0.001
SLOW_SETTLE_SECONDS: Final = 0.02
REOPEN_SECONDS: Final = 1.0
UNREACHABLE_AFTER_SECONDS: Final = 5.0
LEAVE_SECONDS: Final = 0.5
"""For telling the hub that this engine ends: for the step under way to end, and again for the message to get out."""
MAX_POLL_SECONDS: Final = 1.0
MISSED_SECONDS: Final = 1.0
"""A wall clock that goes ahead of the boot clock by more, between two events: this process was restored, or the clock was set."""


class AgentThread:
    """Runs an `Agent` against a hub.

    Args:
        endpoint: of the hub, such as `tcp://epochkv-hub.epochkv-system.svc:7700`.
        instance: 16 random bytes drawn when this process started.
        credentials: reads the keys again, every third of a lease and when the hub refuses those in use; on a thread of its own,
            so that it may hang. When they have changed, a second connection is made with the new ones, and takes over as soon
            as it stands: the lease goes on.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        instance: bytes,
        identity: EngineIdentity,
        hooks: AgentHooks,
        *,
        credentials: Callable[[], ClientKeys] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        self._say = SayOnce(logger)
        self._mailbox = Mailbox()
        reader = KeyReader(credentials, self._mailbox.wake) if credentials is not None else None
        self._links = Links(endpoint, keys, reader, self._mailbox, self.counters, self._say)
        self._engine = GuardedEngine(instance, identity, hooks, self._mailbox, self.counters, self._say)
        self._agent = ag.Agent(instance)
        self._view = self._agent.view
        self._thread = threading.Thread(target=self._run, name="epochkv-agent", daemon=True)
        self._stopping = threading.Event()
        self._started = False
        self._settling_since: float | None = None
        self._ahead = lease_clock.ahead
        self._disconnected_at = time.monotonic()

    # ------------------------------------------------------------------ any thread

    def counts(self) -> dict[str, int]:
        """What went wrong, by kind, and the grants that were not taken, by reason (`refused_...`)."""
        # `dict` copies at once; the agent's thread counts there meanwhile.
        return {**dict(self.counters), **{f"refused_{reason}": count for reason, count in dict(self._agent.refused).items()}}

    @property
    def view(self) -> ag.View:
        """Epoch and lease, replaced as one object. The epoch may be used while `lease_clock() < lease_until`."""
        return self._view if lease_clock.ahead <= self._ahead + MISSED_SECONDS else self._view._replace(lease_until=ag.NO_LEASE)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> bool:
        """Give up the lease, tell the hub so, and end. Returns whether the thread ended in time."""
        self._stopping.set()
        self._mailbox.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        self._view = self._view._replace(lease_until=ag.NO_LEASE)
        return not self._thread.is_alive()

    def propose(self, epoch: int) -> None:
        """Ask the hub to go on to `epoch` (one above the adopted one), again and again until it is reached."""
        self._mailbox.post(ag.Proposed(epoch))

    def poke(self) -> None:
        """Something the hub should know has changed: heartbeat now."""
        self._mailbox.post(ag.Poked())

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._session()
                except Exception as error:
                    self.counters["sessions_failed"] += 1
                    text = "the agent's session failed: %r; sharing nothing, retrying"
                    self._say("hub", f"broken: {error}", logging.ERROR, text, error)
                    self._stopping.wait(REOPEN_SECONDS)
        finally:
            self._view = self._view._replace(lease_until=ag.NO_LEASE)

    def _session(self) -> None:
        try:
            self._links.open()
            while not self._stopping.is_set():
                events, messages = self._mailbox.take(self._links.poll(self._poll_ms()))
                for event in events:
                    self._step(event)
                for message in messages:
                    self._send(message)
                self._read_link(self._links.current)
                if self._links.take_over():
                    self._step(ag.Poked())
                self._pass_time()
            self._leave()
        finally:
            self._links.close()

    def _leave(self) -> None:
        """Without this a reset would wait until the lease is over. It goes first: a step that begins from now on uses nothing."""
        self._view = self._view._replace(lease_until=ag.NO_LEASE)
        until = time.monotonic() + LEAVE_SECONDS
        while self._engine.busy:
            if time.monotonic() >= until:
                return
            time.sleep(SETTLE_POLL_SECONDS)
        self._links.current.socket.linger = int(LEAVE_SECONDS * 1000)
        self._step(ag.Left())

    def _poll_ms(self) -> int:
        now = time.monotonic()
        wait = min(self._agent.deadline() - lease_clock(), MAX_POLL_SECONDS)
        if not self._started:
            wait = min(wait, READY_POLL_SECONDS)
        if self._settling_since is not None:
            fast = now < self._settling_since + 0.1
            wait = min(wait, SETTLE_POLL_SECONDS if fast else SLOW_SETTLE_SECONDS)
        return max(0, int(wait * 1000 + 0.999))

    def _pass_time(self) -> None:
        if not self._started and self._engine.ready:
            self._started = True
            self._step(ag.Started())
        if self._settling_since is not None and not self._engine.busy:
            self._settling_since = None
            self._step(ag.Settled())
        now, lease_now = time.monotonic(), lease_clock()
        if lease_now >= self._agent.deadline() or lease_clock.ahead > self._ahead + MISSED_SECONDS:
            self._step(ag.Tick())
        explained = self._links.current.connected or self._say.state("hub") in ("refused", "handshake")
        if not explained and now >= self._disconnected_at + UNREACHABLE_AFTER_SECONDS:
            until = "sharing nothing when the lease is over" if lease_now < self._view.lease_until else "sharing nothing until there is one"
            self._say("hub", "unreachable", logging.WARNING, "no connection to the hub at %s; %s, retrying", self.endpoint, until)
        self._links.redial(now)
        self._links.read_keys(self._agent.lease_seconds, now)

    # ------------------------------------------------------------------ in and out

    def _read_link(self, link: Link) -> None:
        for event in link.events():
            self._link_event(event)
        for _ in range(64):
            frames = link.receive()
            if frames is None:
                return
            try:
                message = ms.decode(frames)
            except ms.WireError as error:
                self.counters["wire_errors"] += 1
                self._say(f"wire {error.code.value}", "said", logging.WARNING, "dropped a message from the hub: %s", error.text)
                self._send(ms.Error(error.code, error.text[: ms.MAX_TEXT]))
                continue
            if isinstance(message, ms.Grant) and message.weights is not None:
                self._engine.labelled(message.weights, message.label)
            self._step(ag.Received(message))

    def _link_event(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.CONNECTED:
                self._say("hub", "connected", logging.INFO, "connected to the hub at %s", self.endpoint)
                self._step(ag.Poked())
            case LinkEvent.REFUSED:
                text = "the hub at %s rejects our key, which is not authorized for any pool of this hub; sharing nothing, retrying"
                self._say("hub", "refused", logging.WARNING, text, self.endpoint)
                self._links.read_keys_soon()
            case LinkEvent.NO_HANDSHAKE:
                text = "no CURVE handshake with %s (is hub.pub the key of that hub, or does it hang?); sharing nothing, retrying"
                if self._say.state("hub") != "refused":
                    self._say("hub", "handshake", logging.WARNING, text, self.endpoint)
                self._links.read_keys_soon()
            case LinkEvent.DISCONNECTED:
                self._disconnected_at = time.monotonic()
                self._say("hub", "disconnected", logging.INFO, "lost the connection to the hub at %s", self.endpoint)

    def _send(self, message: ms.Message) -> None:
        try:
            frames = ms.encode(message)
        except Exception as error:  # what a hook said may be too large, or no number at all
            self.counters["unencodable"] += 1
            kind = type(message).__name__
            self._say(f"wire {kind}", "unencodable", logging.ERROR, "a %s cannot be encoded and is not sent: %r", kind, error)
            return
        sent = self._links.current.send(frames)
        self.counters["sent" if sent else "unsent"] += 1  # without a connection: the next heartbeat says it all

    # ------------------------------------------------------------------ the state machine

    def _step(self, event: ag.Event) -> None:
        now, missed = lease_clock(), lease_clock.ahead - self._ahead
        if missed > MISSED_SECONDS:
            self._view = self._view._replace(lease_until=ag.NO_LEASE)  # first: `view` trusts it again from the next line on
        self._ahead += missed
        if missed > MISSED_SECONDS:
            self._say("clock", str(now), logging.WARNING, "the clock went ahead by %.1f s; asking for a lease as another instance", missed)
            self._step(ag.Woke(self._engine.wake()))
        actions = self._agent.step(event, now)
        self._view = self._agent.view
        for action in actions:
            self._do(action)

    def _do(self, action: ag.Action) -> None:
        match action:
            case ag.Beat(seq, epoch):
                self._send(self._engine.heartbeat(seq, epoch))
            case ag.Adopt(epoch):
                self._step(ag.Adopted(epoch) if self._engine.adopt(epoch) else ag.AdoptFailed())
            case ag.Settle():
                self._settling_since = time.monotonic()
            case ag.Send(message):
                self._send(message)
            case ag.RemoveOld():
                self._engine.remove_old(action)
            case ag.HubRefused(error):
                self.counters["refused_by_hub"] += 1
                self._say(f"refusal {error.code.value}", error.text, logging.WARNING, "the hub rejected a message: %s", error.text)
                if error.code is ms.Refusal.POOL:
                    self._links.read_keys_soon()
