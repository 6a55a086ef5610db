"""Runs checks side by side. Each has a deadline of its own, and what one of them raises is one line of the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from epochkv_fence.common import on_daemon_thread
from epochkv_fence.doctor.finding import CannotLook, Finding, Level

T = TypeVar("T")
logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 15.0
CLOSE_SECONDS: Final = 1.0
END_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Check:
    """One check: its name and what makes it. `about` stands in findings that the check itself cannot make any more."""

    name: str
    look: Callable[[], Awaitable[Sequence[Finding]]]
    about: str = ""
    seconds: float = CHECK_SECONDS


async def _nothing() -> None:
    """There is nothing to close."""


@dataclass(frozen=True)
class Examination:
    """Checks, and what ends their connections."""

    checks: Sequence[Check]
    close: Callable[[], Coroutine[Any, Any, None]] = _nothing


async def run_checks(examination: Examination) -> list[Finding]:
    """Their findings, in the order of the checks."""
    try:
        found = await asyncio.gather(*(_guarded(check) for check in examination.checks))
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await examination.close()
    return [finding for findings in found for finding in findings]


async def _guarded(check: Check) -> Sequence[Finding]:
    def unknown(text: str, fix: str = "") -> list[Finding]:
        return [Finding(check.name, Level.UNKNOWN, text, fix, check.about)]

    try:
        async with asyncio.timeout(check.seconds):
            return await check.look()
    except TimeoutError:
        return unknown(f"no answer within {check.seconds:g} s")
    except CannotLook as error:
        return unknown(str(error), error.fix)
    except Exception as error:
        logger.debug("check %s", check.name, exc_info=True)
        return unknown(f"the check itself failed: {type(error).__name__}: {error}")


class Shared:
    """What several checks need is looked at once: the first that asks begins, and one that gives up takes it from nobody."""

    def __init__(self) -> None:
        self._tasks: dict[Any, asyncio.Task[Any]] = {}

    async def get(self, key: Any, look: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of `look`, or what it raised."""
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(look())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to those that still wait, if anybody does
        answer: T = await asyncio.shield(self._tasks[key])
        return answer


def apart(work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
    """Run on an event loop of its own thread, and wait for the result, not for what lingers.

    Returns:
        The result, and whether nothing lingers: a look-up of a name cannot be ended, and Python waits for it when it exits.
    """
    result: Future[T] = Future()

    async def run() -> None:
        try:
            result.set_result(await work())
        except BaseException as error:
            result.set_exception(error)

    ended = on_daemon_thread(lambda: asyncio.run(run()), "epochkv-doctor")
    answer = result.result()
    try:
        ended.result(END_SECONDS)
    except TimeoutError:
        return answer, False
    return answer, True
