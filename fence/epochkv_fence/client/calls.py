"""What a trainer asks of a hub, as coroutines on the client's own loop; the synchronous and the asyncio face share them.

Every call ends at its deadline, and every ask is repeated until it is answered, so hubs may restart or be replaced at any
point. A reset of `epoch=None` asks for one above the target that a hub showed after the call, upon a leadership read. No
engine was at that epoch before the call, whoever else asks for it meanwhile, so its publication is what the caller wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_fence.client.arguments import check_jump
from epochkv_fence.client.errors import HubUnreachable, KeyRefused, PoolError, ResetNotRecorded, ResetTimeout, WrongPool
from epochkv_fence.client.laggards import FIRST_LOOK_SECONDS, LOOK_SECONDS, Laggards
from epochkv_fence.client.results import OnFailure, PoolStatus, Reset
from epochkv_fence.client.session import Conversation, Session
from epochkv_fence.protocol.messages import MAX_EPOCH, Bump, BumpStatus, EngineStatus, Status

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 2.0
FIRST_POLL_SECONDS: Final = 0.01
MAX_POLL_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 2.0
"""A hub that starts refuses keys until it knows its pools; a key that is refused for longer is wrong."""

Progress = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a reset is, for people who wait.

    Attributes:
        laggards: number of engines that have not acknowledged; `names` are theirs once it takes longer.
    """

    epoch: int
    recorded: bool
    published: bool
    engines: int
    laggards: int
    names: tuple[str, ...] = ()


class Teller:
    """Calls the caller's `progress`, which only looks on: whatever it raises is logged once, and never ends a call."""

    def __init__(self, progress: Callable[[Any], None] | None) -> None:
        self._progress = progress
        self._has_failed = False
        self._told: object = None

    def again(self) -> None:
        """Tell the next one also when nothing has changed."""
        self._told = None

    def __call__(self, standing: object) -> None:
        if self._progress is None or standing == self._told:
            return
        self._told = standing
        try:
            self._progress(standing)
        except BaseException:  # also SystemExit, which would end the client's thread
            if not self._has_failed:
                logger.warning("the progress callback failed; the call goes on", exc_info=True)
            self._has_failed = True


@dataclass(slots=True)
class Ask:
    """One reset from its call to its end.

    Attributes:
        names: of live engines below the epoch, as they were listed last; `late` remembers also those that fell silent.
    """

    epoch: int
    called_at: float
    until: float
    noop: bool = False
    newest: BumpStatus | None = None
    names: tuple[str, ...] = ()
    late: Laggards = field(default_factory=Laggards)

    def take(self, answer: BumpStatus) -> None:
        """An answer that is older than another one says nothing."""
        if self.newest is None or answer.published >= self.newest.published:
            self.newest = answer

    @property
    def recorded(self) -> bool:
        return self.newest is not None and self.newest.target >= self.epoch

    @property
    def published(self) -> bool:
        return self.newest is not None and self.newest.published >= self.epoch

    def standing(self) -> Standing:
        newest = self.newest
        if newest is None:
            return Standing(self.epoch, False, False, 0, 0)
        return Standing(self.epoch, self.recorded, self.published, newest.engines, newest.laggards, self.names)


class Calls:
    """What a client may ask about epochs, on one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    # ------------------------------------------------------------------ looking

    async def greet(self, timeout_s: float) -> None:
        """Is there a hub, does it take our key, and is it the right pool? A key that stays refused is not waited for."""
        with self.session.conversation() as conversation:
            await self._page(conversation, None, time.monotonic() + timeout_s, REFUSED_SECONDS)

    async def status(self, timeout_s: float) -> PoolStatus:
        """The pool and its live engines."""
        return await self.look(time.monotonic() + timeout_s)

    async def look(self, until: float) -> PoolStatus:
        """The same, by a moment of our monotonic clock."""
        page, engines = await self._engines(until)
        pool = self.session.connection.pool
        return PoolStatus.of(pool.name, pool.uid, page, engines)

    async def _engines(self, until: float) -> tuple[Status, list[EngineStatus]]:
        """The first page, and the engines of all."""
        found: dict[bytes, EngineStatus] = {}
        with self.session.conversation() as conversation:
            first = page = await self._page(conversation, None, until)
            while page.engines:
                found.update({engine.boot: engine for engine in page.engines})
                if len(found) >= page.total:
                    break
                page = await self._page(conversation, page.engines[-1].boot, until)
        return first, list(found.values())

    async def _page(self, conversation: Conversation, after: bytes | None, until: float, refused_seconds: float = math.inf) -> Status:
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
        """To be raised: why there was no answer."""
        kind = KeyRefused if self.session.refused_seconds > 0 else HubUnreachable
        return kind(f"no answer from the hub at {self.session.connection.hub.endpoint}: {await self.session.explain()}")

    # ------------------------------------------------------------------ resetting

    async def reset(
        self, epoch: int | None, wait: bool, timeout_s: float, on_failure: OnFailure, progress: Progress | None, force: bool
    ) -> Reset:
        """See `Pool.reset`."""
        called_at = time.monotonic()
        until = called_at + timeout_s
        try:
            with self.session.conversation() as conversation:
                page = await self._page(conversation, None, until)
        except HubUnreachable as error:
            raise await self._not_recorded(epoch, timeout_s) from error
        if epoch is not None and not force:
            check_jump(epoch, page.target)
        number = epoch if epoch is not None else _above(page.target)
        ask = Ask(number, called_at, until, noop=page.published >= number)
        await self._pursue(ask, (lambda: ask.published) if wait else (lambda: ask.recorded), Teller(progress))
        if not ask.recorded:
            raise await self._not_recorded(ask.epoch, timeout_s)
        return await self._outcome(ask, wait, on_failure)

    async def _pursue(self, ask: Ask, ended: Callable[[], bool], tell: Teller) -> None:
        """Ask until `ended`, or until the time is over."""
        looking = asyncio.get_running_loop().create_task(self._watch(ask))
        try:
            with self.session.conversation() as conversation:
                await self._ask(conversation, ask, ended, tell)
        finally:
            looking.cancel()

    async def _watch(self, ask: Ask) -> None:
        """Whom the epoch waits for, once it takes longer: who is silent for a lease is listed no more when it is published."""
        await asyncio.sleep(FIRST_LOOK_SECONDS)
        while True:
            if ask.recorded and not ask.published:
                ask.names = await self._look(ask.late, ask.epoch)
            await asyncio.sleep(LOOK_SECONDS)

    @staticmethod
    async def _ask(conversation: Conversation, ask: Ask, ended: Callable[[], bool], tell: Teller) -> None:
        poll = FIRST_POLL_SECONDS
        while time.monotonic() < ask.until:
            conversation.ask(Bump(conversation.request, ask.epoch))
            again = min(ask.until, time.monotonic() + poll)
            while (answer := await conversation.next(again - time.monotonic())) is not None:
                if not isinstance(answer, BumpStatus) or answer.epoch != ask.epoch:
                    continue
                ask.take(answer)
                tell(ask.standing())
                if ended():
                    return
            poll = min(2 * poll, MAX_POLL_SECONDS)
            if poll == MAX_POLL_SECONDS:
                tell.again()

    async def _outcome(self, ask: Ask, wait: bool, on_failure: OnFailure) -> Reset:
        newest = ask.newest
        assert newest is not None
        if newest.laggards or not ask.published or ask.late:
            await self._look(ask.late, ask.epoch)
        reset = Reset(
            epoch=ask.epoch,
            published=ask.published,
            duration_s=time.monotonic() - ask.called_at,
            engines=newest.engines,
            laggards=ask.late.names,
            carried=newest.carried,
            noop=ask.noop,
        )
        if wait and not ask.published and on_failure == "crash":
            raise ResetTimeout(self._late(reset), reset)
        return reset

    @staticmethod
    def _late(reset: Reset) -> str:
        names = ", ".join(reset.laggards[:10]) or "none known"
        return (
            f"epoch {reset.epoch} is recorded and not published after {reset.duration_s:.1f} s; not yet acknowledged by: {names}. "
            "Engines that do not answer leave the older epochs when their leases are over"
        )

    async def _look(self, late: Laggards, epoch: int) -> tuple[str, ...]:
        """Best effort: the names of live engines below `epoch`, which `late` remembers."""
        with contextlib.suppress(PoolError):
            return late.look(*await self._engines(time.monotonic() + MAX_RETRY_SECONDS), epoch)
        return ()

    async def _not_recorded(self, epoch: int | None, timeout_s: float) -> ResetNotRecorded:
        what = f"epoch {epoch}" if epoch is not None else "the next epoch"
        where = self.session.connection.hub.endpoint
        text = (
            f"no hub is known to have recorded {what} within {timeout_s:g} s, so engines go on with the KV they have: ask again. "
            f"The hub at {where}: {await self.session.explain()}"
        )
        return ResetNotRecorded(text, epoch)

    # ------------------------------------------------------------------ waiting

    async def wait(self, epoch: int, timeout_s: float, progress: Progress | None = None) -> Reset:
        """See `Pool.wait`. Asks for nothing."""
        called_at = time.monotonic()
        until, late = called_at + timeout_s, Laggards()
        with self.session.conversation() as conversation:
            page = await self._page(conversation, None, until)
            noop = page.published >= epoch
            await self._wait(conversation, page, epoch, called_at, until, late, Teller(progress))
        page, engines = await self._engines(max(until, time.monotonic() + MAX_RETRY_SECONDS))
        published = page.published >= epoch
        if not noop and page.target >= epoch:  # as long as nobody asks, nobody is waited for
            late.look(page, engines, epoch)
        reset = Reset(
            epoch=epoch,
            published=published,
            duration_s=time.monotonic() - called_at,
            engines=len(engines),
            laggards=late.names,
            carried=sum(engine.carried for engine in engines),
            noop=noop,
        )
        if not published:
            unasked = (
                f"epoch {epoch} is not published after {timeout_s:g} s: nobody has asked for it (the target is {page.target}). "
                "Waiting asks for nothing; a reset does"
            )
            raise ResetTimeout(self._late(reset) if page.target >= epoch else unasked, reset)
        return reset

    async def _wait(
        self, conversation: Conversation, page: Status, epoch: int, called_at: float, until: float, late: Laggards, tell: Teller
    ) -> None:
        """Until it is published, or the time is over."""
        pause, look_at = FIRST_POLL_SECONDS, called_at + FIRST_LOOK_SECONDS
        names: tuple[str, ...] = ()
        while True:
            published = page.published >= epoch
            if page.target >= epoch and not published and time.monotonic() >= look_at:
                names = await self._look(late, epoch)
                look_at = time.monotonic() + LOOK_SECONDS
            if pause == MAX_POLL_SECONDS:
                tell.again()
            tell(Standing(epoch, page.target >= epoch, published, page.total, len(names), names))
            if published or time.monotonic() + pause >= until:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
            with contextlib.suppress(HubUnreachable):
                page = await self._page(conversation, None, until)


def _above(target: int) -> int:
    if target >= MAX_EPOCH:
        raise PoolError(f"the pool is at epoch {target}, which is the highest there is; make a new pool")
    return target + 1
