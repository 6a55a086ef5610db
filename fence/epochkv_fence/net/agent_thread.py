"""The agent inside an engine: one daemon thread that keeps this boot's lease and adopts epochs.

It dials the hub, never the other way round. Nothing here raises into the engine: without a hub, with a wrong key or with
garbage on the wire the lease runs out and the engine shares nothing, which is always correct.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import zmq

from epochkv_fence.net.dealer import Link, LinkEvent
from epochkv_fence.net.key_reader import KeyReader
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import (
    CONTROL,
    MAX_STAT_NAME,
    MAX_STATS,
    MAX_TEXT,
    WEIGHTS_BYTES,
    Error,
    Heartbeat,
    Message,
    Reclaimed,
    Refusal,
    WireError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

READY_POLL_SECONDS: Final = 0.05
SETTLE_POLL_SECONDS: Final = 0.001
SLOW_SETTLE_SECONDS: Final = 0.02
REOPEN_SECONDS: Final = 1.0
KEYS_SECONDS: Final = 10.0
"""Between two looks at the credentials before the length of a lease is known; then it is a third of a lease."""
MIN_KEYS_SECONDS: Final = 0.5
UNREACHABLE_AFTER_SECONDS: Final = 5.0
LEAVE_SECONDS: Final = 0.5
"""For telling the hub that this engine ends: for the step under way to end, and again for the message to get out."""
MAX_POLL_SECONDS: Final = 1.0


class AgentHooks(Protocol):
    """What the engine offers; called on the agent thread, except `reclaim`."""

    def ready(self) -> bool:
        """False until vLLM has set its own root: adopt nothing."""

    def adopt(self, epoch: int) -> None:
        """Bind the root of `epoch`; the acknowledgement is sent after this returns. The lease moves after it, too."""

    def busy(self) -> bool:
        """The scheduler is inside `schedule()`: the acknowledgement is held back until this is False."""

    def carried(self) -> int:
        """Requests admitted under a root that is no longer current."""

    def private(self) -> bool:
        """The caches of this engine alone were reset, so it shares nothing before the next epoch."""

    def weights(self) -> tuple[bytes | None, str]:
        """The digest of the weights that its ranks hold, 16 bytes; or None, and why. Who changes it calls `AgentThread.poke`."""

    def stats(self) -> dict[str, float]:
        """Counters for status and metrics; at most 64, of names with at most 64 characters."""

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> int | tuple[int, int]:
        """Remove the pool's keys of epochs below `below`, and unless `keep` is empty those of all weights that are not in it,
        whatever their epoch. Returns how many were removed, 0 if none were left, or (that, bytes).

        Called on a thread of its own; may take long, and may raise when it cannot tell.
        """


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who this engine is, for status. `pod` is empty for engines nobody provisioned."""

    engine: str
    pod: str = ""
    rank: int = 0
    fingerprint: str = ""


class AgentThread:
    """Runs an `Agent` against a hub.

    Args:
        endpoint: of the hub, such as `tcp://epochkv-hub.epochkv-system.svc:7700`.
        boot: 16 random bytes drawn when this process started.
        credentials: reads the keys again, every third of a lease and when the hub refuses those in use; on a thread of its own,
            so that it may hang. When they have changed, a second connection is made with the new ones, and takes over as soon
            as it stands: the lease goes on.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        boot: bytes,
        identity: EngineIdentity,
        hooks: AgentHooks,
        *,
        credentials: Callable[[], ClientKeys] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._identity = identity
        self._hooks = hooks
        self._key_reader = KeyReader(credentials, self._wake) if credentials is not None else None
        self._keys_due = time.monotonic() + KEYS_SECONDS
        self._born = time.monotonic()
        self._reported_weights: bytes | None = None
        self._reported_since = self._born
        self._agent = ag.Agent(boot)
        self._view = self._agent.view
        self._thread = threading.Thread(target=self._run, name="epochkv-agent", daemon=True)
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._inbox_lock = threading.Lock()
        self._inbox: list[ag.Event] = []
        self._outbox: list[Message] = []
        self._started = False
        self._settling_since: float | None = None
        self._said: dict[str, str] = {}
        self._disconnected_at = self._born
        self._reclaiming = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link: Link | None = None
        self._next: Link | None = None  # with newer keys; takes over when it stands
        self._poller: zmq.Poller | None = None

    # ------------------------------------------------------------------ any thread

    @property
    def view(self) -> ag.View:
        """Epoch and lease, replaced as one object. The epoch may be used while `time.monotonic() < lease_until`."""
        return self._view

    @property
    def refused_grants(self) -> Counter[str]:
        """Grants dropped so far, by reason."""
        return Counter(self._agent.refused)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> bool:
        """Give up the lease, tell the hub so, and end. Returns whether the thread ended in time."""
        self._stopping.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        self._view = self._view._replace(lease_until=ag.NO_LEASE)
        return not self._thread.is_alive()

    def propose(self, epoch: int) -> None:
        """Ask the hub to go on to `epoch` (one above the adopted one), again and again until it is reached."""
        self._post(ag.Proposed(epoch))

    def poke(self) -> None:
        """Something the hub should know has changed: heartbeat now."""
        self._post(ag.Poked())

    def _post(self, event: ag.Event) -> None:
        with self._inbox_lock:
            if event not in self._inbox:
                self._inbox.append(event)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full (it will wake anyhow) or closed
            os.write(self._wake_write, b"x")

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
        self._context = zmq.Context()
        try:
            self._link = Link(self._context, self.endpoint, self._keys)
            while not self._stopping.is_set():
                woken = self._poll()
                self._drain_inbox(woken)
                self._read_link(self._link)
                if self._next is not None:
                    self._read_next(self._next)
                self._pass_time()
            self._leave(self._link)
        finally:
            for link in (self._link, self._next):
                if link is not None:
                    link.close()
            self._link = self._next = self._poller = None
            self._context.destroy(linger=0)

    def _leave(self, link: Link) -> None:
        """Without this a reset would wait until the lease is over. It goes first: a step that begins from now on uses nothing."""
        self._view = self._view._replace(lease_until=ag.NO_LEASE)
        until = time.monotonic() + LEAVE_SECONDS
        while self._hook("busy", self._hooks.busy, True):
            if time.monotonic() >= until:
                return
            time.sleep(SETTLE_POLL_SECONDS)
        link.socket.linger = int(LEAVE_SECONDS * 1000)
        self._step(ag.Left())

    def _poll(self) -> bool:
        """Wait for something to do; returns whether another thread woke us."""
        if self._poller is None:
            self._poller = zmq.Poller()
            self._poller.register(self._wake_read, zmq.POLLIN)
            for link in (self._link, self._next):
                if link is not None:
                    self._poller.register(link.socket, zmq.POLLIN)
                    self._poller.register(link.monitor, zmq.POLLIN)
        return self._wake_read in dict(self._poller.poll(self._poll_ms()))

    def _poll_ms(self) -> int:
        now = time.monotonic()
        wait = min(self._agent.deadline() - now, MAX_POLL_SECONDS)
        if not self._started:
            wait = min(wait, READY_POLL_SECONDS)
        if self._settling_since is not None:
            fast = now < self._settling_since + 0.1
            wait = min(wait, SETTLE_POLL_SECONDS if fast else SLOW_SETTLE_SECONDS)
        return max(0, int(wait * 1000 + 0.999))

    def _pass_time(self) -> None:
        if not self._started and self._hook("ready", self._hooks.ready, False):
            self._started = True
            self._step(ag.Started())
        if self._settling_since is not None and not self._hook("busy", self._hooks.busy, True):
            self._settling_since = None
            self._step(ag.Settled())
        now = time.monotonic()
        if now >= self._agent.deadline():
            self._step(ag.Tick())
        connected = self._link is not None and self._link.connected
        explained = connected or self._said.get("hub") in ("refused", "handshake")
        if not explained and now >= self._disconnected_at + UNREACHABLE_AFTER_SECONDS:
            until = "sharing nothing when the lease is over" if now < self._view.lease_until else "sharing nothing until there is one"
            self._say("hub", "unreachable", logging.WARNING, "no connection to the hub at %s; %s, retrying", self.endpoint, until)
        for link in (self._link, self._next):
            if link is not None and now >= link.redial_at:
                link.redial()
                self.counters["redials"] += 1
        if self._key_reader is not None:
            self._read_keys(self._key_reader, now)
        self._tell_state(now)

    # ------------------------------------------------------------------ keys

    def _read_keys(self, reader: KeyReader, now: float) -> None:
        if now >= self._keys_due:
            lease = self._agent.lease_seconds
            self._keys_due = now + (KEYS_SECONDS if lease is None else max(MIN_KEYS_SECONDS, lease / ag.BEATS_PER_LEASE))
            reader.begin()
        answer = reader.answer()
        if isinstance(answer, ClientKeys):
            self._say("keys", "", logging.DEBUG, "the credentials are readable")
            self._compare_keys(answer)
        elif answer is not None:
            self.counters["credentials_errors"] += 1
            self._say("keys", repr(answer), logging.WARNING, "cannot read the credentials: %s; going on with those in use", answer)

    def _compare_keys(self, keys: ClientKeys) -> None:
        """Whether these are newer keys; if so, dial with them beside the connection there is."""
        if self._link is None or self._context is None:
            return
        if self._next is not None and (keys == self._link.keys or keys != self._next.keys):
            self._next.close()
            self._next = self._poller = None
        if self._next is None and keys != self._link.keys:
            self._next = Link(self._context, self.endpoint, keys)
            self._poller = None
            self._say("next", keys.public, logging.INFO, "there are new keys; connecting to the hub at %s with them", self.endpoint)

    def _read_next(self, link: Link) -> None:
        """The connection with newer keys takes over once it stands; until then the other one goes on."""
        for event in link.events():
            if event is LinkEvent.REFUSED:
                text = "the hub at %s does not take the new keys yet; going on with those in use, retrying"
                self._say("next", "refused", logging.WARNING, text, self.endpoint)
            if event is LinkEvent.CONNECTED:
                if self._link is not None:
                    self._link.close()
                self._link, self._next, self._poller = link, None, None
                self._keys = link.keys
                self.counters["key_changes"] += 1
                self._say("next", "", logging.INFO, "connected to the hub at %s with the new keys", self.endpoint)
                self._say("hub", "connected", logging.INFO, "connected to the hub at %s", self.endpoint)
                self._step(ag.Poked())
                return

    def _drain_inbox(self, woken: bool) -> None:
        if woken:
            with contextlib.suppress(OSError):
                while os.read(self._wake_read, 4096):
                    pass
        with self._inbox_lock:
            events, self._inbox = self._inbox, []
            messages, self._outbox = self._outbox, []
        for event in events:
            self._step(event)
        for message in messages:
            self._send(message)

    # ------------------------------------------------------------------ in and out

    def _read_link(self, link: Link) -> None:
        for event in link.events():
            self._link_event(event)
        for _ in range(64):
            frames = link.receive()
            if frames is None:
                return
            try:
                message = decode(frames)
            except WireError as error:
                self.counters["wire_errors"] += 1
                self._say(f"wire {error.code.value}", "said", logging.WARNING, "dropped a message from the hub: %s", error.text)
                self._send(Error(error.code, error.text[:1024]))
                continue
            self._step(ag.Received(message))

    def _link_event(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.CONNECTED:
                self._say("hub", "connected", logging.INFO, "connected to the hub at %s", self.endpoint)
                self._step(ag.Poked())
            case LinkEvent.REFUSED:
                text = "the hub at %s refuses our key (is it the key of a pool it serves?); sharing nothing, retrying"
                self._say("hub", "refused", logging.WARNING, text, self.endpoint)
                self._keys_due = time.monotonic()
            case LinkEvent.NO_HANDSHAKE:
                text = "no CURVE handshake with %s (is hub.pub the key of that hub, or does it hang?); sharing nothing, retrying"
                if self._said.get("hub") != "refused":
                    self._say("hub", "handshake", logging.WARNING, text, self.endpoint)
                self._keys_due = time.monotonic()
            case LinkEvent.DISCONNECTED:
                self._disconnected_at = time.monotonic()
                self._say("hub", "disconnected", logging.INFO, "lost the connection to the hub at %s", self.endpoint)

    def _send(self, message: Message) -> None:
        if self._link is None:
            return
        try:
            frames = encode(message)
        except Exception as error:  # what a hook said may be too large, or no number at all
            self.counters["unencodable"] += 1
            kind = type(message).__name__
            self._say(f"wire {kind}", "unencodable", logging.ERROR, "a %s cannot be encoded and is not sent: %r", kind, error)
            return
        sent = self._link.send(frames)
        self.counters["sent" if sent else "unsent"] += 1  # without a connection: the next heartbeat says it all

    # ------------------------------------------------------------------ the state machine

    def _step(self, event: ag.Event) -> None:
        actions = self._agent.step(event, time.monotonic())
        self._view = self._agent.view
        for action in actions:
            self._do(action)

    def _do(self, action: ag.Action) -> None:
        match action:
            case ag.Beat(seq, epoch):
                self._send(self._heartbeat(seq, epoch))
            case ag.Adopt(epoch):
                self._adopt(epoch)
            case ag.Settle():
                self._settling_since = time.monotonic()
            case ag.Send(message):
                self._send(message)
            case ag.RemoveOld():
                self._reclaim(action)
            case ag.HubRefused(error):
                self.counters["refused_by_hub"] += 1
                self._say(f"refusal {error.code.value}", "said", logging.WARNING, "the hub did not take a message: %s", error.text)
                if error.code is Refusal.POOL:
                    self._keys_due = time.monotonic()

    def _heartbeat(self, seq: int, epoch: int | None) -> Heartbeat:
        none: dict[str, float] = {}
        stats = self._hook("stats", self._hooks.stats, none)
        weights, note = self._weights()
        return Heartbeat(
            boot=self._agent.boot,
            seq=seq,
            epoch=epoch,
            carried=max(0, self._hook("carried", self._hooks.carried, 0)),
            boot_age_seconds=time.monotonic() - self._born,
            engine=self._identity.engine[:253],
            pod=self._identity.pod[:253],
            rank=self._identity.rank,
            fingerprint=self._identity.fingerprint[:253],
            stats={name[:MAX_STAT_NAME]: value for name, value in list(stats.items())[:MAX_STATS]},
            private=bool(self._hook("private", self._hooks.private, False)),
            weights=weights,
            weights_note=note,
            weights_age_seconds=self._weights_age(weights, time.monotonic()),
        )

    def _weights_age(self, weights: bytes | None, now: float) -> float:
        if weights != self._reported_weights:
            self._reported_weights, self._reported_since = weights, now
        return now - self._reported_since

    def _weights(self) -> tuple[bytes | None, str]:
        unknown: tuple[bytes | None, str] = None, "the engine cannot say what it holds"
        weights, note = self._hook("weights", self._hooks.weights, unknown)
        if weights is None:
            return None, CONTROL.sub(" ", note)[:MAX_TEXT]
        return (weights, "") if len(weights) == WEIGHTS_BYTES else (None, f"a digest of {len(weights)} bytes, not {WEIGHTS_BYTES}")

    def _adopt(self, epoch: int) -> None:
        try:
            self._hooks.adopt(epoch)
        except Exception as error:
            self.counters["adopt_errors"] += 1
            self._say("adopt", f"failed {epoch}", logging.ERROR, "cannot adopt epoch %d: %r; sharing nothing", epoch, error)
            self._step(ag.AdoptFailed())
            return
        self._say("adopt", f"{epoch}", logging.DEBUG, "adopted epoch %d", epoch)
        self._step(ag.Adopted(epoch))

    def _reclaim(self, asked: ag.RemoveOld) -> None:
        if self._reclaiming:
            return
        self._reclaiming = True
        threading.Thread(target=self._remove_old, args=(asked,), name="epochkv-reclaim", daemon=True).start()

    def _remove_old(self, asked: ag.RemoveOld) -> None:
        below = asked.below
        try:
            answer = self._hooks.reclaim(below, asked.keep)
            removed, num_bytes = answer if isinstance(answer, tuple) else (answer, 0)
            with self._inbox_lock:
                self._outbox.append(Reclaimed(self._agent.boot, below, max(0, removed), max(0, num_bytes), asked.number))
            self._wake()
        except Exception as error:
            self.counters["reclaim_errors"] += 1
            logger.warning("cannot remove keys of older epochs (below %d) or weights: %r; another engine will be asked", below, error)
        finally:
            self._reclaiming = False

    # ------------------------------------------------------------------ helpers

    def _hook(self, name: str, call: Callable[[], T], default: T) -> T:
        try:
            return call()
        except Exception as error:
            self.counters["hook_errors"] += 1
            self._say(f"hook {name}", repr(error), logging.ERROR, "%s() failed: %r", name, error)
            return default

    def _tell_state(self, now: float) -> None:
        state = self._agent.state(now)
        previous = self._said.get("state")
        if previous is None and state is ag.AgentState.UNASSIGNED:
            return
        what = "no live lease: sharing nothing" if state is ag.AgentState.UNASSIGNED else "lease held"
        # The engine says what it makes of it, once (`epochkv_connector.naming.bypass`).
        self._say("state", state.value, logging.DEBUG, "%s (epoch %s)", what, self._agent.epoch)

    def _say(self, topic: str, state: str, level: int, text: str, *args: object) -> None:
        """Log once per change of state of a topic."""
        if self._said.get(topic) != state:
            self._said[topic] = state
            logger.log(level, text, *args)
