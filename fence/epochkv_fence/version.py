"""The version of EpochKV that this process runs; empty when it runs from its source without being installed."""

from __future__ import annotations

import importlib.metadata
from typing import Final


def installed(package: str) -> str:
    """Version of an installed package; empty when there is none of that name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


VERSION: Final = installed("epochkv")[:64]
