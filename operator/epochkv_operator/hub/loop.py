"""An event loop on a thread of its own, for what must never wait for the rest of the process: the Lease and the hub."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CALL_SECONDS = 5.0
SWITCH_SECONDS = 0.0005
"""After so long, a thread that computes lets another one have the interpreter. With Python's 5 ms, each message of a reset may wait that
long for a reconcile: 200 round trips beside a busy thread took 0.24 s, and take 0.03 s."""
STOP_SECONDS = 5.0


class LoopThread:
    """Runs coroutines and calls of other threads. Nothing that runs here may block: others wait for it."""

    def __init__(self, name: str) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its end here. Cancelling the wait cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a function called there, after all that was posted before; what it raises is logged by the loop."""
        self.loop.call_soon_threadsafe(lambda: function(*args, **kwargs))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function there and return what it returns, or raise what it raises.

        Raises:
            TimeoutError: the loop did not get to it within `CALL_SECONDS`.
        """
        answer: Future[T] = Future()

        def answered() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(*args, **kwargs))
            except BaseException as error:
                answer.set_exception(error)

        self.loop.call_soon_threadsafe(answered)
        try:
            return answer.result(CALL_SECONDS)
        except TimeoutError:
            answer.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread. Whatever still runs there is cancelled."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=STOP_SECONDS / 2))
        finally:
            self.loop.close()
