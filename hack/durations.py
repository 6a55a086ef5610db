"""How long the steps of a long job take on this machine, kept in a file of the cache folder."""

from __future__ import annotations

import json
from pathlib import Path


def clock(seconds: float) -> str:
    """Minutes and seconds, such as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Durations:
    """Seconds that each named step took last time here. A file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._seconds: dict[str, float] = {str(key): float(value) for key, value in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError):
            self._seconds = {}

    def expected(self, name: str, default: float) -> float:
        """Seconds; `default` when the step never ran here."""
        return self._seconds.get(name, default)

    def record(self, name: str, seconds: float) -> None:
        self._seconds[name] = round(seconds, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._seconds, indent=1, sort_keys=True) + "\n")
