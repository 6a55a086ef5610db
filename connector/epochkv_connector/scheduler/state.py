"""What the parts of the scheduler role share, and what each of their operations begins with: `SharedState.apply`.

Epochs are adopted on another thread, leases end and weights change between two calls of vLLM. Nothing is pushed into the
bookkeeping then: whoever is called next finds that the root shows something else than was last applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from epochkv_connector.engine import patches
from epochkv_connector.engine.events import HostEvents, Outgoing
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.naming.pins import Pins, is_private
from epochkv_connector.scheduler.requests import Requests
from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping


class SharedState:
    """One per EngineCore; scheduler thread only.

    Attributes:
        events, outgoing: what routers are told of L1; what they are told at all.
        books: bookkeeping of the tiers; None when no tier is configured (the fence still works).
        on_error: told of errors that were dealt with here.
        applied: the names that the bookkeeping works with.
        manager, pool, hash_block_size: vLLM's cache manager, its GPU block pool, tokens of a hash block; known before the first request.
        broken: an error left the books in doubt: the tiers stay off until this engine restarts.
    """

    def __init__(self, pins: Pins, books: Bookkeeping | None, on_error: Callable[[str, Exception], None], core: Any | None = None) -> None:
        self.pins = pins
        self._core = core
        self.books = books
        self.on_error = on_error
        self.counters: Counter[str] = Counter()
        self.requests = Requests(self.counters)
        self.events = HostEvents(on_error)
        self.outgoing = Outgoing(self.events, lambda request: is_private(pins, request), on_error)
        self.applied: Snapshot = pins.root.snapshot
        self.broken = False
        self.manager: Any = None
        self.pool: Any = None
        self.hash_block_size = 0

    def apply(self) -> Snapshot:
        """Bring the bookkeeping to what holds now: poison what an adoption overtook. Returns what holds now."""
        snapshot = self.pins.root.refresh()
        if snapshot is self.applied:
            return snapshot
        changed_root = snapshot.root != self.applied.root
        self._rename("adopt", lambda books: books.adopt(snapshot))
        self.applied = snapshot  # from here on an error cannot leave a load unpoisoned
        if changed_root:
            self.events.cleared(drop_pending=False)
        return snapshot

    def clear(self) -> None:
        """Every tier forgets what it holds, under whatever name."""
        self._rename("reset", lambda books: books.reset())
        self.events.cleared(drop_pending=True)

    def _rename(self, where: str, change: Callable[[Bookkeeping], None]) -> None:
        """What is being loaded must fail, also where the bookkeeping cannot follow."""
        self.requests.overtake()
        if self.books is not None:
            try:
                change(self.books)
            except Exception as error:
                self.fail(where, error)

    @property
    def must_tell(self) -> bool:
        """Routers have not heard yet of what holds now, and an engine that idles would not tell them. Any thread."""
        return self.outgoing.enabled and (self.outgoing.waiting or self.pins.root.refresh() is not self.applied)

    def tell_soon(self) -> None:
        """Wake an engine that idles, so that it takes the step with which vLLM publishes. Any thread."""
        if self.must_tell:
            patches.wake(self._core)

    def fail(self, where: str, error: Exception) -> None:
        """An error left the books in doubt: they are used no more."""
        self.broken = True
        self.on_error(where, error)
