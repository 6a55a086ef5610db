"""How many messages a client may send: token buckets, one per connection and one per pool.

A client that sends more loses what is above the limit and nothing else. An honest client repeats everything that is lost.
The limit of a connection keeps one client from using up its pool's. The limit of a pool keeps many connections of one pool
from using up the hub. Messages that look at every boot of a pool have a limit of their own, so trainers who ask too often lose
no heartbeat of their pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PEER_RATE: Final = 200.0
"""Messages a second of one connection: an agent needs a few while a reset is open, a trainer a page of status each 5 ms."""
PEER_BURST: Final = 400.0
POOL_RATE: Final = 20_000.0
"""Messages a second of one pool: what 10,000 boots say while resets follow one another without a pause."""
POOL_BURST: Final = 50_000.0
"""A reset of 10,000 boots: nudged heartbeats, acknowledgements, and all of it again."""
COST_RATE: Final = 2_000.0
"""Of what looks at every boot of a pool, a `Bump` or a page of `Status`: one for each, and one per `BOOTS_PER_COST` boots. So
such messages of one pool take no more than about 15 % of the hub's only thread."""
COST_BURST: Final = 20_000.0
"""All pages of 10,000 boots, and a `Bump` in as many messages as it takes."""
BOOTS_PER_COST: Final = 100
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

    @classmethod
    def full(cls, rate: float, burst: float, now: float) -> Bucket:
        return cls(rate, burst, burst, now)

    def take(self, tokens: float, now: float) -> bool:
        if now > self.at:
            self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
            self.at = now
        if self.tokens < tokens:
            return False
        self.tokens -= tokens
        return True

    def penalise(self, tokens: float) -> None:
        """Take them in any case; what is missing has to be made up for first."""
        self.tokens -= tokens


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
            peer = self._peers[name] = Peer(Bucket.full(self._rate, self._burst, now))
        return peer
