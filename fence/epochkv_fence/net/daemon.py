"""Work that may never return, for a caller that has a deadline: an executor's threads would be joined at exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def on_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a daemon thread of its own; whoever cancels the future waits no longer, and the work goes on."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # handed to the caller
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
