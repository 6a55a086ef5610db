"""A client's look at its pool: the pages of a hub's `Status`, asked again until they are answered."""

from __future__ import annotations

import math
import time
from typing import Final

from epochkv_fence.client.errors import HubUnreachable, KeyRefused, WrongPool
from epochkv_fence.client.results import PoolStatus
from epochkv_fence.client.session import Conversation, Session
from epochkv_fence.protocol.messages import EngineStatus, Status

FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 2.0
REFUSED_SECONDS: Final = 2.0
"""A starting hub refuses keys until it knows its pools; a key that it refuses for longer is wrong."""


class Looks:
    """Looks at the pool of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    async def greet(self, timeout_s: float) -> None:
        """Prove that a hub answers, takes our key and serves the right pool. It does not wait long for a hub that refuses the key."""
        with self.session.conversation() as conversation:
            await self.page(conversation, None, time.monotonic() + timeout_s, REFUSED_SECONDS)

    async def status(self, timeout_s: float) -> PoolStatus:
        """The pool and its live engines."""
        page, engines = await self.engines(time.monotonic() + timeout_s)
        pool = self.session.connection.pool
        return PoolStatus.of(pool.name, pool.uid, page, engines)

    async def engines(self, until: float) -> tuple[Status, list[EngineStatus]]:
        found: dict[bytes, EngineStatus] = {}
        with self.session.conversation() as conversation:
            first = page = await self.page(conversation, None, until)
            while page.engines:
                found.update({engine.boot: engine for engine in page.engines})
                if len(found) >= page.total:
                    break
                page = await self.page(conversation, page.engines[-1].boot, until)
        return first, list(found.values())

    async def page(self, conversation: Conversation, after: bytes | None, until: float, refused_seconds: float = math.inf) -> Status:
        """The page of the pool's state that begins after this boot (None: the first page)."""
        pause = FIRST_RETRY_SECONDS
        while True:
            conversation.ask(Status(conversation.request, after=after))
            again = min(until, time.monotonic() + pause)
            while (answer := await conversation.next(again - time.monotonic())) is not None:
                if isinstance(answer, Status) and answer.after == after and answer.lease_seconds > 0:
                    self._check_pool(answer)
                    return answer
            if time.monotonic() >= until or self.session.refused_seconds > refused_seconds:
                raise await self.unreachable()
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _check_pool(self, page: Status) -> None:
        pool = self.session.connection.pool
        if page.pool and page.pool != pool.uid:
            origin = self.session.connection.origin
            raise WrongPool(
                f"the key speaks for the pool with uid {page.pool}, and {origin} names {pool.name} with uid {pool.uid}; "
                "take both from one pool"
            )

    async def unreachable(self) -> HubUnreachable:
        """The error to raise, which says why no hub answered."""
        kind = KeyRefused if self.session.refused_seconds > 0 else HubUnreachable
        return kind(f"no answer from the hub at {self.session.connection.hub.endpoint}: {await self.session.explain()}")
