"""The agent's connections: the one in use, and beside it one with newer keys, which takes over when it stands."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import zmq

from epochkv_fence.net.agent.mailbox import Mailbox
from epochkv_fence.net.dealer import Link, LinkEvent
from epochkv_fence.net.key_reader import KeyReader
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.net.say_once import SayOnce
from epochkv_fence.protocol.agent import BEATS_PER_LEASE

KEYS_SECONDS: Final = 10.0
"""Between two looks at the credentials before the length of a lease is known; then it is a third of a lease."""
MIN_KEYS_SECONDS: Final = 0.5


class Links:
    """Used by one thread.

    Attributes:
        current: the connection in use; None while none is open.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        credentials: Callable[[], ClientKeys] | None,
        mailbox: Mailbox,
        counters: Counter[str],
        say: SayOnce,
    ) -> None:
        self.endpoint = endpoint
        self.current: Link | None = None
        self._next: Link | None = None
        self._keys = keys
        self._mailbox = mailbox
        self._counters = counters
        self._say = say
        self._reader = KeyReader(credentials, mailbox.wake) if credentials is not None else None
        self._read_at = time.monotonic() + KEYS_SECONDS
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._poller: zmq.Poller | None = None

    def open(self) -> None:
        """Dial with the keys that were accepted last."""
        self._context = zmq.Context()
        self.current = Link(self._context, self.endpoint, self._keys)

    def close(self) -> None:
        for link in self._open:
            link.close()
        self.current = self._next = self._poller = None
        if self._context is not None:
            self._context.destroy(linger=0)

    @property
    def connected(self) -> bool:
        return self.current is not None and self.current.connected

    @property
    def _open(self) -> list[Link]:
        return [link for link in (self.current, self._next) if link is not None]

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
        if self.current is None or self._context is None:
            return
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
                if self.current is not None:
                    self.current.close()
                self.current, self._next, self._poller = link, None, None
                self._keys = link.keys
                self._counters["key_changes"] += 1
                self._say("next", "", logging.INFO, "connected to the hub at %s with the new keys", self.endpoint)
                self._say("hub", "connected", logging.INFO, "connected to the hub at %s", self.endpoint)
                return True
        return False
