"""Objects for planning tests, in few words."""

from typing import Any

from epochkv_operator.api import InferenceEngine, KVCachePool, parse_engine, parse_pool
from epochkv_operator.planning.context import Context
from epochkv_operator.settings import Settings

Json = dict[str, Any]

CONTEXT = Context(Settings("epochkv-system"), "keys-1", operator_version="0.1.0")
MASTER_LIMIT = {"name": "master", "resources": {"limits": {"memory": "1Gi"}}}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
ELECTED = {"replicas": 3, "highAvailability": {"backend": "Etcd", "etcd": {"endpoints": ["e0:2379", "e1:2379"]}}}
LARGE = {"image": "registry.example/mooncake:1", "master": ELECTED, "store": {"replicas": 4, "segmentSize": "200Gi"}}
RDMA: Json = {"protocol": "RDMA", "devices": ["mlx5_0"]}
PLUGIN: Json = {**RDMA, "resourceName": "rdma/hca_shared_devices_a", "gidIndex": 3}
SHARED = {"masterAddress": "etcd://e0:2379;e1:2379", "clusterId": "shared", "transport": RDMA}
MASTER_TEMPLATE = {"spec": {"topologySpreadConstraints": [SPREAD], "containers": [MASTER_LIMIT]}}
EXPORTER = {"name": "exporter", "image": "exporter:1", "args": ["--x"]}
STORE_TEMPLATE = {
    "metadata": {"labels": {"team": "infra"}, "annotations": {"note": "hot"}},
    "spec": {"tolerations": [{"operator": "Exists"}], "terminationGracePeriodSeconds": None, "containers": [EXPORTER]},
}
POOL_SPECS: dict[str, Json] = {
    "l1": {"local": {"capacity": "2Gi"}},
    "l1-l2": {"resetEpoch": 7, "local": {"capacity": "1Gi"}, "distributed": {"mooncake": {"store": {"segmentSize": "256Mi"}}}},
    "ssd": {"distributed": {"mooncake": {"store": {"segmentSize": "2Gi", "ssd": {"capacity": "100Gi", "storageClassName": "local-nvme"}}}}},
    "external": {"distributed": {"external": {"masterAddress": "mooncake.shared:50051"}}},
    "ha": {"distributed": {"mooncake": LARGE}},
    "rdma": {
        "networkPolicy": {"mode": "Disabled"},
        "distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}, "transport": {"protocol": "RDMA", "devices": ["mlx5_0", "mlx5_1"]}}},
    },
    "rdma-plugin": {"distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}, "transport": PLUGIN}}},
    "external-rdma": {"distributed": {"external": SHARED}},
    "templates": {
        "distributed": {"mooncake": {"master": {"template": MASTER_TEMPLATE}, "store": {"segmentSize": "1Gi", "template": STORE_TEMPLATE}}}
    },
}
MODELS_MOUNT = {"name": "models", "mountPath": "/models", "readOnly": True}
ENGINE_SPECS: dict[str, Json] = {
    "minimal": {"model": {"name": "tiny"}, "poolRef": {"name": "policy"}},
    "no-pool": {"model": {"name": "tiny"}},
    "full": {
        "poolRef": {"name": "policy"},
        "model": {"name": "Qwen/Qwen3-8B", "revision": "abc123", "source": "/models/qwen"},
        "image": "registry.example/engine:2",
        "imagePullPolicy": "Never",
        "replicas": 4,
        "parallelism": {"tensor": 2},
        "args": ["--max-model-len=4096", "--served_model_name=policy", "--no-enable-prompt-tokens-details"],
        "env": [{"name": "HOME", "value": "/home/vllm"}, {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}, "requests": {"memory": "32Gi", "cpu": "4"}},
        "template": {
            "metadata": {"labels": {"team": "rl"}},
            "spec": {
                "terminationGracePeriodSeconds": 300,
                "nodeSelector": {"gpu": "h100"},
                "volumes": [
                    {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
                    {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}},
                ],
                "containers": [
                    {"name": "engine", "volumeMounts": [MODELS_MOUNT], "startupProbe": {"failureThreshold": 720}},
                    {"name": "sidecar", "image": "sidecar:1"},
                ],
            },
        },
    },
}


def pool(spec: Json | str = "l1-l2", name: str = "policy", **metadata: Any) -> KVCachePool:
    return parse_pool(_object("KVCachePool", "1", POOL_SPECS[spec] if isinstance(spec, str) else spec, name, metadata))


def engine(spec: Json | str = "minimal", name: str = "rollout", **metadata: Any) -> InferenceEngine:
    return parse_engine(_object("InferenceEngine", "2", ENGINE_SPECS[spec] if isinstance(spec, str) else spec, name, metadata))


def _object(kind: str, digit: str, spec: Json, name: str, metadata: Json) -> Json:
    meta = {"name": name, "namespace": "rl", "uid": f"{digit * 8}-0000-4000-8000-{digit:0>12}", "generation": 1, **metadata}
    return {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": meta, "spec": spec}


def one(objects: list[Json], kind: str, name: str | None = None) -> Json:
    """The only object of that kind (and name)."""
    found = [obj for obj in objects if obj["kind"] == kind and name in (None, obj["metadata"]["name"])]
    assert len(found) == 1, [obj["metadata"]["name"] for obj in objects if obj["kind"] == kind]
    return found[0]


def containers(obj: Json) -> list[Json]:
    spec = obj["spec"]["template"]["spec"]
    return [*spec["containers"], *spec.get("initContainers", [])]


def variables(container: Json) -> dict[str, Any]:
    """Environment by name; a plain value, or the source as a dict."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
