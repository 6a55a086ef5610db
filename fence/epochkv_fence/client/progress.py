"""Tells people who wait how far a call is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

Progress = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a reset is.

    Attributes:
        laggards: how many engines have not acknowledged; `names` has their names once the reset takes longer.
    """

    epoch: int
    recorded: bool
    published: bool
    engines: int
    laggards: int
    names: tuple[str, ...] = ()


class Teller:
    """Calls the caller's `progress`. That only looks on, so whatever it raises goes to the log once and never ends a call."""

    def __init__(self, progress: Callable[[Any], None] | None) -> None:
        self._progress = progress
        self._has_failed = False
        self._told: object = None

    def again(self) -> None:
        """Tell the next standing even if it is the same."""
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
