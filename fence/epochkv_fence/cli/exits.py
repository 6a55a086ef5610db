"""Exit statuses of `epochkv`; part of its interface."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """What a script can tell apart."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_PUBLISHED = 3
    UNREACHABLE = 4
    STATE = 5
    LOST = 6
    BUSY = 75  # EX_TEMPFAIL of sysexits.h: nothing was done, try again later
    NOT_EXECUTABLE = 126  # as a shell says it, and the next one
    NO_COMMAND = 127
    INTERRUPTED = 130
