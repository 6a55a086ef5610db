"""A hub's socket: who may connect, how much each peer and pool may ask, and whose turn it is."""

import asyncio
import logging
import resource
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from epochkv_fence.common import Seldom
from epochkv_fence.net.keys import KeyPair
from epochkv_fence.protocol.messages import MAX_MESSAGE_BYTES, MAX_TEXT, Error, Message, Refusal, WireError, decode, encode

PEER_RATE: Final = 200.0
"""Messages a second of one connection: an agent needs a few while a reset is open, a trainer a page of status each 5 ms."""
PEER_BURST: Final = 400.0
POOL_RATE: Final = 20_000.0
"""Messages a second of one pool: what 10,000 instances say while resets follow one another without a pause."""
POOL_BURST: Final = 50_000.0
"""A reset of 10,000 instances: nudged heartbeats, acknowledgements, and all of it again."""
COST_RATE: Final = 2_000.0
"""Of what visits every instance of a pool, a `Bump` or a page of `Status`: one for each, and one per `INSTANCES_PER_COST` instances.
So such messages of one pool take no more than about 15 % of the hub's only thread."""
COST_BURST: Final = 20_000.0
"""All pages of 10,000 instances, and a `Bump` in as many messages as it takes."""
INSTANCES_PER_COST: Final = 100
BYTES_PER_TOKEN: Final = 4096
GARBAGE_TOKENS: Final = 9.0
"""What a message costs that cannot be taken, on top."""
MAX_PEERS: Final = 65_536


@dataclass(slots=True)
class Bucket:
    """`rate` tokens a second, at most `burst` at once. Times are seconds on one monotonic clock."""

    rate: float
    burst: float
    tokens: float
    at: float

    def take(self, tokens: float, now: float) -> bool:
        if now > self.at:
            self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
            self.at = now
        if self.tokens < tokens:
            return False
        self.tokens -= tokens
        return True


@dataclass(slots=True)
class Peer:
    """One connection: what it may still send, and when it may be told of an error again."""

    bucket: Bucket
    answer_at: float = 0.0


class Peers:
    """The connections that said something. The oldest are forgotten beyond a limit: libzmq does not tell when one ends."""

    def __init__(self, rate: float = PEER_RATE, burst: float = PEER_BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._peers: dict[bytes, Peer] = {}

    def get(self, name: bytes, now: float) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            while len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            peer = self._peers[name] = Peer(Bucket(self._rate, self._burst, self._burst, now))
        return peer


# ----------------------------------------------------------------------------------------------------------------------
# Whose message is taken next: pools take turns by the time that their messages cost, so that no flood of one pool delays
# another's leases.
#
# libzmq hands messages over connection by connection. A pool with hundreds of connections, or with messages that look at
# thousands of instances, would have nearly all of the hub's only thread. So what arrives is put into a queue per pool at once, which
# is cheap, and taken from the queue that has used the least time so far.


SLICE_SECONDS: Final = 0.0005
"""How long one pool is served before another's turn; a single message may take longer."""
MAX_WAITING: Final = 20_000
"""Messages of one pool: what 10,000 instances say at once, twice."""
MAX_WAITING_BYTES: Final = 32 * 2**20


class Waiting(NamedTuple):
    """A message that was received and not looked at yet."""

    peer: bytes
    key: str
    frames: list[bytes]


@dataclass(slots=True)
class PoolQueue:
    """The messages of one pool, in their order.

    Attributes:
        used: seconds, on a clock that only compares queues: who waits for the first time starts with those served now.
    """

    waiting: deque[Waiting] = field(default_factory=deque)
    num_bytes: int = 0
    used: float = 0.0
    queued: bool = False


class Turns:
    """The queues that are not empty."""

    def __init__(self) -> None:
        self._queues: list[tuple[float, int, PoolQueue]] = []
        self._clock = 0.0
        self._number = 0

    def put(self, queue: PoolQueue, message: Waiting) -> bool:
        """Add it to the end of its queue; False: the queue is too long."""
        size = sum(map(len, message.frames))
        if len(queue.waiting) >= MAX_WAITING or queue.num_bytes + size > MAX_WAITING_BYTES:
            return False
        queue.waiting.append(message)
        queue.num_bytes += size
        if not queue.queued:
            queue.used = max(queue.used, self._clock)
            self._enqueue(queue)
        return True

    def __bool__(self) -> bool:
        return bool(self._queues)

    def serve(self, take: Callable[[Waiting], None], seconds: float) -> int:
        """Take messages for about so long; returns how many. `take` must not raise."""
        taken = 0
        now = time.monotonic()
        end = now + seconds
        while self._queues and now < end:
            _, _, queue = heappop(self._queues)
            self._clock = queue.used
            began = now
            while queue.waiting and now < began + SLICE_SECONDS:
                message = queue.waiting.popleft()
                queue.num_bytes -= sum(map(len, message.frames))
                take(message)
                taken += 1
                now = time.monotonic()
            queue.used += now - began
            queue.queued = False
            if queue.waiting:
                self._enqueue(queue)
        return taken

    def _enqueue(self, queue: PoolQueue) -> None:
        queue.queued = True
        self._number += 1
        heappush(self._queues, (queue.used, self._number, queue))


# ----------------------------------------------------------------------------------------------------------------------
# A plain ZeroMQ socket in an asyncio event loop.
#
# `zmq.asyncio` makes a future, a timer and a round of the loop for every message; a hub of thousands of engines cannot pay
# that. Here the loop watches the socket's file descriptor and takes messages in bursts. That descriptor has two traps. It
# tells of *changes* only, so a socket has to be read until it is empty. And sending may swallow a change, so whoever sends
# has to look again (`kick`).


logger = logging.getLogger(__name__)

BURST_MESSAGES: Final = 256
BURST_SECONDS: Final = 0.002
"""After so much the loop does what else is due before it reads on: a flood must not keep time and rounds from running."""


class SocketReader:
    """Calls `take` for as long as it finds something, in bursts.

    Args:
        take: takes one message; raises `zmq.Again` when there is none.
        done: called after each burst, also one that found nothing.
        failed: called when `take` or `done` raised anything else; the reader goes on.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[], None],
        done: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._done = done or (lambda: None)
        self._failed = failed or (lambda: None)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._pending: asyncio.Handle | None = None
        self._open = True
        self._loop.add_reader(self._fd, self._read)
        self.kick()

    def kick(self) -> None:
        """Look again soon: something was sent on the socket, or `done` has more to do."""
        if self._pending is None and self._open:
            self._pending = self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop; before the socket is closed."""
        self._open = False
        self._loop.remove_reader(self._fd)
        if self._pending is not None:
            self._pending.cancel()

    def _read(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        end = time.monotonic() + BURST_SECONDS
        taken = 0
        try:
            while taken < BURST_MESSAGES and time.monotonic() < end:
                try:
                    self._take()
                except zmq.Again:
                    break
                except Exception:
                    self._failed()
                    logger.exception("a message could not be handled")
                taken += 1
            else:
                self.kick()
            self._done()
        except Exception:
            self._failed()
            logger.exception("a burst of messages could not be handled")


# ----------------------------------------------------------------------------------------------------------------------
# Who may connect: the ZAP handler of the hub's context (RFC 27), which libzmq asks about every CURVE client.
#
# Answered at once, from a dictionary, and without a task per connection: thousands of agents come back together when a hub
# restarts, and anybody may try keys.


ADDRESS: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"
MAX_ADDRESS: Final = 64


class ZapHandler:
    """Lets a client in when `knows` its public key (z85), of the address it comes from; its messages then carry that key as `User-Id`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], domain: str, knows: Callable[[str, str], bool]) -> None:
        self._domain = domain.encode()
        self._knows = knows
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ADDRESS)
        self._reader = SocketReader(self._socket, self._take)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _take(self) -> None:
        request = self._socket.recv_multipart(zmq.NOBLOCK)
        number = request[1] if len(request) > 1 else b""
        key = self._key(request)
        known = bool(key) and self._knows(key, request[3].decode("ascii", "replace")[:MAX_ADDRESS])
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._socket.send_multipart([VERSION, number, status, text, key.encode() if known else b"", b""], zmq.NOBLOCK)
        self._reader.kick()

    def _key(self, request: list[bytes]) -> str:
        """The client's key; empty unless this is a request about a CURVE client of our domain."""
        if len(request) != 7:
            return ""
        version, _, domain, _, _, mechanism, key = request
        if version != VERSION or domain != self._domain or mechanism != b"CURVE" or len(key) != 32:
            return ""
        return z85.encode(key).decode("ascii")


# ----------------------------------------------------------------------------------------------------------------------
# The hub's socket: a ROUTER with CURVE, limits on what clients may send, turns between pools, and counters of what was not taken.
#
# Without handover, a client that names its connection itself cannot take over that of another pool's engine. There are no ZMTP
# heartbeats: see `dealer`.


ZAP_DOMAIN: Final = "epochkv"
NO_POOL: Final = "key not authorized for any pool of this hub"
TOO_MANY: Final = f"more than {PEER_RATE:.0f} messages a second, or too many of your pool; what was above is lost, repeat it"
TOO_COSTLY: Final = "your pool asks for more than its share of the hub's time; this was not taken, ask again more slowly"
REFUSED_SECONDS: Final = 60.0
"""The log has one line in this time for each address, and few in all: a client with a wrong key dials twice a second."""
GIVE_KEYS: Final = "Give it the pool's keys again: the folder STATE/client of `epochkv hub`, or the Secret <pool>-fence"
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


class PoolLimits:
    """What the clients of one pool may still send, and where their messages wait."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.bucket = Bucket(POOL_RATE, POOL_BURST, POOL_BURST, now)
        self.costs = Bucket(COST_RATE, COST_BURST, COST_BURST, now)
        self.queue = PoolQueue()

    def cost(self, message: Message) -> float:
        """What a message takes from `costs`; 0: it does not look at all instances of the pool."""
        return 0.0


class Client(NamedTuple):
    """What a client's key stands for: a pool, and which of its accepted keys this is."""

    pool: PoolLimits
    key_index: int


class Router:
    """Receives from clients, and sends to peers. One event loop's; `open` before anything else.

    Args:
        holder: says what a key stands for; None: no pool (any more).
        hear: takes a message that a client sent from a peer.
        burst_done: called when all that was there has been taken, or enough of it for now.

    Attributes:
        peers: what each connection may still send.
    """

    def __init__(
        self,
        keys: KeyPair,
        counters: Counter[str],
        holder: Callable[[str], Client | None],
        hear: Callable[[Client, bytes, Message], None],
        burst_done: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._counters = counters
        self._holder = holder
        self._hear = hear
        self._burst_done = burst_done
        self.peers = Peers()
        self._turns = Turns()
        self._refusals = Seldom(logger, REFUSED_SECONDS)
        self._unencodable = Seldom(logger, REFUSED_SECONDS)
        self._discarding = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._zap: ZapHandler | None = None
        self._readers: list[SocketReader] = []

    # ------------------------------------------------------------------ life

    def open(self, bind: str) -> str:
        """Listen; returns the address with its port. Raises `zmq.ZMQError`: the address cannot be bound. Nothing stays open then."""
        raise_file_limit()
        self._context = zmq.Context()
        try:
            self._zap = ZapHandler(self._context, ZAP_DOMAIN, self._knows)
            self._socket = self._make(self._context, "[" in bind or "*" in bind)
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
        return bytes(bound).rstrip(b"\0").decode().replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")

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
        known = self._holder(key) is not None
        self._counters["connections_accepted" if known else "connections_refused"] += 1
        if not known:
            self._log_refused_key(address)
        return known

    def _log_refused_key(self, address: str) -> None:
        who = address or "an unknown address"
        text = "rejected a client at %s: its key is not authorized for any pool of this hub, or was retired. %s"
        self._refusals(who, logging.WARNING, text, who, GIVE_KEYS)

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
        key = _known(frames[-1], "User-Id")
        client = self._client(key, name, peer, now)
        if client is None:
            self._log_refused_key(_known(frames[-1], "Peer-Address"))
            return
        message = Waiting(name, key, [frame.bytes for frame in frames[1:]])
        if not client.pool.bucket.take(tokens, now) or not self._turns.put(client.pool.queue, message):
            self._counters["dropped_pool"] += 1
            self._refuse(name, peer, Refusal.LIMIT, TOO_MANY, now)

    def _client(self, key: str, name: bytes, peer: Peer, now: float) -> Client | None:
        client = self._holder(key)
        if client is None:  # its key was accepted when it connected, and is not any more
            self._counters["refused_pool"] += 1
            self._refuse(name, peer, Refusal.POOL, NO_POOL, now)
        return client

    def _serve(self) -> None:
        """Hand messages over, in turns, for as long as a burst may last."""
        if self._turns and self._turns.serve(self._hand_over, BURST_SECONDS):
            self._burst_done()
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
            peer.bucket.tokens -= GARBAGE_TOKENS  # in any case: what is missing has to be made up for first
            self._refuse(name, peer, error.code, error.text[:MAX_TEXT], now)
            return
        cost = client.pool.cost(message)
        if cost and not client.pool.costs.take(cost, now):
            self._counters["dropped_cost"] += 1
            self._refuse(name, peer, Refusal.LIMIT, TOO_COSTLY, now)
            return
        self._counters["received"] += 1
        self._hear(client, name, message)

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
        self._counters["receive_failed"] += 1

    def _take_event(self) -> None:
        assert self._monitor is not None
        seen = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        event = int(seen["event"])
        self._counters[EVENT_COUNTERS.get(event, "other_events")] += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and int(seen["value"]) == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            text = "a connection failed its CURVE handshake: a client with the hub.pub of another hub, or nobody's client"
            self._refusals("handshake", logging.WARNING, "%s. %s", text, GIVE_KEYS)

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
            kind = type(message).__name__
            self._unencodable(kind, logging.ERROR, "a %s cannot be encoded and is not sent: %r", kind, error)
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


def _known(frame: zmq.Frame, what: str) -> str:
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
