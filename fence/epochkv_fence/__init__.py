"""The epoch protocol of EpochKV: which epoch an engine may name its KV with, and the proof that nobody uses an older one.

`protocol` has the engine's state machine, the messages and what a hub must remember; `hub` has the hub's state machine. Both are
pure: `net` runs them on sockets. Nothing here needs Kubernetes or vLLM.
"""

from __future__ import annotations

import importlib.metadata
from typing import Final

# ----------------------------------------------------------------------------------------------------------------------
# The version of EpochKV that this process runs; empty when it runs from its source without being installed.


def installed(package: str) -> str:
    """Version of an installed package; empty when there is none of that name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


VERSION: Final = installed("epochkv")[:64]
