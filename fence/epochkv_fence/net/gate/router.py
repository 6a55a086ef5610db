"""The hub's socket: a ROUTER with CURVE, limits on what clients may send, turns between pools, and counters of what was not taken.

Peers are named by the socket, never by themselves. With names of their own choice and handover, a client of one pool could
take over the connection of another pool's engine. There are no ZMTP heartbeats: see `dealer`.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from epochkv_fence.net.gate.fairness import PoolQueue, Turns, Waiting
from epochkv_fence.net.gate.limits import BYTES_PER_TOKEN, GARBAGE_TOKENS, PEER_RATE, Bucket, Peer, Peers
from epochkv_fence.net.gate.reader import BURST_SECONDS, SocketReader
from epochkv_fence.net.gate.refusals import RefusalLog
from epochkv_fence.net.gate.zap import ZapHandler
from epochkv_fence.net.keys import KeyPair
from epochkv_fence.protocol.messages import MAX_MESSAGE_BYTES, Error, Message, Refusal, WireError, decode, encode

logger = logging.getLogger(__name__)

ZAP_DOMAIN: Final = "epochkv"
NO_POOL: Final = "your key speaks for no pool of this hub"
TOO_MANY: Final = f"more than {PEER_RATE:.0f} messages a second, or too many of your pool; what was above is lost, repeat it"
TOO_COSTLY: Final = "your pool asks for more than its share of the hub's time; this was not taken, ask again more slowly"
ANSWER_SECONDS: Final = 1.0
"""Between two errors told to one peer."""
RECEIVE_QUEUE: Final = 64
"""Messages of one peer that wait here; an honest one never has more than a few. Above, TCP makes it wait."""
SEND_QUEUE: Final = 256
"""Messages for one peer that does not read; above, they are dropped."""
HANDSHAKE_MILLISECONDS: Final = 10_000
"""Who connects and says nothing holds a file descriptor for no longer than this. 5,000 agents at once need about 3 s."""
MAX_FILES: Final = 262_144
MAX_FRAMES: Final = 4
DISCARDED_AT_ONCE: Final = 500
RECEIVE_MORE: Final = int(zmq.RCVMORE)
NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)  # plain numbers: combining pyzmq's enums costs as much as sending
EVENT_COUNTERS: Final = {
    int(zmq.EVENT_ACCEPTED): "connections",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol_errors",  # also frames that were tampered with or replayed, later on
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshakes_failed",
}
"""Not EVENT_ACCEPT_FAILED: without file descriptors libzmq tries, fails and tells 100,000 times a second."""
MONITORED: Final = sum(EVENT_COUNTERS)


class LimitedPool(Protocol):
    """What the router knows of a pool.

    Attributes:
        bucket: messages that its clients may still send.
        costs: of those that look at all its boots.
        queue: where its messages wait.
    """

    bucket: Bucket
    costs: Bucket
    queue: PoolQueue

    def cost(self, message: Message) -> float:
        """What a message takes from `costs`; 0: it does not look at all boots."""


class Client(NamedTuple):
    """What a client's key stands for: a pool, and which of its accepted keys this is."""

    pool: LimitedPool
    key_index: int


@dataclass(frozen=True, slots=True)
class Receiver:
    """Who takes what the clients say.

    Attributes:
        client: says what a key stands for; None: no pool (any more).
        take: takes a message that a client sent from a peer.
        burst_done: called when all that was there has been taken, or enough of it for now.
    """

    client: Callable[[str], Client | None]
    take: Callable[[Client, bytes, Message], None]
    burst_done: Callable[[], None]


class Router:
    """Receives for a `Receiver`; sends to peers. One event loop's; `open` before anything else.

    Attributes:
        peers: what each connection may still send.
    """

    def __init__(self, keys: KeyPair, receiver: Receiver, counters: Counter[str]) -> None:
        self._keys = keys
        self._receiver = receiver
        self._counters = counters
        self.peers = Peers()
        self._turns = Turns()
        self._refusals = RefusalLog()
        self._discarding = False
        self._unencodable: set[str] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._zap: ZapHandler | None = None
        self._readers: list[SocketReader] = []

    # ------------------------------------------------------------------ life

    def open(self, bind: str) -> str:
        """Listen; returns the address with its port.

        Raises:
            zmq.ZMQError: the address cannot be bound. Nothing stays open then.
        """
        raise_file_limit()
        self._context = zmq.Context()
        try:
            self._zap = ZapHandler(self._context, ZAP_DOMAIN, self._knows)
            self._socket = self._make(self._context, "[" in bind)
            self._monitor = self._watch(self._context, self._socket)
            self._socket.bind(bind)
        except zmq.ZMQError:
            self.close()
            raise
        self._readers = [
            SocketReader(self._socket, self._take, self._serve, self._take_failed),
            SocketReader(self._monitor, self._take_event),
        ]
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return bytes(bound).rstrip(b"\0").decode().replace("0.0.0.0", "127.0.0.1")

    def _make(self, context: zmq.Context[zmq.Socket[bytes]], ipv6: bool) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.ipv6 = ipv6
        router.linger = 0
        router.rcvhwm = RECEIVE_QUEUE
        router.sndhwm = SEND_QUEUE
        router.maxmsgsize = 4 * MAX_MESSAGE_BYTES  # what is between this and the limit is answered, what is above is cut off
        router.backlog = 4096
        router.handshake_ivl = HANDSHAKE_MILLISECONDS
        router.tcp_keepalive = 1
        router.tcp_keepalive_idle = 10
        router.tcp_keepalive_intvl = 5
        router.tcp_keepalive_cnt = 3
        router.tcp_maxrt = 15_000
        router.zap_domain = ZAP_DOMAIN.encode()
        router.curve_server = 1
        router.curve_publickey = self._keys.public.encode()
        router.curve_secretkey = self._keys.secret.encode()
        return router

    def _watch(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """The socket's events. Their queue has no limit: with one, libzmq's I/O thread would wait for us to read them."""
        address = "inproc://epochkv.hub.monitor"
        router.monitor(address, MONITORED)
        monitor = context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0
        monitor.connect(address)
        return monitor

    def close(self) -> None:
        """Close every connection; may be called twice."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        if self._zap is not None:
            self._zap.close()
        if self._socket is not None:
            self._socket.disable_monitor()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = self._socket = self._monitor = self._zap = None

    # ------------------------------------------------------------------ in

    def _knows(self, key: str, address: str) -> bool:
        known = self._receiver.client(key) is not None
        self._counters["connections_accepted" if known else "connections_refused"] += 1
        if not known:
            self._tell_refused(self._refusals.key(address, time.monotonic()))
        return known

    @staticmethod
    def _tell_refused(text: str | None) -> None:
        if text is not None:
            logger.warning("%s", text)

    def _take(self) -> None:
        """Receive one message and put it into its pool's queue, which is cheap whatever it says."""
        if self._discarding:
            self._discard()
            return
        frames = self._receive()
        now = time.monotonic()
        name = frames[0].bytes
        peer = self.peers.get(name, now)
        size = sum(map(len, frames))
        tokens = 1 + size // BYTES_PER_TOKEN
        if not peer.bucket.take(tokens, now):
            self._counters["dropped_peer"] += 1
            self._refuse(name, peer, Refusal.LIMIT, TOO_MANY, now)
            return
        key = _told(frames[-1], "User-Id")
        client = self._client(key, name, peer, now)
        if client is None:
            self._tell_refused(self._refusals.key(_told(frames[-1], "Peer-Address"), now))
            return
        message = Waiting(name, key, [frame.bytes for frame in frames[1:]])
        if not client.pool.bucket.take(tokens, now) or not self._turns.put(client.pool.queue, message):
            self._counters["dropped_pool"] += 1
            self._refuse(name, peer, Refusal.LIMIT, TOO_MANY, now)

    def _client(self, key: str, name: bytes, peer: Peer, now: float) -> Client | None:
        client = self._receiver.client(key)
        if client is None:  # its key was accepted when it connected, and is not any more
            self._counters["refused_pool"] += 1
            self._refuse(name, peer, Refusal.POOL, NO_POOL, now)
        return client

    def _serve(self) -> None:
        """Hand messages over, in turns, for as long as a burst may last."""
        if self._turns and self._turns.serve(self._hand_over, BURST_SECONDS):
            self._receiver.burst_done()
        if self._turns and self._readers:
            self._readers[0].kick()

    def _hand_over(self, waiting: Waiting) -> None:
        try:
            self._judge(waiting, time.monotonic())
        except Exception:
            self._take_failed()
            logger.exception("a message could not be handled")

    def _judge(self, waiting: Waiting, now: float) -> None:
        name = waiting.peer
        peer = self.peers.get(name, now)
        client = self._client(waiting.key, name, peer, now)
        if client is None:
            return
        try:
            message = decode(waiting.frames)
        except WireError as error:
            self._counters[f"refused_{error.code.value}"] += 1
            peer.bucket.penalise(GARBAGE_TOKENS)
            self._refuse(name, peer, error.code, error.text[:1024], now)
            return
        cost = client.pool.cost(message)
        if cost and not client.pool.costs.take(cost, now):
            self._counters["dropped_cost"] += 1
            self._refuse(name, peer, Refusal.LIMIT, TOO_COSTLY, now)
            return
        self._counters["received"] += 1
        self._receiver.take(client, name, message)

    def _receive(self) -> list[zmq.Frame]:
        """Peer and frames of the next message. Of one with too many frames, only the first ones.

        The rest is thrown away later, a bit at a time, so that a message of a million frames holds nothing up.
        """
        assert self._socket is not None
        frames = [self._socket.recv(NOBLOCK, copy=False)]
        while self._socket.getsockopt(RECEIVE_MORE):
            if len(frames) > MAX_FRAMES:
                self._discarding = True
                break
            frames.append(self._socket.recv(NOBLOCK, copy=False))
        return frames

    def _discard(self) -> None:
        assert self._socket is not None
        for _ in range(DISCARDED_AT_ONCE):
            if not self._socket.getsockopt(RECEIVE_MORE):
                self._discarding = False
                return
            self._socket.recv(NOBLOCK)
            self._counters["discarded_frames"] += 1

    def _take_failed(self) -> None:
        self._counters["take_failed"] += 1

    def _take_event(self) -> None:
        assert self._monitor is not None
        told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        event = int(told["event"])
        self._counters[EVENT_COUNTERS.get(event, "other_events")] += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and int(told["value"]) == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._tell_refused(self._refusals.handshake(time.monotonic()))

    # ------------------------------------------------------------------ out

    def send(self, name: bytes, message: Message) -> None:
        """Send, or drop when the peer is gone or does not read. An error is told at most once a second."""
        if isinstance(message, Error):
            now = time.monotonic()
            self._refuse(name, self.peers.get(name, now), message.code, message.text, now)
        else:
            self._send(name, message)

    def _refuse(self, name: bytes, peer: Peer, code: Refusal, text: str, now: float) -> None:
        if now < peer.answer_at:
            self._counters["errors_unsaid"] += 1
            return
        peer.answer_at = now + ANSWER_SECONDS
        self._send(name, Error(code, text))

    def _send(self, name: bytes, message: Message) -> None:
        if self._socket is None:
            return
        try:
            version, payload = encode(message)
        except Exception as error:  # what clients said may add up to what no message can hold
            self._counters["unencodable"] += 1
            self._tell_unencodable(type(message).__name__, error)
            return
        try:
            self._socket.send(name, MORE)
            self._socket.send(version, MORE)
            self._socket.send(payload, NOBLOCK)
        except zmq.ZMQError as error:
            self._counters["unsent"] += 1
            logger.debug("cannot send to a peer: %s", error)
        if self._readers:
            self._readers[0].kick()

    def _tell_unencodable(self, kind: str, error: Exception) -> None:
        """Once per kind of message: whoever causes it may do so without end."""
        if kind not in self._unencodable:
            self._unencodable.add(kind)
            logger.error("a %s cannot be encoded and is not sent, nor are later ones of which this is true: %r", kind, error)


def _told(frame: zmq.Frame, what: str) -> str:
    """What libzmq knows of the connection that a frame came from."""
    try:
        return str(frame.get(what))
    except (zmq.ZMQError, KeyError):
        return ""


def raise_file_limit() -> None:
    """Every connection takes a file descriptor: allow as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
