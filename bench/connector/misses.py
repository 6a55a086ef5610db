"""What becomes of a row when an engine does not answer as it should: a miss, which is counted, said and printed beside the figures.

Engines run with the limits that ship, so a transfer may be given up in a turn, and a request may not be answered in time.
That says something about the connector it happened to; it must not cost the row.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bench.report import Figure, repeated
from hack.engine_api import EngineError

T = TypeVar("T")


class OtherHit(RuntimeError):
    """An answer that is not of the tier that was to be measured."""


class Misses:
    """Counts by engine. Any thread.

    Args:
        say: told of each miss and its reason.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._lock = threading.Lock()
        self.attempts: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def attempt(self, name: str, ask: Callable[[], T]) -> T | None:
        """`ask()`, or None if this engine gave no answer, gave it too late, or took it from elsewhere.

        Raises:
            Exception: anything else is an error of the benchmark.
        """
        with self._lock:
            self.attempts[name] = self.attempts.get(name, 0) + 1
            self.counts.setdefault(name, 0)
        try:
            return ask()
        except (OtherHit, EngineError, TimeoutError) as error:
            with self._lock:
                self.counts[name] += 1
            self._say(f"    a miss of {name}: {error}")
            return None

    def figures(self) -> list[Figure]:
        """One for each engine."""
        return [Figure(f"misses of {name}, of {self.attempts[name]}", count, None, "") for name, count in self.counts.items()]


def pairs(first: Sequence[float | None], second: Sequence[float | None]) -> list[tuple[float, float]]:
    """Turns in which neither side missed.

    Raises:
        ValueError: the sides had not equally many turns.
    """
    return [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]


def added(first: Sequence[float | None], second: Sequence[float | None]) -> list[float | None]:
    """By how much the first side is more, turn by turn; None where one of them missed."""
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def ratio(name: str, turns: Sequence[tuple[float, float]], aim: float | None, *, at_least: bool = False) -> list[Figure]:
    """Median of the first side over the second; no figure if there was no turn without a miss."""
    values = [a / b for a, b in turns]
    return [repeated(name, values, aim, at_least=at_least)] if values else []


def medians(samples: Mapping[str, Sequence[float | None]], unit: str) -> list[Figure]:
    """One for each side that ever answered."""
    answered = {name: [value for value in values if value is not None] for name, values in samples.items()}
    return [repeated(name, values, None, unit) for name, values in answered.items() if values]
