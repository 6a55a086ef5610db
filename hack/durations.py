"""How long the steps of a long job take on this machine, kept in a file of the cache folder.

A step that never ran here is expected to take its default, times the pace of this run's steps that had to work.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Final

IDLE: Final = 0.2
"""A step that took less than this share of its default found its work done already, and tells nothing about the machine."""


def minutes(text: str) -> float:
    """`type` of an argument: a duration of faults."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration of faults; give minutes above 0, such as 2 or 0.5")
    return value


def clock(seconds: float) -> str:
    """Minutes and seconds, such as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Durations:
    """Seconds that each named step took last time here. A file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._defaults: dict[str, float] = {}
        self._ratios: list[float] = []
        try:
            self._seconds: dict[str, float] = {str(key): float(value) for key, value in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError):
            self._seconds = {}

    def expected(self, name: str, default: float) -> float:
        """Seconds; from `default`, those on two cores without other work, when the step never ran here."""
        self._defaults[name] = default
        return self._seconds.get(name) or default * self._pace()

    def _pace(self) -> float:
        """Seconds here for each second of a default, from the steps of this run."""
        return median(self._ratios) if self._ratios else 1.0

    def record(self, name: str, seconds: float) -> None:
        if (default := self._defaults.get(name)) and seconds > IDLE * default:
            self._ratios.append(seconds / default)
        self._seconds[name] = round(seconds, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._seconds, indent=1, sort_keys=True) + "\n")
