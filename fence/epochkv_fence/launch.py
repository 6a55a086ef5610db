"""What engines and stores are started with, whoever starts them: vLLM's argument, and the environment of Mooncake's clients."""

from collections.abc import Mapping
from typing import Any, Final

NAME: Final = "EpochKVConnector"
"""What `kv_connector` is in vLLM's configuration."""
MODULE: Final = "epochkv_connector.connector"
EXTRA: Final = "kv_connector_extra_config"


def transfer_config(extra: Mapping[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """What vLLM's `--kv-transfer-config` takes, around the connector's own configuration."""
    return {"kv_connector": NAME, "kv_connector_module_path": MODULE, "kv_role": role, EXTRA: dict(extra)}


TRANSFER_PORTS: Final = (15000, 15127)
"""Of Mooncake clients: two for each rank, and two for each engine core."""

CLIENT_ENVIRONMENT: Final = {
    "MC_RPC_TIMEOUT_MS": "1000",  # a hung master costs 1 s, not 30
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",  # a master behind a dead address costs 4 s, not 120
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # setup holds the GIL while it tries
    # A hung segment owner. Shorter takes a machine that stands still for a store that is gone (measured: 18 of 28 gets failed in a stall of
    # 2.5 s with a limit of 2 s, none with 5 s); longer keeps the buffers of a call to a hung store for minutes.
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",  # a peer that stalls in mid-payload
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # after an overflow, every transfer to that peer fails
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
    "MC_MIN_RPC_PORT": str(TRANSFER_PORTS[0]),  # pins both listeners of a client, so that a NetworkPolicy can name them
    "MC_MAX_RPC_PORT": str(TRANSFER_PORTS[1]),
    "MC_YLT_LOG_LEVEL": "warn",
}
"""Of every Mooncake client. Variable -> value, measured as a whole block on the pinned Mooncake version."""
