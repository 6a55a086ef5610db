"""Resets and waits for them: how far a call is, and by name who has not acknowledged its epoch."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_fence.client.arguments import check_epoch, check_jump, check_reset, check_timeout
from epochkv_fence.client.results import HubUnreachable, OnFailure, PoolError, Reset, ResetNotRecorded, ResetTimeout
from epochkv_fence.client.session import MAX_RETRY_SECONDS, Session
from epochkv_fence.protocol.messages import MAX_EPOCH, Bump, BumpStatus, EngineStatus, Status

logger = logging.getLogger(__name__)

RESET_SECONDS: Final = 300.0
FIRST_LISTING_SECONDS: Final = 0.5
"""Most resets are over by then, and nobody has to be listed for them."""
LISTING_SECONDS: Final = 1.0
REPORT_SECONDS: Final = 1.0

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


@dataclass(eq=False)
class Reporter:
    """Calls the caller's `progress` at every change, and each second. Whatever it raises goes to the log once and ends no call."""

    _progress: Callable[[Any], None] | None
    _has_failed: bool = False
    _last: object = None
    _again_at: float = -math.inf

    def __call__(self, standing: object) -> None:
        now = time.monotonic()
        if self._progress is None or (standing == self._last and now < self._again_at):
            return
        self._last, self._again_at = standing, now + REPORT_SECONDS
        try:
            self._progress(standing)
        except BaseException:  # also SystemExit, which would end the client's thread
            if not self._has_failed:
                logger.warning("the progress callback failed; the call goes on", exc_info=True)
            self._has_failed = True


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
    """One reset, or one wait for it, from its call to its end.

    Attributes:
        newest: the last answer that counts; of a `Status` only what the pool's hub says of the epochs.
        late: names of engines below the epoch when they were listed last, by instance.
        names: of those in the newest list.
    """

    epoch: int
    called_at: float
    until: float
    noop: bool = False
    newest: BumpStatus | Status | None = None
    names: tuple[str, ...] = ()
    late: dict[bytes, str] = field(default_factory=dict)

    def take(self, answer: BumpStatus | Status) -> None:
        """Take an answer, unless a newer one came before it."""
        if self.newest is None or answer.published >= self.newest.published:
            self.newest = answer

    def see(self, page: Status, engines: Sequence[EngineStatus]) -> None:
        """Take a list of the live engines. One that fell silent, or left, is listed no more, and stays late."""
        behind = [engine for engine in engines if engine.epoch is None or engine.epoch < self.epoch]
        if page.published >= self.epoch:  # nobody waited for one that has joined since
            behind = [engine for engine in behind if engine.epoch is not None or engine.instance in self.late]
        for engine in engines:
            self.late.pop(engine.instance, None)
        self.late |= {engine.instance: engine.name(engine.instance) for engine in behind}
        self.names = tuple(sorted(self.late[engine.instance] for engine in behind))

    @property
    def laggards(self) -> tuple[str, ...]:
        return tuple(sorted(self.late.values()))

    @property
    def recorded(self) -> bool:
        return self.newest is not None and self.newest.target >= self.epoch

    @property
    def published(self) -> bool:
        return self.newest is not None and self.newest.published >= self.epoch

    def outcome(self, published: bool, engines: int, old_epoch_requests: int) -> Reset:
        seconds = time.monotonic() - self.called_at
        return Reset(self.epoch, published, seconds, engines, self.laggards, old_epoch_requests, self.noop)

    def standing(self) -> Standing:
        assert self.newest is not None
        counts = (
            (self.newest.engines, self.newest.laggards) if isinstance(self.newest, BumpStatus) else (self.newest.total, len(self.names))
        )
        return Standing(self.epoch, self.recorded, self.published, *counts, self.names)


async def reset(
    session: Session,
    epoch: int | None = None,
    *,
    wait: bool = True,
    timeout_s: float = RESET_SECONDS,
    on_failure: OnFailure = "bypass",
    progress: Progress | None = None,
    force: bool = False,
) -> Reset:
    """Make all KV of the pool unreachable. Repeating it with the same epoch changes nothing.

    New weights do not need it: they make names of their own.

    Args:
        epoch: None: one above the pool's target. A number: it is enough that this epoch is published, whoever asked for it.
        wait: return when the epoch is published; False: when it is recorded, from which on every engine is moved.
        timeout_s: for the whole call.
        on_failure: when it is recorded and not published in time: `bypass` returns with `published=False` and the
            laggards' names (their leases fence them), `crash` raises `ResetTimeout`.
        progress: called on another thread with a `Standing` at every change, and about once a second while it takes.
            What it raises is logged once and changes nothing. A plain function.
        force: also an `epoch` more than a million above the target (at most 10^13), which no reset brings down again.

    Raises:
        ResetNotRecorded: whatever `on_failure` says. Engines go on with the KV they have.
        ResetTimeout: with `on_failure="crash"`.
        WrongPool: the keys are those of another pool by now, such as a new one of the same name.
        ArgumentError (a ValueError): an argument cannot be meant.
    """
    check_reset(epoch, timeout_s, on_failure)
    called_at = time.monotonic()
    until = called_at + timeout_s
    try:
        with session.conversation() as conversation:
            page = await session.page(conversation, None, until)
    except HubUnreachable as error:
        raise await _not_recorded(session, epoch, timeout_s) from error
    if epoch is not None:
        check_jump(epoch, page.target, force)
    if epoch is None and page.target >= MAX_EPOCH:
        raise PoolError(f"the pool is at epoch {page.target}, which is the highest there is; make a new pool")
    number = epoch if epoch is not None else page.target + 1
    ask = ResetAsk(number, called_at, until, noop=page.published >= number)
    await _pursue(session, ask, (lambda: ask.published) if wait else (lambda: ask.recorded), Reporter(progress), asks=True)
    if not ask.recorded:
        raise await _not_recorded(session, ask.epoch, timeout_s)
    return await _outcome(session, ask, wait, on_failure)


async def _pursue(session: Session, ask: ResetAsk, ended: Callable[[], bool], report: Reporter, *, asks: bool) -> None:
    """Ask for the epoch, or only about it, until `ended` or until the time is over."""
    listing = asyncio.create_task(_watch(session, ask))
    try:
        with session.conversation() as conversation:
            message = Bump(conversation.request, ask.epoch) if asks else Status(conversation.request)
            async for answer in conversation.answers(message, FIRST_POLL_SECONDS, MAX_POLL_SECONDS, ask.until):
                bumped = isinstance(answer, BumpStatus) and asks and answer.epoch == ask.epoch
                shown = isinstance(answer, Status) and not asks and answer.after is None and answer.lease_seconds > 0
                if bumped or shown:
                    assert isinstance(answer, BumpStatus | Status)
                    ask.take(answer)
                    report(ask.standing())
                    if ended():
                        return
    finally:
        listing.cancel()


async def _watch(session: Session, ask: ResetAsk) -> None:
    """Note whom the epoch waits for, once it takes longer. After publication the hub no longer lists engines that fell silent."""
    await asyncio.sleep(FIRST_LISTING_SECONDS)
    while True:
        if ask.recorded and not ask.published:
            await _see(session, ask)
        await asyncio.sleep(LISTING_SECONDS)


async def _outcome(session: Session, ask: ResetAsk, wait: bool, on_failure: OnFailure) -> Reset:
    newest = ask.newest
    assert isinstance(newest, BumpStatus)
    if newest.laggards or not ask.published or ask.late:
        await _see(session, ask)
    reset = ask.outcome(ask.published, newest.engines, newest.old_epoch_requests)
    if wait and not ask.published and on_failure == "crash":
        raise ResetTimeout(_late(reset), reset)
    return reset


def _late(reset: Reset) -> str:
    names = ", ".join(reset.laggards[:10]) or "none known"
    return (
        f"epoch {reset.epoch} is recorded and not published after {reset.duration_s:.1f} s; not yet acknowledged by: {names}. "
        "Engines that do not answer leave the older epochs when their leases are over"
    )


async def _see(session: Session, ask: ResetAsk) -> None:
    """Note whom it waits for, if a hub answers soon."""
    with contextlib.suppress(PoolError):
        ask.see(*await session.engines(time.monotonic() + MAX_RETRY_SECONDS))


async def _not_recorded(session: Session, epoch: int | None, timeout_s: float) -> ResetNotRecorded:
    what = f"epoch {epoch}" if epoch is not None else "the next epoch"
    where = session.connection.hub.endpoint
    text = (
        f"no hub is known to have recorded {what} within {timeout_s:g} s, so engines go on with the KV they have: ask again. "
        f"The hub at {where}: {await session.explain()}"
    )
    return ResetNotRecorded(text, epoch)


async def wait(session: Session, epoch: int, timeout_s: float = RESET_SECONDS, progress: Progress | None = None) -> Reset:
    """Wait until `epoch` is published, without asking for it.

    Raises:
        ResetTimeout: it was not in time.
        HubUnreachable: no hub answered in time.
        ArgumentError (a ValueError): an argument cannot be meant.
    """
    check_epoch(epoch)
    check_timeout(timeout_s)
    called_at = time.monotonic()
    until, report = called_at + timeout_s, Reporter(progress)
    with session.conversation() as conversation:
        page = await session.page(conversation, None, until)
    ask = ResetAsk(epoch, called_at, until, noop=page.published >= epoch, newest=page)
    report(ask.standing())
    if not ask.noop:
        await _pursue(session, ask, lambda: ask.published, report, asks=False)
    engines: list[EngineStatus] = []
    try:
        page, engines = await session.engines(time.monotonic() + 2 * MAX_RETRY_SECONDS)
    except HubUnreachable:
        if not ask.published:
            raise
    if not ask.noop and page.target >= epoch:  # as long as nobody asks, nobody is waited for
        ask.see(page, engines)
    reset = ask.outcome(ask.published or page.published >= epoch, page.total, sum(engine.old_epoch_requests for engine in engines))
    if not reset.published:
        unasked = (
            f"epoch {epoch} is not published after {timeout_s:g} s: nobody has asked for it (the target is {page.target}). "
            "Waiting asks for nothing; a reset does"
        )
        raise ResetTimeout(_late(reset) if page.target >= epoch else unasked, reset)
    return reset
