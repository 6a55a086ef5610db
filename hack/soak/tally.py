"""What happened in a soak so far: counters, and the first reports of anything that must not happen. Any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

KEPT_REPORTS = 50


class Tally:
    """Counts by kind; `wrong` and `failed` keep a report of each, at most `KEPT_REPORTS`.

    Args:
        log: every event goes there as a line, with seconds since the start.
    """

    def __init__(self, log: Path) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._log = log.open("a", buffering=1)
        self._began = time.monotonic()
        self._over = False
        self.problems: list[str] = []

    def count(self, kind: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[kind] += amount

    def __getitem__(self, kind: str) -> int:
        with self._lock:
            return self._counts[kind]

    def of(self, prefix: str) -> dict[str, int]:
        """Counts of the kinds that begin like this, without the beginning."""
        with self._lock:
            return {kind.removeprefix(prefix): count for kind, count in sorted(self._counts.items()) if kind.startswith(prefix)}

    def note(self, text: str) -> None:
        self._log.write(f"{time.monotonic() - self._began:9.3f} {text}\n")

    def close(self) -> None:
        """Everything is being ended, perhaps in the middle of something: what fails from now on is no finding."""
        self._over = True
        self.note("the end")

    def problem(self, kind: str, **details: Any) -> None:
        """Something that must not happen."""
        text = f"{kind}: " + ", ".join(f"{name}={value}" for name, value in details.items())
        if self._over:
            self.note(f"after the end: {text}")
            return
        self.note(f"PROBLEM {text}")
        self.count(kind)
        with self._lock:
            if len(self.problems) < KEPT_REPORTS:
                self.problems.append(text)
