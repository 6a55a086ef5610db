"""What a hub's log says of clients that it does not let in: who, and what to do. One line a minute for each address, few in
all, because a client with a wrong key dials twice a second and anybody may try keys from many addresses. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SAY_SECONDS: Final = 60.0
MAX_ADDRESSES: Final = 1024
MAX_LINES: Final = 10
"""In `SAY_SECONDS`, of all addresses; what is above is counted and told in a later line."""


@dataclass(slots=True)
class _Address:
    said_at: float = -math.inf
    unsaid: int = 0


class RefusalLog:
    """What one hub process says of all clients that it refuses."""

    def __init__(self) -> None:
        self._addresses: dict[str, _Address] = {}
        self._window_at = -math.inf
        self._lines = 0
        self._unsaid = 0

    def key(self, address: str, now: float) -> str | None:
        """A client's key is none that is accepted; returns the line to log, if it is time for one."""
        return self._note(
            address,
            f"a client at {address or 'an unknown address'} is refused: its key is of no pool of this hub, or was retired. Give it the "
            "pool's keys again: the folder STATE/client of `epochkv hub`, or the Secret <pool>-fence",
            now,
        )

    def handshake(self, now: float) -> str | None:
        """A connection failed its handshake, from whichever address; as `key`."""
        return self._note(
            "handshake",
            "a connection failed its CURVE handshake: a client with the hub.pub of another hub, or nobody's client. Give it the pool's "
            "keys again: the folder STATE/client of `epochkv hub`, or the Secret <pool>-fence",
            now,
        )

    def _note(self, address: str, text: str, now: float) -> str | None:
        found = self._addresses.get(address)
        if found is None:
            while len(self._addresses) >= MAX_ADDRESSES:
                self._unsaid += self._addresses.pop(next(iter(self._addresses))).unsaid
            found = self._addresses[address] = _Address()
        if now - self._window_at >= SAY_SECONDS:
            self._window_at, self._lines = now, 0
        if now - found.said_at < SAY_SECONDS or self._lines >= MAX_LINES:
            found.unsaid += 1
            return None
        again = f" ({found.unsaid} more times since this was said last)" if found.unsaid and found.said_at > -math.inf else ""
        others = f" ({self._unsaid} more from other addresses)" if self._unsaid else ""
        found.said_at, found.unsaid, self._unsaid = now, 0, 0
        self._lines += 1
        return text + again + others
