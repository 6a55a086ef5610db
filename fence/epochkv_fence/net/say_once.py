"""Log lines that come once per change: what goes on failing is told when it begins to, and when it works again."""

from __future__ import annotations

import logging
from collections.abc import Hashable


class SayOnce:
    """Logs what has changed, by topic.

    Args:
        first: the state of a topic of which nothing was said yet.
    """

    def __init__(self, logger: logging.Logger, first: str | None = None) -> None:
        self._logger = logger
        self._first = first
        self._states: dict[Hashable, str] = {}

    def __call__(self, topic: Hashable, state: str, level: int, text: str, *args: object) -> None:
        """Log this, if the topic's state is another one than before."""
        if self.state(topic) != state:
            self._states[topic] = state
            self._logger.log(level, text, *args)

    def state(self, topic: Hashable) -> str | None:
        """What was said of it last."""
        return self._states.get(topic, self._first)

    def forget(self, topic: Hashable) -> None:
        """It is as if nothing had been said of it."""
        self._states.pop(topic, None)
