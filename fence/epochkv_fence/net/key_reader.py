"""Reads an engine's credentials on threads of their own: a file system that hangs must not cost the lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from epochkv_fence.net.daemon import on_daemon_thread
from epochkv_fence.net.keys import ClientKeys

READ_SECONDS: Final = 5.0
"""After this a read counts as hung; another is begun beside it, for the file system may have been replaced under it."""
MAX_READS: Final = 4
"""At once. A thread that hangs in the kernel cannot be ended."""


@dataclass(slots=True)
class _Read:
    """`superseded`: a younger read has answered. `told`: it was said that this one hangs."""

    began: float
    future: Future[ClientKeys]
    superseded: bool = False
    told: bool = False


class KeyReader:
    """Used by one thread; what it starts are daemon threads, for which nobody ever waits.

    Args:
        read: reads the credentials; may raise, and may never return.
        done: called on another thread when there is an answer.
        seconds: after which a read counts as hung.
    """

    def __init__(self, read: Callable[[], ClientKeys], done: Callable[[], None], seconds: float = READ_SECONDS) -> None:
        self._read = read
        self._done = done
        self._seconds = seconds
        self._reads: list[_Read] = []

    def begin(self) -> None:
        """Read, unless a read is under way that does not hang, or too many hang."""
        now = time.monotonic()
        running = [read for read in self._reads if not read.future.done()]
        if len(running) >= MAX_READS or any(now < read.began + self._seconds for read in running):
            return
        try:
            future = on_daemon_thread(self._read, "epochkv-keys")
        except RuntimeError as error:  # no more threads
            future = Future()
            future.set_exception(error)
        self._reads.append(_Read(now, future))
        future.add_done_callback(lambda _: self._done())

    def answer(self) -> ClientKeys | BaseException | None:
        """What the youngest read that has ended since the last call has found.

        A `TimeoutError`, once per read: the youngest hangs. Its answer still counts when it comes.
        """
        ended = [read for read in self._reads if read.future.done()]
        self._reads = [read for read in self._reads if read not in ended]
        if ended and not ended[-1].superseded:
            for read in self._reads:
                read.superseded = read.superseded or read.began < ended[-1].began
            return ended[-1].future.exception() or ended[-1].future.result()
        youngest = self._reads[-1] if self._reads else None
        if youngest is not None and not youngest.told and not youngest.superseded and time.monotonic() >= youngest.began + self._seconds:
            youngest.told = True
            return TimeoutError(f"no answer within {self._seconds} s: the file system hangs")
        return None
