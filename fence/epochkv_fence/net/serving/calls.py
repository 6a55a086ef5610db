"""The hub's calls to the authority and to stores. Each has a deadline, and none ever raises.

The log says only when a call stops or starts to work.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from epochkv_fence.net.say_once import SayOnce
from epochkv_fence.protocol.authority import AuthorityError
from epochkv_fence.stores.admin import StoreAdminError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Calls:
    """Makes the calls, and counts those that fail."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._said: dict[str, SayOnce] = {}

    async def call(self, name: str, what: str, seconds: float, call: Callable[[], Awaitable[T]]) -> T | None:
        """What `call` answered; None when it failed or gave no answer in time: it may still take effect.

        Args:
            name: of the pool, for the log.
            what: one word for the kind of call.
            seconds: the deadline.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await call()
        except (AuthorityError, StoreAdminError, TimeoutError, OSError) as error:
            reason = f"no answer within {seconds} s" if isinstance(error, TimeoutError) else str(error)
            self._failed(name, what, "failed", logging.WARNING, f"{what} failed: {reason}; trying again")
            return None
        except Exception as error:
            self._failed(name, what, repr(error), logging.ERROR, f"{what} failed: {error!r}; trying again")
            return None
        self._say(name, what, "", logging.INFO, f"{what} works again")
        return answer

    def forget(self, name: str) -> None:
        """The pool is gone."""
        self._said.pop(name, None)

    def _failed(self, name: str, what: str, state: str, level: int, text: str) -> None:
        self._counters[f"{what}_failed"] += 1
        self._say(name, what, state, level, text)

    def _say(self, name: str, topic: str, state: str, level: int, text: str) -> None:
        self._said.setdefault(name, SayOnce(logger, first=""))(topic, state, level, "%s: %s", name, text)
