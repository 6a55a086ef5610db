"""How engines, stores and trainers reach a pool: the connector's configuration and Mooncake's environment.

The schema of the configuration is `connector/epochkv_connector/config.py`. It holds no epoch: epochs reach engines
only through the fence, so a reset never changes a pod template."""

import json
import re

from epochkv_fence import launch, quantity
from epochkv_operator.api.base import ENGINE_LABEL, MANAGED_BY, MANAGED_BY_LABEL, POOL_LABEL
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool, Mooncake, Transport
from epochkv_operator.planning import names
from epochkv_operator.planning.context import Context, Json


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
    assert distributed.mooncake is not None, "the rules of the API want one of the two"
    etcd = etcd_endpoints(distributed.mooncake)
    if etcd is not None:
        return f"etcd://{etcd}"
    return f"{names.component_name(pool.metadata.name, 'master')}.{pool.metadata.namespace}.svc:{names.MASTER_RPC_PORT}"


def cluster_of(pool: KVCachePool) -> str | None:
    """`--cluster_id` of masters that agree on a leader; None: there is one master, or the owner of an external store has not said."""
    distributed = pool.spec.distributed
    if distributed is not None and distributed.external is not None:
        return distributed.external.cluster_id
    return cluster_id(pool) if pool.mooncake is not None and etcd_endpoints(pool.mooncake) is not None else None


def store_environment(pool: KVCachePool) -> dict[str, str]:
    """Variables for the Mooncake clients in stores. Engines set theirs, the same ones, by themselves and by `connection`."""
    used, cluster = transport(pool), cluster_of(pool)
    environment = dict(launch.CLIENT_ENVIRONMENT) if cluster is None else {**launch.CLIENT_ENVIRONMENT, "MC_STORE_CLUSTER_ID": cluster}
    if used is not None and used.gid_index is not None:
        environment["MC_GID_INDEX"] = str(used.gid_index)
    return environment


def transport(pool: KVCachePool) -> Transport | None:
    """How blocks travel; None for a pool without L2."""
    distributed = pool.spec.distributed
    used = distributed and (distributed.mooncake or distributed.external)
    return used.transport if used else None


def connection(pool: KVCachePool, context: Context, save: int | str | None = None) -> Json:
    """The connector's configuration (`kv_connector_extra_config`) for a pool's engines and for pods that join. `save`: an engine's own."""
    metadata = pool.metadata
    config: Json = {
        "pool": {"name": metadata.name, "namespace": metadata.namespace, "uid": metadata.uid},
        "hub": {"endpoint": context.settings.endpoint, "credentials_dir": names.CREDENTIALS_DIR},
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
        optional = {"cluster_id": cluster_of(pool), "gid_index": used.gid_index}
        config["distributed"] |= {key: value for key, value in optional.items() if value is not None}
    save = pool.spec.save if save is None else save
    if save is not None:
        config["save"] = save if isinstance(save, str) else {"max_tokens": save}
    if pool.spec.stamp == "All":
        config["stamp"] = True
    if pool.spec.media_ids == "Trusted":
        config["trust_media_ids"] = True
    return config


def transfer_config(config: Json) -> str:
    """The value of vLLM's `--kv-transfer-config` around a connector configuration."""
    return json.dumps(launch.transfer_config(config), sort_keys=True, separators=(",", ":"))


SSD_PORTS = (10000, 65535)
"""What is on disk is asked for on a port that the kernel chooses, and Mooncake has no option for it. None of a store's other ports."""


def pool_policies(pool: KVCachePool, context: Context) -> list[Json]:
    """Policies of the master, the stores and the pods that joined by their label, for a pool whose Mooncake the operator runs."""
    if pool.spec.network_policy.mode == "Disabled":
        return []
    assert pool.mooncake is not None
    name, members = pool.metadata.name, _members(pool)
    scrapers = [{"namespaceSelector": {"matchLabels": {names.SCRAPE_LABEL: "true"}}}]
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": context.settings.namespace}},
        **_pods({"app.kubernetes.io/part-of": "epochkv", names.COMPONENT_LABEL: "operator"}),
    }
    ingress = {
        "master": [
            {"from": members, "ports": [_tcp(names.MASTER_RPC_PORT)]},
            {"from": [operator, *scrapers], "ports": [_tcp(names.MASTER_ADMIN_PORT)]},
        ],
        "store": [
            {"from": members, "ports": [_tcp(*(SSD_PORTS if pool.mooncake.store.ssd else launch.TRANSFER_PORTS))]},
            {"from": scrapers, "ports": [_tcp(names.STORE_HEALTH_PORT)]},
        ],
    }
    policies = {component: _policy(names.component_selector(name, component), allowed) for component, allowed in ingress.items()}
    policies["joined"] = _policy({POOL_LABEL: name}, _engine_ingress(pool))
    not_ours = {"key": MANAGED_BY_LABEL, "operator": "NotIn", "values": [MANAGED_BY]}
    policies["joined"]["spec"]["podSelector"]["matchExpressions"] = [not_ours]
    return [names.pool_object("NetworkPolicy", pool, component, context, policy) for component, policy in policies.items()]


def engine_policy(engine: InferenceEngine, pool: KVCachePool, context: Context) -> list[Json]:
    if pool.spec.network_policy.mode == "Disabled" or pool.mooncake is None:
        return []
    policy = _policy(names.engine_selector(engine.metadata.name), _engine_ingress(pool))
    return [names.engine_object("NetworkPolicy", engine, context, policy)]


def _engine_ingress(pool: KVCachePool) -> list[Json]:
    """Closes an engine's transfer ports, whose buffers hold KV, to everybody outside the pool.

    Its other ports stay open: to clients, and to trainers that push weights over ports of their own choice.
    """
    first, last = launch.TRANSFER_PORTS
    return [
        {"ports": [_tcp(1, first - 1), _tcp(last + 1, 65535), {"protocol": "UDP", "port": 1, "endPort": 65535}]},
        {"from": _members(pool), "ports": [_tcp(first, last)]},
    ]


def _members(pool: KVCachePool) -> list[Json]:
    """Pods of the pool, also in the namespaces that it allows."""
    pods, allowed = _pods({POOL_LABEL: pool.metadata.name}), pool.spec.allowed_namespaces
    found = [pods]
    if allowed is not None and allowed.names:
        named: Json = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(allowed.names)}
        found.append({"namespaceSelector": {"matchExpressions": [named]}, **pods})
    if allowed is not None and allowed.selector is not None:
        found.append({"namespaceSelector": allowed.selector.model_dump(mode="json", exclude_none=True), **pods})
    return found


def _policy(selector: dict[str, str], ingress: list[Json]) -> Json:
    return {"spec": {**_pods(selector), "policyTypes": ["Ingress"], "ingress": ingress}}


def _pods(labels: dict[str, str]) -> Json:
    return {"podSelector": {"matchLabels": labels}}


def _tcp(port: int, end: int | None = None) -> Json:
    return {"protocol": "TCP", "port": port} | ({"endPort": end} if end is not None else {})


_NAMED = {POOL_LABEL: "pool", ENGINE_LABEL: "inference_engine"}
"""Labels of pods -> labels of their series, which dashboards and alerts go by. `engine` is taken: vLLM numbers its cores by it."""


def engine_monitor(engine: InferenceEngine, selector: dict[str, str], context: Context, *, tls: bool) -> list[Json]:
    """Scrapes the pods that answer requests, by HTTPS with `tls`; the connector's metrics are among vLLM's."""
    if "PodMonitor" not in context.served:
        return []
    body = _body(selector, "http")
    if tls:  # a certificate has no name of a pod
        body["spec"]["podMetricsEndpoints"][0] |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return [names.engine_object("PodMonitor", engine, context, body, more=dict(context.settings.monitor_labels))]


def pool_monitors(pool: KVCachePool, context: Context) -> list[Json]:
    """For a pool whose Mooncake the operator runs."""
    if "PodMonitor" not in context.served:
        return []
    name, labels = pool.metadata.name, dict(context.settings.monitor_labels)
    return [
        names.pool_object("PodMonitor", pool, component, context, _body(names.component_selector(name, component), port), labels)
        for component, port in (("master", "admin"), ("store", "health"))
    ]


def _body(selector: dict[str, str], port: str) -> Json:
    endpoint = {"port": port, "path": "/metrics", "relabelings": [_label(label, name) for label, name in _NAMED.items()]}
    return {"spec": {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [endpoint]}}


def _label(label: str, name: str) -> Json:
    """Give the series of a pod the value of its label. Where the pod has no such label, the series have none either."""
    return {"sourceLabels": ["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)], "targetLabel": name}
