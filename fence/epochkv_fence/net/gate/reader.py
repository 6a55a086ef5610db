"""A plain ZeroMQ socket in an asyncio event loop.

`zmq.asyncio` makes a future, a timer and a round of the loop for every message; a hub of thousands of engines cannot pay
that. Here the loop watches the socket's file descriptor and takes messages in bursts. That descriptor has two traps. It
tells of *changes* only, so a socket has to be read until it is empty. And sending may swallow a change, so whoever sends
has to look again (`kick`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import zmq

logger = logging.getLogger(__name__)

BURST_MESSAGES: Final = 256
BURST_SECONDS: Final = 0.002
"""After so much the loop does what else is due before it reads on: a flood must not keep time and rounds from running."""


class SocketReader:
    """Calls `take` for as long as it finds something, in bursts.

    Args:
        take: takes one message; raises `zmq.Again` when there is none.
        done: called after each burst, also one that found nothing.
        failed: called when `take` or `done` raised anything else; the reader goes on.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[], None],
        done: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._done = done or (lambda: None)
        self._failed = failed or (lambda: None)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._pending: asyncio.Handle | None = None
        self._open = True
        self._loop.add_reader(self._fd, self._read)
        self.kick()

    def kick(self) -> None:
        """Look again soon: something was sent on the socket, or `done` has more to do."""
        if self._pending is None and self._open:
            self._pending = self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop; before the socket is closed."""
        self._open = False
        self._loop.remove_reader(self._fd)
        if self._pending is not None:
            self._pending.cancel()

    def _read(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        end = time.monotonic() + BURST_SECONDS
        taken = 0
        try:
            while taken < BURST_MESSAGES and time.monotonic() < end:
                try:
                    self._take()
                except zmq.Again:
                    break
                except Exception:
                    self._failed()
                    logger.exception("a message could not be handled")
                taken += 1
            else:
                self.kick()
            self._done()
        except Exception:
            self._failed()
            logger.exception("a burst of messages could not be handled")
