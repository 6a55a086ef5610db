"""The names of vLLM that the connector cannot do without, and which versions of vLLM are accepted.

Base classes of connectors and the module of block hashes are imported from here, so that a vLLM without them is refused with a
sentence. A renamed global of vLLM would make every name in this project a lie, so other versions are refused at start, too (unless
`allow_untested_vllm`). Knows of vLLM 0.30 to 0.33: `__version__`, and the modules that define the names.
"""

import re

import vllm

from epochkv_connector.store.connection import mooncake_version
from epochkv_fence.version import VERSION

TESTED_VERSIONS = ((0, 30), (0, 33))
"""First and last minor version accepted."""


class UnsupportedEngine(RuntimeError):
    """This engine cannot be fenced; the message says what is wrong and what to change."""


def unsupported(found: str) -> str:
    """The sentence for this version."""
    first, last = TESTED_VERSIONS
    return f"vLLM {found} is not supported: EpochKV takes {first[0]}.{first[1]} to {last[0]}.{last[1]}; install one of these"


def running() -> dict[str, str]:
    """Versions of what this engine runs, by name, for its hub; what cannot be told is left out."""
    found = {"epochkv": VERSION, "vllm": str(getattr(vllm, "__version__", "")), "mooncake": mooncake_version()}
    return {name: version for name, version in found.items() if version}


def check_version(allow_untested: bool) -> None:
    """Raise `UnsupportedEngine` unless vLLM's minor version was tested, or untested ones are allowed (`allow_untested_vllm`)."""
    found = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", found)
    minor = (int(match[1]), int(match[2])) if match else (-1, -1)
    first, last = TESTED_VERSIONS
    if first <= minor <= last or allow_untested:
        return
    raise UnsupportedEngine(f"{unsupported(found)}, or set allow_untested_vllm to true in kv_connector_extra_config at your own risk")


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils
except ImportError as error:  # a version so far away that there is nothing to try
    raise UnsupportedEngine(f"{unsupported(getattr(vllm, '__version__', '(unknown)'))} ({error})") from None

try:  # 0.33 and later
    from vllm.v1.core import kv_cache_planning
except ImportError:
    kv_cache_planning = None

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "SupportsHMA",
    "kv_cache_interface",
    "kv_cache_planning",
    "kv_cache_utils",
]
