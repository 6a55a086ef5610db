"""The names of vLLM that the connector cannot do without: base classes of connectors, and the module of block hashes.

Everything imports them from here, so that a vLLM without them is refused with a sentence. Knows of vLLM 0.30 to 0.33: the
modules that define them.
"""

from __future__ import annotations

import vllm

from epochkv_connector.engine.version import UnsupportedEngine, unsupported

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
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
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "kv_cache_interface",
    "kv_cache_planning",
    "kv_cache_utils",
]
