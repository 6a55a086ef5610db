"""The loop with a deadline that tools, benchmarks and tests wait with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def poll(probe: Callable[[], T], seconds: float, pause: float = 0.05) -> T:
    """The first true result of `probe`; the last one, which is not, when `seconds` have passed.

    Args:
        pause: between two probes; the first pauses are shorter, as most waits are.
    """
    deadline = time.monotonic() + seconds
    growing = pause / 16
    while not (found := probe()) and time.monotonic() < deadline:
        time.sleep(growing)
        growing = min(pause, 1.5 * growing)
    return found


def eventually(
    probe: Callable[[], T | None], what: str | Callable[[], str] = "the condition", seconds: float = 30.0, pause: float = 0.05
) -> T:
    """The first true result of `probe`.

    Args:
        what: is waited for, or a function that says it at the end.

    Raises:
        TimeoutError: there was none within `seconds`.
    """
    found = poll(probe, seconds, pause)
    if not found:
        raise TimeoutError(f"not within {seconds:g} s: {what() if callable(what) else what}")
    return found
