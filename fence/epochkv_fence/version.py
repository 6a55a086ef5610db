"""The version of EpochKV that this process runs; empty when it runs from its source without being installed."""

import contextlib
import importlib.metadata

VERSION = ""
with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    VERSION = importlib.metadata.version("epochkv")[:64]
