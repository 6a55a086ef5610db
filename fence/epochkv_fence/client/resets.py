"""How far a call is: what its caller is told, and by name who has not acknowledged an epoch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_fence.client.arguments import check_jump
from epochkv_fence.client.results import Engine, HubUnreachable, OnFailure, PoolError, Reset, ResetNotRecorded, ResetTimeout
from epochkv_fence.client.session import MAX_RETRY_SECONDS, Conversation, Looks
from epochkv_fence.protocol.messages import MAX_EPOCH, Bump, BumpStatus, EngineStatus, Status

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS: Final = 0.5
"""Most resets are over by then, and nobody has to be listed for them."""
LOOK_SECONDS: Final = 1.0
SILENT_SHARE: Final = 0.9
"""Of a lease. One that vanishes from the hub's list and was heard within it has said goodbye: no lease was waited for."""

Progress = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a reset is.

    Attributes:
        laggards: how many engines have not acknowledged; `names` has their names once the reset takes longer.
    """

    epoch: int
    recorded: bool
    published: bool
    engines: int
    laggards: int
    names: tuple[str, ...] = ()


class Teller:
    """Calls the caller's `progress`. That only looks on, so whatever it raises goes to the log once and never ends a call."""

    def __init__(self, progress: Callable[[Any], None] | None) -> None:
        self._progress = progress
        self._has_failed = False
        self._told: object = None

    def again(self) -> None:
        """Tell the next standing even if it is the same."""
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """An engine below the epoch, as it was listed last; `heard_at` is on our monotonic clock."""

    name: str
    heard_at: float


@dataclass(slots=True)
class Laggards:
    """Engines that a call saw below its epoch, and has not seen at it since. The hub lists live engines alone, so this remembers
    those that fell silent."""

    _seen: dict[bytes, _Seen] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def look(self, page: Status, engines: Sequence[EngineStatus], epoch: int) -> tuple[str, ...]:
        """Take a list of the live engines; returns the names of those below `epoch`."""
        before, now = self._seen, time.monotonic()
        listed = {engine.instance for engine in engines}
        # A hub that has only begun to lead lists those that it has heard; whom it has not heard has not left.
        settling = page.settling_seconds > 0
        self._seen = {
            instance: seen
            for instance, seen in before.items()
            if instance not in listed and (settling or now - seen.heard_at >= SILENT_SHARE * page.lease_seconds)
        }
        behind = [engine for engine in engines if engine.epoch is None or engine.epoch < epoch]
        if page.published >= epoch:  # nobody waited for one that has joined since
            behind = [engine for engine in behind if engine.epoch is not None or engine.instance in before]
        for engine in behind:
            self._seen[engine.instance] = _Seen(Engine.of(engine, page.target).name, now - engine.silent_seconds)
        return tuple(sorted(self._seen[engine.instance].name for engine in behind))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them, live or not."""
        return tuple(sorted(seen.name for seen in self._seen.values()))


# ----------------------------------------------------------------------------------------------------------------------
# What a trainer asks of a hub about epochs, as coroutines on the client's own loop; both faces of the client share them.
#
# Every call ends at its deadline, and every ask is repeated until it is answered, so hubs may restart or be replaced at any
# point. A reset of `epoch=None` asks for one above the target that a hub showed after the call, upon a leadership read. No
# engine was at that epoch before the call, whoever else asks for it meanwhile, so its publication is what the caller wants.


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
            old_epoch_requests=newest.old_epoch_requests,
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
            old_epoch_requests=sum(engine.old_epoch_requests for engine in engines),
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
