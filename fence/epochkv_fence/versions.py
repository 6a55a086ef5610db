"""Names of weights that EpochKV itself gives."""

from __future__ import annotations

from typing import Final

MAX_VERSION: Final = 253
FAILED: Final = "failed: "


def failed_version(version: str, mark: str) -> str:
    """What status shows for weights whose push did not end well; `mark` makes it different each time."""
    room = MAX_VERSION - len(FAILED) - len(mark) - 1
    return f"{FAILED}{version[:room]} {mark}"
