"""One event loop on a daemon thread: where a client's connection lives, whatever the caller's own threads and loops do.

`Pool` and `AsyncPool` both hand their coroutines to it. A caller that blocks its own loop for minutes, as a weight push
does, loses neither its connection nor its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from epochkv_fence.client.errors import HubUnreachable, PoolClosed

T = TypeVar("T")

GRACE_SECONDS: Final = 5.0
"""Beyond a call's own deadline: only a loop that is stuck (a file system that hangs) gets that far."""
STOP_SECONDS: Final = 2.0


class Background:
    """Runs coroutines until `stop`; ends by itself with the interpreter."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="epochkv-client", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread, self._pid)

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
        return asyncio.run_coroutine_threadsafe(work, self._loop)

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


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_SECONDS))
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # the thread did not come along
    with contextlib.suppress(RuntimeError):  # already closed
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(STOP_SECONDS)
