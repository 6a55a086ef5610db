"""The `kv_transfer_config` of an engine that is joined to a pool, wherever it is written for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from epochkv_connector.config.connector_config import EXTRA, NAME

MODULE: Final = "epochkv_connector.connector"
MOONCAKE: Final = "MooncakeStoreConnector"
"""vLLM's own connector to a Mooncake store."""
MOONCAKE_ENV: Final = "MOONCAKE_CONFIG_PATH"
"""Where it looks for its file."""
MOONCAKE_KEY: Final = "mooncake_config_path"
"""Where its users name that file: our plugin hands it on."""


def transfer_config(extra: Mapping[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """What vLLM's `--kv-transfer-config` takes, around the connector's own configuration."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        EXTRA: dict(extra),
    }
