"""What the command `epochkv` ends with."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """What a script can tell apart."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_IN_TIME = 3  # an epoch is recorded, not published; engines do not hold the same, new weights
    UNREACHABLE = 4
    STATE = 5
    LOST = 6
    NOT_EXECUTABLE = 126  # as a shell says it, and the next one
    NO_COMMAND = 127
    INTERRUPTED = 130
