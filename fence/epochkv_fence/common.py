"""What every part needs and no part owns: threads that nobody waits for, lines of the log that come once, words for numbers, this
machine's address."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import socket
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

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads
        future.set_exception(error)
    return future


# ----------------------------------------------------------------------------------------------------------------------
# Log lines that come once per change, so that a fault which lasts does not fill the log.


class SayOnce:
    """Logs what changes, by topic. Every topic begins in the state `first`."""

    def __init__(self, logger: logging.Logger, first: str | None = None) -> None:
        self._logger = logger
        self._first = first
        self._states: dict[str, str] = {}

    def __call__(self, topic: str, state: str, level: int, text: str, *args: object) -> None:
        """Log this, if it changes the topic's state."""
        if self.state(topic) != state:
            self._states[topic] = state
            self._logger.log(level, text, *args)

    def state(self, topic: str) -> str | None:
        """What the log says of a topic."""
        return self._states.get(topic, self._first)


class Seldom:
    """Lets a topic through once in so many seconds, and few topics in all: whoever causes the lines may do so without end."""

    def __init__(self, seconds: float, most: int = 10) -> None:
        self._seconds = seconds
        self._most = most
        self._until = -math.inf
        self._said: set[str] = set()
        self._unsaid = 0

    def __call__(self, topic: str, now: float) -> str | None:
        """What to add to the line, or None: it is not to be logged. `now`: on one monotonic clock."""
        if now >= self._until:
            self._until, self._said = now + self._seconds, set()
        if topic in self._said or len(self._said) >= self._most:
            self._unsaid += 1
            return None
        self._said.add(topic)
        unsaid, self._unsaid = self._unsaid, 0
        return f" ({unsaid} more were not logged)" if unsaid else ""


# ----------------------------------------------------------------------------------------------------------------------
# Values as people read them.


def duration(seconds: float) -> str:
    """Short: 4s, 3m12s, 5h07m, 2d3h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


# ----------------------------------------------------------------------------------------------------------------------
# Addresses.


def own_address() -> str:
    """Where other machines reach this one, by its default routes: an IPv4 address, else an IPv6 one, else nothing. Sends nothing."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return ""


def is_name(host: str) -> bool:
    """A host's name, and no address, with or without brackets."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False


def bracketed(address: str) -> str:
    """An address as it stands before a port."""
    return f"[{address}]" if ":" in address else address
