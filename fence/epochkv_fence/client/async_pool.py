"""`Pool` for programs on asyncio: the same calls, awaited. The connection lives on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Never, Self, TypeVar

from epochkv_fence.client.arguments import check_reset, check_timeout, check_wait, check_weights, refuse_gone_parameters
from epochkv_fence.client.background import Background, closed_meanwhile
from epochkv_fence.client.pool import CONNECT_SECONDS, LOOK_SECONDS, RESET_SECONDS, WEIGHTS_SECONDS, Config, Face, open_calls
from epochkv_fence.client.progress import Progress
from epochkv_fence.client.results import Engine, OnFailure, PoolStatus, Reset
from epochkv_fence.client.waiting import Update, WeightsProgress
from epochkv_fence.client.weights import WeightsReport
from epochkv_fence.connection import Connection

T = TypeVar("T")


class AsyncPool(Face):
    """One pool, from asyncio. Any number of tasks, and loops, may call at once. See `Pool` for what each call means.

    A call that is cancelled is given up; what it had asked for may still happen. `progress` is a plain function here, too, and
    called on another thread: `loop.call_soon_threadsafe` brings what it is told to a loop. A coroutine function is refused.
    """

    @classmethod
    async def connect(cls, config: Config = None, timeout_s: float = CONNECT_SECONDS) -> AsyncPool:
        check_timeout(timeout_s)
        connection = config if isinstance(config, Connection) else Connection.load(config)
        background = Background()
        try:
            calls = await asyncio.wrap_future(background.submit(open_calls(connection, timeout_s)))
        except BaseException:
            background.stop()
            raise
        return cls(connection, background, calls)

    async def status(self, timeout_s: float = LOOK_SECONDS) -> PoolStatus:
        check_timeout(timeout_s)
        return await self._do(self._calls.looks.status(timeout_s))

    async def engines(self, timeout_s: float = LOOK_SECONDS) -> tuple[Engine, ...]:
        return (await self.status(timeout_s)).engines

    async def reset(
        self,
        epoch: int | None = None,
        *,
        wait: bool = True,
        timeout_s: float = RESET_SECONDS,
        on_failure: OnFailure = "bypass",
        progress: Progress | None = None,
        force: bool = False,
        **gone: Never,
    ) -> Reset:
        refuse_gone_parameters("reset", gone)
        check_reset(epoch, timeout_s, on_failure, progress, wait=wait, force=force)
        return await self._do(self._calls.resets.reset(epoch, wait, timeout_s, on_failure, progress, force))

    async def wait(self, epoch: int, timeout_s: float = RESET_SECONDS, progress: Progress | None = None) -> Reset:
        check_wait(epoch, timeout_s, progress)
        return await self._do(self._calls.resets.wait(epoch, timeout_s, progress))

    async def weights(self, timeout_s: float = LOOK_SECONDS) -> WeightsReport:
        check_timeout(timeout_s)
        return await self._do(self._calls.pushes.weights(timeout_s))

    async def wait_weights(
        self,
        engines: Iterable[str] | None = None,
        timeout_s: float = WEIGHTS_SECONDS,
        label: str | None = None,
        other_than: Iterable[str] = (),
        progress: WeightsProgress | None = None,
    ) -> WeightsReport:
        names, digests = check_weights(engines, timeout_s, label, other_than, progress)
        return await self._do(self._calls.pushes.wait_weights(names, timeout_s, label, digests, progress))

    @asynccontextmanager
    async def weight_update(
        self,
        label: str | None = None,
        *,
        engines: Iterable[str] | None = None,
        timeout_s: float = WEIGHTS_SECONDS,
        progress: WeightsProgress | None = None,
        **gone: Never,
    ) -> AsyncIterator[Update]:
        refuse_gone_parameters("weight_update", gone)
        names, _ = check_weights(engines, timeout_s, label, (), progress)
        update = await self._do(self._calls.pushes.begin_update(label, names, timeout_s))
        yield update
        update.report = await self._do(self._calls.pushes.wait_weights(names, timeout_s, label, update.other_than, progress))

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
