"""What a trainer asks of a hub about epochs, as coroutines on the client's own loop; both faces of the client share them.

Every call ends at its deadline, and every ask is repeated until it is answered, so hubs may restart or be replaced at any
point. A reset of `epoch=None` asks for one above the target that a hub showed after the call, upon a leadership read. No
engine was at that epoch before the call, whoever else asks for it meanwhile, so its publication is what the caller wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from epochkv_fence.client.arguments import check_jump
from epochkv_fence.client.errors import HubUnreachable, PoolError, ResetNotRecorded, ResetTimeout
from epochkv_fence.client.looks import MAX_RETRY_SECONDS, Looks
from epochkv_fence.client.progress import FIRST_LOOK_SECONDS, LOOK_SECONDS, Laggards, Progress, Standing, Teller
from epochkv_fence.client.results import OnFailure, Reset
from epochkv_fence.client.session import Conversation
from epochkv_fence.protocol.messages import MAX_EPOCH, Bump, BumpStatus

FIRST_POLL_SECONDS: Final = 0.01
MAX_POLL_SECONDS: Final = 1.0


@dataclass(slots=True)
class ResetAsk:
    """One reset from its call to its end.

    Attributes:
        names: the live engines below the epoch in the newest listing; `late` also remembers those that fell silent.
    """

    epoch: int
    called_at: float
    until: float
    noop: bool = False
    newest: BumpStatus | None = None
    names: tuple[str, ...] = ()
    late: Laggards = field(default_factory=Laggards)

    def take(self, answer: BumpStatus) -> None:
        """Take an answer, unless a newer one came before it."""
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


class Resets:
    """Resets a pool, and waits for resets."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._session = looks.session

    async def reset(
        self, epoch: int | None, wait: bool, timeout_s: float, on_failure: OnFailure, progress: Progress | None, force: bool
    ) -> Reset:
        called_at = time.monotonic()
        until = called_at + timeout_s
        try:
            with self._session.conversation() as conversation:
                page = await self._looks.page(conversation, None, until)
        except HubUnreachable as error:
            raise await self._not_recorded(epoch, timeout_s) from error
        if epoch is not None and not force:
            check_jump(epoch, page.target)
        number = epoch if epoch is not None else _above(page.target)
        ask = ResetAsk(number, called_at, until, noop=page.published >= number)
        await self._pursue(ask, (lambda: ask.published) if wait else (lambda: ask.recorded), Teller(progress))
        if not ask.recorded:
            raise await self._not_recorded(ask.epoch, timeout_s)
        return await self._outcome(ask, wait, on_failure)

    async def _pursue(self, ask: ResetAsk, ended: Callable[[], bool], tell: Teller) -> None:
        """Ask until `ended`, or until the time is over."""
        looking = asyncio.get_running_loop().create_task(self._watch(ask))
        try:
            with self._session.conversation() as conversation:
                await self._repeat(conversation, ask, ended, tell)
        finally:
            looking.cancel()

    async def _watch(self, ask: ResetAsk) -> None:
        """Note whom the epoch waits for, once it takes longer. After publication the hub no longer lists engines that fell silent."""
        await asyncio.sleep(FIRST_LOOK_SECONDS)
        while True:
            if ask.recorded and not ask.published:
                ask.names = await self._see(ask.late, ask.epoch)
            await asyncio.sleep(LOOK_SECONDS)

    @staticmethod
    async def _repeat(conversation: Conversation, ask: ResetAsk, ended: Callable[[], bool], tell: Teller) -> None:
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

    async def _outcome(self, ask: ResetAsk, wait: bool, on_failure: OnFailure) -> Reset:
        newest = ask.newest
        assert newest is not None
        if newest.laggards or not ask.published or ask.late:
            await self._see(ask.late, ask.epoch)
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

    async def _see(self, late: Laggards, epoch: int) -> tuple[str, ...]:
        """The names of live engines below `epoch`, which `late` remembers; empty if no hub answers soon."""
        with contextlib.suppress(PoolError):
            return late.look(*await self._looks.engines(time.monotonic() + MAX_RETRY_SECONDS), epoch)
        return ()

    async def _not_recorded(self, epoch: int | None, timeout_s: float) -> ResetNotRecorded:
        what = f"epoch {epoch}" if epoch is not None else "the next epoch"
        where = self._session.connection.hub.endpoint
        text = (
            f"no hub is known to have recorded {what} within {timeout_s:g} s, so engines go on with the KV they have: ask again. "
            f"The hub at {where}: {await self._session.explain()}"
        )
        return ResetNotRecorded(text, epoch)

    # ------------------------------------------------------------------ waiting

    async def wait(self, epoch: int, timeout_s: float, progress: Progress | None = None) -> Reset:
        called_at = time.monotonic()
        until, late, tell = called_at + timeout_s, Laggards(), Teller(progress)
        pause, look_at = FIRST_POLL_SECONDS, called_at + FIRST_LOOK_SECONDS
        names: tuple[str, ...] = ()
        with self._session.conversation() as conversation:
            page = await self._looks.page(conversation, None, until)
            noop = page.published >= epoch
            while True:
                published = page.published >= epoch
                if page.target >= epoch and not published and time.monotonic() >= look_at:
                    names = await self._see(late, epoch)
                    look_at = time.monotonic() + LOOK_SECONDS
                if pause == MAX_POLL_SECONDS:
                    tell.again()
                tell(Standing(epoch, page.target >= epoch, published, page.total, len(names), names))
                if published or time.monotonic() + pause >= until:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_POLL_SECONDS)
                with contextlib.suppress(HubUnreachable):
                    page = await self._looks.page(conversation, None, until)
        page, engines = await self._looks.engines(max(until, time.monotonic() + MAX_RETRY_SECONDS))
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


def _above(target: int) -> int:
    if target >= MAX_EPOCH:
        raise PoolError(f"the pool is at epoch {target}, which is the highest there is; make a new pool")
    return target + 1
