"""The trainer's way to a pool: raise the epoch, wait until it is proved, look at the engines. Needs the pool's key only.

    with Pool.connect("policy/connection.json") as pool:
        pause_all(); push(weights)
        pool.reset()            # returns when no engine can use KV of the old weights
        resume_all()

or, so that restarted engines never share with weights they did not get:

    with pool.weight_update("step-42"):
        push(weights)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from epochkv_fence.client.arguments import check_arguments, check_flags, check_order, check_timeout, check_version, check_wait
from epochkv_fence.client.background import Background
from epochkv_fence.client.calls import Progress
from epochkv_fence.client.errors import HubUnreachable, PoolError, ResetTimeout, UpdateInProgress
from epochkv_fence.client.results import Engine, OnFailure, Order, PoolStatus, Reset
from epochkv_fence.client.session import Session
from epochkv_fence.client.updating import FAIL_SECONDS, Update, UpdateCalls
from epochkv_fence.connection import Connection

logger = logging.getLogger(__name__)

Config = str | os.PathLike[str] | Mapping[str, Any] | Connection | None
CONNECT_SECONDS: Final = 10.0
RESET_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 10.0
EXTRA_SECONDS: Final = 5.0
"""What a call may take beyond its limit, for naming laggards."""


class Pool:
    """One pool, from a program without an event loop. Thread-safe: any number of threads may call at once.

    A forked child cannot use its parent's: connect again there. `AsyncPool` is the same for asyncio.
    """

    def __init__(self, connection: Connection, background: Background, calls: UpdateCalls) -> None:
        """Use `connect`."""
        self._connection = connection
        self._background = background
        self._calls = calls

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
            calls = background.run(open_calls(connection, timeout_s), timeout_s)
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

    def status(self, timeout_s: float = LOOK_SECONDS) -> PoolStatus:
        """The pool and its live engines.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        check_timeout(timeout_s)
        return self._background.run(self._calls.status(timeout_s), timeout_s)

    def engines(self, timeout_s: float = LOOK_SECONDS) -> tuple[Engine, ...]:
        """The live engines, by name.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        return self.status(timeout_s).engines

    def reset(
        self,
        epoch: int | None = None,
        weights_version: str | None = None,
        wait: bool = True,
        timeout_s: float = RESET_SECONDS,
        on_failure: OnFailure = "bypass",
        progress: Progress | None = None,
        force: bool = False,
    ) -> Reset:
        """Make all KV of the pool unreachable. Repeating it with the same epoch changes nothing.

        Args:
            epoch: None: one above the pool's target, and above what anybody else asks for meanwhile. A number: it is
                enough that this epoch is published, whoever asked for it.
            weights_version: what you call the weights of this epoch, at most 253 characters. It says that they have been
                pushed, so engines older than `joinAfterSeconds` share. While a weight update is open it is a label only.
            wait: return when the epoch is published; False: when it is recorded, from which on every engine is moved.
            timeout_s: for the whole call.
            on_failure: when it is recorded and not published in time: `bypass` returns with `published=False` and the
                laggards' names (their leases fence them), `crash` raises `ResetTimeout`.
            progress: called on another thread with a `Standing` at every change, and about once a second while it takes.
                What it raises is logged once and changes nothing. A plain function: a coroutine function is refused.
            force: also an `epoch` more than a million above the target, which no reset brings down again.

        Raises:
            ResetNotRecorded: whatever `on_failure` says. Nobody fences the engines: keep them paused.
            ResetTimeout: with `on_failure="crash"`.
            ArgumentError (a ValueError, or also a TypeError): an argument cannot be meant.
        """
        check_flags(wait=wait, force=force)
        version = check_arguments(epoch, weights_version, timeout_s, on_failure, progress)
        work = self._calls.reset(epoch, version, wait, timeout_s, on_failure, progress=progress, force=force)
        return self._background.run(work, timeout_s + EXTRA_SECONDS)

    def wait(self, epoch: int, timeout_s: float = RESET_SECONDS, progress: Progress | None = None) -> Reset:
        """Wait until `epoch` is published, without asking for it.

        Raises:
            ResetTimeout: it was not in time.
            HubUnreachable: no hub answered in time.
            ArgumentError (a ValueError, or also a TypeError): an argument cannot be meant.
        """
        check_wait(epoch, timeout_s, progress)
        return self._background.run(self._calls.wait(epoch, timeout_s, progress), timeout_s + EXTRA_SECONDS)

    @contextmanager
    def weight_update(
        self,
        version: str,
        order: Order = "push_under_pause",
        timeout_s: float = RESET_SECONDS,
        on_failure: OnFailure = "bypass",
        progress: Progress | None = None,
    ) -> Iterator[Update]:
        """Push new weights inside this block, to every engine of the pool.

        Exactly the engine processes that are there on entry share the new epoch; one that starts or restarts meanwhile
        serves without reuse until the next update. An exception inside raises the epoch with nobody named, best effort:
        weights are unknown, so every engine leaves the old epoch and none shares; status shows them as `failed: <version> ...`.
        Whatever this raises has a note (`__notes__`) that says what state the engines are in.

        Args:
            version: of the weights, at most 253 characters; different for every update.
            order: `push_under_pause`: pause the engines before the block, or in it before the push, and resume after it.
                `fence_first`: the epoch is raised and published on entry, and engines may serve (without reuse) while
                weights are pushed; also what a trainer that may die in the middle should use, because its engines are
                then in bypass already.
            timeout_s: for entry and exit each.
            on_failure: as in `reset`, on exit.

        Raises:
            ResetNotRecorded, ResetTimeout: as in `reset`; on entry with `fence_first` a reset that is not published in
                time always raises.
            HubUnreachable: no hub answered on entry; or on exit with `fence_first`: engines then serve without reuse.
            UpdateInProgress: another trainer has one open, and the block does not run. A trainer that died holds it for the pool's
                lease and its margin at most. On exit: this one was taken for dead and another one was opened; it counts as failed.
        """
        version = check_version(version)
        check_order(order)
        check_arguments(None, version, timeout_s, on_failure, progress)
        begin = self._calls.begin_update(version, order, timeout_s, on_failure)
        update = self._background.run(begin, timeout_s + EXTRA_SECONDS)
        try:
            yield update
        except BaseException as error:
            self._fail(update, error)
            raise
        try:
            update.reset = self._background.run(self._calls.end_update(update, progress), timeout_s + EXTRA_SECONDS)
        except BaseException as error:
            note_unfinished(error, update)
            raise

    def _fail(self, update: Update, cause: BaseException) -> None:
        try:
            epoch = self._background.run(self._calls.fail_update(update), FAIL_SECONDS)
        except PoolError as error:
            note_failure(cause, update, None, error)
        else:
            note_failure(cause, update, epoch, None)

    def close(self) -> None:
        """Hang up and end the thread. Safe to call twice."""
        if self._background.usable:
            try:
                self._background.run(self._calls.session.close(), 1.0)
            except PoolError as error:
                logger.debug("closing: %s", error)
        self._background.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Pool is a connection of this process and cannot be pickled; send its configuration and connect there")

    def __repr__(self) -> str:
        return f"<Pool {self.name} at {self._connection.hub.endpoint}>"


async def open_calls(connection: Connection, timeout_s: float) -> UpdateCalls:
    """Connect, on the background loop; proves that a hub answers and which pool it is."""
    session = Session(connection)
    await session.start()
    calls = UpdateCalls(session)
    try:
        await calls.greet(timeout_s)
    except BaseException:
        await session.close()
        raise
    return calls


def note_failure(cause: BaseException, update: Update, epoch: int | None, error: PoolError | None) -> None:
    """Say on the exception of the block what became of the pool."""
    if error is None:
        text = f"EpochKV: epoch {epoch}: engines serve without reuse until the next weight update"
    elif update.epoch is not None:
        text = f"EpochKV: engines serve epoch {update.epoch} without reuse; {error}"
    else:
        text = f"EpochKV: the pool could not be told, so engines keep the old epoch; keep them paused until the next update: {error}"
    cause.add_note(text)
    logger.warning("the update to %s failed. %s", update.version, text)


def note_unfinished(cause: BaseException, update: Update) -> None:
    """Say on what the end of an update raised, after a push that succeeded, what became of the pool."""
    if isinstance(cause, UpdateInProgress):
        cause.pushed = True
        return  # it says so itself
    if isinstance(cause, ResetTimeout):
        text = f"epoch {cause.reset.epoch} is recorded: engines leave the older ones now, those that do not answer with their leases"
    elif update.epoch is not None:
        text = f"engines are at epoch {update.epoch}, in bypass (without reuse) until a hub is told that they have {update.version}"
    elif isinstance(cause, HubUnreachable):
        text = f"engines have {update.version} and may go on with older KV: keep them paused and update again"
    else:
        text = f"engines have {update.version}, and whether its epoch is recorded is not known: keep them paused and update again"
    cause.add_note(f"EpochKV: {text}")
    logger.warning("the update to %s is not finished: %s", update.version, text)
