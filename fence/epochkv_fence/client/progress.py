"""How far a call is, for people who wait for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

Progress = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a reset is, for people who wait.

    Attributes:
        laggards: number of engines that have not acknowledged; `names` are theirs once it takes longer.
    """

    epoch: int
    recorded: bool
    published: bool
    engines: int
    laggards: int
    names: tuple[str, ...] = ()


class Teller:
    """Calls the caller's `progress`, which only looks on: whatever it raises is logged once, and never ends a call."""

    def __init__(self, progress: Callable[[Any], None] | None) -> None:
        self._progress = progress
        self._has_failed = False
        self._told: object = None

    def again(self) -> None:
        """Tell the next one also when nothing has changed."""
        self._told = None

    def __call__(self, standing: object) -> None:
        if self._progress is None or standing == self._told:
            return
        self._told = standing
        try:
            self._progress(standing)
        except BaseException:  # also SystemExit, which would end the client's thread
            if not self._has_failed:
                logger.warning("the progress callback failed; the call goes on", exc_info=True)
            self._has_failed = True
