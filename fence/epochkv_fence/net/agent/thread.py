"""The agent inside an engine: one daemon thread that keeps this boot's lease and adopts epochs.

It dials the hub, never the other way round. Nothing here raises into the engine. Without a hub, with a wrong key or with garbage
on the wire the lease runs out. Then the engine shares nothing, which is always correct.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from epochkv_fence.net.agent.engine import AgentHooks, EngineIdentity, GuardedEngine
from epochkv_fence.net.agent.links import Links
from epochkv_fence.net.agent.mailbox import Mailbox
from epochkv_fence.net.say_once import SayOnce

from epochkv_fence.net.dealer import Link, LinkEvent
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import Error, Message, Refusal, WireError, decode, encode

logger = logging.getLogger(__name__)

READY_POLL_SECONDS: Final = 0.05
SETTLE_POLL_SECONDS: Final = 0.001
SLOW_SETTLE_SECONDS: Final = 0.02
REOPEN_SECONDS: Final = 1.0
UNREACHABLE_AFTER_SECONDS: Final = 5.0
LEAVE_SECONDS: Final = 0.5
"""For telling the hub that this engine ends: for the step under way to end, and again for the message to get out."""
MAX_POLL_SECONDS: Final = 1.0


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
        self._say = SayOnce(logger)
        self._mailbox = Mailbox()
        self._links = Links(endpoint, keys, credentials, self._mailbox, self.counters, self._say)
        self._engine = GuardedEngine(boot, identity, hooks, self._mailbox, self.counters, self._say)
        self._agent = ag.Agent(boot)
        self._view = self._agent.view
        self._thread = threading.Thread(target=self._run, name="epochkv-agent", daemon=True)
        self._stopping = threading.Event()
        self._started = False
        self._settling_since: float | None = None
        self._disconnected_at = time.monotonic()

    # ------------------------------------------------------------------ any thread

    @property
    def view(self) -> ag.View:
        """Epoch and lease, replaced as one object. The epoch may be used while `time.monotonic() < lease_until`."""
        return self._view

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
                if self._links.current is not None:
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
        if self._links.current is not None:
            self._links.current.socket.linger = int(LEAVE_SECONDS * 1000)
        self._step(ag.Left())

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
        if not self._started and self._engine.ready:
            self._started = True
            self._step(ag.Started())
        if self._settling_since is not None and not self._engine.busy:
            self._settling_since = None
            self._step(ag.Settled())
        now = time.monotonic()
        if now >= self._agent.deadline():
            self._step(ag.Tick())
        explained = self._links.connected or self._say.state("hub") in ("refused", "handshake")
        if not explained and now >= self._disconnected_at + UNREACHABLE_AFTER_SECONDS:
            until = "sharing nothing when the lease is over" if now < self._view.lease_until else "sharing nothing until there is one"
            self._say("hub", "unreachable", logging.WARNING, "no connection to the hub at %s; %s, retrying", self.endpoint, until)
        self._links.redial(now)
        self._links.read_keys(self._agent.lease_seconds, now)
        self._tell_state(now)

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
                self._links.read_keys_soon()
            case LinkEvent.NO_HANDSHAKE:
                text = "no CURVE handshake with %s (is hub.pub the key of that hub, or does it hang?); sharing nothing, retrying"
                if self._say.state("hub") != "refused":
                    self._say("hub", "handshake", logging.WARNING, text, self.endpoint)
                self._links.read_keys_soon()
            case LinkEvent.DISCONNECTED:
                self._disconnected_at = time.monotonic()
                self._say("hub", "disconnected", logging.INFO, "lost the connection to the hub at %s", self.endpoint)

    def _send(self, message: Message) -> None:
        link = self._links.current
        if link is None:
            return
        try:
            frames = encode(message)
        except Exception as error:  # what a hook said may be too large, or no number at all
            self.counters["unencodable"] += 1
            kind = type(message).__name__
            self._say(f"wire {kind}", "unencodable", logging.ERROR, "a %s cannot be encoded and is not sent: %r", kind, error)
            return
        sent = link.send(frames)
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
                self._say(f"refusal {error.code.value}", error.text, logging.WARNING, "the hub did not take a message: %s", error.text)
                if error.code is Refusal.POOL:
                    self._links.read_keys_soon()

    def _tell_state(self, now: float) -> None:
        state = self._agent.state(now)
        previous = self._say.state("state")
        if previous is None and state is ag.AgentState.UNASSIGNED:
            return
        what = "no live lease: sharing nothing" if state is ag.AgentState.UNASSIGNED else "lease held"
        # The engine says what it makes of it, once (`epochkv_connector.naming.root`).
        self._say("state", state.value, logging.DEBUG, "%s (epoch %s)", what, self._agent.epoch)
