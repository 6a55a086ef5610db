"""Reads an engine's credentials on threads of their own: a file system that hangs must not cost the lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from epochkv_fence.net.keys import ClientKeys

READ_SECONDS: Final = 5.0
"""After this a read counts as hung; another is begun beside it, for the file system may have been replaced under it."""
MAX_READS: Final = 4
"""At once. A thread that hangs in the kernel cannot be ended."""


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
        self._lock = threading.Lock()
        self._number = 0
        self._running: dict[int, float] = {}
        self._answers: dict[int, ClientKeys | Exception] = {}
        self._taken = 0
        self._told = 0  # newest read of which it was said that it hangs

    def begin(self) -> None:
        """Read, unless a read is under way that does not hang, or too many hang."""
        now = time.monotonic()
        with self._lock:
            if len(self._running) >= MAX_READS or any(now < began + self._seconds for began in self._running.values()):
                return
            self._number += 1
            self._running[self._number] = now
            number = self._number
        try:
            threading.Thread(target=self._run, args=(number,), name="epochkv-keys", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._answer(number, error)

    def answer(self) -> ClientKeys | Exception | None:
        """What the youngest read that has ended since the last call has found.

        A `TimeoutError`, once per read: the youngest hangs. Its answer still counts when it comes.
        """
        now = time.monotonic()
        with self._lock:
            answers, self._answers = self._answers, {}
            number = max(answers, default=0)
            if number > self._taken:
                self._taken = number
                return answers[number]
            began = self._running.get(self._number)
            if began is not None and self._number > self._told and now >= began + self._seconds:
                self._told = self._number
                return TimeoutError(f"no answer within {self._seconds} s: the file system hangs")
        return None

    def _run(self, number: int) -> None:
        try:
            self._answer(number, self._read())
        except Exception as error:
            self._answer(number, error)

    def _answer(self, number: int, answer: ClientKeys | Exception) -> None:
        with self._lock:
            del self._running[number]
            self._answers[number] = answer
        self._done()
