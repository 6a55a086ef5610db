"""What Prometheus scrapes: a PodMonitor for the engines, the masters and the stores, where the cluster has that kind."""

from __future__ import annotations

import re

from epochkv_operator.api.base import ENGINE_LABEL, POOL_LABEL
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.names import component_selector, engine_object, pool_object

_PORTS = {"master": "admin", "store": "health"}
"""Names of the ports with metrics, by component."""
_NAMED = {POOL_LABEL: "pool", ENGINE_LABEL: "inference_engine"}
"""Labels of pods -> labels of their series, which dashboards and alerts go by. `engine` is taken: vLLM numbers its cores by it."""


def engine_monitor(engine: InferenceEngine, selector: dict[str, str], context: Context, *, tls: bool) -> list[Json]:
    """Scrapes the pods that answer requests, by HTTPS with `tls`; the connector's metrics are among vLLM's."""
    if "PodMonitor" not in context.served:
        return []
    body = _body(selector, "http")
    if tls:  # a certificate has no name of a pod
        body["spec"]["podMetricsEndpoints"][0] |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return [engine_object("PodMonitor", engine, context, body, more=dict(context.monitor_labels))]


def pool_monitors(pool: KVCachePool, context: Context) -> list[Json]:
    """For a pool whose Mooncake the operator runs."""
    if "PodMonitor" not in context.served:
        return []
    name, labels = pool.metadata.name, dict(context.monitor_labels)
    return [
        pool_object("PodMonitor", pool, component, context, _body(component_selector(name, component), port), labels)
        for component, port in _PORTS.items()
    ]


def _body(selector: dict[str, str], port: str) -> Json:
    endpoint = {"port": port, "path": "/metrics", "relabelings": [_label(label, name) for label, name in _NAMED.items()]}
    return {"spec": {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [endpoint]}}


def _label(label: str, name: str) -> Json:
    """Give the series of a pod the value of its label. Where the pod has no such label, the series have none either."""
    return {"sourceLabels": ["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)], "targetLabel": name}
