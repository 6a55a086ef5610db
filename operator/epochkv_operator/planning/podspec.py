"""What all pods of the operator have in common: security, environment, probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epochkv_fence import quantity
from epochkv_operator.planning.context import Json

USER_ID: Final = 65532


def downward(field_path: str) -> Json:
    """A variable's source: a field of the pod."""
    return {"fieldRef": {"apiVersion": "v1", "fieldPath": field_path}}


def environment(values: Mapping[str, str]) -> list[Json]:
    """Variables with plain values."""
    return [{"name": name, "value": value} for name, value in values.items()]


def pod_ip() -> Json:
    """The variable POD_IP, which others refer to as `$(POD_IP)`."""
    return {"name": "POD_IP", "valueFrom": downward("status.podIP")}


def tcp_probe(port: int, *, period: int, failures: int) -> Json:
    return {"tcpSocket": {"port": port}, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 2}


def http_probe(path: str, port: int, *, period: int, failures: int, tls: bool = False) -> Json:
    """With `tls` the kubelet asks by HTTPS, and takes any certificate."""
    get: Json = {"path": path, "port": port, **({"scheme": "HTTPS"} if tls else {})}
    return {"httpGet": get, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5}


def port(name: str, number: int) -> Json:
    """A port of a container."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def service(selector: dict[str, str], name: str, number: int) -> Json:
    """Spec of a Service with one port."""
    return {"selector": selector, "ports": [{"name": name, "port": number, "targetPort": number, "protocol": "TCP"}]}


def base_spec() -> Json:
    """The part of a pod spec that satisfies Pod Security `restricted` and hands no API token to the pod."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            # Without it the kubelet changes the owner of every file of a mounted volume at every start: minutes for big models.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def container_security() -> Json:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def budget(selector: dict[str, str], max_unavailable: int | str = 1) -> Json:
    """Body of a PodDisruptionBudget: so many pods at a time, and a pod that is not healthy never keeps a node from being drained."""
    return {"spec": {"maxUnavailable": max_unavailable, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": {"matchLabels": selector}}}


def with_disk(spec: Json, capacity: int, storage_class: str | None, mount: str) -> Json:
    """The pod with a volume `ssd` of so many bytes, made and deleted with the pod. `storage_class` None: the cluster's default."""
    [container] = spec["containers"]
    claim: Json = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": quantity.from_bytes(capacity)}}}
    if storage_class is not None:
        claim["storageClassName"] = storage_class
    volume = {"name": "ssd", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    mounts = [*container["volumeMounts"], {"name": "ssd", "mountPath": mount}]
    return {**spec, "containers": [{**container, "volumeMounts": mounts}], "volumes": [*spec["volumes"], volume]}


def with_rdma(spec: Json, resource: str | None) -> Json:
    """The pod with what RDMA needs: root, locked memory and devices. Only a namespace at level `privileged` admits it.

    `resource`: a device plugin's name for the devices, which then brings one of them; None: the host's folder of them is mounted.
    """
    [container] = spec["containers"]
    capabilities = {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_RESOURCE"]}
    security = {key: value for key, value in spec["securityContext"].items() if key != "runAsNonRoot"}
    changed = {**container, "securityContext": {**container["securityContext"], "capabilities": capabilities}}
    volumes = spec["volumes"]
    if resource is not None:
        resources = container.get("resources", {})
        changed["resources"] = {**resources, "limits": {**resources.get("limits", {}), resource: 1}}
    else:
        changed["volumeMounts"] = [*container["volumeMounts"], {"name": "infiniband", "mountPath": "/dev/infiniband"}]
        volumes = [*volumes, {"name": "infiniband", "hostPath": {"path": "/dev/infiniband", "type": "Directory"}}]
    return {**spec, "securityContext": {**security, "runAsUser": 0, "runAsGroup": 0}, "containers": [changed], "volumes": volumes}
