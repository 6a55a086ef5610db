"""`Pool` for programs on asyncio: the same calls, awaited. The connection lives on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from epochkv_fence.client.arguments import check_arguments, check_flags, check_order, check_timeout, check_version, check_wait
from epochkv_fence.client.background import Background, closed_meanwhile
from epochkv_fence.client.calls import Progress
from epochkv_fence.client.errors import PoolError
from epochkv_fence.client.pool import CONNECT_SECONDS, LOOK_SECONDS, RESET_SECONDS, Config, note_failure, note_unfinished, open_calls
from epochkv_fence.client.results import Engine, OnFailure, Order, PoolStatus, Reset
from epochkv_fence.client.updating import Update, UpdateCalls
from epochkv_fence.connection import Connection

T = TypeVar("T")


class AsyncPool:
    """One pool, from asyncio. Any number of tasks, and loops, may call at once. See `Pool` for what each call means.

    A call that is cancelled is given up; what it had asked for may still happen. `progress` is a plain function here, too, and
    called on another thread: `loop.call_soon_threadsafe` brings what it is told to a loop. A coroutine function is refused.
    """

    def __init__(self, connection: Connection, background: Background, calls: UpdateCalls) -> None:
        """Use `connect`."""
        self._connection = connection
        self._background = background
        self._calls = calls

    @classmethod
    async def connect(cls, config: Config = None, timeout_s: float = CONNECT_SECONDS) -> AsyncPool:
        """As `Pool.connect`."""
        check_timeout(timeout_s)
        connection = config if isinstance(config, Connection) else Connection.load(config)
        background = Background()
        try:
            calls = await asyncio.wrap_future(background.submit(open_calls(connection, timeout_s)))
        except BaseException:
            background.stop()
            raise
        return cls(connection, background, calls)

    @property
    def name(self) -> str:
        """Of the pool, as its configuration says."""
        return self._connection.pool.name

    @property
    def uid(self) -> str:
        """Of the pool; never reused."""
        return self._connection.pool.uid

    async def status(self, timeout_s: float = LOOK_SECONDS) -> PoolStatus:
        """As `Pool.status`."""
        check_timeout(timeout_s)
        return await self._do(self._calls.status(timeout_s))

    async def engines(self, timeout_s: float = LOOK_SECONDS) -> tuple[Engine, ...]:
        """As `Pool.engines`."""
        return (await self.status(timeout_s)).engines

    async def reset(
        self,
        epoch: int | None = None,
        weights_version: str | None = None,
        wait: bool = True,
        timeout_s: float = RESET_SECONDS,
        on_failure: OnFailure = "bypass",
        progress: Progress | None = None,
        force: bool = False,
    ) -> Reset:
        """As `Pool.reset`."""
        check_flags(wait=wait, force=force)
        version = check_arguments(epoch, weights_version, timeout_s, on_failure, progress)
        return await self._do(self._calls.reset(epoch, version, wait, timeout_s, on_failure, progress=progress, force=force))

    async def wait(self, epoch: int, timeout_s: float = RESET_SECONDS, progress: Progress | None = None) -> Reset:
        """As `Pool.wait`."""
        check_wait(epoch, timeout_s, progress)
        return await self._do(self._calls.wait(epoch, timeout_s, progress))

    @asynccontextmanager
    async def weight_update(
        self,
        version: str,
        order: Order = "push_under_pause",
        timeout_s: float = RESET_SECONDS,
        on_failure: OnFailure = "bypass",
        progress: Progress | None = None,
    ) -> AsyncIterator[Update]:
        """As `Pool.weight_update`; a cancellation inside counts as a failed push."""
        version = check_version(version)
        check_order(order)
        check_arguments(None, version, timeout_s, on_failure, progress)
        update = await self._do(self._calls.begin_update(version, order, timeout_s, on_failure))
        try:
            yield update
        except BaseException as error:
            await self._fail(update, error)
            raise
        try:
            update.reset = await self._do(self._calls.end_update(update, progress))
        except BaseException as error:
            note_unfinished(error, update)
            raise

    async def _fail(self, update: Update, cause: BaseException) -> None:
        try:
            epoch = await self._do(self._calls.fail_update(update))
        except PoolError as error:
            note_failure(cause, update, None, error)
        else:
            note_failure(cause, update, epoch, None)

    async def close(self) -> None:
        """Hang up and end the thread. Safe to call twice."""
        if self._background.usable:
            await asyncio.wrap_future(self._background.submit(self._calls.session.close()))
        await asyncio.to_thread(self._background.stop)

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._background.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and (task is None or not task.cancelling()):
                raise closed_meanwhile() from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncPool is a connection of this process and cannot be pickled; send its configuration and connect there")

    def __repr__(self) -> str:
        return f"<AsyncPool {self.name} at {self._connection.hub.endpoint}>"
