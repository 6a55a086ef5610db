"""What a trainer asks of a hub, as coroutines on the client's own loop; the synchronous and the asyncio face share them.

Every call ends at its deadline, and every ask is repeated until it is answered, so hubs may restart or be replaced at any
point. Two rules keep a reset from being less than what the caller means by it:

- *Whose epoch.* `epoch=None` asks for one above the target. If another asker turns out to own that number, its ask may be
  older than the push, and may name other boots: the number is exceeded, not joined. So an epoch counts as ours once a hub
  shows it as the target with our version of the weights; an explicit epoch is what the caller says it is.
- *How old.* Every ask carries a moment of the hub's clock and the time that passed here since the reset was called for, so
  that a late ask never counts as made on arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from epochkv_fence.client.arguments import check_jump
from epochkv_fence.client.errors import (
    HubUnreachable,
    KeyRefused,
    PoolError,
    ResetNotRecorded,
    ResetTimeout,
    WrongPool,
)
from epochkv_fence.client.holding import Holding
from epochkv_fence.client.laggards import FIRST_LOOK_SECONDS, LOOK_SECONDS, Laggards
from epochkv_fence.client.results import OnFailure, OpenUpdate, PoolStatus, Reset
from epochkv_fence.client.session import Answer, Conversation, Session
from epochkv_fence.messages import MAX_EPOCH, Bump, BumpStatus, EngineStatus, Moment, Status

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 2.0
FIRST_POLL_SECONDS: Final = 0.01
MAX_POLL_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 2.0
"""A hub that starts refuses keys until it knows its pools; a key that is refused for longer is wrong."""
MAX_PASSES: Final = 4
BOOTS_PER_MESSAGE: Final = 2048

Progress = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a reset is, for people who wait.

    Attributes:
        laggards: number of engines that have not acknowledged; `names` are theirs once it takes longer.
        pending: engines with the weights that do not share yet.
        update: the weight update of somebody else in whose middle this reset was asked for; engines share when it has ended.
    """

    epoch: int
    recorded: bool
    published: bool
    engines: int
    laggards: int
    pending: int
    names: tuple[str, ...] = ()
    update: OpenUpdate | None = None


class _Teller:
    """Calls the caller's `progress`, which only looks on: whatever it raises is logged once, and never ends a reset."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._has_failed = False
        self._told: Standing | None = None

    def again(self) -> None:
        """Tell the next one also when nothing has changed."""
        self._told = None

    def __call__(self, standing: Standing) -> None:
        if self._progress is None or standing == self._told:
            return
        self._told = standing
        try:
            self._progress(standing)
        except BaseException:  # also SystemExit, which would end the client's thread
            if not self._has_failed:
                logger.warning("the progress callback failed; the reset goes on", exc_info=True)
            self._has_failed = True


@dataclass(slots=True)
class Ask:
    """One reset from its call to its end.

    Attributes:
        boots: who has the weights; None: nobody says, the pool's age rule decides.
        exact: the caller named the epoch; otherwise it is ours only when a hub says so.
        moment, ago_seconds: a moment of a hub, and how long after the call it was received.
        names: of live engines below the epoch, as they were listed last; `late` remembers also those that fell silent.
        ends: the update that this is the end of.
        amid: the one of somebody else that was open when this was asked for.
    """

    epoch: int
    version: str
    boots: Sequence[bytes] | None
    exact: bool
    called_at: float
    until: float
    moment: Moment | None = None
    ago_seconds: float = 0.0
    owned: bool = False
    noop: bool = False
    newest: BumpStatus | None = None
    names: tuple[str, ...] = ()
    late: Laggards = field(default_factory=Laggards)
    ends: Holding | None = None
    amid: OpenUpdate | None = None

    def note_moment(self, moment: Moment | None) -> None:
        """The first moment of each hub process is the closest to the call."""
        if moment is not None and (self.moment is None or moment.hub != self.moment.hub):
            self.moment, self.ago_seconds = moment, time.monotonic() - self.called_at

    def messages(self, request: int) -> list[Bump]:
        """A long list of boots goes in several messages."""
        boots = self.boots
        parts = (
            [None] if boots is None else [list(boots[i : i + BOOTS_PER_MESSAGE]) for i in range(0, max(1, len(boots)), BOOTS_PER_MESSAGE)]
        )
        number = self.ends.number if self.ends is not None else None
        return [Bump(request, self.epoch, part, self.version, self.moment, self.ago_seconds, number) for part in parts]

    @property
    def recorded(self) -> bool:
        return self.newest is not None and self.newest.target >= self.epoch and (self.exact or self.owned)

    @property
    def published(self) -> bool:
        return self.recorded and self.newest is not None and self.newest.published >= self.epoch

    @property
    def settled(self) -> bool:
        """Published, and whoever was named shares again."""
        return self.published and (not self.boots or self.newest is None or self.newest.pending == 0)

    def standing(self) -> Standing:
        newest = self.newest
        if newest is None:
            return Standing(self.epoch, False, False, 0, 0, 0, update=self.amid)
        return Standing(self.epoch, self.recorded, self.published, newest.engines, newest.laggards, newest.pending, self.names, self.amid)


class Calls:
    """Everything a client may ask, on one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    # ------------------------------------------------------------------ looking

    async def greet(self, timeout_s: float) -> None:
        """Is there a hub, does it take our key, and is it the right pool? A key that stays refused is not waited for."""
        with self.session.conversation() as conversation:
            await self._page(conversation, 0, time.monotonic() + timeout_s, REFUSED_SECONDS)

    async def status(self, timeout_s: float) -> PoolStatus:
        """The pool and its live engines."""
        page, engines = await self._engines(time.monotonic() + timeout_s)
        pool = self.session.connection.pool
        return PoolStatus.of(pool.name, pool.uid, page, engines)

    async def _engines(self, until: float) -> tuple[Status, list[EngineStatus]]:
        """All pages. While boots come and go their places move, so it is asked again until the count fits."""
        found: dict[bytes, EngineStatus] = {}
        page = None
        with self.session.conversation() as conversation:
            for _ in range(MAX_PASSES):
                seen: dict[bytes, EngineStatus] = {}
                first = 0
                while True:
                    page = await self._page(conversation, first, until)
                    seen.update({engine.boot: engine for engine in page.engines})
                    first += len(page.engines)
                    if not page.engines or first >= page.total:
                        break
                found.update(seen)
                if len(seen) >= page.total:
                    return page, list(seen.values())
        assert page is not None
        return page, list(found.values())

    async def _page(
        self,
        conversation: Conversation,
        first: int,
        until: float,
        refused_seconds: float = math.inf,
        holding: Holding | None = None,
    ) -> Status:
        def wanted(answer: Answer) -> Status | None:
            return answer if isinstance(answer, Status) and answer.first == first and answer.moment is not None else None

        pause = FIRST_RETRY_SECONDS
        while True:
            conversation.ask(Status(conversation.request, first, update=holding.asked() if holding is not None else None))
            again = min(until, time.monotonic() + pause)
            while (answer := await conversation.next(again - time.monotonic())) is not None:
                if (page := wanted(answer)) is not None:
                    self._check_pool(page)
                    return page
            if time.monotonic() >= until or self.session.refused_seconds > refused_seconds:
                raise await self._unreachable()
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _check_pool(self, page: Status) -> None:
        pool = self.session.connection.pool
        if page.pool and page.pool != pool.uid:
            origin = self.session.connection.origin
            raise WrongPool(
                f"the key speaks for the pool with uid {page.pool}, and {origin} names {pool.name} with uid {pool.uid}; "
                "take both from one pool"
            )

    async def _unreachable(self) -> HubUnreachable:
        kind = KeyRefused if self.session.refused_seconds > 0 else HubUnreachable
        return kind(f"no answer from the hub at {self.session.connection.hub.endpoint}: {await self.session.explain()}")

    # ------------------------------------------------------------------ resetting

    async def reset(
        self,
        epoch: int | None,
        version: str,
        wait: bool,
        timeout_s: float,
        on_failure: OnFailure,
        boots: Sequence[bytes] | None = None,
        progress: Progress | None = None,
        ends: Holding | None = None,
        force: bool = False,
    ) -> Reset:
        """See `Pool.reset`; with `boots`, exactly these may share the epoch, and with `ends` that update is over."""
        called_at = time.monotonic()
        until = called_at + timeout_s
        try:
            with self.session.conversation() as conversation:
                page = await self._page(conversation, 0, until, holding=None if ends is None or ends.given_up else ends)
        except HubUnreachable as error:
            raise await self._not_recorded(epoch, timeout_s) from error
        if ends is not None and not ends.given_up:
            ends.take(page, self.session.connection.pool.name)
        exact = epoch is not None
        if epoch is not None and not force:
            check_jump(epoch, page.target)
        number = epoch if epoch is not None else _above(page.target)
        ask = Ask(number, version, boots, exact, called_at, until, noop=exact and page.published >= number, ends=ends)
        ask.note_moment(page.moment)
        if ends is None and not ask.noop:
            ask.amid = OpenUpdate.of(page)
        await self._pursue(ask, (lambda: ask.settled) if wait else (lambda: ask.recorded), progress)
        if not ask.recorded:
            raise await self._not_recorded(ask.epoch, timeout_s)
        if len(ask.boots or ()) > BOOTS_PER_MESSAGE:
            await self._heard_all()
        return await self._outcome(ask, wait, on_failure)

    async def _pursue(self, ask: Ask, ended: Callable[[], bool], progress: Progress | None = None) -> None:
        """Ask until `ended`, or until the time is over."""
        looking = asyncio.get_running_loop().create_task(self._watch(ask))
        try:
            await self._ask_until(ask, ended, _Teller(progress))
        finally:
            looking.cancel()

    async def _watch(self, ask: Ask) -> None:
        """Whom the epoch waits for, once it takes longer: who is silent for a lease is listed no more when it is published."""
        await asyncio.sleep(FIRST_LOOK_SECONDS)
        while True:
            if ask.recorded and not ask.published:
                ask.names = await self._look(ask.late, ask.epoch)
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask_until(self, ask: Ask, ended: Callable[[], bool], tell: _Teller) -> None:
        while time.monotonic() < ask.until:
            with self.session.conversation() as conversation:
                taken = await self._ask(conversation, ask, ended, tell)
            if not taken:
                return
            assert ask.newest is not None
            logger.info("epoch %d is somebody else's; asking for %d", ask.epoch, ask.newest.target + 1)
            ask.epoch, ask.owned, ask.newest = _above(ask.newest.target), False, None

    async def _ask(self, conversation: Conversation, ask: Ask, ended: Callable[[], bool], tell: _Teller) -> bool:
        """Repeat one ask. Returns True when its epoch belongs to somebody else, so that a higher one is needed."""
        poll = FIRST_POLL_SECONDS
        while True:
            for message in ask.messages(conversation.request):
                conversation.ask(message)
            again = min(ask.until, time.monotonic() + poll)
            while (answer := await conversation.next(again - time.monotonic())) is not None:
                if not isinstance(answer, BumpStatus) or answer.epoch != ask.epoch:
                    continue
                self._take(ask, answer)
                tell(ask.standing())
                if ended():
                    return False
                if not ask.exact and answer.target >= ask.epoch and not ask.owned:
                    return True
            if time.monotonic() >= ask.until:
                return False
            poll = min(2 * poll, MAX_POLL_SECONDS)
            if poll == MAX_POLL_SECONDS:
                tell.again()

    @staticmethod
    def _take(ask: Ask, answer: BumpStatus) -> None:
        ask.note_moment(answer.moment)
        if ask.newest is not None and answer.published < ask.newest.published:
            return  # late
        ask.newest = answer
        if answer.target == ask.epoch and answer.may_answer(ask.version, listed=ask.boots is not None):
            ask.owned = True

    async def _heard_all(self) -> None:
        """What answered may be the first of several messages, and a client that hangs up now takes the others with it. A
        hub takes messages in order. Best effort: a boot that is not marked stays in bypass."""
        with contextlib.suppress(HubUnreachable), self.session.conversation() as conversation:
            await self._page(conversation, 0, time.monotonic() + MAX_RETRY_SECONDS)

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
            bypassed=newest.bypassed,
            weights_version=newest.weights_version,
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
            f"no hub is known to have recorded {what} within {timeout_s:g} s, so engines may go on with old KV: keep them paused and ask "
            f"again. The hub at {where}: {await self.session.explain()}"
        )
        return ResetNotRecorded(text, epoch)

    # ------------------------------------------------------------------ waiting

    async def wait(self, epoch: int, timeout_s: float, progress: Progress | None = None) -> Reset:
        """See `Pool.wait`. Asks for nothing."""
        called_at = time.monotonic()
        until, late = called_at + timeout_s, Laggards()
        with self.session.conversation() as conversation:
            page = await self._page(conversation, 0, until)
            noop = page.published >= epoch
            await self._wait(conversation, page, epoch, called_at, until, late, _Teller(progress))
        page, engines = await self._engines(max(until, time.monotonic() + MAX_RETRY_SECONDS))
        published = page.published >= epoch
        if not noop and page.target >= epoch:  # as long as nobody asks, nobody is waited for
            late.look(page, engines, epoch)
        status = PoolStatus.of("", "", page, engines)
        reset = Reset(
            epoch=epoch,
            published=published,
            duration_s=time.monotonic() - called_at,
            engines=len(status.engines),
            laggards=late.names,
            carried=sum(engine.carried for engine in status.engines),
            noop=noop,
            bypassed=sum(engine.state == "bypass" for engine in status.engines),
            weights_version=status.weights_version,
        )
        if not published:
            unasked = (
                f"epoch {epoch} is not published after {timeout_s:g} s: nobody has asked for it (the target is {page.target}). "
                "Waiting asks for nothing; a reset does"
            )
            raise ResetTimeout(self._late(reset) if page.target >= epoch else unasked, reset)
        return reset

    async def _wait(
        self, conversation: Conversation, page: Status, epoch: int, called_at: float, until: float, late: Laggards, tell: _Teller
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
            tell(Standing(epoch, page.target >= epoch, published, page.total, len(names), 0, names))
            if published or time.monotonic() + pause >= until:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
            with contextlib.suppress(HubUnreachable):
                page = await self._page(conversation, 0, until)


def _above(target: int) -> int:
    if target >= MAX_EPOCH:
        raise PoolError(f"the pool is at epoch {target}, which is the highest there is; make a new pool")
    return target + 1
