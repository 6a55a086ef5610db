"""How engines, stores and trainers reach a pool: the connector's configuration and Mooncake's environment.

The schema of the configuration is `connector/epochkv_connector/config/connector_config.py`. It holds no epoch: epochs reach engines
only through the fence, so a reset never changes a pod template.
"""

from __future__ import annotations

import json
from typing import Final

from epochkv_fence import quantity
from epochkv_operator.api.pool import KVCachePool, Mooncake, Transport
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.names import CREDENTIALS_DIR, MASTER_RPC_PORT, TRANSFER_PORTS, component_name, digest

# Each of these was measured: without them a dead pod costs two minutes and an overflow poisons a client for good.
_CLIENT_ENV: Final = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # half of the default deadline of a load
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
    "MC_MIN_RPC_PORT": str(TRANSFER_PORTS[0]),
    "MC_MAX_RPC_PORT": str(TRANSFER_PORTS[1]),
    "MC_YLT_LOG_LEVEL": "warn",
}


def etcd_endpoints(mooncake: Mooncake) -> str | None:
    """`host:port;host:port` when the masters are highly available, else None."""
    etcd = mooncake.master.high_availability.etcd
    return ";".join(etcd.endpoints) if etcd is not None else None


def cluster_id(pool: KVCachePool) -> str:
    """Name of the masters' state in etcd; by uid, so that a pool never finds the index of a deleted namesake."""
    return f"epochkv-{pool.metadata.uid}"


def master_address(pool: KVCachePool) -> str | None:
    """What Mooncake clients dial; None for a pool without L2."""
    distributed = pool.spec.distributed
    if distributed is None:
        return None
    if distributed.external is not None:
        return distributed.external.master_address
    assert distributed.mooncake is not None  # exactly one, checked by the model
    etcd = etcd_endpoints(distributed.mooncake)
    if etcd is not None:
        return f"etcd://{etcd}"
    return f"{component_name(pool.metadata.name, 'master')}.{pool.metadata.namespace}.svc:{MASTER_RPC_PORT}"


def client_environment(pool: KVCachePool) -> dict[str, str]:
    """Variables for every process with a Mooncake client of this pool; empty for a pool without L2."""
    if pool.spec.distributed is None:
        return {}
    environment, external = dict(_CLIENT_ENV), pool.spec.distributed.external
    if pool.mooncake is not None and etcd_endpoints(pool.mooncake) is not None:
        environment["MC_STORE_CLUSTER_ID"] = cluster_id(pool)
    if external is not None and external.cluster_id is not None:
        environment["MC_STORE_CLUSTER_ID"] = external.cluster_id
    used = transport(pool)
    if used is not None and used.gid_index is not None:
        environment["MC_GID_INDEX"] = str(used.gid_index)
    return environment


def transport(pool: KVCachePool) -> Transport | None:
    """How blocks travel; None for a pool without L2."""
    if pool.spec.distributed is None:
        return None
    used = pool.spec.distributed.mooncake or pool.spec.distributed.external
    assert used is not None  # exactly one, checked by the model
    return used.transport


def uses_rdma(pool: KVCachePool) -> bool:
    """True when blocks travel over RDMA, which needs privileged pods."""
    used = transport(pool)
    return used is not None and used.protocol == "RDMA"


def rdma_resource(pool: KVCachePool) -> str | None:
    """What a device plugin calls the devices that each pod needs one of; None: the host's."""
    used = transport(pool)
    return used.resource_name if used is not None else None


def connection(pool: KVCachePool, context: Context) -> Json:
    """The connector's configuration (`kv_connector_extra_config`) for one pool."""
    metadata = pool.metadata
    config: Json = {
        "pool": {"name": metadata.name, "namespace": metadata.namespace, "uid": metadata.uid},
        "hub": {"endpoint": context.hub_endpoint, "credentials_dir": CREDENTIALS_DIR},
        # Without an L2 nobody else can have saved a block, so the tracker may answer a miss by itself.
        "tracker": pool.spec.distributed is None,
    }
    if pool.spec.local is not None:
        config["local"] = {"capacity_bytes": quantity.to_bytes(pool.spec.local.capacity)}
    distributed, used = pool.spec.distributed, transport(pool)
    if distributed is not None and used is not None:
        external = distributed.external
        config["distributed"] = {
            "master_address": master_address(pool),
            "metadata_server": external.metadata_server if external is not None else "P2PHANDSHAKE",
            "protocol": used.protocol.lower(),
            "device_name": ",".join(used.devices or ()),
        }
    return config


def transfer_config(config: Json) -> str:
    """The value of vLLM's `--kv-transfer-config` around a connector configuration."""
    return json.dumps(
        {
            "kv_connector": "EpochKVConnector",
            "kv_connector_module_path": "epochkv_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config,
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def connection_hash(config: Json, context: Context) -> str:
    """Changes when an engine must restart to reach its pool: configuration or keys."""
    return digest([config, context.credentials_revision])
