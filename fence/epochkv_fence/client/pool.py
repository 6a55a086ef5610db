"""The trainer's client: `Pool` for threads, `AsyncPool` for asyncio, over one connection on a thread of its own."""

from __future__ import annotations

import asyncio
import functools
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
from epochkv_fence.client.resets import RESET_SECONDS, Progress
from epochkv_fence.client.results import Engine, HubUnreachable, OnFailure, PoolClosed, PoolError, PoolStatus, Reset, WeightsReport
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

    @property
    def usable(self) -> bool:
        """Neither stopped nor another process's."""
        return self._finalizer.alive and os.getpid() == self._pid

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine there.

        Raises:
            PoolClosed: it was stopped, or this is a fork of the process that made it.
        """
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
            raise HubUnreachable(f"the client's own thread has not answered for {seconds + GRACE_SECONDS:g} s") from error
        finally:
            future.cancel()

    def stop(self) -> None:
        """End the thread; everything that still runs there is cancelled. Safe to call twice, and in a fork."""
        self._finalizer()


def closed_meanwhile() -> PoolClosed:
    """Somebody closed the pool while a call was under way."""
    return PoolClosed("this pool was closed while the call was under way; what was asked for may still happen")


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


async def open_session(connection: Connection, timeout_s: float) -> Session:
    """Connect, on the background loop, and prove that a hub answers and serves the right pool."""
    session = Session(connection)
    await session.start()
    try:
        await session.greet(timeout_s)
    except BaseException:
        await session.close()
        raise
    return session


class Face:
    """What `Pool` and `AsyncPool` have in common: one connection, which lives on a thread of its own. Use `connect`."""

    def __init__(self, connection: Connection, background: Background, session: Session) -> None:
        self._connection = connection
        self._background = background
        self._session = session

    @property
    def name(self) -> str:
        """Of the pool, as its configuration says."""
        return self._connection.pool.name

    @property
    def uid(self) -> str:
        """Of the pool; never reused."""
        return self._connection.pool.uid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self._connection.hub.endpoint}>"


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
        connection = config if isinstance(config, Connection) else Connection.load(config)
        background = Background()
        try:
            session = background.run(open_session(connection, timeout_s), timeout_s)
        except BaseException:
            background.stop()
            raise
        return cls(connection, background, session)

    def status(self, timeout_s: float = STATUS_SECONDS) -> PoolStatus:
        """The pool and its live engines.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        return self._run(self._session.status(timeout_s), timeout_s)

    def engines(self, timeout_s: float = STATUS_SECONDS) -> tuple[Engine, ...]:
        """The live engines, by name.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        return self.status(timeout_s).engines

    def reset(
        self,
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
            force: also an `epoch` more than a million above the target, which no reset brings down again.

        Raises:
            ResetNotRecorded: whatever `on_failure` says. Engines go on with the KV they have.
            ResetTimeout: with `on_failure="crash"`.
            ArgumentError (a ValueError): an argument cannot be meant.
        """
        work = resets.reset(self._session, epoch, wait=wait, timeout_s=timeout_s, on_failure=on_failure, progress=progress, force=force)
        return self._run(work, timeout_s, EXTRA_SECONDS)

    def wait(self, epoch: int, timeout_s: float = RESET_SECONDS, progress: Progress | None = None) -> Reset:
        """Wait until `epoch` is published, without asking for it.

        Raises:
            ResetTimeout: it was not in time.
            HubUnreachable: no hub answered in time.
            ArgumentError (a ValueError): an argument cannot be meant.
        """
        return self._run(resets.wait(self._session, epoch, timeout_s, progress), timeout_s, EXTRA_SECONDS)

    def weights(self, timeout_s: float = STATUS_SECONDS) -> WeightsReport:
        """Which live engines hold which weights now.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        return self._run(pushes.weights(self._session, timeout_s), timeout_s)

    def wait_weights(
        self,
        engines: Iterable[str] | None = None,
        timeout_s: float = WEIGHTS_SECONDS,
        label: str | None = None,
        other_than: Iterable[str] = (),
        progress: WeightsProgress | None = None,
        only_new: bool = False,
    ) -> WeightsReport:
        """Wait until all engines hold the same weights, bit by bit; engines of different fingerprints need not be equal.

        Whoever joins meanwhile counts, and whoever leaves, or dies and loses its lease, does not. Without `other_than` weights
        that nobody has replaced are the same, too.

        Args:
            engines: names, each of which has to be a live engine's (without `/rank`: all ranks). None: every engine of the pool.
            timeout_s: for the wait; the last look and the label may take a few seconds more.
            label: what these weights are called from now on, at most 253 characters; of several names the newest counts.
            other_than: digests (32 hex digits) of weights that are not new, such as `pool.weights().common` before the push.
            progress: called on another thread with a `WeightsStanding` after every look. A plain function.
            only_new: also raise `WeightsDiverged` where engines held these weights before under a label, or `label` was that of
                others. Nothing is called `label` then.

        Returns:
            Who holds what. Its `notes` say what `only_new` would raise for, unless the weights are only called what they were.

        Raises:
            WeightsDiverged: they do not in time. It names those that differ, those whose weights are unknown and why, and
                those that still hold `other_than`.
            HubUnreachable: no hub answered in time, or none has noted the label.
            ArgumentError (a ValueError): an argument cannot be meant.
        """
        work = pushes.wait_weights(self._session, engines, timeout_s, label, other_than, progress, only_new)
        return self._run(work, timeout_s, EXTRA_SECONDS)

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
            WeightsDiverged: on exit, as in `wait_weights`; also when a push changed nothing.
        """
        update = self._run(pushes.begin_update(self._session, label, engines, timeout_s), timeout_s)
        yield update
        work = pushes.wait_weights(self._session, update.engines, timeout_s, label, update.other_than, progress, only_new)
        update.report = self._run(work, timeout_s, EXTRA_SECONDS)

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float, extra_s: float = 0.0) -> T:
        try:
            check_timeout(timeout_s)
        except ValueError:
            work.close()
            raise
        return self._background.run(work, timeout_s + extra_s)

    def close(self) -> None:
        """Hang up and end the thread. Safe to call twice."""
        if self._background.usable:
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


def _awaited(
    call: Callable[Concatenate[Session, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AsyncPool, P], Coroutine[Any, Any, T]]:
    """The method of `AsyncPool` that makes `call` on its session."""

    @functools.wraps(call)
    async def method(pool: AsyncPool, /, *arguments: P.args, **keys: P.kwargs) -> T:
        return await pool._do(call(pool._session, *arguments, **keys))

    return method


class AsyncPool(Face):
    """One pool, from asyncio. Any number of tasks, and loops, may call at once. See `Pool` for what each call means.

    A call that is cancelled is given up; what it had asked for may still happen. `progress` is a plain function here, too, and
    called on another thread: `loop.call_soon_threadsafe` brings its argument to a loop.
    """

    @classmethod
    async def connect(cls, config: Config = None, timeout_s: float = CONNECT_SECONDS) -> AsyncPool:
        check_timeout(timeout_s)
        connection = config if isinstance(config, Connection) else Connection.load(config)
        background = Background()
        try:
            session = await asyncio.wrap_future(background.submit(open_session(connection, timeout_s)))
        except BaseException:
            background.stop()
            raise
        return cls(connection, background, session)

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
        update = await self._do(pushes.begin_update(self._session, label, engines, timeout_s))
        yield update
        work = pushes.wait_weights(self._session, update.engines, timeout_s, label, update.other_than, progress, only_new)
        update.report = await self._do(work)

    async def close(self) -> None:
        """Hang up and end the thread. Safe to call twice."""
        if self._background.usable:
            await asyncio.wrap_future(self._background.submit(self._session.close()))
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
