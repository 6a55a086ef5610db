"""The agent inside an engine: one daemon thread that keeps this boot's lease and adopts epochs.

It dials the hub, never the other way round. Nothing here raises into the engine: without a hub, with a wrong key or with
garbage on the wire the lease runs out and the engine serves in bypass, which is always correct.
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
from typing import Any, Final, Protocol, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from epochkv_fence import agent as ag
from epochkv_fence.messages import (
    MAX_MESSAGE_BYTES,
    MAX_STAT_NAME,
    MAX_STATS,
    Error,
    Heartbeat,
    Message,
    Mode,
    Reclaimed,
    WireError,
    decode,
    encode,
)
from epochkv_fence.transport.keys import ClientKeys

logger = logging.getLogger(__name__)
T = TypeVar("T")

READY_POLL_SECONDS: Final = 0.05
SETTLE_POLL_SECONDS: Final = 0.001
SLOW_SETTLE_SECONDS: Final = 0.02
REOPEN_SECONDS: Final = 1.0
REDIAL_SECONDS: Final = 1.0
"""After a refused handshake, upon which libzmq never dials again: the hub may learn of our pool, or its key, later."""
SILENT_REDIAL_SECONDS: Final = 3.0
"""Without a connection (libzmq gives up for good, silently, on bytes that are not the protocol), and with one on which
heartbeats are not answered (a frozen hub): dial anew. Doubles while it does not help."""
MAX_SILENT_REDIAL_SECONDS: Final = 30.0
UNREACHABLE_AFTER_SECONDS: Final = 5.0
MAX_POLL_SECONDS: Final = 1.0
MONITORED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class AgentHooks(Protocol):
    """What the engine offers; called on the agent thread, except `reclaim`."""

    def ready(self) -> bool:
        """False until vLLM has set its own root: adopt nothing."""

    def adopt(self, epoch: int, mode: Mode) -> None:
        """Bind the root of `epoch`; the acknowledgement is sent after this returns. The lease moves after it, too."""

    def busy(self) -> bool:
        """The scheduler is inside `schedule()`: the acknowledgement is held back until this is False."""

    def carried(self) -> int:
        """Requests admitted under a root that is no longer current."""

    def stats(self) -> dict[str, float]:
        """Counters for status and metrics; at most 64, of names with at most 64 characters."""

    def reclaim(self, below: int) -> int:
        """Remove the pool's keys of epochs below `below`; returns how many were removed, 0 if none were left.

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
    """

    def __init__(self, endpoint: str, keys: ClientKeys, boot: bytes, identity: EngineIdentity, hooks: AgentHooks) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._identity = identity
        self._hooks = hooks
        self._born = time.monotonic()
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
        self._connected = False
        self._disconnected_at = self._born
        self._redial_at = float("inf")
        self._patience = SILENT_REDIAL_SECONDS
        self._reclaiming = False
        self._dealer: zmq.Socket[bytes] | None = None

    # ------------------------------------------------------------------ any thread

    @property
    def view(self) -> ag.View:
        """Epoch, mode and lease, replaced as one object. Bypass unless USE and `time.monotonic() < lease_until`."""
        return self._view

    @property
    def refused_grants(self) -> Counter[str]:
        """Grants dropped so far, by reason."""
        return Counter(self._agent.refused)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> bool:
        """Stop heartbeats and give up the lease. Returns whether the thread ended in time."""
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
                    self._say(
                        "hub",
                        f"broken: {error}",
                        logging.ERROR,
                        "the agent's session failed: %r; bypass, retrying",
                        error,
                    )
                    self._stopping.wait(REOPEN_SECONDS)
        finally:
            self._view = self._view._replace(lease_until=ag.NO_LEASE)

    def _session(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            dealer = self._dealer = self._open(context)
            monitor = dealer.get_monitor_socket(MONITORED)
            dealer.connect(self.endpoint)
            self._redial_at = time.monotonic() + SILENT_REDIAL_SECONDS
            poller = zmq.Poller()
            for source in (dealer, monitor, self._wake_read):
                poller.register(source, zmq.POLLIN)
            while not self._stopping.is_set():
                ready = dict(poller.poll(self._poll_ms()))
                self._drain_inbox(self._wake_read in ready)
                if monitor in ready:
                    self._read_monitor(monitor)
                if dealer in ready:
                    self._read_messages(dealer)
                self._pass_time()
        finally:
            self._connected = False
            if self._dealer is not None:
                self._dealer.disable_monitor()
            self._dealer = None
            context.destroy(linger=0)

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """libzmq's defaults never notice a dead peer behind a ClusterIP. The kernel does, with these, within 4 s.

        Not ZMTP heartbeats: their timer runs into an assertion of libzmq, which aborts the process, when a peer goes away
        while input is stopped (libzmq issues 3937, 4364, 4767; seen here with tampered frames).
        """
        dealer = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 2),
            (zmq.TCP_KEEPALIVE_INTVL, 1),
            (zmq.TCP_KEEPALIVE_CNT, 2),
            (zmq.TCP_MAXRT, 3000),
            (zmq.CONNECT_TIMEOUT, 1000),
            (zmq.HANDSHAKE_IVL, 1500),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, 4 * MAX_MESSAGE_BYTES),
        ):
            dealer.setsockopt(option, value)
        dealer.curve_serverkey = self._keys.hub_public.encode()
        dealer.curve_publickey = self._keys.public.encode()
        dealer.curve_secretkey = self._keys.secret.encode()
        return dealer

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
        explained = self._connected or self._said.get("hub") in ("refused", "handshake")
        if not explained and now >= self._disconnected_at + UNREACHABLE_AFTER_SECONDS:
            text = "no connection to the hub at %s; bypass when the lease is over, retrying"
            self._say("hub", "unreachable", logging.WARNING, text, self.endpoint)
        if now >= self._redial_at:
            self._redial(now)
        self._tell_state(now)

    def _redial(self, now: float) -> None:
        self._redial_at = now + self._patience
        self._patience = min(2 * self._patience, MAX_SILENT_REDIAL_SECONDS)
        if self._dealer is not None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have dropped it already
                self._dealer.disconnect(self.endpoint)
            self._dealer.connect(self.endpoint)
            self.counters["redials"] += 1

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

    def _read_messages(self, dealer: zmq.Socket[bytes]) -> None:
        for _ in range(64):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._redial_at, self._patience = float("inf"), SILENT_REDIAL_SECONDS
            try:
                message = decode(frames)
            except WireError as error:
                self.counters["wire_errors"] += 1
                self._say("wire", error.code.value, logging.WARNING, "dropped a message from the hub: %s", error.text)
                self._send(Error(error.code, error.text))
                continue
            self._step(ag.Received(message))

    def _read_monitor(self, monitor: Any) -> None:
        while monitor.poll(0):
            event = int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._say("hub", "connected", logging.INFO, "connected to the hub at %s", self.endpoint)
                self._step(ag.Poked())
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._redial_at = time.monotonic() + REDIAL_SECONDS
                text = "the hub at %s refuses our key (is it the key of a pool it serves?); bypass, retrying"
                self._say("hub", "refused", logging.WARNING, text, self.endpoint)
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                self._redial_at = time.monotonic() + REDIAL_SECONDS
                text = "no CURVE handshake with %s (is hub.pub the key of that hub?); bypass, retrying"
                if self._said.get("hub") != "refused":
                    self._say("hub", "handshake", logging.WARNING, text, self.endpoint)
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                self._connected = False
                self._disconnected_at = time.monotonic()
                self._redial_at = self._disconnected_at + SILENT_REDIAL_SECONDS
                self._say("hub", "disconnected", logging.INFO, "lost the connection to the hub at %s", self.endpoint)

    def _send(self, message: Message) -> None:
        if self._dealer is None:
            return
        try:
            self._dealer.send_multipart(encode(message), zmq.NOBLOCK)
            self.counters["sent"] += 1
            self._redial_at = min(self._redial_at, time.monotonic() + self._patience)  # until something is heard
        except zmq.Again:
            self.counters["unsent"] += 1  # no connection: the next heartbeat says it all
        except WireError as error:
            self.counters["unsent"] += 1
            self._say("wire", "too large", logging.ERROR, "cannot send: %s", error.text)

    # ------------------------------------------------------------------ the state machine

    def _step(self, event: ag.Event) -> None:
        actions = self._agent.step(event, time.monotonic())
        self._view = self._agent.view
        for action in actions:
            self._do(action)

    def _do(self, action: ag.Action) -> None:
        match action:
            case ag.Beat(seq, epoch, mode):
                self._send(self._heartbeat(seq, epoch, mode))
            case ag.Adopt(epoch, mode):
                self._adopt(epoch, mode)
            case ag.Settle():
                self._settling_since = time.monotonic()
            case ag.Send(message):
                self._send(message)
            case ag.RemoveOld(below):
                self._reclaim(below)
            case ag.HubRefused(error):
                self.counters["refused_by_hub"] += 1
                self._say("refusal", error.code.value, logging.WARNING, "the hub did not take a message: %s", error.text)

    def _heartbeat(self, seq: int, epoch: int | None, mode: Mode) -> Heartbeat:
        none: dict[str, float] = {}
        stats = self._hook("stats", self._hooks.stats, none)
        return Heartbeat(
            boot=self._agent.boot,
            seq=seq,
            epoch=epoch,
            mode=mode,
            carried=max(0, self._hook("carried", self._hooks.carried, 0)),
            boot_age_seconds=time.monotonic() - self._born,
            engine=self._identity.engine[:253],
            pod=self._identity.pod[:253],
            rank=self._identity.rank,
            fingerprint=self._identity.fingerprint[:253],
            stats={name[:MAX_STAT_NAME]: value for name, value in list(stats.items())[:MAX_STATS]},
        )

    def _adopt(self, epoch: int, mode: Mode) -> None:
        try:
            self._hooks.adopt(epoch, mode)
        except Exception as error:
            self.counters["adopt_errors"] += 1
            self._say("adopt", f"failed {epoch}", logging.ERROR, "cannot adopt epoch %d: %r; bypass", epoch, error)
            self._step(ag.AdoptFailed())
            return
        self._say("adopt", f"{epoch} {mode.value}", logging.INFO, "adopted epoch %d, mode %s", epoch, mode.value)
        self._step(ag.Adopted(epoch, mode))

    def _reclaim(self, below: int) -> None:
        if self._reclaiming:
            return
        self._reclaiming = True
        threading.Thread(target=self._remove_old, args=(below,), name="epochkv-reclaim", daemon=True).start()

    def _remove_old(self, below: int) -> None:
        try:
            removed = self._hooks.reclaim(below)
            with self._inbox_lock:
                self._outbox.append(Reclaimed(self._agent.boot, below, max(0, removed)))
            self._wake()
        except Exception as error:
            self.counters["reclaim_errors"] += 1
            logger.warning("cannot remove keys of epochs below %d: %r; another engine will be asked", below, error)
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
        level = logging.WARNING if state is ag.AgentState.UNASSIGNED else logging.INFO
        what = "no live lease: bypass" if state is ag.AgentState.UNASSIGNED else f"lease held, mode {state.value}"
        self._say("state", state.value, level, "%s (epoch %s)", what, self._agent.epoch)

    def _say(self, topic: str, state: str, level: int, text: str, *args: object) -> None:
        """Log once per change of state of a topic."""
        if self._said.get(topic) != state:
            self._said[topic] = state
            logger.log(level, text, *args)
