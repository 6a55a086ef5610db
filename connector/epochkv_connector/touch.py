"""Gives fresh memory its pages before anything is copied into it, on several threads and within a bounded time.

The first write to a page stops whoever writes until the kernel has found and cleared one: on a busy or virtual machine that
was seconds, in which Mooncake's only TCP thread answered nobody. Also, memory that cannot be had is then missing at the
start and not hours later. Standard library only: store nodes use it without torch.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)

TOUCH_SECONDS = 300.0
"""After so long the rest is left to its first use."""
MAX_THREADS = 8
"""More do not make it faster: they clear memory."""
CHUNK_BYTES = 64 << 20
"""Touched in one call; between two of them the time is looked at."""
LARGE_BYTES = 8 << 30
"""From here on the log says when it begins and ends."""

_MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 14, 10, 23
_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run, `mmap.madvise` does not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Touch:
    """One run over `[address, address + num_bytes)` of fresh memory: nobody may have written to it yet.

    Args:
        address, num_bytes: page-aligned start; its length in bytes.
        what: names the memory in messages.
        seconds: at most; the rest is left as it is.
        threads: None: as many as this process may use, at most `MAX_THREADS`.
        say: gets a line before and after what is larger than `LARGE_BYTES`.
    """

    def __init__(
        self,
        address: int,
        num_bytes: int,
        what: str,
        *,
        seconds: float = TOUCH_SECONDS,
        threads: int | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._address, self._num_bytes, self._what, self._say = address, num_bytes, what, say
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def run(self) -> int:
        """Touch. Returns how many bytes have pages now: all, or fewer after `seconds`.

        Raises:
            OSError: the machine, or this process's limit, has no more memory.
        """
        starts = range(0, self._num_bytes, CHUNK_BYTES)
        if self._num_bytes >= LARGE_BYTES:
            self._say(f"{self._what}: touching {_gib(self._num_bytes)} on {self._threads} threads")
        with ThreadPoolExecutor(self._threads, "epochkv-touch") as pool:
            touched = sum(pool.map(self._chunk, starts))
        if touched < self._num_bytes:
            logger.warning(
                "%s: %s of %s have pages after %.0f s; the rest gets its own when it is first used",
                self._what,
                _gib(touched),
                _gib(self._num_bytes),
                time.monotonic() - self._began,
            )
        elif self._num_bytes >= LARGE_BYTES:
            self._say(f"{self._what}: {_gib(self._num_bytes)} touched in {time.monotonic() - self._began:.1f} s")
        return touched

    def stop(self) -> None:
        """Have `run` end after the chunks under way. Any thread."""
        self._deadline = self._began

    def _chunk(self, start: int) -> int:
        if time.monotonic() >= self._deadline:
            return 0
        size = min(CHUNK_BYTES, self._num_bytes - start)
        populate(self._address + start, size)
        return size


def populate(address: int, num_bytes: int) -> None:
    """Give every page of fresh memory its backing; OSError if there is none. Before Linux 5.14 the contents become zeros."""
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, f"{_gib(num_bytes)} of host memory cannot be had: {os.strerror(code)}")
    write_pages(address, num_bytes)


def write_pages(address: int, num_bytes: int) -> None:
    """`populate` for kernels that have no word for it: zeros over everything."""
    ctypes.memset(address, 0, num_bytes)


def advise(address: int, num_bytes: int) -> None:
    """Ask for huge pages, and leave the memory out of forked children. Only hints: a kernel without them goes on without."""
    whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for advice in (_MADV_HUGEPAGE, _MADV_DONTFORK):
        _libc.madvise(address, whole, advice)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
