"""The trainer's client: `Pool` for threads, `AsyncPool` for asyncio, over one connection on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from epochkv_fence.client import pushes, resets
from epochkv_fence.client.arguments import check_timeout
from epochkv_fence.client.pushes import WEIGHTS_SECONDS, Update, WeightsProgress
from epochkv_fence.client.results import Engine, HubUnreachable, PoolClosed, PoolError
from epochkv_fence.client.session import STATUS_SECONDS, Session
from epochkv_fence.common import LoopThread
from epochkv_fence.connection import Connection

P = ParamSpec("P")
T = TypeVar("T")

GRACE_SECONDS: Final = 5.0
"""Beyond a call's own deadline: only a loop that is stuck (a file system that hangs) gets that far."""
STOP_SECONDS: Final = 2.0


class Background:
    """Runs coroutines until `stop`; ends by itself with the interpreter."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread = LoopThread("epochkv-client", STOP_SECONDS)
        self._finalizer = weakref.finalize(self, _stop, self._thread, self._pid)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine there.

        Raises:
            PoolClosed: it was stopped, or this is a fork of the process that made it.
            RuntimeError: it was called there, and would wait for itself.
        """
        if self._thread.is_here:
            work.close()
            raise RuntimeError("a progress callback runs on the thread that serves the pool, so it cannot ask the pool anything")
        if os.getpid() != self._pid:
            work.close()
            raise PoolClosed(f"this pool was connected by process {self._pid}, which forked this one; connect again here")
        if not self._finalizer.alive:
            work.close()
            raise PoolClosed("this pool is closed; connect again")
        return asyncio.run_coroutine_threadsafe(work, self._thread.loop)

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Wait for a coroutine; one that is interrupted is cancelled there.

        Raises:
            PoolClosed: as `submit`.
            HubUnreachable: the loop itself does not answer.
        """
        future = self.submit(work)
        try:
            return future.result(seconds + GRACE_SECONDS)
        except CancelledError as error:
            raise closed_meanwhile() from error
        except TimeoutError as error:
            if future.done():
                raise
            raise stuck(seconds) from error
        finally:
            future.cancel()

    async def wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The same on another event loop."""
        future = self.submit(work)
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS) as limit:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and (task is None or not task.cancelling()):
                raise closed_meanwhile() from None
            raise
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise stuck(seconds) from error

    def stop(self) -> None:
        """End the thread; everything that still runs there is cancelled. Safe to call twice, and in a fork."""
        self._finalizer()


def closed_meanwhile() -> PoolClosed:
    """Somebody closed the pool while a call was under way."""
    return PoolClosed("this pool was closed while the call was under way; what was asked for may still happen")


def stuck(seconds: float) -> HubUnreachable:
    """The client's own loop has not ended a call of so many seconds."""
    return HubUnreachable(f"the client's own thread has not answered for {seconds + GRACE_SECONDS:g} s")


def _stop(thread: LoopThread, pid: int) -> None:
    if os.getpid() == pid:  # in a fork, the thread did not come along
        thread.stop()


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's way to a pool: prove that a push arrived, forget all KV, look at the engines. Needs the pool's key only.
#
# with Pool.connect("policy/connection.json") as pool:
#     with pool.weight_update("step-42"):
#         push(weights)       # as you like: KV is named by the weights that computed it
#     # every engine holds the same, new weights, bit by bit
#
#     pool.reset()            # returns when no engine can find older KV


logger = logging.getLogger(__name__)

Config = str | os.PathLike[str] | Mapping[str, Any] | Connection | None
CONNECT_SECONDS: Final = 10.0
EXTRA_SECONDS: Final = 5.0
"""What a call may take beyond its limit, for naming laggards, a last look, a label."""


async def open_session(config: Config, timeout_s: float) -> Session:
    """Connect, on the background loop, and prove that a hub answers and serves the right pool."""
    session = Session(config if isinstance(config, Connection) else Connection.load(config))
    try:
        await session.greet(timeout_s)
    except BaseException:
        await session.close()
        raise
    return session


class Face:
    """What `Pool` and `AsyncPool` have in common: one connection, which lives on a thread of its own. Use `connect`."""

    def __init__(self, background: Background, session: Session) -> None:
        self._background = background
        self._session = session

    @property
    def name(self) -> str:
        """Of the pool, as its configuration says."""
        return self._session.connection.pool.name

    @property
    def uid(self) -> str:
        """Of the pool; never reused."""
        return self._session.connection.pool.uid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self._session.connection.hub.endpoint}>"


def _limit(call: Callable[..., Any]) -> Callable[..., float]:
    """A function of a call's arguments: how long it may take, its `timeout_s` and `EXTRA_SECONDS`."""
    signature = inspect.signature(call)

    def seconds(*arguments: Any, **keys: Any) -> float:
        given = signature.bind(*arguments, **keys)
        given.apply_defaults()
        check_timeout(given.arguments["timeout_s"])
        return float(given.arguments["timeout_s"]) + EXTRA_SECONDS

    return seconds


def _blocking(call: Callable[Concatenate[Session, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Pool, P], T]:
    """The method of `Pool` that makes `call` on its session and waits for it."""
    limit = _limit(call)

    @functools.wraps(call)
    def method(pool: Pool, /, *arguments: P.args, **keys: P.kwargs) -> T:
        seconds = limit(pool._session, *arguments, **keys)
        return pool._background.run(call(pool._session, *arguments, **keys), seconds)

    return method


def _awaited(
    call: Callable[Concatenate[Session, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AsyncPool, P], Coroutine[Any, Any, T]]:
    """The same for `AsyncPool`."""
    limit = _limit(call)

    @functools.wraps(call)
    async def method(pool: AsyncPool, /, *arguments: P.args, **keys: P.kwargs) -> T:
        seconds = limit(pool._session, *arguments, **keys)
        return await pool._background.wait(call(pool._session, *arguments, **keys), seconds)

    return method


class Pool(Face):
    """One pool, from a program without an event loop. Thread-safe: any number of threads may call at once.

    A forked child cannot use its parent's: connect again there. `AsyncPool` is the same for asyncio.
    """

    @classmethod
    def connect(cls, config: Config = None, timeout_s: float = CONNECT_SECONDS) -> Pool:
        """Reach the pool's hub.

        Args:
            config: path of the pool's `connection.json` or its directory, its content, or None for what the
                environment variable `EPOCHKV_CONFIG` names.

        Raises:
            ConfigurationError: the configuration or its keys cannot be used.
            HubUnreachable: no hub answered in time; `KeyRefused` when one did and refused.
            WrongPool: the keys are those of another pool.
        """
        check_timeout(timeout_s)
        background = Background()
        try:
            session = background.run(open_session(config, timeout_s), timeout_s)
        except BaseException:
            background.stop()
            raise
        return cls(background, session)

    status = _blocking(Session.status)
    weights = _blocking(pushes.weights)
    reset = _blocking(resets.reset)
    wait = _blocking(resets.wait)
    wait_weights = _blocking(pushes.wait_weights)

    def engines(self, timeout_s: float = STATUS_SECONDS) -> tuple[Engine, ...]:
        """The live engines, by name.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        return self.status(timeout_s).engines

    @contextmanager
    def weight_update(
        self,
        label: str | None = None,
        *,
        engines: Iterable[str] | None = None,
        timeout_s: float = WEIGHTS_SECONDS,
        progress: WeightsProgress | None = None,
        only_new: bool = False,
    ) -> Iterator[Update]:
        """Push new weights inside this block, in any order, and have it proved at the end that every engine holds them.

        It is `wait_weights` with the weights that the engines of a fingerprint all held before as `other_than`. Nothing is asked
        of the pool but the label, and several may run at once. An exception inside goes on as it is: each engine names its KV by
        what it holds.

        Args:
            label, engines, progress, only_new: as in `wait_weights`.
            timeout_s: for entry and exit each.

        Raises:
            HubUnreachable: no hub answered; on entry the block does not run.
            WeightsDiverged: on exit, as in `wait_weights`; also when a push changed nothing of an engine whose weights were known on entry.
        """
        check_timeout(timeout_s)
        update = self._background.run(pushes.begin_update(self._session, label, engines, timeout_s), timeout_s)
        yield update
        update.report = self.wait_weights(update.engines, timeout_s, label, update.other_than, progress, only_new)

    def close(self) -> None:
        """Hang up and end the thread. Safe to call twice."""
        try:
            self._background.run(self._session.close(), 1.0)
        except PoolError as error:
            logger.debug("closing: %s", error)
        self._background.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# ----------------------------------------------------------------------------------------------------------------------
# `Pool` for programs on asyncio: the same calls, awaited. The connection lives on a thread of its own.


class AsyncPool(Face):
    """One pool, from asyncio. Any number of tasks, and loops, may call at once. See `Pool` for what each call means.

    A call that is cancelled is given up; what it had asked for may still happen. `progress` is a plain function here, too, and
    called on another thread: `loop.call_soon_threadsafe` brings its argument to a loop.
    """

    @classmethod
    async def connect(cls, config: Config = None, timeout_s: float = CONNECT_SECONDS) -> AsyncPool:
        check_timeout(timeout_s)
        background = Background()
        try:
            session = await background.wait(open_session(config, timeout_s), timeout_s)
        except BaseException:
            await asyncio.to_thread(background.stop)
            raise
        return cls(background, session)

    status = _awaited(Session.status)
    reset = _awaited(resets.reset)
    wait = _awaited(resets.wait)
    weights = _awaited(pushes.weights)
    wait_weights = _awaited(pushes.wait_weights)

    async def engines(self, timeout_s: float = STATUS_SECONDS) -> tuple[Engine, ...]:
        return (await self.status(timeout_s)).engines

    @asynccontextmanager
    async def weight_update(
        self,
        label: str | None = None,
        *,
        engines: Iterable[str] | None = None,
        timeout_s: float = WEIGHTS_SECONDS,
        progress: WeightsProgress | None = None,
        only_new: bool = False,
    ) -> AsyncIterator[Update]:
        check_timeout(timeout_s)
        update = await self._background.wait(pushes.begin_update(self._session, label, engines, timeout_s), timeout_s)
        yield update
        update.report = await self.wait_weights(update.engines, timeout_s, label, update.other_than, progress, only_new)

    async def close(self) -> None:
        """Hang up and end the thread. Safe to call twice."""
        with contextlib.suppress(PoolError):  # before, or by another task meanwhile
            await self._background.wait(self._session.close(), 1.0)
        await asyncio.to_thread(self._background.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
