"""Weight updates: who pushes, which engines were there, and what they may share when the push has ended, well or not.

The rules of `calls` count here, too; on top of them a pool has one trainer at a time that pushes (`holding`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from epochkv_fence.client.calls import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, Ask, Calls, Progress
from epochkv_fence.client.errors import HubUnreachable, PoolError, UpdateInProgress
from epochkv_fence.client.holding import Holding
from epochkv_fence.client.results import Engine, OnFailure, Order, PoolStatus, Reset
from epochkv_fence.client.session import Session
from epochkv_fence.messages import Status
from epochkv_fence.versions import failed_version

logger = logging.getLogger(__name__)

FAIL_SECONDS: Final = 10.0
"""For saying that an update failed, whatever the caller's own time limit was."""
KEEPS_PER_LEASE: Final = 3
MIN_KEEP_SECONDS: Final = 0.05


@dataclass(slots=True)
class Update:
    """A weight update under way, as the caller's block sees it.

    Attributes:
        version: of the weights that are pushed.
        boots: the engines that were there before the push began; exactly these may share the new epoch.
        epoch: the epoch of the new weights; with `push_under_pause` None until the block has ended.
        reset: the outcome; None until the block has ended well.
        holding: keeps other trainers out while the block runs.
    """

    version: str
    order: Order
    boots: tuple[bytes, ...]
    timeout_s: float
    on_failure: OnFailure
    holding: Holding = field(repr=False)
    epoch: int | None = None
    reset: Reset | None = None
    engines: tuple[Engine, ...] = field(default_factory=tuple)


class UpdateCalls(Calls):
    """`Calls`, and weight updates."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._keeping: dict[bytes, asyncio.Task[None]] = {}  # of the updates whose blocks run

    async def begin_update(self, version: str, order: Order, timeout_s: float, on_failure: OnFailure) -> Update:
        """Before the push: be the only one, list the boots; with `fence_first`, move everybody off the old epoch."""
        until, holding = time.monotonic() + timeout_s, Holding(version)
        try:
            lease_seconds = await self._open(holding, until)
            page, engines = await self._engines(until)
            update = Update(version, order, tuple(engine.boot for engine in engines), timeout_s, on_failure, holding)
            update.engines = PoolStatus.of("", "", page, engines).engines
            self._keeping[holding.number] = asyncio.get_running_loop().create_task(self._keep(holding, lease_seconds))
            if order == "fence_first":
                reset = await self.reset(None, version, True, timeout_s, "crash", boots=())
                update.epoch = reset.epoch
        except BaseException:
            self._let_go(holding)
            raise
        return update

    async def _open(self, holding: Holding, until: float) -> float:
        """Be the one who pushes; returns the pool's lease.

        Raises:
            UpdateInProgress: somebody else is.
            HubUnreachable: no hub said who is, or may admit one yet, in time.
        """
        pause = FIRST_RETRY_SECONDS
        while True:
            with self.session.conversation() as conversation:
                page = await self._page(conversation, 0, until, holding=holding)
            if holding.take(page, self.session.connection.pool.name):
                return page.lease_seconds
            if time.monotonic() + pause >= until:
                raise HubUnreachable(
                    f"the hub at {self.session.connection.hub.endpoint} has led for too short to know whether another trainer is pushing "
                    "weights to the pool; nothing was asked of it: try again"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def _keep(self, holding: Holding, lease_seconds: float) -> None:
        """Say that the push goes on, until it has ended, or somebody else's turns out to be open: the end of ours will tell."""
        pause, warned = max(MIN_KEEP_SECONDS, lease_seconds / KEEPS_PER_LEASE), False
        while True:
            await asyncio.sleep(pause)
            try:
                with self.session.conversation() as conversation:
                    page = await self._page(conversation, 0, time.monotonic() + pause, holding=holding)
                holding.take(page, self.session.connection.pool.name)
            except UpdateInProgress as error:  # whoever pushes meanwhile has to hear of this one, too
                if not warned:
                    logger.warning("%s", error)
                warned = True
            except PoolError as error:
                logger.debug("the update to %s is not kept open: %s", holding.version, error)

    def _let_go(self, holding: Holding) -> None:
        """It has not begun: say so, once, without waiting for an answer."""
        self._rest(holding)
        holding.given_up = True
        with self.session.conversation() as conversation:
            conversation.ask(Status(conversation.request, update=holding.asked()))

    def _rest(self, holding: Holding) -> None:
        """Keep it open no longer."""
        keeping = self._keeping.pop(holding.number, None)
        if keeping is not None:
            keeping.cancel()

    async def end_update(self, update: Update, progress: Progress | None = None) -> Reset:
        """After the push: name those who have the weights, in a new epoch or in the one that was fenced first.

        Raises:
            UpdateInProgress: another trainer may have pushed meanwhile, so nobody's weights are known; told as `fail_update` does.
        """
        self._rest(update.holding)
        try:
            return await self._end(update, progress)
        except UpdateInProgress as error:
            error.add_note(f"EpochKV: epoch {await self.fail_update(update)}: engines serve without reuse until the next weight update")
            raise

    async def _end(self, update: Update, progress: Progress | None) -> Reset:
        if update.epoch is not None:
            if (reset := await self._mark(update, update.epoch, progress)) is not None:
                return reset
            update.epoch = None  # somebody raised the pool beyond it: its marks mean nothing any more
        reset = await self.reset(None, update.version, True, update.timeout_s, update.on_failure, update.boots, progress, update.holding)
        update.epoch = reset.epoch
        return reset

    async def _mark(self, update: Update, epoch: int, progress: Progress | None) -> Reset | None:
        """Name those who have the weights of the epoch that was fenced first; None: it is not the target any more."""
        called = time.monotonic()
        ask = Ask(epoch, update.version, update.boots, True, called, called + update.timeout_s, ends=update.holding)
        with contextlib.suppress(HubUnreachable):
            if await self._superseded(epoch, ask.until, update.holding):
                return None
            await self._pursue(ask, lambda: ask.settled, progress)
        if ask.newest is None:
            where, problem = self.session.connection.hub.endpoint, await self.session.explain()
            raise HubUnreachable(
                f"epoch {epoch} is published and engines serve in bypass there, without reuse, until a hub is told that they have the "
                f"weights; none answered within {update.timeout_s:g} s. The hub at {where}: {problem}"
            )
        if ask.newest.target < epoch:
            raise await self._not_recorded(epoch, update.timeout_s)
        # Who raised the pool since then goes on with the list, which a hub has taken.
        taken = ask.owned or ask.newest.target == epoch
        return await self._outcome(ask, True, update.on_failure) if taken else None

    async def fail_update(self, update: Update) -> int:
        """The push failed, so nobody's weights are known: nobody may share until the next update. Returns the new epoch.

        It is asked for with a version of its own, so that an ask of somebody else (a plain reset, an engine's proposal), which
        may let engines share by age, is never taken for this one.
        """
        seconds, version = min(FAIL_SECONDS, update.timeout_s), failed_version(update.version, secrets.token_hex(4))
        self._rest(update.holding)
        update.holding.given_up = True
        reset = await self.reset(None, version, False, seconds, "bypass", boots=(), ends=update.holding)
        return reset.epoch

    async def _superseded(self, epoch: int, until: float, holding: Holding) -> bool:
        """Somebody raised the pool beyond `epoch` meanwhile: its marks mean nothing any more."""
        with self.session.conversation() as conversation:
            page = await self._page(conversation, 0, until, holding=holding)
        holding.take(page, self.session.connection.pool.name)
        return page.target != epoch
