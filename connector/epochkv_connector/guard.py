"""Keeps our exceptions away from vLLM: each is counted, logged once per kind, and becomes a miss."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from epochkv_fence.connection import ConfigurationError

logger = logging.getLogger("vllm.epochkv")

T = TypeVar("T")


class Guard:
    """Runs our code so that vLLM never sees its exceptions."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()  # by place
        self.first: dict[str, str] = {}  # what the first of each place was
        self._logged: set[tuple[str, str]] = set()

    def run(self, where: str, work: Callable[[], T], fallback: Callable[[], T], *, may_end_start: bool = False) -> T:
        """`work()`; on an exception: count, log once per kind, and `fallback()`. Raises ConfigurationError if it `may_end_start`."""
        try:
            return work()
        except Exception as error:
            if may_end_start and isinstance(error, ConfigurationError):
                logger.error("EpochKV cannot start: %s", error)
                raise
            self.note(where, error)
        return fallback()

    def note(self, where: str, error: Exception) -> None:
        """Count the error; log the first of its kind with its trace."""
        self.errors[where] += 1
        self.first.setdefault(where, f"{type(error).__name__}: {error}")
        kind = (where, type(error).__name__)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.error(
                "EpochKV: %s failed (%s: %s); treated as a miss, further ones of this kind are only counted",
                where,
                *(type(error).__name__, error),
                exc_info=error,
            )
