"""The one exception of the cluster tooling, and the command lines that print it without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ClusterError(RuntimeError):
    """Something about a cluster failed. The text says what, to which object, and what to do."""


def run_command_line(app: Callable[[], object]) -> None:
    """A command line: known failures are one clear message and exit status 1."""
    try:
        app()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
