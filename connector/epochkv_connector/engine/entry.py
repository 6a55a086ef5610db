"""The entry point that vLLM calls first in every process (`vllm.general_plugins`): what has to come before the connector is imported.

Pods that join a pool by their label have a vLLM image without EpochKV. Their init container leaves a folder with the connector, which
`PYTHONPATH` names, and beside it what vLLM does not bring, for each Python (`docker/engine.Dockerfile`, target `connector`). Nobody has
asked whether such an engine can have a connector, so one that cannot stays as it is (`injected`).
"""

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Final

from epochkv_connector.engine import injected

HERE: Final = f"cp{sys.version_info.major}{sys.version_info.minor}"
"""This Python, as packages are named for it."""
BUNDLE: Final = Path(__file__).parents[2]
"""The folder with the packages of this project."""
OF_THE_SYSTEM: Final = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
"""What Mooncake's wheel links to and does not bring. A library that is loaded already is found by its name."""


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    if injected.is_left():
        return
    asked = not injected.is_injected()
    try:
        if not asked:
            check_python(BUNDLE)
        use_bundle(BUNDLE)
        if not asked:
            from epochkv_connector.engine.interface import check_version

            check_version(allow_untested=False)
        from epochkv_connector.engine import plugin

        plugin.register()
    except (Exception, SystemExit) as error:
        if asked:
            raise
        injected.leave(error)


def check_python(folder: Path) -> None:
    """Raise `RuntimeError` if packages lie beside the connector for other Pythons than this one."""
    made_for = sorted(path.name for path in folder.glob("cp3*"))
    if made_for and HERE not in made_for:
        raise RuntimeError(f"this Python is {HERE}, and the connector was brought for {', '.join(made_for)}")


def use_bundle(folder: Path) -> None:
    """Let this process import what lies beside the connector, made for its Python, and load the libraries that the system lacks."""
    packages = folder / HERE
    if not packages.is_dir() or str(packages) in sys.path:
        return
    sys.path.append(str(packages))
    for library in OF_THE_SYSTEM:
        try:
            ctypes.CDLL(library)
        except OSError:
            with contextlib.suppress(OSError):  # Mooncake says what it lacks
                ctypes.CDLL(str(folder / "lib" / library))


def prefer_bundle(folder: Path = BUNDLE) -> None:
    """This process has our connector: its Mooncake counts, as a master takes clients of its own version alone. vLLM's own connectors
    keep that of the image."""
    packages = str(folder / HERE)
    if packages in sys.path:
        sys.path.remove(packages)
        sys.path.insert(0, packages)
