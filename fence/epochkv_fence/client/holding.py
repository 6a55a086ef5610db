"""Keeping a weight update open while its push runs, so that a second trainer is refused instead of pushing into the first."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from epochkv_fence.client.errors import UpdateInProgress
from epochkv_fence.messages import BOOT_BYTES, OpenUpdate, Status

MAX_HOLDER = 253


def this_process() -> str:
    """Who holds an update, for the people who wait for it."""
    return f"process {os.getpid()} on {socket.gethostname()}"[:MAX_HOLDER]


@dataclass(slots=True)
class Holding:
    """This trainer's hold on one update.

    Attributes:
        since: when a hub first said that it is open, on our monotonic clock; None: not yet.
        given_up: it has failed, or not begun: whoever hears of it is to know that it is over.
    """

    version: str
    number: bytes = field(default_factory=lambda: secrets.token_bytes(BOOT_BYTES))
    holder: str = field(default_factory=this_process)
    since: float | None = None
    given_up: bool = False

    def asked(self) -> OpenUpdate:
        """What goes with a question."""
        since_seconds = 0.0 if self.since is None else max(1e-3, time.monotonic() - self.since)
        return OpenUpdate(self.number, self.holder, self.version, since_seconds, over=self.given_up)

    def take(self, page: Status, pool: str) -> bool:
        """Whether it is open. False: the hub does not admit one yet, ask again.

        Raises:
            UpdateInProgress: another one is open, or was while this one was taken for dead.
        """
        found = page.update
        if found is not None and found.number == self.number:
            self.since = time.monotonic() if self.since is None else self.since
            return True
        if self.since is not None:
            raise UpdateInProgress(self._lost(found, pool), found)
        if found is not None:
            raise UpdateInProgress(f"nothing was asked of pool {pool}: {_told(found)}", found)
        return False

    def _lost(self, found: OpenUpdate | None, pool: str) -> str:
        other = _told(found) if found is not None else "another trainer pushed meanwhile"
        return (
            f"the update of pool {pool} to {self.version!r} was not kept open (this process, or its way to the hub, stood still for "
            f"longer than the pool's lease), and {other}. Engines may hold some weights of both"
        )


def _told(found: OpenUpdate) -> str:
    since = datetime.fromtimestamp(time.time() - found.since_seconds, UTC)
    return (
        f"{found.holder!r} has had an update to {found.version!r} open since {since:%Y-%m-%d %H:%M:%S} UTC "
        f"({found.since_seconds:.0f} s); if it has died, the next one may begin in {found.left_seconds:.0f} s"
    )
