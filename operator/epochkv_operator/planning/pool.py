"""The objects of a KVCachePool: Mooncake masters and stores, the connection that trainers read, network policies."""

import json
from functools import partial

from epochkv_fence import quantity
from epochkv_operator.api.base import POOL_NAMESPACE, SHARED_LABEL, PodTemplate
from epochkv_operator.api.pool import KVCachePool, Mooncake
from epochkv_operator.planning import connection as wiring
from epochkv_operator.planning import names, podspec
from epochkv_operator.planning.context import Context, Json

# What a store process needs beside its segment (measured: 331 MiB peak with a full segment of 256 MiB), with its local buffer.
_STORE_OVERHEAD_BYTES = 320 * 2**20
_PAGE_TABLE_SHARE = 512  # 8 bytes for each page of 4 KiB; a pod pays for them, too
_MASTER = "mooncake_master --metrics_host=$any"
_STORE_MODULE = "epochkv_connector.storenode"  # in our image; an image of the owner's is only known to have Mooncake
_PLAIN_STORE_MODULE = "mooncake.mooncake_store_service"
_MOONCAKE_IPV6 = "case $POD_IP in *:*) export MC_USE_IPV6=1;; esac"  # without it, all transfers by IPv6 fail
# Masters and stores call nothing outside of the cluster. Through a proxy, none of them reaches etcd, and all look healthy.
_NO_PROXY = "unset HTTP_PROXY http_proxy HTTPS_PROXY https_proxy ALL_PROXY all_proxy"
_SLOW_FILL_BYTES_PER_SECOND = 2**28
_STORE_LOCAL_BUFFER_BYTES = 16 * 2**20
_SSD_WRITE_BUFFER_BYTES = 64 * 2**20
_SSD_MOUNT = "/ssd"
# Blocks are copied to disk when they come. Mooncake's other mode waits until memory is full, and takes no blocks meanwhile.
_SSD_MASTER_ARGUMENTS = ("--enable_offload=true",)
# Readers get misses at once. Otherwise each waits for seconds for a store that is gone, until the master forgets it.
_SSD_DEREGISTER = (
    "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open(u.Request("
    f"'http://127.0.0.1:{names.STORE_REST_PORT}/api/unmount_local_disk', b'{{\"grace_period_seconds\": 2}}', method='POST'), timeout=15)"
)

# Both servers of Mooncake's own store listen on IPv4 alone; our module answers on IPv6 for them.
_LISTENS = f"import socket; socket.create_connection(('127.0.0.1', {names.STORE_REST_PORT}), 2)"
_HEALTHY = (
    f"import http.client as h; c = h.HTTPConnection('127.0.0.1', {names.STORE_HEALTH_PORT}, timeout=4); c.request('GET', '/health'); "
    "exit(c.getresponse().status != 200)"
)


def desired_pool(pool: KVCachePool, context: Context) -> list[Json]:
    """Every object of a pool except its Secret, which holds random keys and is made by the runtime.

    Raises:
        InvalidTemplate: an override in a `template` that belongs to the operator.
    """

    def child(kind: str, component: str, body: Json) -> Json:
        return names.pool_object(kind, pool, component, context, body)

    objects = [child("ConfigMap", "connection", {"data": _connection_files(pool, context)})]
    mooncake = pool.mooncake
    if mooncake is None:
        return objects
    objects += wiring.pool_policies(pool, context)  # no pod runs before them
    masters, stores = names.component_selector(pool.metadata.name, "master"), names.component_selector(pool.metadata.name, "store")
    objects.append(child("Deployment", "master", {"spec": _master(pool, mooncake, context)}))
    if not wiring.etcd_endpoints(mooncake):  # through etcd, clients find the leader by themselves
        # Without the admin port: it accepts a flush.
        objects.append(child("Service", "master", {"spec": podspec.service(masters, "rpc", names.MASTER_RPC_PORT)}))
    return [
        *objects,
        child("PodDisruptionBudget", "master", podspec.budget(masters)),
        child("StatefulSet", "store", {"spec": _store(pool, mooncake, context)}),
        child("Service", "store", {"spec": {"clusterIP": "None", **podspec.service(stores, "health", names.STORE_HEALTH_PORT)}}),
        child("PodDisruptionBudget", "store", podspec.budget(stores)),
        *wiring.pool_monitors(pool, context),
    ]


def shared_connection(pool: KVCachePool, namespace: str, keys: str, context: Context) -> Json:
    """The ConfigMap by which pods of another namespace join. Nothing of another namespace can own it, so it says whose it is.

    Args:
        keys: changes when the Secret beside it must.
    """
    home, labels = pool.metadata, names.pool_labels(pool.metadata.name, "connection")
    name = names.copy_name(home.namespace, home.name, "connection")
    del labels["app.kubernetes.io/instance"]  # Argo CD knows by it what is its own, and prunes of that what no object owns
    metadata = {"name": name, "namespace": namespace, "labels": {SHARED_LABEL: "true", **labels}}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _connection_files(pool, context)}
    return names.stamped(body, context, {POOL_NAMESPACE: home.namespace, names.KEYS_ANNOTATION: keys})


def _connection_files(pool: KVCachePool, context: Context) -> dict[str, str]:
    config = wiring.connection(pool, context)
    files = {
        "connection.json": json.dumps(config, sort_keys=True, indent=2) + "\n",
        "kv-transfer-config.json": wiring.transfer_config(config),
    }
    # For the admission policy of the chart: what it adds to the memory of pods that join, and whether they may have the gate.
    if pool.spec.local is not None:
        files["local"] = str(quantity.to_bytes(pool.spec.local.capacity))
    return files if pool.spec.serve is None else {**files, "serve": pool.spec.serve.weights}


def _master(pool: KVCachePool, mooncake: Mooncake, context: Context) -> Json:
    etcd = wiring.etcd_endpoints(mooncake)
    health = podspec.http_probe("/health", names.MASTER_ADMIN_PORT, period=10, failures=3)
    container: Json = {
        "name": "master",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "image": mooncake.image or context.settings.store_image,
        "command": podspec.started(_MASTER if etcd else f"{_MASTER} --rpc_address=$any", podspec.EVERY_ADDRESS, _NO_PROXY),
        "args": [*_master_arguments(pool, etcd), *([] if mooncake.store.ssd is None else _SSD_MASTER_ARGUMENTS)],
        "env": [podspec.pod_ip()],
        "ports": [podspec.port("rpc", names.MASTER_RPC_PORT), podspec.port("admin", names.MASTER_ADMIN_PORT)],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "readinessProbe": health if etcd else podspec.tcp_probe(names.MASTER_RPC_PORT, period=2, failures=3),
        "livenessProbe": health,
        "securityContext": podspec.container_security(),
    }
    security = mooncake.pod_security or context.settings.pod_security
    return {
        "replicas": mooncake.master.replicas,
        # Two masters that do not know each other would split the cache between them.
        "strategy": {"type": "RollingUpdate" if etcd else "Recreate"},
        **_pods(pool, "master", {**podspec.base_spec(security), "containers": [container]}, mooncake.master.template),
    }


def _master_arguments(pool: KVCachePool, etcd: str | None) -> list[str]:
    arguments = [
        f"--rpc_port={names.MASTER_RPC_PORT}",
        "--rpc_thread_num=4",
        f"--metrics_port={names.MASTER_ADMIN_PORT}",
        "--client_ttl=10",
        "--default_kv_lease_ttl=10000",
        "--eviction_high_watermark_ratio=0.85",
        "--eviction_ratio=0.10",
        "--put_start_discard_timeout_sec=30",
        "--logtostderr=true",
    ]
    if etcd:
        arguments += [
            "--rpc_address=$(POD_IP)",  # what the leader publishes; standbys keep the port closed
            "--enable_ha=true",
            "--ha_backend_type=etcd",
            f"--ha_backend_connstring={etcd}",
            f"--cluster_id={wiring.cluster_id(pool)}",
            "--enable_oplog=true",
        ]
    return arguments


def _store(pool: KVCachePool, mooncake: Mooncake, context: Context) -> Json:
    segment = quantity.to_bytes(mooncake.store.segment_size)
    disk = 0 if mooncake.store.ssd is None else _ssd_buffer_bytes(segment) + _SSD_WRITE_BUFFER_BYTES
    num_bytes = segment + segment // _PAGE_TABLE_SHARE + _STORE_LOCAL_BUFFER_BYTES + _STORE_OVERHEAD_BYTES + disk
    memory = quantity.from_bytes(-(-num_bytes // 2**20) * 2**20)  # in whole MiB
    fill_seconds = segment // _SLOW_FILL_BYTES_PER_SECOND
    own = mooncake.image is None
    listens = partial(podspec.tcp_probe, names.STORE_REST_PORT) if own else partial(podspec.exec_probe, _LISTENS)
    healthy = partial(podspec.http_probe, "/health", names.STORE_HEALTH_PORT) if own else partial(podspec.exec_probe, _HEALTHY)
    container: Json = {
        "name": "store",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "image": mooncake.image or context.settings.store_image,
        "command": podspec.started(f"python3 -m {_STORE_MODULE if own else _PLAIN_STORE_MODULE}", _MOONCAKE_IPV6, _NO_PROXY),
        "args": ["--port", str(names.STORE_REST_PORT), "--max-wait-time", "60"],
        "env": [podspec.pod_ip(), *podspec.environment(_store_environment(pool, mooncake, segment) | _ssd_environment(mooncake, segment))],
        "ports": [podspec.port("health", names.STORE_HEALTH_PORT)],
        "resources": {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}},
        # The kernel fills the segment, and setup may wait for the master for a minute; only then does the process listen.
        "startupProbe": listens(period=2, failures=60 + fill_seconds // 2),
        # 503 while the master is away: not ready, but nothing that a restart would mend.
        "readinessProbe": healthy(period=3, failures=4),
        "livenessProbe": listens(period=10, failures=3),
        "securityContext": podspec.container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **({} if mooncake.store.ssd is None else {"lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", _SSD_DEREGISTER]}}}}),
    }
    spec = {
        **podspec.base_spec(mooncake.pod_security or context.settings.pod_security),
        "terminationGracePeriodSeconds": 30,  # SIGTERM unmounts the segment in about two seconds
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if mooncake.transport.protocol == "RDMA":
        spec = podspec.with_rdma(spec, mooncake.transport.resource_name)
    if mooncake.store.ssd is not None:
        spec = podspec.with_disk(spec, quantity.to_bytes(mooncake.store.ssd.capacity), mooncake.store.ssd.storage_class_name, _SSD_MOUNT)
    return {
        "replicas": mooncake.store.replicas,
        "serviceName": names.component_name(pool.metadata.name, "store"),
        "podManagementPolicy": "Parallel",
        **_pods(pool, "store", spec, mooncake.store.template),
    }


def _store_environment(pool: KVCachePool, mooncake: Mooncake, segment: int) -> dict[str, str]:
    return {
        **wiring.store_environment(pool),
        "MOONCAKE_LOCAL_HOSTNAME": "$(POD_IP)",  # localhost otherwise
        "MOONCAKE_MASTER": wiring.master_address(pool) or "",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_PROTOCOL": mooncake.transport.protocol.lower(),
        "MOONCAKE_DEVICE": ",".join(mooncake.transport.devices or ()),
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment),
        "MOONCAKE_LOCAL_BUFFER_SIZE": str(_STORE_LOCAL_BUFFER_BYTES),
        "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "true",
        "MOONCAKE_CLIENT_HTTP_PORT": str(names.STORE_HEALTH_PORT),
        "HOME": "/tmp",
    }


def _ssd_buffer_bytes(segment: int) -> int:
    """Blocks that were read from disk stay there until a reader has fetched them. At most Mooncake's own default."""
    return max(64 * 2**20, min(1280 * 2**20, segment // 4))


def _ssd_environment(mooncake: Mooncake, segment: int) -> dict[str, str]:
    """What makes a store use its disk; empty for one without."""
    if mooncake.store.ssd is None:
        return {}
    return {
        "MOONCAKE_OFFLOAD_ENABLED": "true",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": _SSD_MOUNT,
        # It fills nine tenths of the file system, then the oldest blocks go. The others lose blocks (bucket), or all in a restart (offset).
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",  # with 10, more blocks leave memory before they are on disk
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(_ssd_buffer_bytes(segment)),
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(quantity.to_bytes(mooncake.store.ssd.capacity)),
    }


def _pods(pool: KVCachePool, component: str, spec: Json, overrides: PodTemplate | None) -> Json:
    """What Deployment and StatefulSet have in common: their pods, with the user's overrides."""
    name = pool.metadata.name
    pod = {"metadata": {"labels": names.pool_labels(name, component)}, "spec": spec}
    return {
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": names.component_selector(name, component)},
        "template": podspec.finish_pod(pod, overrides, component, f"spec.distributed.mooncake.{component}.template"),
    }
