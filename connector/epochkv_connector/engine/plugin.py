"""What vLLM calls first in every process (`vllm.general_plugins` entry point): registers the connector, has configurations checked
before a model is loaded, and has weights looked at before a kernel packs them away.

`kv_connector_module_path` suffices for the connector alone; a MultiConnector rebuilds its children's stats through the
registry, so as a child it must be registered.

vLLM makes connectors after it has loaded the model, in processes of their own: a wrong key would end the start minutes later,
under one trace for each process. So what vLLM makes of its arguments is checked as soon as it has made it, in the process
that the user started; vLLM's own commands then end with one line. Knows of vLLM: `KVConnectorFactory`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from epochkv_connector.config.keys import NAME, ConfigError
from epochkv_connector.engine import limits
from epochkv_connector.engine.version import UnsupportedEngine


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from epochkv_connector.engine import patches
    from epochkv_connector.weights.packed import mark

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "epochkv_connector.connector", NAME)
    patches.after_arguments(check)
    patches.before_packing(mark)


def check(vllm_config: Any) -> None:
    """Refuse an engine that our connector would refuse once its model is loaded.

    Raises:
        ConfigError, UnsupportedEngine: the message says what to change.
        SystemExit: the same in one line, where vLLM's own command runs.
    """
    try:
        limits.check_before_load(vllm_config)
    except (ConfigError, UnsupportedEngine) as error:
        if is_command_of_vllm():
            raise SystemExit(f"EpochKV cannot start: {error}") from None
        raise


def is_command_of_vllm() -> bool:
    """Whether this process runs `vllm ...` or `python -m vllm...`, and no program that could catch an error."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module.name.startswith("vllm.") if module is not None else Path(sys.argv[0]).name == "vllm"
