"""The entry point that vLLM calls first in every process (`vllm.general_plugins`): what has to come before the connector is imported.

Pods that join a pool by their label have a vLLM image without EpochKV. Their init container leaves a folder with the connector, which
`PYTHONPATH` names, and beside it what vLLM does not bring, for each Python (`docker/engine.Dockerfile`, target `connector`). Nobody has
asked whether that vLLM can have a connector, so one that cannot stays as it is. Knows of vLLM 0.30 to 0.33: `__version__`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Final

INJECTED_ENV: Final = "EPOCHKV_INJECTED"
"""Set in containers that join by the label of their pod."""
BUNDLE: Final = Path(__file__).parents[2]
"""The folder with the packages of this project."""
OF_THE_SYSTEM: Final = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
"""What Mooncake's wheel links to and does not bring. A library that is loaded already is found by its name."""


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    use_bundle(BUNDLE)
    if os.environ.get(INJECTED_ENV) == "1":
        try:
            from epochkv_connector.engine.interface import check_version

            check_version(allow_untested=False)
        except RuntimeError as error:  # `UnsupportedEngine`, also of the module itself
            logging.getLogger("vllm.epochkv").warning("EpochKV: this engine stays as it is: %s", error)
            return
    from epochkv_connector.engine import plugin

    plugin.register()


def use_bundle(folder: Path) -> None:
    """Let this process import what lies beside the connector, made for its Python, and load the libraries that the system lacks."""
    packages = folder / f"cp{sys.version_info.major}{sys.version_info.minor}"
    if not packages.is_dir() or str(packages) in sys.path:
        return
    sys.path.append(str(packages))
    for library in OF_THE_SYSTEM:
        try:
            ctypes.CDLL(library)
        except OSError:
            with contextlib.suppress(OSError):  # Mooncake says what it lacks
                ctypes.CDLL(str(folder / "lib" / library))
