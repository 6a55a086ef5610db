"""The one exception of the cluster tooling, so that the command line can print it without a traceback."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """Something about a cluster failed. The text says what, to which object, and what to do."""
