"""What every part needs and no part owns: threads that nobody waits for, lines of the log that come once, words for numbers, this
machine's address."""

import asyncio
import contextlib
import ipaddress
import logging.handlers
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CALL_SECONDS: Final = 5.0


def on_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a daemon thread of its own; whoever cancels the future waits no longer, and the work goes on."""
    future: Future[T] = Future()
    try:
        threading.Thread(target=fulfil, args=(future, work), name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads
        future.set_exception(error)
    return future


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work of `future`, unless that was cancelled; its owner gets the result, or what the work raises."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)


async def end(tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel the tasks and wait for their ends, but no longer than this."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)


class LoopThread:
    """An event loop on a daemon thread of its own. What blocks there holds up all else that is to run there."""

    def __init__(self, name: str, stop_seconds: float) -> None:
        self.loop = asyncio.new_event_loop()
        self._stop_seconds = stop_seconds
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller is on that thread."""
        return self._thread is threading.current_thread()

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
        self.loop.call_soon_threadsafe(fulfil, answer, lambda: function(*args, **kwargs))
        try:
            return answer.result(CALL_SECONDS)
        except TimeoutError:
            answer.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread. Whatever still runs there is cancelled."""
        with contextlib.suppress(RuntimeError):  # already closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_here:
            self._thread.join(self._stop_seconds)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(end(asyncio.all_tasks(self.loop), self._stop_seconds / 2))
        finally:
            self.loop.close()


# ----------------------------------------------------------------------------------------------------------------------
# The clock of leases.


class LeaseClock:
    """Seconds that go on while a machine is suspended, as Linux's boot clock does, and while this process lies in an image from which it
    is restored, as the wall clock does. A wall clock that is set back changes nothing; each time that it goes ahead is time missed.
    What two threads overwrite of each other, the next reading finds again."""

    def __init__(self) -> None:
        self.ahead = -math.inf  # of the boot clock
        self._set_back = 0.0  # by how much the wall clock was, in all
        self()

    def __call__(self) -> float:
        set_back, wall = self._set_back, time.time()  # first: a thread that waits between the lines must not look restored
        now = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        ahead = self.ahead = max(self.ahead, set_back + wall - now)
        again = time.time()  # nor must such a thread see a clock that was set back
        if set_back + again - now < ahead - 0.5:  # less than any margin
            self._set_back = ahead + now - again
        return now + ahead


lease_clock: Final = LeaseClock()


# ----------------------------------------------------------------------------------------------------------------------
# Logs: no thread waits for whoever reads them, and a fault that lasts does not fill them.


class LogThread(logging.handlers.QueueHandler):
    """Writes lines to a file descriptor on a thread of its own. A stopped terminal, or a pipe that nobody empties, holds up nobody who
    logs, nor the end of the process: what its queue has no room for is lost, and counted in the log once there is room."""

    def __init__(self, file: int, formatter: logging.Formatter, size: int = 1000) -> None:
        self._texts: queue.Queue[str | None] = queue.Queue(size)
        super().__init__(self._texts)
        self.setFormatter(formatter)
        self._file, self._lost = file, 0
        self._thread = threading.Thread(target=self._write, name="epochkv-log", daemon=True)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, record: str) -> None:  # type: ignore[override]  # what `prepare` made
        try:
            self._texts.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """When the process ends. Waits two seconds at most for what is queued."""
        with contextlib.suppress(queue.Full):
            self._texts.put(None, timeout=1.0)
            self._thread.join(1.0)
        super().close()

    def _write(self) -> None:
        while (text := self._texts.get()) is not None:
            if lost := self._lost:
                self._lost = 0
                said = f"{lost} lines of this log are lost: nobody read it"
                text = f"{self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, said, None, None))}\n{text}"
            left = f"{text}\n".encode(errors="replace")
            with contextlib.suppress(OSError):  # such as a pipe that nobody has open any more
                while left:
                    try:
                        left = left[os.write(self._file, left) :]
                    except BlockingIOError:  # somebody who has it, too, made it so
                        select.select((), (self._file,), ())


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


MAX_TOPICS: Final = 20


class Seldom:
    """Logs each topic once in so many seconds, and few topics in all: whoever causes the lines may do so without end. Any thread."""

    def __init__(self, logger: logging.Logger, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._seconds, self._clock = logger, seconds, clock
        self._lock = threading.Lock()
        self._until, self._said, self._unsaid = -math.inf, set[str](), 0

    def __call__(self, topic: str, level: int, text: str, *args: object, exc_info: bool = False) -> None:
        """Log this, unless its topic was logged a short time ago."""
        with self._lock:
            if (now := self._clock()) >= self._until:
                self._until, self._said = now + self._seconds, set()
            if topic in self._said or len(self._said) >= MAX_TOPICS:
                self._unsaid += 1
                return
            self._said.add(topic)
            unsaid, self._unsaid = self._unsaid, 0
        more = f" ({unsaid} more were not logged)" if unsaid else ""
        self._logger.log(level, f"{text}%s", *args, more, exc_info=exc_info, stacklevel=2)  # the line that says so

    def forget(self) -> None:
        """Every topic may be logged again: the state that the lines described is over."""
        self._until = -math.inf


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
