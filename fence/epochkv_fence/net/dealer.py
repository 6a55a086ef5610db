"""One connection to a hub, with one set of keys: a DEALER with CURVE that says what becomes of it, and dials anew when libzmq
does not.

libzmq never reconnects after a refused key or a protocol error, and never notices a hub that is frozen or behind a
ClusterIP that leads nowhere. There are no ZMTP heartbeats. When a peer goes away while input is stopped, their timer runs
into an assertion of libzmq, which aborts the process (issues 3937, 4364, 4767; seen here with tampered frames). With the
options below, the kernel notices dead peers within 4 s.
"""

import contextlib
import enum
import math
import time
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from epochkv_fence.common import is_name, own_address
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol.messages import MAX_MESSAGE_BYTES

REDIAL_SECONDS: Final = 1.0
"""After a refused handshake, upon which libzmq never dials again: the hub may learn of our pool, or its key, later."""
SILENT_REDIAL_SECONDS: Final = 3.0
"""Without a connection (libzmq gives up for good, silently, on bytes that are not the protocol), and with one on which
messages are not answered (a frozen hub): dial anew. Doubles while it does not help."""
MAX_SILENT_REDIAL_SECONDS: Final = 30.0


class LinkEvent(enum.Enum):
    """What became of a connection."""

    CONNECTED = "connected"
    REFUSED = "refused"  # our key
    NO_HANDSHAKE = "no handshake"  # no CURVE, or not the key of that hub
    DISCONNECTED = "disconnected"


EVENTS: Final = {
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): LinkEvent.CONNECTED,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): LinkEvent.REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): LinkEvent.NO_HANDSHAKE,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): LinkEvent.NO_HANDSHAKE,
    int(zmq.EVENT_DISCONNECTED): LinkEvent.DISCONNECTED,
}


class Link:
    """A connection, being made or made. Used by one thread.

    Attributes:
        socket, monitor: to be polled for input.
        keys: what it dials with.
        connected: the hub has accepted the keys, and the connection stands.
        redial_at: when to call `redial`, on the monotonic clock; infinity while all is well.

    Raises:
        zmq.ZMQError: `endpoint` is none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ClientKeys,
        *,
        handshake_ms: int = 10_000,
        reconnect_max_ms: int = 500,
    ) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self.connected = False
        self.redial_at = time.monotonic() + SILENT_REDIAL_SECONDS
        self._patience = SILENT_REDIAL_SECONDS
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 2),
            (zmq.TCP_KEEPALIVE_INTVL, 1),
            (zmq.TCP_KEEPALIVE_CNT, 2),
            (zmq.TCP_MAXRT, 3000),
            (zmq.CONNECT_TIMEOUT, 1000),
            (zmq.HANDSHAKE_IVL, handshake_ms),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, reconnect_max_ms),
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, 4 * MAX_MESSAGE_BYTES),
        ):
            self.socket.setsockopt(option, value)
        keys.apply(self.socket)
        # Of the addresses of a name, libzmq takes those of one family alone.
        self._unsure = is_name(endpoint.removeprefix("tcp://").rpartition(":")[0])
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint or (self._unsure and ":" in own_address()))
        self.monitor: Any = self.socket.get_monitor_socket(sum(EVENTS))
        self.monitor.linger = 0
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Hang up; may be called twice."""
        self.connected = False
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close()
            self.socket.close()

    def redial(self) -> None:
        """Give the connection up and dial anew; a name under which nobody has answered yet, in the other family."""
        self.connected = False  # libzmq does not tell who asked for it
        self.redial_at = time.monotonic() + self._patience
        if self._unsure:
            self.socket.setsockopt(zmq.IPV6, not self.socket.getsockopt(zmq.IPV6))
        else:
            self._patience = min(2 * self._patience, MAX_SILENT_REDIAL_SECONDS)
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have dropped it already
            self.socket.disconnect(self.endpoint)
        self.socket.connect(self.endpoint)

    def send(self, frames: list[bytes]) -> bool:
        """Send if there is a connection; returns whether it was sent. Something has to be heard soon after."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.redial_at = min(self.redial_at, time.monotonic() + self._patience)
        return True

    def receive(self) -> list[bytes] | None:
        """The next message that has arrived; None when there is none."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.redial_at, self._patience = math.inf, SILENT_REDIAL_SECONDS
        return frames

    def events(self) -> list[LinkEvent]:
        """What became of the connection since the last call."""
        found: list[LinkEvent] = []
        while self.monitor.poll(0):
            event = EVENTS.get(int(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]))
            self._unsure = False
            if event is LinkEvent.CONNECTED:
                self.connected = True
            elif event in (LinkEvent.REFUSED, LinkEvent.NO_HANDSHAKE):
                self.redial_at = min(self.redial_at, time.monotonic() + REDIAL_SECONDS)  # a failed handshake is repeated
            elif event is LinkEvent.DISCONNECTED:
                if not self.connected:
                    continue
                self.connected = False
                self.redial_at = time.monotonic() + SILENT_REDIAL_SECONDS
            if event is not None:
                found.append(event)
        return found
