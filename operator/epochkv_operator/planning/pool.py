"""The objects of a KVCachePool: Mooncake masters and stores, the connection that trainers read, network policies."""

from __future__ import annotations

import json

from epochkv_operator.api import quantity
from epochkv_operator.api.pool import KVCachePool, Mooncake
from epochkv_operator.planning import connection as wiring
from epochkv_operator.planning import podspec
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.merge import apply_template
from epochkv_operator.planning.names import (
    MASTER_ADMIN_PORT,
    MASTER_RPC_PORT,
    STORE_HEALTH_PORT,
    STORE_REST_PORT,
    component_selector,
    connection_name,
    master_name,
    owned_object,
    pool_labels,
    store_name,
)
from epochkv_operator.planning.network import pool_policies

_TEMPLATE_FIELD = "spec.distributed.mooncake.{}.template"
# What a store process needs beside its segment (measured: 331 MiB peak with a full segment of 256 MiB), with its local buffer.
_STORE_OVERHEAD_BYTES = 320 * 2**20
_PAGE_TABLE_SHARE = 512  # 8 bytes for each page of 4 KiB; a pod pays for them, too
_STORE_MODULE = "epochkv_connector.storenode"  # in our image; an image of the owner's is only known to have Mooncake
_PLAIN_STORE_MODULE = "mooncake.mooncake_store_service"
_LONGEST_TOUCH_SECONDS = 300
_SLOW_TOUCH_BYTES_PER_SECOND = 2**28
_STORE_LOCAL_BUFFER_BYTES = 16 * 2**20


def desired_pool(pool: KVCachePool, context: Context) -> list[Json]:
    """Every object of a pool except its Secret, which holds random keys and is made by the runtime.

    Raises:
        InvalidTemplate: an override in a `template` that belongs to the operator.
    """
    objects = [_connection_map(pool, context)]
    distributed = pool.spec.distributed
    if distributed is not None and distributed.mooncake is not None:
        mooncake = distributed.mooncake
        objects += [
            _master(pool, mooncake, context),
            *([] if wiring.etcd_endpoints(mooncake) else [_master_service(pool, context)]),
            _budget(pool, "master", context),
            _store(pool, mooncake, context),
            _store_service(pool, context),
            _budget(pool, "store", context),
            *pool_policies(pool, context),
        ]
    return objects


def _connection_map(pool: KVCachePool, context: Context) -> Json:
    name = connection_name(pool.metadata.name)
    config = wiring.connection(pool, context)
    data = {
        "connection.json": json.dumps(config, sort_keys=True, indent=2) + "\n",
        "kv-transfer-config.json": wiring.transfer_config(config),
    }
    return owned_object("v1", "ConfigMap", name, pool, pool_labels(pool.metadata.name, "connection"), context, {"data": data})


def _master(pool: KVCachePool, mooncake: Mooncake, context: Context) -> Json:
    name, master = pool.metadata.name, mooncake.master
    etcd = wiring.etcd_endpoints(mooncake)
    args = [
        # With etcd this address is what the leader publishes; standbys keep the port closed.
        f"--rpc_address={'$(POD_IP)' if etcd else '0.0.0.0'}",
        f"--rpc_port={MASTER_RPC_PORT}",
        "--rpc_thread_num=4",
        "--metrics_host=0.0.0.0",
        f"--metrics_port={MASTER_ADMIN_PORT}",
        "--client_ttl=10",
        "--default_kv_lease_ttl=10000",
        "--eviction_high_watermark_ratio=0.85",
        "--eviction_ratio=0.10",
        "--put_start_discard_timeout_sec=30",
        "--logtostderr=true",
    ]
    if etcd:
        args += [
            "--enable_ha=true",
            "--ha_backend_type=etcd",
            f"--ha_backend_connstring={etcd}",
            f"--cluster_id={wiring.cluster_id(pool)}",
            "--enable_oplog=true",
        ]
    health = podspec.http_probe("/health", MASTER_ADMIN_PORT, period=10, failures=3)
    container: Json = {
        "name": "master",
        "image": mooncake.image or context.store_image,
        "command": ["mooncake_master"],
        "args": args,
        "env": [podspec.pod_ip()],
        "ports": [
            {"name": "rpc", "containerPort": MASTER_RPC_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": MASTER_ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "readinessProbe": health if etcd else podspec.tcp_probe(MASTER_RPC_PORT, period=2, failures=3),
        "livenessProbe": health,
        "securityContext": podspec.container_security(),
    }
    labels = pool_labels(name, "master")
    template = {"metadata": {"labels": labels}, "spec": {**podspec.base_spec(), "containers": [container]}}
    body = {
        "spec": {
            "replicas": master.replicas,
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": component_selector(name, "master")},
            # Two masters that do not know each other would split the cache between them.
            "strategy": {"type": "RollingUpdate"} if etcd else {"type": "Recreate"},
            "template": podspec.harden(apply_template(template, master.template, "master", _TEMPLATE_FIELD.format("master"))),
        }
    }
    return owned_object("apps/v1", "Deployment", master_name(name), pool, labels, context, body)


def _master_service(pool: KVCachePool, context: Context) -> Json:
    """Clients of highly available masters find the leader in etcd; all others go through this Service. No admin port: it accepts
    a flush."""
    name = pool.metadata.name
    ports = [{"name": "rpc", "port": MASTER_RPC_PORT, "targetPort": MASTER_RPC_PORT, "protocol": "TCP"}]
    body = {"spec": {"selector": component_selector(name, "master"), "ports": ports}}
    return owned_object("v1", "Service", master_name(name), pool, pool_labels(name, "master"), context, body)


def _store(pool: KVCachePool, mooncake: Mooncake, context: Context) -> Json:
    name, store = pool.metadata.name, mooncake.store
    segment = quantity.to_bytes(store.segment_size)
    memory = quantity.from_bytes(
        _round_up(segment + segment // _PAGE_TABLE_SHARE + _STORE_LOCAL_BUFFER_BYTES + _STORE_OVERHEAD_BYTES, 2**20)
    )
    variables = {
        **wiring.client_environment(pool),
        "MOONCAKE_LOCAL_HOSTNAME": "$(POD_IP)",  # localhost otherwise
        "MOONCAKE_MASTER": wiring.master_address(pool) or "",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_PROTOCOL": mooncake.transport.protocol.lower(),
        "MOONCAKE_DEVICE": ",".join(mooncake.transport.devices or ()),
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment),
        "MOONCAKE_LOCAL_BUFFER_SIZE": str(_STORE_LOCAL_BUFFER_BYTES),
        "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "true",
        "MOONCAKE_CLIENT_HTTP_PORT": str(STORE_HEALTH_PORT),
        "HOME": "/tmp",
    }
    container: Json = {
        "name": "store",
        "image": mooncake.image or context.store_image,
        "command": ["python3", "-m", _STORE_MODULE if mooncake.image is None else _PLAIN_STORE_MODULE],
        "args": ["--port", str(STORE_REST_PORT), "--max-wait-time", "60"],
        "env": [podspec.pod_ip(), *podspec.environment(variables)],
        "ports": [{"name": "health", "containerPort": STORE_HEALTH_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}},
        # The segment is touched, and setup may wait for the master for a minute; only then does the process listen.
        "startupProbe": podspec.tcp_probe(STORE_REST_PORT, period=2, failures=60 + _touch_seconds(segment) // 2),
        # 503 while the master is away: not ready, but nothing that a restart would mend.
        "readinessProbe": podspec.http_probe("/health", STORE_HEALTH_PORT, period=3, failures=4),
        "livenessProbe": podspec.tcp_probe(STORE_REST_PORT, period=10, failures=3),
        "securityContext": podspec.container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        **podspec.base_spec(),
        "terminationGracePeriodSeconds": 30,  # SIGTERM unmounts the segment in about two seconds
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if wiring.uses_rdma(pool):
        spec = podspec.with_rdma(spec)
    labels = pool_labels(name, "store")
    template = {"metadata": {"labels": labels}, "spec": spec}
    body = {
        "spec": {
            "replicas": store.replicas,
            "serviceName": store_name(name),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": component_selector(name, "store")},
            "template": podspec.harden(apply_template(template, store.template, "store", _TEMPLATE_FIELD.format("store"))),
        }
    }
    return owned_object("apps/v1", "StatefulSet", store_name(name), pool, labels, context, body)


def _touch_seconds(segment: int) -> int:
    """How long a store may take to touch its segment: `epochkv_connector.touch` gives up after the longest."""
    return min(_LONGEST_TOUCH_SECONDS, segment // _SLOW_TOUCH_BYTES_PER_SECOND)


def _store_service(pool: KVCachePool, context: Context) -> Json:
    name = pool.metadata.name
    ports = [{"name": "health", "port": STORE_HEALTH_PORT, "targetPort": STORE_HEALTH_PORT, "protocol": "TCP"}]
    body = {"spec": {"clusterIP": "None", "selector": component_selector(name, "store"), "ports": ports}}
    return owned_object("v1", "Service", store_name(name), pool, pool_labels(name, "store"), context, body)


def _budget(pool: KVCachePool, component: str, context: Context) -> Json:
    name = pool.metadata.name
    body = podspec.budget(component_selector(name, component))
    return owned_object("policy/v1", "PodDisruptionBudget", f"{name}-{component}", pool, pool_labels(name, component), context, body)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
