"""Registers the connector by name (`vllm.general_plugins` entry point).

`kv_connector_module_path` suffices for the connector alone; a MultiConnector rebuilds its children's stats through the
registry, so as a child it must be registered.
"""

from __future__ import annotations

NAME = "EpochKVConnector"


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "epochkv_connector.connector", NAME)
