"""What the processes of an engine answer on the admin channel.

Removals reach this pool's names only, whatever the caller asks for: a store may hold those of others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from epochkv_connector.admin import AdminError, AdminServer, Handler, Refused

logger = logging.getLogger("vllm.epochkv.admin")

ANSWER_MARGIN_SECONDS = 0.5
"""A handler that waits gives up so long before the deadline of its request, so that its own words are the answer."""


class RankHalf(Protocol):
    """`worker.WorkerHalf`, as far as it is asked here."""

    def status(self) -> dict[str, Any]: ...
    def drain(self, below: int | None, timeout: float) -> int: ...


class Remover(Protocol):
    """`store.StoreClient`, as far as it is asked here."""

    def remove_by_prefix(self, prefix: str, timeout: float = 10.0) -> int: ...


class RankHandlers:
    """Requests to one worker rank.

    Args:
        pool: the first part of every name of the pool (`identity.pool_prefix`).
        store: None: there is no L2.
    """

    def __init__(self, half: RankHalf, store: Remover | None, pool: str) -> None:
        self._half = half
        self._store = store
        self._pool = pool

    def table(self) -> dict[str, Handler]:
        """Request -> handler."""
        return {"STATUS": self.status, "DRAIN": self.drain, "RECLAIM": self.reclaim, "REMOVE_ALL": self.remove_all}

    def status(self, argument: str, seconds: float) -> Mapping[str, Any]:
        """Counters, and the loads that are over."""
        return {"pid": os.getpid(), **self._half.status()}

    def drain(self, argument: str, seconds: float) -> Mapping[str, Any]:
        """Wait for transfers to end; with an epoch, give up the puts of older ones first."""
        if argument and not argument.isdecimal():
            raise Refused(f"DRAIN takes an epoch or nothing; got {argument[:40]!r}")
        below = int(argument) if argument else None
        left = self._half.drain(below, max(0.1, seconds - ANSWER_MARGIN_SECONDS))
        if left:
            raise Refused(f"{left} {'slots are still in use' if below is None else f'saves of epochs below {below} are still under way'}")
        return {"left": 0}

    def reclaim(self, argument: str, seconds: float) -> Mapping[str, Any]:
        """Remove stored blocks by the beginning of their names."""
        if not f"{argument}/".startswith(f"{self._pool}/"):
            raise Refused(f"RECLAIM takes the beginning of names of this pool, {self._pool}/...; got {argument[:80]!r}")
        return self._remove(argument if "/" in argument else f"{self._pool}/", seconds)

    def remove_all(self, argument: str, seconds: float) -> Mapping[str, Any]:
        """Remove every stored block of the pool."""
        return self._remove(f"{self._pool}/", seconds)

    def _remove(self, prefix: str, seconds: float) -> Mapping[str, Any]:
        if self._store is None:
            raise Refused("this engine has no distributed tier")
        return {"removed": self._store.remove_by_prefix(prefix, max(0.1, seconds - 2 * ANSWER_MARGIN_SECONDS))}


def open_channel(path: Path, handlers: Mapping[str, Handler]) -> AdminServer | None:
    """Serve, or say why not: an engine works without."""
    server = AdminServer(path, handlers)
    try:
        server.start()
    except AdminError as error:
        logger.warning("EpochKV: %s", error)
        return None
    return server
