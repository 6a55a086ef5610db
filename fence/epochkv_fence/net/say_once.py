"""Log lines that come once per change, so that a fault which lasts does not fill the log."""

from __future__ import annotations

import logging


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
